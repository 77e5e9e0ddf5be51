package hostmem

import (
	"context"
	"errors"
	"net"
	"os"
	"path/filepath"
	"testing"
	"time"

	"golang.org/x/sys/unix"
)

const size = 8192

func memfd(t *testing.T, seals int) int {
	t.Helper()
	descriptor, err := unix.MemfdCreate("test", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		t.Fatal(err)
	}
	if err := unix.Ftruncate(descriptor, size); err != nil {
		t.Fatal(err)
	}
	if _, err := unix.FcntlInt(uintptr(descriptor), unix.F_ADD_SEALS, seals); err != nil {
		t.Fatal(err)
	}
	return descriptor
}

func descriptorCount(t *testing.T) int {
	t.Helper()
	entries, err := os.ReadDir("/proc/self/fd")
	if err != nil {
		t.Fatal(err)
	}
	return len(entries)
}

func TestAMappingReadsAndWritesWithinItsBounds(t *testing.T) {
	mapping, err := Map(memfd(t, seals), size)
	if err != nil {
		t.Fatal(err)
	}
	if count, err := mapping.WriteAt([]byte("rows"), size-4); count != 4 || err != nil {
		t.Error(count, err)
	}
	read := make([]byte, 4)
	if _, err := mapping.ReadAt(read, size-4); err != nil || string(read) != "rows" {
		t.Errorf("%q %v", read, err)
	}
	for _, offset := range []int64{-1, size - 3, size + 1, 1 << 62} {
		if _, err := mapping.WriteAt([]byte("rows"), offset); err == nil {
			t.Errorf("at %d", offset)
		}
	}
	for range 2 {
		if err := mapping.Close(); err != nil {
			t.Error(err)
		}
	}
	if _, err := mapping.WriteAt([]byte("rows"), 0); !errors.Is(err, os.ErrClosed) {
		t.Error(err)
	}
}

func TestAFileThatTheOtherSideCouldShrinkIsRefused(t *testing.T) {
	before := descriptorCount(t)
	for _, some := range []int{0, unix.F_SEAL_GROW, unix.F_SEAL_SHRINK} {
		if _, err := Map(memfd(t, some), size); err == nil {
			t.Errorf("seals %d", some)
		}
	}
	for _, wrong := range []uint64{0, size + 1, 1 << 63} {
		if _, err := Map(memfd(t, seals), wrong); err == nil {
			t.Errorf("%d bytes", wrong)
		}
	}
	file, err := os.CreateTemp(t.TempDir(), "")
	if err != nil {
		t.Fatal(err)
	}
	defer file.Close()
	plain, err := unix.Dup(int(file.Fd()))
	if err != nil {
		t.Fatal(err)
	}
	if _, err := Map(plain, size); err == nil {
		t.Error("a plain file")
	}
	if after := descriptorCount(t); after != before+1 { // the plain file is still ours
		t.Errorf("%d descriptors, then %d", before, after)
	}
}

// serve answers one connection of a side socket.
func serve(t *testing.T, answer func(*net.UnixConn)) string {
	t.Helper()
	path := filepath.Join(t.TempDir(), "s.fd")
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		t.Fatal(err)
	}
	done := make(chan struct{})
	go func() {
		defer close(done)
		conn, err := listener.AcceptUnix()
		if err != nil {
			return
		}
		defer conn.Close()
		_, _ = conn.Read(make([]byte, 16)) // the token
		answer(conn)
	}()
	t.Cleanup(func() {
		listener.Close()
		<-done
	})
	return path
}

func TestATokenBuysADescriptor(t *testing.T) {
	sent := memfd(t, seals)
	path := serve(t, func(conn *net.UnixConn) {
		if _, _, err := conn.WriteMsgUnix([]byte{granted}, unix.UnixRights(sent), nil); err != nil {
			t.Error(err)
		}
	})
	descriptor, err := Fetch(t.Context(), path, make([]byte, 16))
	if err != nil {
		t.Fatal(err)
	}
	mapping, err := Map(descriptor, size)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(mapping.Close(), unix.Close(sent)); err != nil {
		t.Error(err)
	}
}

func TestARefusalLeavesNothingOpen(t *testing.T) {
	sent := memfd(t, seals)
	defer unix.Close(sent)
	before := descriptorCount(t)
	answers := map[string]func(*net.UnixConn){
		"another byte":  func(conn *net.UnixConn) { _, _ = conn.Write([]byte{1}) },
		"the end":       func(*net.UnixConn) {},
		"no descriptor": func(conn *net.UnixConn) { _, _ = conn.Write([]byte{granted}) },
		"two descriptors": func(conn *net.UnixConn) {
			_, _, _ = conn.WriteMsgUnix([]byte{granted}, unix.UnixRights(sent, sent), nil)
		},
		"a descriptor that was not granted": func(conn *net.UnixConn) {
			_, _, _ = conn.WriteMsgUnix([]byte{1}, unix.UnixRights(sent), nil)
		},
	}
	for name, answer := range answers {
		t.Run(name, func(t *testing.T) {
			if _, err := Fetch(t.Context(), serve(t, answer), make([]byte, 16)); err == nil {
				t.Error("it was granted")
			}
		})
	}
	if after := descriptorCount(t); after != before {
		t.Errorf("%d descriptors, then %d", before, after)
	}
}

func TestASideSocketThatSaysNothingIsLeftAtTheDeadline(t *testing.T) {
	ended := make(chan struct{})
	path := serve(t, func(*net.UnixConn) { <-ended })
	ctx, cancel := context.WithTimeout(t.Context(), 20*time.Millisecond)
	defer cancel()
	if _, err := Fetch(ctx, path, make([]byte, 16)); !errors.Is(err, os.ErrDeadlineExceeded) {
		t.Error(err)
	}
	close(ended)
	if _, err := Fetch(t.Context(), path+"x", make([]byte, 16)); err == nil {
		t.Error("nothing is there")
	}
}
