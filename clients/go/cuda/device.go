package cuda

import (
	"encoding/hex"
	"errors"
	"fmt"
	"os"
	"runtime"
	"strings"
	"sync"

	"example.com/specdraft/clients/go/specdraft"
)

// Device is one GPU with its primary context. It implements specdraft.Device. Its methods are safe for concurrent use.
type Device struct {
	driver  Driver
	ordinal int
	uuid    UUID
	visible []UUID
	context Context
	copies  StreamHandle // rows are copied on a stream of their own

	mu   sync.Mutex // taken before life
	open map[Handle]*allocation

	life   sync.RWMutex // held for reading while the driver is called
	closed bool
}

// allocation is an exported allocation that is open here: once, however often it is asked for.
type allocation struct {
	pointer Pointer
	size    uint64
	users   int
}

// Open loads the driver and retains the primary context of the GPU with this UUID.
func Open(uuid UUID) (*Device, error) {
	driver, err := Load()
	if err != nil {
		return nil, err
	}
	return NewDevice(driver, uuid)
}

// Visible lists the GPUs that this process sees.
func Visible(driver Driver) ([]UUID, error) {
	count, err := driver.DeviceCount()
	if err != nil {
		return nil, err
	}
	var all []UUID
	for ordinal := range count {
		uuid, err := driver.DeviceUUID(ordinal)
		if err != nil {
			return nil, err
		}
		all = append(all, uuid)
	}
	return all, nil
}

// NewDevice retains the primary context of a GPU with a driver that is loaded already.
func NewDevice(driver Driver, uuid UUID) (*Device, error) {
	visible, err := Visible(driver)
	if err != nil {
		return nil, err
	}
	made := &Device{driver: driver, uuid: uuid, visible: visible, ordinal: -1, open: map[Handle]*allocation{}}
	for ordinal, one := range visible {
		if one == uuid {
			made.ordinal = ordinal
		}
	}
	if made.ordinal < 0 {
		return nil, made.notVisible(uuid)
	}
	if made.context, err = driver.RetainPrimary(made.ordinal); err != nil {
		return nil, err
	}
	err = made.do(func() error {
		made.copies, err = driver.CreateStream()
		return err
	})
	if err != nil {
		return nil, errors.Join(err, driver.ReleasePrimary(made.ordinal))
	}
	return made, nil
}

func (d *Device) notVisible(uuid UUID) error {
	return fmt.Errorf("cuda: %v is not among the GPUs that this process sees, %v", uuid, d.visible)
}

// UUID names the GPU.
func (d *Device) UUID() [16]byte { return d.uuid }

// Close gives the context back. Arenas that are still open are closed first.
func (d *Device) Close() error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.life.Lock()
	defer d.life.Unlock()
	if d.closed {
		return nil
	}
	d.closed = true
	err := d.current(func() error {
		var all []error
		for _, one := range d.open {
			all = append(all, d.driver.CloseIPC(one.pointer))
		}
		return errors.Join(append(all, d.driver.DestroyStream(d.copies))...)
	})
	d.open = nil
	return errors.Join(err, d.driver.ReleasePrimary(d.ordinal))
}

// do runs driver calls while the device is open.
func (d *Device) do(work func() error) error {
	d.life.RLock()
	defer d.life.RUnlock()
	if d.closed {
		return os.ErrClosed
	}
	return d.current(work)
}

// current makes the context current meanwhile: contexts belong to OS threads, and goroutines move between them.
func (d *Device) current(work func() error) error {
	runtime.LockOSThread()
	defer runtime.UnlockOSThread()
	if err := d.driver.PushContext(d.context); err != nil {
		return err
	}
	return errors.Join(work(), d.driver.PopContext())
}

// Import opens an exported allocation of at least size bytes. An allocation is opened once; importing it again shares it.
func (d *Device) Import(handle [64]byte, owner [16]byte, size uint64) (specdraft.Memory, error) {
	known := false
	for _, one := range d.visible {
		known = known || one == UUID(owner)
	}
	if !known {
		return nil, d.notVisible(UUID(owner))
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	one := d.open[Handle(handle)]
	if one == nil {
		opened, err := d.openAllocation(Handle(handle))
		if err != nil {
			return nil, err
		}
		one = opened
		d.open[Handle(handle)] = one
	}
	one.users++
	if one.size < size || size == 0 {
		return nil, errors.Join(
			fmt.Errorf("cuda: the allocation holds %d bytes and should hold %d", one.size, size), d.release(Handle(handle), one),
		)
	}
	return &Mapping{device: d, handle: Handle(handle), allocation: one, size: size}, nil
}

// openAllocation opens a handle and checks that it is the allocation's base. Neither error says the handle: it is a
// secret.
func (d *Device) openAllocation(handle Handle) (*allocation, error) {
	made := &allocation{}
	err := d.do(func() error {
		var err error
		if made.pointer, err = d.driver.OpenIPC(handle); err != nil {
			return explained(err)
		}
		base, size, err := d.driver.AddressRange(made.pointer)
		if err == nil && base != made.pointer {
			err = errors.New("cuda: the handle does not open at the allocation's base")
		}
		if err != nil {
			return errors.Join(err, d.driver.CloseIPC(made.pointer))
		}
		made.size = size
		return nil
	})
	return made, err
}

// explained says what the driver means by a code that misleads.
func explained(err error) error {
	var result *Result
	if errors.As(err, &result) && result.Number == 201 { // CUDA_ERROR_INVALID_CONTEXT
		return fmt.Errorf("%w: so says the driver also where both processes have the same pid in their containers", err)
	}
	return err
}

// release ends one use of an allocation; the caller holds the lock.
func (d *Device) release(handle Handle, one *allocation) error {
	if one.users--; one.users > 0 || d.open == nil {
		return nil
	}
	delete(d.open, handle)
	return d.do(func() error { return d.driver.CloseIPC(one.pointer) })
}

// Mapping is an arena in a GPU's memory. It implements specdraft.Memory: writing returns once the bytes are there.
type Mapping struct {
	device     *Device
	handle     Handle
	allocation *allocation
	size       uint64

	mu     sync.RWMutex // held for reading while bytes are copied
	closed bool
}

// Pointer is the arena's address, for work of the caller's own.
func (m *Mapping) Pointer() Pointer { return m.allocation.pointer }

// WriteAt copies into the arena.
func (m *Mapping) WriteAt(from []byte, offset int64) (int, error) {
	return m.copy(len(from), offset, func(at Pointer) error { return m.device.driver.CopyIn(at, from, m.device.copies) })
}

// ReadAt copies out of the arena.
func (m *Mapping) ReadAt(into []byte, offset int64) (int, error) {
	return m.copy(len(into), offset, func(at Pointer) error { return m.device.driver.CopyOut(into, at, m.device.copies) })
}

// copy waits for the stream: bytes from pageable memory may still be on their way when the driver's own call returns.
func (m *Mapping) copy(count int, offset int64, move func(Pointer) error) (int, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.closed {
		return 0, os.ErrClosed
	}
	if offset < 0 || uint64(offset) > m.size || uint64(count) > m.size-uint64(offset) {
		return 0, fmt.Errorf("cuda: %d bytes at %d lie outside an arena of %d", count, offset, m.size)
	}
	if count == 0 {
		return 0, nil
	}
	err := m.device.do(func() error {
		if err := move(m.allocation.pointer + Pointer(offset)); err != nil {
			return err
		}
		return m.device.driver.Synchronize(m.device.copies)
	})
	if err != nil {
		return 0, err
	}
	return count, nil
}

// Close gives the arena up. It may be called twice.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	if m.closed {
		return nil
	}
	m.closed = true
	m.device.mu.Lock()
	defer m.device.mu.Unlock()
	return m.device.release(m.handle, m.allocation)
}

// ParseUUID reads a UUID as nvidia-smi writes it, or bare.
func ParseUUID(text string) (UUID, error) {
	var uuid UUID
	bare := strings.ReplaceAll(strings.TrimPrefix(text, "GPU-"), "-", "")
	read, err := hex.DecodeString(bare)
	if err != nil || len(read) != len(uuid) {
		return uuid, fmt.Errorf("cuda: %q is no UUID of a GPU", text)
	}
	return UUID(read), nil
}
