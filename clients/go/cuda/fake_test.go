package cuda

import (
	"fmt"
	"sync"

	"golang.org/x/sys/unix"
)

// fakeDriver behaves as the driver does where this package can get it wrong: contexts belong to threads, allocations open
// once and at their base, streams work in order and stop at a wait.
type fakeDriver struct {
	uuids []UUID

	mu       sync.Mutex
	current  map[int][]Context // by thread
	retained map[int]int
	exported map[Handle][]byte
	opened   map[Pointer]Handle
	pages    map[Pointer][]byte
	streams  map[StreamHandle]*fakeStream
	last     uint64
	opens    int
}

type fakeStream struct {
	work []func() bool // false = it has to wait
}

func newFake(uuids ...UUID) *fakeDriver {
	return &fakeDriver{
		uuids: uuids, current: map[int][]Context{}, retained: map[int]int{}, exported: map[Handle][]byte{},
		opened: map[Pointer]Handle{}, pages: map[Pointer][]byte{}, streams: map[StreamHandle]*fakeStream{}, last: 1 << 40,
	}
}

func refused(call string, number int32) error {
	return &Result{Call: call, Number: number, Name: "CUDA_ERROR"}
}

// needContext is what every call of the driver's does that needs one.
func (f *fakeDriver) needContext(call string) error {
	if len(f.current[unix.Gettid()]) == 0 {
		return refused(call, 201)
	}
	return nil
}

func (f *fakeDriver) next() uint64 {
	f.last += 1 << 24
	return f.last
}

func (f *fakeDriver) export(size int) Handle {
	f.mu.Lock()
	defer f.mu.Unlock()
	var handle Handle
	copy(handle[:], fmt.Sprintf("handle %d", f.next()))
	f.exported[handle] = make([]byte, size)
	return handle
}

func (f *fakeDriver) DeviceCount() (int, error) { return len(f.uuids), nil }

func (f *fakeDriver) DeviceUUID(device int) (UUID, error) { return f.uuids[device], nil }

func (f *fakeDriver) RetainPrimary(device int) (Context, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.retained[device]++
	return Context(100 + device), nil
}

func (f *fakeDriver) ReleasePrimary(device int) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.retained[device]--
	return nil
}

func (f *fakeDriver) PushContext(context Context) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	f.current[unix.Gettid()] = append(f.current[unix.Gettid()], context)
	return nil
}

func (f *fakeDriver) PopContext() error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuCtxPopCurrent"); err != nil {
		return err
	}
	stack := f.current[unix.Gettid()]
	f.current[unix.Gettid()] = stack[:len(stack)-1]
	return nil
}

func (f *fakeDriver) OpenIPC(handle Handle) (Pointer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuIpcOpenMemHandle"); err != nil {
		return 0, err
	}
	if f.exported[handle] == nil {
		return 0, refused("cuIpcOpenMemHandle", 400)
	}
	for _, one := range f.opened {
		if one == handle {
			return 0, refused("cuIpcOpenMemHandle", 208) // already mapped
		}
	}
	pointer := Pointer(f.next())
	f.opened[pointer] = handle
	f.opens++
	return pointer, nil
}

func (f *fakeDriver) CloseIPC(pointer Pointer) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuIpcCloseMemHandle"); err != nil {
		return err
	}
	if _, ok := f.opened[pointer]; !ok {
		return refused("cuIpcCloseMemHandle", 1)
	}
	delete(f.opened, pointer)
	return nil
}

// bytes are those at an address, to the end of their allocation.
func (f *fakeDriver) bytes(at Pointer) ([]byte, Pointer, error) {
	for base, handle := range f.opened {
		if data := f.exported[handle]; at >= base && at < base+Pointer(len(data)) {
			return data[at-base:], base, nil
		}
	}
	for base, data := range f.pages {
		if at >= base && at < base+Pointer(len(data)) {
			return data[at-base:], base, nil
		}
	}
	return nil, 0, refused("an address", 1)
}

func (f *fakeDriver) AddressRange(pointer Pointer) (Pointer, uint64, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuMemGetAddressRange"); err != nil {
		return 0, 0, err
	}
	data, base, err := f.bytes(pointer)
	return base, uint64(len(data)) + uint64(pointer-base), err
}

// enqueue puts work on a stream; what is there already may have to wait.
func (f *fakeDriver) enqueue(call string, stream StreamHandle, work func() bool) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext(call); err != nil {
		return err
	}
	one := f.streams[stream]
	if one == nil {
		return refused(call, 400)
	}
	one.work = append(one.work, work)
	return nil
}

func (f *fakeDriver) CopyIn(to Pointer, from []byte, stream StreamHandle) error {
	return f.enqueue("cuMemcpyHtoDAsync", stream, func() bool {
		data, _, err := f.bytes(to)
		return err == nil && copy(data, from) == len(from)
	})
}

func (f *fakeDriver) CopyOut(to []byte, from Pointer, stream StreamHandle) error {
	return f.enqueue("cuMemcpyDtoHAsync", stream, func() bool {
		data, _, err := f.bytes(from)
		return err == nil && copy(to, data) == len(to)
	})
}

func (f *fakeDriver) RegisterHost(page []byte) (Pointer, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuMemHostRegister"); err != nil {
		return 0, err
	}
	pointer := Pointer(f.next())
	f.pages[pointer] = page
	return pointer, nil
}

func (f *fakeDriver) UnregisterHost(page []byte) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	for pointer, one := range f.pages {
		if &one[0] == &page[0] {
			delete(f.pages, pointer)
			return nil
		}
	}
	return refused("cuMemHostUnregister", 1)
}

func (f *fakeDriver) CreateStream() (StreamHandle, error) {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuStreamCreate"); err != nil {
		return 0, err
	}
	handle := StreamHandle(f.next())
	f.streams[handle] = &fakeStream{}
	return handle, nil
}

func (f *fakeDriver) DestroyStream(stream StreamHandle) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuStreamDestroy"); err != nil {
		return err
	}
	delete(f.streams, stream)
	return nil
}

// drain does what a stream can do now; whether all of it.
func (f *fakeDriver) drain(one *fakeStream) bool {
	for len(one.work) > 0 {
		if !one.work[0]() {
			return false
		}
		one.work = one.work[1:]
	}
	return true
}

func (f *fakeDriver) Synchronize(stream StreamHandle) error {
	f.mu.Lock()
	defer f.mu.Unlock()
	if err := f.needContext("cuStreamSynchronize"); err != nil {
		return err
	}
	one := f.streams[stream]
	if one == nil {
		return refused("cuStreamSynchronize", 400)
	}
	for !f.drain(one) {
		f.mu.Unlock() // somebody else has to write what it waits for
		f.mu.Lock()
	}
	return nil
}

func (f *fakeDriver) counter(at Pointer) (Counter, bool) {
	data, _, err := f.bytes(at)
	if err != nil {
		return Counter{}, false
	}
	page := &Page{data: data[:8]}
	counter, err := page.Counter(0)
	return counter, err == nil
}

func (f *fakeDriver) WriteValue(stream StreamHandle, at Pointer, value uint64) error {
	return f.enqueue("cuStreamWriteValue64", stream, func() bool {
		counter, ok := f.counter(at)
		if ok {
			counter.Store(value)
		}
		return ok
	})
}

func (f *fakeDriver) WaitValue(stream StreamHandle, at Pointer, value uint64) error {
	return f.enqueue("cuStreamWaitValue64", stream, func() bool {
		counter, ok := f.counter(at)
		return ok && int64(counter.Load()) >= int64(value)
	})
}
