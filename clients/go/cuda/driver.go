package cuda

import "fmt"

// Handle is a CUDA IPC handle. It is a secret: who has it reads and writes the allocation.
type Handle [64]byte

// UUID names a GPU.
type UUID [16]byte

// String is the UUID as nvidia-smi writes it.
func (u UUID) String() string {
	return fmt.Sprintf("GPU-%x-%x-%x-%x-%x", u[:4], u[4:6], u[6:8], u[8:10], u[10:])
}

// Pointer is an address in the GPU's address space.
type Pointer uint64

// Context and StreamHandle are the driver's own handles.
type (
	Context      uintptr
	StreamHandle uintptr
)

// Driver is the part of the CUDA driver API that this package uses, call by call. From PushContext to PopContext a thread
// has a current context, which every method after PopContext here needs; Device sees to both.
type Driver interface {
	DeviceCount() (int, error)
	DeviceUUID(device int) (UUID, error)
	RetainPrimary(device int) (Context, error)
	ReleasePrimary(device int) error
	PushContext(context Context) error
	PopContext() error

	OpenIPC(handle Handle) (Pointer, error)
	CloseIPC(pointer Pointer) error
	AddressRange(pointer Pointer) (base Pointer, size uint64, err error)
	CopyIn(to Pointer, from []byte, stream StreamHandle) error
	CopyOut(to []byte, from Pointer, stream StreamHandle) error
	RegisterHost(page []byte) (Pointer, error)
	UnregisterHost(page []byte) error
	CreateStream() (StreamHandle, error)
	DestroyStream(stream StreamHandle) error
	Synchronize(stream StreamHandle) error
	// WriteValue makes the stream store a value; WaitValue makes it wait until what is stored there, as a signed number, is
	// at least the value.
	WriteValue(stream StreamHandle, at Pointer, value uint64) error
	WaitValue(stream StreamHandle, at Pointer, value uint64) error
}

// Result is a CUresult other than success, as an error.
type Result struct {
	// Call is the driver's function, Number its result, Name the result's name where the driver knows one.
	Call   string
	Number int32
	Name   string
}

// Error says what failed and how.
func (r *Result) Error() string {
	if r.Name == "" {
		return fmt.Sprintf("%s: CUDA result %d", r.Call, r.Number)
	}
	return fmt.Sprintf("%s: %s (%d)", r.Call, r.Name, r.Number)
}
