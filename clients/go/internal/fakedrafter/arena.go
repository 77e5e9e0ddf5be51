package fakedrafter

import (
	"errors"
	"net"
	"os"
	"strings"
	"sync"

	"golang.org/x/sys/unix"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const (
	// Stride is wider than a row, so that a client that computes it is found out.
	Stride        = 4*Width + 16
	slotsOffset   = 4096
	slotStride    = 1024
	hiddenOffset  = 64
	stagingOffset = 65536
	arenaSize     = stagingOffset + PrefillRows*Stride
	nonceOffset   = 16
)

// sideSocket hands a host arena's descriptor out.
type sideSocket struct {
	listener *net.UnixListener
	path     string

	mu    sync.Mutex
	arena *hostArena
	token []byte
}

type hostArena struct {
	file *os.File
	data []byte
}

func (a *hostArena) nonce() []byte { return append([]byte(nil), a.data[nonceOffset:nonceOffset+16]...) }

func (a *hostArena) rows(start, count int) []byte {
	var dense []byte
	for row := range count {
		dense = append(dense, a.data[start+row*Stride:start+row*Stride+4*Width]...)
	}
	return dense
}

func (a *hostArena) slot(slot, count int) []byte {
	return a.rows(slotsOffset+slot*slotStride+hiddenOffset, count)
}

func (a *hostArena) staging(first, count int) []byte {
	return a.rows(stagingOffset+first*Stride, count)
}

func (a *hostArena) close() {
	if a.file == nil {
		return // a device's memory, which is the test's
	}
	_ = unix.Munmap(a.data) // both only free what the fake holds
	_ = a.file.Close()
}

func listenSide(path string) (*sideSocket, error) {
	listener, err := net.ListenUnix("unix", &net.UnixAddr{Name: path, Net: "unix"})
	if err != nil {
		return nil, err
	}
	made := &sideSocket{listener: listener, path: path}
	go made.serve()
	return made, nil
}

func (s *sideSocket) serve() {
	for {
		conn, err := s.listener.AcceptUnix()
		if err != nil {
			return
		}
		s.hand(conn)
	}
}

func (s *sideSocket) hand(conn *net.UnixConn) {
	defer func() { _ = conn.Close() }() // the client has its answer, or none
	token := make([]byte, 16)
	if _, err := conn.Read(token); err != nil {
		return
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena == nil || string(token) != string(s.token) {
		_, _ = conn.Write([]byte{1}) // a refusal that cannot be written is one too
		return
	}
	_, _, _ = conn.WriteMsgUnix([]byte{0}, unix.UnixRights(int(s.arena.file.Fd())), nil)
}

func (s *sideSocket) close() {
	_ = s.listener.Close()
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena != nil {
		s.arena.close()
		s.arena = nil
	}
}

// newArena makes a sealed memfd and says where things lie in it.
func (s *sideSocket) newArena(slots int) (*pb.Arena, error) {
	descriptor, err := unix.MemfdCreate("arena", unix.MFD_ALLOW_SEALING|unix.MFD_CLOEXEC)
	if err != nil {
		return nil, err
	}
	file := os.NewFile(uintptr(descriptor), "arena")
	data, err := mapSealed(descriptor)
	if err != nil {
		return nil, errors.Join(err, file.Close())
	}
	copy(data[nonceOffset:], newBytes())
	s.mu.Lock()
	defer s.mu.Unlock()
	if s.arena != nil {
		s.arena.close()
	}
	s.arena, s.token = &hostArena{file, data}, newBytes()
	said := layout(pb.MemoryKind_MEMORY_KIND_HOST, slots)
	said.DescriptorToken, said.DescriptorSocket = s.token, s.path
	return said, nil
}

// newDeviceArena takes memory of a (fake) GPU for an arena.
func (s *sideSocket) newDeviceArena(slots int, device *DeviceMemory) *pb.Arena {
	handle, data := device.Export(arenaSize)
	copy(data[nonceOffset:], newBytes())
	s.mu.Lock()
	defer s.mu.Unlock()
	s.arena = &hostArena{data: data}
	said := layout(pb.MemoryKind_MEMORY_KIND_CUDA, slots)
	said.CudaIpcHandle, said.DeviceUuid = handle[:], device.UUID[:]
	return said
}

func layout(kind pb.MemoryKind, slots int) *pb.Arena {
	return &pb.Arena{
		Kind: kind, SizeBytes: arenaSize, SlotCount: uint32(slots), SlotsOffsetBytes: slotsOffset,
		SlotStrideBytes: slotStride, StagingOffsetBytes: stagingOffset, PrefillRowCount: PrefillRows,
		HiddenRowStrideBytes: Stride, NonceOffsetBytes: nonceOffset, Slot: &pb.SlotLayout{HiddenOffsetBytes: hiddenOffset},
	}
}

func mapSealed(descriptor int) ([]byte, error) {
	if err := unix.Ftruncate(descriptor, arenaSize); err != nil {
		return nil, err
	}
	if _, err := unix.FcntlInt(uintptr(descriptor), unix.F_ADD_SEALS, unix.F_SEAL_SHRINK|unix.F_SEAL_GROW); err != nil {
		return nil, err
	}
	return unix.Mmap(descriptor, 0, arenaSize, unix.PROT_READ|unix.PROT_WRITE, unix.MAP_SHARED)
}

func bootID() string {
	text, err := os.ReadFile("/proc/sys/kernel/random/boot_id")
	if err != nil {
		return ""
	}
	return strings.TrimSpace(string(text))
}
