package specdraft

import (
	"context"
	"errors"
	"io"
	"os"
	"sync"

	"golang.org/x/sys/unix"
	"google.golang.org/grpc/codes"

	"example.com/specdraft/clients/go/specdraft/internal/hostmem"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const nonceSize = 16

// Memory is an arena that is mapped here: bytes at offsets from its start. Writing returns once the service can read what
// was written. It is safe for concurrent use; after Close its methods fail.
type Memory interface {
	io.ReaderAt
	io.WriterAt
	io.Closer
}

// Device imports arenas that lie in a GPU's memory. The package cuda has one.
type Device interface {
	// UUID names the target's GPU.
	UUID() [16]byte
	// Import maps the arena of size bytes whose CUDA IPC handle the service sent; owner is the GPU that holds it.
	Import(handle [64]byte, owner [16]byte, size uint64) (Memory, error)
}

// arena is a session's arena, and who uses which part of it.
type arena struct {
	memory Memory
	layout *pb.Arena
	// row is the size of one dense hidden row; slotRows is how many a slot holds.
	row, slotRows int

	mu       sync.Mutex
	slots    []uint32 // free
	nextRow  int      // first free row of the staging area, handed out from the front and recovered together
	stagings int      // claims of it that have not ended
}

func newArena(memory Memory, layout *pb.Arena, row, slotRows int) *arena {
	made := &arena{memory: memory, layout: layout, row: row, slotRows: slotRows}
	for slot := layout.GetSlotCount(); slot > 0; slot-- {
		made.slots = append(made.slots, slot-1)
	}
	return made
}

func (a *arena) nonce() ([]byte, error) {
	nonce := make([]byte, nonceSize)
	_, err := a.memory.ReadAt(nonce, int64(a.layout.GetNonceOffsetBytes()))
	return nonce, err
}

func (a *arena) takeSlot() (uint32, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if len(a.slots) == 0 {
		return 0, false
	}
	slot := a.slots[len(a.slots)-1]
	a.slots = a.slots[:len(a.slots)-1]
	return slot, true
}

func (a *arena) giveSlot(slot uint32) {
	a.mu.Lock()
	defer a.mu.Unlock()
	a.slots = append(a.slots, slot)
}

func (a *arena) claimStaging(rows int) (uint32, bool) {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.nextRow+rows > int(a.layout.GetPrefillRowCount()) {
		return 0, false
	}
	first := a.nextRow
	a.nextRow += rows
	a.stagings++
	return uint32(first), true
}

func (a *arena) endStaging() {
	a.mu.Lock()
	defer a.mu.Unlock()
	if a.stagings--; a.stagings == 0 {
		a.nextRow = 0
	}
}

// inUse counts slots and staging claims that have not been given back.
func (a *arena) inUse() int {
	a.mu.Lock()
	defer a.mu.Unlock()
	return int(a.layout.GetSlotCount()) - len(a.slots) + a.stagings
}

func (a *arena) slotStart(slot uint32) int64 {
	return int64(a.layout.GetSlotsOffsetBytes() + uint64(slot)*a.layout.GetSlotStrideBytes())
}

func (a *arena) writeSlot(slot uint32, rows Rows) error {
	return a.writeRows(a.slotStart(slot)+int64(a.layout.GetSlot().GetHiddenOffsetBytes()), rows)
}

func (a *arena) writeStaging(firstRow uint32, rows Rows) error {
	start := a.layout.GetStagingOffsetBytes() + uint64(firstRow)*uint64(a.layout.GetHiddenRowStrideBytes())
	return a.writeRows(int64(start), rows)
}

func (a *arena) writeMask(slot uint32, words []uint32) error {
	_, err := a.memory.WriteAt(uint32Bytes(words), a.slotStart(slot)+int64(a.layout.GetSlot().GetMaskOffsetBytes()))
	return err
}

// writeRows copies dense rows to where they lie a stride apart.
func (a *arena) writeRows(start int64, rows Rows) error {
	data, stride := rows.data, int(a.layout.GetHiddenRowStrideBytes())
	if stride == a.row {
		_, err := a.memory.WriteAt(data, start)
		return err
	}
	for row := range rows.Len() {
		if _, err := a.memory.WriteAt(data[row*a.row:(row+1)*a.row], start+int64(row*stride)); err != nil {
			return err
		}
	}
	return nil
}

// mapHost fetches the descriptor of a host arena from the side socket and maps it.
func mapHost(ctx context.Context, layout *pb.Arena, ownSocket string) (Memory, *Error) {
	path := layout.GetDescriptorSocket()
	// Another mount point of the same directory is normal between containers.
	if ownSocket != "" && unix.Access(path, unix.F_OK) != nil {
		path = ownSocket + hostmem.SideSocketSuffix
	}
	descriptor, err := hostmem.Fetch(ctx, path, layout.GetDescriptorToken())
	if err != nil {
		return nil, transportUnavailable(err)
	}
	memory, err := hostmem.Map(descriptor, layout.GetSizeBytes())
	if err != nil {
		return nil, transportUnavailable(err)
	}
	return memory, nil
}

// importDevice maps a CUDA arena.
func importDevice(device Device, layout *pb.Arena) (Memory, *Error) {
	handle, owner := layout.GetCudaIpcHandle(), layout.GetDeviceUuid()
	if len(handle) != 64 || len(owner) != 16 {
		return nil, internalError("an IPC handle of %d bytes, of a GPU with a UUID of %d", len(handle), len(owner))
	}
	memory, err := device.Import([64]byte(handle), [16]byte(owner), layout.GetSizeBytes())
	if err != nil {
		return nil, transportUnavailable(err)
	}
	return memory, nil
}

func transportUnavailable(err error) *Error {
	failed := &Error{Code: codes.FailedPrecondition, Reason: ReasonTransportUnavailable, Message: err.Error(), cause: err}
	failed.Details = map[string]string{"kind": "HOST"}
	return failed
}

// arenaError is the error of writing into an arena that is closed or not as laid out.
func arenaError(err error) *Error {
	if errors.Is(err, os.ErrClosed) {
		return closedError()
	}
	return &Error{Code: codes.Internal, Message: "the arena cannot be written: " + err.Error(), cause: err}
}
