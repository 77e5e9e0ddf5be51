// Package hostmem maps host arenas: the descriptor from the side socket, its seals, the mapping.
package hostmem

import (
	"context"
	"errors"
	"fmt"
	"io"
	"net"
	"os"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// SideSocketSuffix makes the side socket's path of the gRPC socket's.
const SideSocketSuffix = ".fd"

const (
	granted    = 0x00
	retryDelay = 10 * time.Millisecond
	seals      = unix.F_SEAL_SHRINK | unix.F_SEAL_GROW
)

// Fetch trades a token for the arena's file descriptor, which the caller owns.
func Fetch(ctx context.Context, path string, token []byte) (int, error) {
	conn, err := connect(ctx, path)
	if err != nil {
		return -1, fmt.Errorf("the side socket %s cannot be used: %w", path, err)
	}
	defer func() { _ = conn.Close() }() // the answer is there, or it failed
	if deadline, ok := ctx.Deadline(); ok {
		if err := conn.SetDeadline(deadline); err != nil {
			return -1, err
		}
	}
	stop := context.AfterFunc(ctx, func() { _ = conn.SetDeadline(time.Unix(1, 0)) })
	defer stop()
	if _, err := conn.Write(token); err != nil {
		return -1, fmt.Errorf("the side socket %s cannot be used: %w", path, err)
	}
	answer, descriptors, err := receive(conn)
	if err != nil {
		return -1, fmt.Errorf("the side socket %s cannot be used: %w", path, err)
	}
	if len(answer) != 1 || answer[0] != granted || len(descriptors) != 1 {
		for _, descriptor := range descriptors {
			_ = unix.Close(descriptor) // nothing was written through it
		}
		return -1, fmt.Errorf("the side socket %s refused the token", path)
	}
	return descriptors[0], nil
}

// connect tries again while the socket's queue is full: the kernel says so at once instead of waiting.
func connect(ctx context.Context, path string) (*net.UnixConn, error) {
	var dialer net.Dialer
	for {
		conn, err := dialer.DialContext(ctx, "unix", path)
		if err == nil {
			return conn.(*net.UnixConn), nil
		}
		if !errors.Is(err, unix.EAGAIN) {
			return nil, err
		}
		timer := time.NewTimer(retryDelay)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return nil, err
		}
	}
}

// receive has room for two descriptors: a peer that sends more than one is refused, and nothing that it sent stays open.
// Go receives them close-on-exec.
func receive(conn *net.UnixConn) ([]byte, []int, error) {
	data, room := make([]byte, 1), make([]byte, unix.CmsgSpace(2*4))
	count, controlCount, _, _, err := conn.ReadMsgUnix(data, room)
	if err != nil && !errors.Is(err, io.EOF) {
		return nil, nil, err
	}
	messages, err := unix.ParseSocketControlMessage(room[:controlCount])
	if err != nil {
		return nil, nil, err
	}
	var descriptors []int
	for _, message := range messages {
		found, err := unix.ParseUnixRights(&message)
		if err == nil {
			descriptors = append(descriptors, found...)
		}
	}
	return data[:count], descriptors, nil
}

// Mapping is a host arena in this process. Its methods are safe for concurrent use.
type Mapping struct {
	mu   sync.RWMutex
	data []byte // nil once closed
}

// Map checks and maps an arena, and closes the descriptor, also on failure.
func Map(descriptor int, size uint64) (*Mapping, error) {
	defer func() { _ = unix.Close(descriptor) }() // the mapping holds the file
	if err := check(descriptor, size); err != nil {
		return nil, err
	}
	data, err := unix.Mmap(descriptor, 0, int(size), unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
	if err != nil {
		return nil, fmt.Errorf("the arena cannot be mapped: %w", err)
	}
	return &Mapping{data: data}, nil
}

// check insists on the seals: without them the other side could truncate the file and kill us with SIGBUS.
func check(descriptor int, size uint64) error {
	found, err := unix.FcntlInt(uintptr(descriptor), unix.F_GET_SEALS, 0)
	if err != nil {
		return errors.New("the arena's file is not a memfd that can be sealed")
	}
	if found&seals != seals {
		return errors.New("the arena's file is not sealed against shrinking and growing")
	}
	var stat unix.Stat_t
	if err := unix.Fstat(descriptor, &stat); err != nil {
		return err
	}
	if stat.Size < 0 || uint64(stat.Size) < size || size == 0 {
		return fmt.Errorf("the arena's file holds %d bytes and should hold %d", stat.Size, size)
	}
	return nil
}

// ReadAt copies out of the arena.
func (m *Mapping) ReadAt(into []byte, offset int64) (int, error) {
	return m.copy(into, offset, func(part []byte) int { return copy(into, part) })
}

// WriteAt copies into the arena.
func (m *Mapping) WriteAt(from []byte, offset int64) (int, error) {
	return m.copy(from, offset, func(part []byte) int { return copy(part, from) })
}

func (m *Mapping) copy(data []byte, offset int64, move func([]byte) int) (int, error) {
	m.mu.RLock()
	defer m.mu.RUnlock()
	if m.data == nil {
		return 0, os.ErrClosed
	}
	if offset < 0 || offset > int64(len(m.data)) || int64(len(data)) > int64(len(m.data))-offset {
		return 0, fmt.Errorf("%d bytes at %d lie outside an arena of %d", len(data), offset, len(m.data))
	}
	return move(m.data[offset : offset+int64(len(data))]), nil
}

// Close unmaps the arena. It may be called twice.
func (m *Mapping) Close() error {
	m.mu.Lock()
	defer m.mu.Unlock()
	data := m.data
	m.data = nil
	if data == nil {
		return nil
	}
	return unix.Munmap(data)
}
