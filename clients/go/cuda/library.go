package cuda

import (
	"fmt"
	"unsafe"

	"github.com/ebitengine/purego"
)

// Library is the driver library's name.
const Library = "libcuda.so.1"

const (
	lazyPeerAccess     = 1 // CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
	hostRegisterMapped = 2 // CU_MEMHOSTREGISTER_DEVICEMAP
	streamNonBlocking  = 1 // CU_STREAM_NON_BLOCKING
	waitGreaterOrEqual = 0 // CU_STREAM_WAIT_VALUE_GEQ
)

// library is libcuda, loaded. Handles go by value: purego puts structs where the platform's ABI wants them.
type library struct {
	cuInit                    func(flags uint32) int32
	cuGetErrorName            func(result int32, name **byte) int32
	cuDeviceGetCount          func(count *int32) int32
	cuDeviceGet               func(device *int32, ordinal int32) int32
	cuDeviceGetUuid           func(uuid *UUID, device int32) int32
	cuDevicePrimaryCtxRetain  func(context *Context, device int32) int32
	cuDevicePrimaryCtxRelease func(device int32) int32
	cuCtxPushCurrent          func(context Context) int32
	cuCtxPopCurrent           func(context *Context) int32
	cuIpcOpenMemHandle        func(pointer *Pointer, handle ipcHandle, flags uint32) int32
	cuIpcCloseMemHandle       func(pointer Pointer) int32
	cuMemGetAddressRange      func(base *Pointer, size *uint64, pointer Pointer) int32
	cuMemcpyHtoDAsync         func(to Pointer, from unsafe.Pointer, size uint64, stream StreamHandle) int32
	cuMemcpyDtoHAsync         func(to unsafe.Pointer, from Pointer, size uint64, stream StreamHandle) int32
	cuMemHostRegister         func(page unsafe.Pointer, size uint64, flags uint32) int32
	cuMemHostUnregister       func(page unsafe.Pointer) int32
	cuMemHostGetDevicePointer func(pointer *Pointer, page unsafe.Pointer, flags uint32) int32
	cuStreamCreate            func(stream *StreamHandle, flags uint32) int32
	cuStreamDestroy           func(stream StreamHandle) int32
	cuStreamSynchronize       func(stream StreamHandle) int32
	cuStreamWriteValue64      func(stream StreamHandle, at Pointer, value uint64, flags uint32) int32
	cuStreamWaitValue64       func(stream StreamHandle, at Pointer, value uint64, flags uint32) int32
}

// ipcHandle is CUipcMemHandle: 64 bytes, passed by value.
type ipcHandle struct {
	words [8]uint64
}

// Load loads the driver library and starts the driver.
func Load() (Driver, error) { return loadFrom(Library) }

func loadFrom(name string) (Driver, error) {
	handle, err := purego.Dlopen(name, purego.RTLD_NOW|purego.RTLD_GLOBAL)
	if err != nil {
		return nil, fmt.Errorf("cuda: %w", err)
	}
	l := &library{}
	for symbol, function := range l.symbols() {
		address, err := purego.Dlsym(handle, symbol)
		if err != nil {
			return nil, fmt.Errorf("cuda: %w", err)
		}
		purego.RegisterFunc(function, address)
	}
	return l, l.check("cuInit", l.cuInit(0))
}

func (l *library) symbols() map[string]any {
	return map[string]any{
		"cuInit":                       &l.cuInit,
		"cuGetErrorName":               &l.cuGetErrorName,
		"cuDeviceGetCount":             &l.cuDeviceGetCount,
		"cuDeviceGet":                  &l.cuDeviceGet,
		"cuDeviceGetUuid_v2":           &l.cuDeviceGetUuid,
		"cuDevicePrimaryCtxRetain":     &l.cuDevicePrimaryCtxRetain,
		"cuDevicePrimaryCtxRelease_v2": &l.cuDevicePrimaryCtxRelease,
		"cuCtxPushCurrent_v2":          &l.cuCtxPushCurrent,
		"cuCtxPopCurrent_v2":           &l.cuCtxPopCurrent,
		"cuIpcOpenMemHandle_v2":        &l.cuIpcOpenMemHandle,
		"cuIpcCloseMemHandle":          &l.cuIpcCloseMemHandle,
		"cuMemGetAddressRange_v2":      &l.cuMemGetAddressRange,
		"cuMemcpyHtoDAsync_v2":         &l.cuMemcpyHtoDAsync,
		"cuMemcpyDtoHAsync_v2":         &l.cuMemcpyDtoHAsync,
		"cuMemHostRegister_v2":         &l.cuMemHostRegister,
		"cuMemHostUnregister":          &l.cuMemHostUnregister,
		"cuMemHostGetDevicePointer_v2": &l.cuMemHostGetDevicePointer,
		"cuStreamCreate":               &l.cuStreamCreate,
		"cuStreamDestroy_v2":           &l.cuStreamDestroy,
		"cuStreamSynchronize":          &l.cuStreamSynchronize,
		"cuStreamWriteValue64_v2":      &l.cuStreamWriteValue64,
		"cuStreamWaitValue64_v2":       &l.cuStreamWaitValue64,
	}
}

func (l *library) check(call string, result int32) error {
	if result == 0 {
		return nil
	}
	failed := &Result{Call: call, Number: result}
	var name *byte
	if l.cuGetErrorName(result, &name) == 0 && name != nil {
		for length := 0; ; length++ {
			if *(*byte)(unsafe.Add(unsafe.Pointer(name), length)) == 0 {
				failed.Name = string(unsafe.Slice(name, length))
				break
			}
		}
	}
	return failed
}

func (l *library) device(ordinal int) (int32, error) {
	var device int32
	return device, l.check("cuDeviceGet", l.cuDeviceGet(&device, int32(ordinal)))
}

func (l *library) DeviceCount() (int, error) {
	var count int32
	err := l.check("cuDeviceGetCount", l.cuDeviceGetCount(&count))
	return int(count), err
}

func (l *library) DeviceUUID(ordinal int) (UUID, error) {
	var uuid UUID
	device, err := l.device(ordinal)
	if err != nil {
		return uuid, err
	}
	err = l.check("cuDeviceGetUuid", l.cuDeviceGetUuid(&uuid, device))
	return uuid, err
}

func (l *library) RetainPrimary(ordinal int) (Context, error) {
	var context Context
	device, err := l.device(ordinal)
	if err != nil {
		return 0, err
	}
	err = l.check("cuDevicePrimaryCtxRetain", l.cuDevicePrimaryCtxRetain(&context, device))
	return context, err
}

func (l *library) ReleasePrimary(ordinal int) error {
	device, err := l.device(ordinal)
	if err != nil {
		return err
	}
	return l.check("cuDevicePrimaryCtxRelease", l.cuDevicePrimaryCtxRelease(device))
}

func (l *library) PushContext(context Context) error {
	return l.check("cuCtxPushCurrent", l.cuCtxPushCurrent(context))
}

func (l *library) PopContext() error {
	var context Context
	return l.check("cuCtxPopCurrent", l.cuCtxPopCurrent(&context))
}

func (l *library) OpenIPC(handle Handle) (Pointer, error) {
	var pointer Pointer
	value := *(*ipcHandle)(unsafe.Pointer(&handle))
	err := l.check("cuIpcOpenMemHandle", l.cuIpcOpenMemHandle(&pointer, value, lazyPeerAccess))
	return pointer, err
}

func (l *library) CloseIPC(pointer Pointer) error {
	return l.check("cuIpcCloseMemHandle", l.cuIpcCloseMemHandle(pointer))
}

func (l *library) AddressRange(pointer Pointer) (Pointer, uint64, error) {
	var base Pointer
	var size uint64
	err := l.check("cuMemGetAddressRange", l.cuMemGetAddressRange(&base, &size, pointer))
	return base, size, err
}

func (l *library) CopyIn(to Pointer, from []byte, stream StreamHandle) error {
	result := l.cuMemcpyHtoDAsync(to, unsafe.Pointer(unsafe.SliceData(from)), uint64(len(from)), stream)
	return l.check("cuMemcpyHtoDAsync", result)
}

func (l *library) CopyOut(to []byte, from Pointer, stream StreamHandle) error {
	result := l.cuMemcpyDtoHAsync(unsafe.Pointer(unsafe.SliceData(to)), from, uint64(len(to)), stream)
	return l.check("cuMemcpyDtoHAsync", result)
}

func (l *library) RegisterHost(page []byte) (Pointer, error) {
	start := unsafe.Pointer(unsafe.SliceData(page))
	if err := l.check("cuMemHostRegister", l.cuMemHostRegister(start, uint64(len(page)), hostRegisterMapped)); err != nil {
		return 0, err
	}
	var pointer Pointer
	if err := l.check("cuMemHostGetDevicePointer", l.cuMemHostGetDevicePointer(&pointer, start, 0)); err != nil {
		l.cuMemHostUnregister(start)
		return 0, err
	}
	return pointer, nil
}

func (l *library) UnregisterHost(page []byte) error {
	return l.check("cuMemHostUnregister", l.cuMemHostUnregister(unsafe.Pointer(unsafe.SliceData(page))))
}

func (l *library) CreateStream() (StreamHandle, error) {
	var stream StreamHandle
	err := l.check("cuStreamCreate", l.cuStreamCreate(&stream, streamNonBlocking))
	return stream, err
}

func (l *library) DestroyStream(stream StreamHandle) error {
	return l.check("cuStreamDestroy", l.cuStreamDestroy(stream))
}

func (l *library) Synchronize(stream StreamHandle) error {
	return l.check("cuStreamSynchronize", l.cuStreamSynchronize(stream))
}

func (l *library) WriteValue(stream StreamHandle, at Pointer, value uint64) error {
	return l.check("cuStreamWriteValue64", l.cuStreamWriteValue64(stream, at, value, 0))
}

func (l *library) WaitValue(stream StreamHandle, at Pointer, value uint64) error {
	return l.check("cuStreamWaitValue64", l.cuStreamWaitValue64(stream, at, value, waitGreaterOrEqual))
}
