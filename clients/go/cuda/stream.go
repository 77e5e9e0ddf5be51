package cuda

import (
	"errors"
	"fmt"
	"math"
	"os"
	"strconv"
	"sync/atomic"
	"unsafe"
)

// Released is what a released counter holds: no ticket is above it.
const Released = math.MaxInt64

// Page is host memory that the GPU sees too: counters of lanes. It has to be shared memory of a memfd or a tmpfs, whole
// pages, mapped by the caller, who keeps it mapped until Close.
type Page struct {
	device  *Device
	data    []byte
	pointer Pointer
}

// RegisterPage shows a host page to the GPU.
func (d *Device) RegisterPage(data []byte) (*Page, error) {
	if len(data) == 0 || len(data)%os.Getpagesize() != 0 {
		return nil, fmt.Errorf("cuda: %d bytes are no whole pages", len(data))
	}
	made := &Page{device: d, data: data}
	err := d.do(func() error {
		var err error
		made.pointer, err = d.driver.RegisterHost(data)
		return err
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// Close takes the page from the GPU. Nothing may wait on its counters any more.
func (p *Page) Close() error {
	return p.device.do(func() error { return p.device.driver.UnregisterHost(p.data) })
}

// Counter is the one at an offset, in bytes, a multiple of 8.
func (p *Page) Counter(offset int) (Counter, error) {
	if offset < 0 || offset%8 != 0 || offset > len(p.data)-8 {
		return Counter{}, fmt.Errorf("cuda: no counter at %d in a page of %d bytes", offset, len(p.data))
	}
	return Counter{(*uint64)(unsafe.Pointer(&p.data[offset])), p.pointer + Pointer(offset)}, nil
}

// Counter is a number that host and GPU share.
type Counter struct {
	host   *uint64
	device Pointer
}

// Load reads the counter.
func (c Counter) Load() uint64 { return atomic.LoadUint64(c.host) }

// Store sets the counter from the host, without a CUDA call: it helps also while every queue of the GPU waits.
func (c Counter) Store(value uint64) { atomic.StoreUint64(c.host, value) }

// Release lets everything pass that waits for the counter, now and later.
func (c Counter) Release() { c.Store(Released) }

// Stream is an ordered queue of work on the GPU.
type Stream struct {
	device *Device
	handle StreamHandle
	isOurs bool
}

// NewStream makes a stream that waits for no other.
func (d *Device) NewStream() (*Stream, error) {
	made := &Stream{device: d, isOurs: true}
	err := d.do(func() error {
		var err error
		made.handle, err = d.driver.CreateStream()
		return err
	})
	if err != nil {
		return nil, err
	}
	return made, nil
}

// WrapStream is a stream that the caller has made, a CUstream of this device's primary context, and keeps.
func (d *Device) WrapStream(handle StreamHandle) *Stream { return &Stream{device: d, handle: handle} }

// Write makes the stream set a counter once everything before it is done.
func (s *Stream) Write(counter Counter, value uint64) error {
	return s.device.do(func() error { return s.device.driver.WriteValue(s.handle, counter.device, value) })
}

// Wait makes the stream wait until a counter is at least value. A wait holds one of the GPU's queues: see
// CheckConnections.
func (s *Stream) Wait(counter Counter, value uint64) error {
	if value > Released {
		return errors.New("cuda: counters are compared as signed numbers")
	}
	return s.device.do(func() error { return s.device.driver.WaitValue(s.handle, counter.device, value) })
}

// Synchronize waits on the host until the stream is done.
func (s *Stream) Synchronize() error {
	return s.device.do(func() error { return s.device.driver.Synchronize(s.handle) })
}

// Close gives a stream up that NewStream made.
func (s *Stream) Close() error {
	if !s.isOurs {
		return nil
	}
	return s.device.do(func() error { return s.device.driver.DestroyStream(s.handle) })
}

const (
	connectionsVariable = "CUDA_DEVICE_MAX_CONNECTIONS"
	connectionsDefault  = 8
)

// CheckConnections says whether so many open waits leave the GPU a queue to work with. CUDA reads
// CUDA_DEVICE_MAX_CONNECTIONS when it starts; without it there are 8 queues, and 2 under MPS, which nobody can ask for.
func CheckConnections(waits int) error {
	queues := connectionsDefault
	if said := os.Getenv(connectionsVariable); said != "" {
		read, err := strconv.Atoi(said)
		if err != nil || read < 1 {
			return fmt.Errorf("cuda: %s=%q is no number of queues", connectionsVariable, said)
		}
		queues = min(read, 32)
	}
	if waits >= queues {
		return fmt.Errorf("cuda: %d open waits would stop all %d queues: set %s before CUDA starts", waits, queues, connectionsVariable)
	}
	return nil
}
