package cuda

import (
	"bytes"
	"errors"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"golang.org/x/sys/unix"

	"example.com/specdraft/clients/go/specdraft"
)

var (
	_ specdraft.Device = (*Device)(nil)
	_ specdraft.Memory = (*Mapping)(nil)
	_ Driver           = (*library)(nil)
	_ Driver           = (*fakeDriver)(nil)
)

func uuid(fill byte) (made UUID) {
	for index := range made {
		made[index] = fill
	}
	return made
}

func openFake(t *testing.T) (*fakeDriver, *Device) {
	t.Helper()
	fake := newFake(uuid(1), uuid(2))
	device, err := NewDevice(fake, uuid(2))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
		if len(fake.opened) != 0 || len(fake.streams) != 0 || fake.retained[1] != 0 {
			t.Errorf("left behind: %d allocations, %d streams, %d contexts", len(fake.opened), len(fake.streams), fake.retained[1])
		}
		for thread, stack := range fake.current {
			if len(stack) != 0 {
				t.Errorf("thread %d still has a context", thread)
			}
		}
	})
	return fake, device
}

func TestAnArenaIsWrittenAndReadThroughItsHandle(t *testing.T) {
	fake, device := openFake(t)
	handle := fake.export(4096)
	arena, err := device.Import(handle, uuid(1), 4096)
	if err != nil {
		t.Fatal(err)
	}
	if count, err := arena.WriteAt([]byte("rows"), 4092); count != 4 || err != nil {
		t.Error(count, err)
	}
	read := make([]byte, 4)
	if _, err := arena.ReadAt(read, 4092); err != nil || string(read) != "rows" || !bytes.HasSuffix(fake.exported[handle], read) {
		t.Errorf("%q %v", read, err)
	}
	for _, offset := range []int64{-1, 4093, 5000, 1 << 62} {
		if _, err := arena.WriteAt([]byte("rows"), offset); err == nil {
			t.Errorf("at %d", offset)
		}
	}
	for range 2 {
		if err := arena.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := arena.WriteAt([]byte("rows"), 0); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

func TestAnAllocationIsOpenedOnceAndClosedWithItsLastUser(t *testing.T) {
	fake, device := openFake(t)
	handle := fake.export(64)
	first, err := device.Import(handle, uuid(2), 64)
	if err != nil {
		t.Fatal(err)
	}
	second, err := device.Import(handle, uuid(2), 32)
	if err != nil || fake.opens != 1 {
		t.Fatal(fake.opens, err)
	}
	if err := first.Close(); err != nil || len(fake.opened) != 1 {
		t.Error(err)
	}
	if _, err := second.WriteAt([]byte{1}, 0); err != nil {
		t.Error(err)
	}
	if err := second.Close(); err != nil || len(fake.opened) != 0 {
		t.Error(err)
	}
}

func TestWhatCannotBeImportedLeavesNothingOpenAndTellsNoHandle(t *testing.T) {
	fake, device := openFake(t)
	handle := fake.export(64)
	for name, err := range map[string]error{
		"an unknown handle": importError(device, Handle{1, 2, 3}, uuid(2), 64),
		"too small":         importError(device, handle, uuid(2), 65),
		"nothing":           importError(device, handle, uuid(2), 0),
		"another GPU":       importError(device, handle, uuid(9), 64),
	} {
		if err == nil || strings.Contains(err.Error(), "handle 1") || len(fake.opened) != 0 {
			t.Errorf("%s: %v, %d open", name, err, len(fake.opened))
		}
	}
	if _, err := NewDevice(newFake(uuid(1)), uuid(3)); err == nil || !strings.Contains(err.Error(), "GPU-03030303-0303") {
		t.Error(err)
	}
}

func importError(device *Device, handle Handle, owner UUID, size uint64) error {
	_, err := device.Import(handle, owner, size)
	return err
}

func TestManyGoroutinesShareADevice(t *testing.T) {
	fake, device := openFake(t)
	var all sync.WaitGroup
	for index := range 16 {
		handle := fake.export(1024)
		all.Go(func() {
			arena, err := device.Import(handle, uuid(2), 1024)
			if err != nil {
				t.Error(err)
				return
			}
			row, read := bytes.Repeat([]byte{byte(index)}, 64), make([]byte, 64)
			for offset := range int64(16) {
				_, in := arena.WriteAt(row, 64*offset)
				_, out := arena.ReadAt(read, 64*offset)
				if in != nil || out != nil || !bytes.Equal(row, read) {
					t.Errorf("%v %v", in, out)
				}
			}
			if err := arena.Close(); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
}

func TestClosingADeviceClosesItsArenas(t *testing.T) {
	fake := newFake(uuid(1))
	device, err := NewDevice(fake, uuid(1))
	if err != nil {
		t.Fatal(err)
	}
	arena, err := device.Import(fake.export(64), uuid(1), 64)
	if err != nil {
		t.Fatal(err)
	}
	if err := device.Close(); err != nil || len(fake.opened) != 0 {
		t.Error(err)
	}
	if _, err := arena.WriteAt([]byte{1}, 0); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
	if err := errors.Join(arena.Close(), device.Close()); err != nil {
		t.Error(err)
	}
	if err := importError(device, Handle{}, uuid(1), 64); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

func page(t *testing.T) []byte {
	t.Helper()
	data, err := unix.Mmap(-1, 0, os.Getpagesize(), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED|unix.MAP_ANON)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = unix.Munmap(data) })
	return data
}

// counters are ready and done of a lane.
func counters(t *testing.T, device *Device) (ready, done Counter) {
	t.Helper()
	registered, err := device.RegisterPage(page(t))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := registered.Close(); err != nil {
			t.Error(err)
		}
	})
	for offset, counter := range map[int]*Counter{0: &ready, 128: &done} {
		if *counter, err = registered.Counter(offset); err != nil {
			t.Fatal(err)
		}
	}
	for _, offset := range []int{-8, 4, os.Getpagesize()} {
		if _, err := registered.Counter(offset); err == nil {
			t.Errorf("a counter at %d", offset)
		}
	}
	return ready, done
}

func TestAStreamWaitsForACounterThatAnotherWrites(t *testing.T) {
	fake, device := openFake(t)
	ready, done := counters(t, device)
	ours, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	theirs, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	for ticket := uint64(1); ticket <= 3; ticket++ {
		// The service: wait for ready, then done. The client: ready, then wait for done.
		if err := errors.Join(theirs.Wait(ready, ticket), theirs.Write(done, ticket)); err != nil {
			t.Fatal(err)
		}
		if err := errors.Join(ours.Write(ready, ticket), ours.Wait(done, ticket)); err != nil {
			t.Fatal(err)
		}
		finished := make(chan error)
		go func() { finished <- ours.Synchronize() }()
		if err := errors.Join(theirs.Synchronize(), <-finished); err != nil || done.Load() != ticket {
			t.Errorf("ticket %d: %v, done %d", ticket, err, done.Load())
		}
	}
	if err := errors.Join(ours.Close(), theirs.Close()); err != nil || len(fake.streams) != 1 {
		t.Error(err)
	}
}

func TestAReleasedCounterLetsEverythingPass(t *testing.T) {
	_, device := openFake(t)
	ready, _ := counters(t, device)
	stream, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stream.Wait(ready, 5), stream.Wait(ready, Released)); err != nil {
		t.Fatal(err)
	}
	finished := make(chan error)
	go func() { finished <- stream.Synchronize() }()
	ready.Release()
	if err := <-finished; err != nil {
		t.Error(err)
	}
	if err := stream.Wait(ready, Released+1); err == nil {
		t.Error("counters are signed")
	}
	if err := stream.Close(); err != nil {
		t.Error(err)
	}
	if err := device.WrapStream(4).Close(); err != nil {
		t.Error("a wrapped stream is not ours to close")
	}
}

func TestOpenWaitsLeaveAQueue(t *testing.T) {
	for _, one := range []struct {
		said  string
		waits int
		fine  bool
	}{{"", 7, true}, {"", 8, false}, {"32", 24, true}, {"99", 32, false}, {"1", 1, false}, {"many", 1, false}} {
		t.Setenv("CUDA_DEVICE_MAX_CONNECTIONS", one.said)
		if err := CheckConnections(one.waits); (err == nil) != one.fine {
			t.Errorf("%+v: %v", one, err)
		}
	}
}

func TestUUIDsAreReadAsTheyAreWritten(t *testing.T) {
	read, err := ParseUUID(uuid(0xab).String())
	if err != nil || read != uuid(0xab) {
		t.Error(read, err)
	}
	for _, wrong := range []string{"", "GPU-12", strings.Repeat("x", 32)} {
		if _, err := ParseUUID(wrong); err == nil {
			t.Error(wrong)
		}
	}
}

// standIn compiles the stand-in for libcuda.
func standIn(t *testing.T) string {
	t.Helper()
	compiler, err := exec.LookPath("gcc")
	if err != nil {
		t.Skip("gcc is missing")
	}
	path := filepath.Join(t.TempDir(), "libstandin.so")
	if said, err := exec.Command(compiler, "-shared", "-fPIC", "-O1", "-o", path, "testdata/standin.c").CombinedOutput(); err != nil {
		t.Fatalf("%v\n%s", err, said)
	}
	return path
}

func TestArgumentsArriveAsTheABIWantsThem(t *testing.T) {
	driver, err := loadFrom(standIn(t))
	if err != nil {
		t.Fatal(err)
	}
	device, err := NewDevice(driver, uuid(41))
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() {
		if err := device.Close(); err != nil {
			t.Error(err)
		}
	})
	var handle Handle
	for index := range handle {
		handle[index] = byte(3*index + 1)
	}
	arena, err := device.Import(handle, uuid(40), 1<<20)
	if err != nil {
		t.Fatal(err) // the 64 bytes went by value
	}
	read := make([]byte, 3)
	_, in := arena.WriteAt([]byte("abc"), 1<<20-3)
	_, out := arena.ReadAt(read, 1<<20-3)
	if in != nil || out != nil || string(read) != "abc" {
		t.Errorf("%v %v %q", in, out, read)
	}
	ready, done := counters(t, device)
	stream, err := device.NewStream()
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(stream.Write(ready, 1<<40), stream.Wait(ready, 1<<40), stream.Synchronize(), stream.Close()); err != nil {
		t.Error(err)
	}
	if ready.Load() != 1<<40 || done.Load() != 0 {
		t.Error(ready.Load(), done.Load())
	}
	var result *Result
	if err := importError(device, Handle{}, uuid(40), 1); !errors.As(err, &result) || result.Name != "CUDA_ERROR_INVALID_VALUE" {
		t.Error(err)
	}
	if err := arena.Close(); err != nil {
		t.Error(err)
	}
}

func TestALibraryThatIsNotThereSaysSo(t *testing.T) {
	if _, err := loadFrom("libnothing-of-that-name.so.1"); err == nil {
		t.Error("it was loaded")
	}
}
