package specdraft

import (
	"context"
	"errors"
	"os"
	"strings"
	"sync"
	"time"

	"google.golang.org/grpc/codes"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const (
	defaultMessageSize = 4 << 20
	bootIDPath         = "/proc/sys/kernel/random/boot_id"

	// KeepAlive is sent at leaseShare-th of the lease, after a failure at retryShare-th.
	leaseShare = 3
	retryShare = 15
)

// terms are what holds while a session lives, as the service granted it.
type terms struct {
	dtype        DType
	width        int
	maxDrafts    int
	entriesMax   int
	rowsMax      int // pairs of one Catchup entry
	messageMax   int // bytes of a request
	lease, grace time.Duration
	kind         MemoryKind
	carries      []Carry
	layerCount   int
	pageRows     int
	maskWords    int
}

// grant is one session as the service knows it. A service that has restarted knows it no more; a Session then gets
// another.
type grant struct {
	id        []byte
	terms     terms
	transport *transport
	placement *placement
	memory    Memory // nil = inline
	endLease  context.CancelFunc
	leaseDone chan struct{}
	closing   sync.Once

	leftLock sync.Mutex
	left     []*ledger // sequences whose closing got no answer
}

// openGrant opens a session at the service, maps its arena and proves the mapping.
func (c *Client) openGrant(ctx context.Context, options SessionOptions) (*grant, *Error) {
	before := c.transport(nil)
	info, err := invoke(ctx, before, rpcGetServerInfo(), &pb.GetServerInfoRequest{})
	if err != nil {
		return nil, err
	}
	answer, err := invoke(ctx, before, rpcOpenSession(), openRequest(options, info, socketPath(c.target)))
	if err != nil {
		return nil, err
	}
	made := &grant{
		id:        answer.GetSessionId(),
		terms:     readTerms(options, info, answer),
		transport: c.transport(answer.GetSessionToken()),
		endLease:  func() {},
		leaseDone: make(chan struct{}),
	}
	if err := made.proveMapping(ctx, c, options, answer); err != nil {
		close(made.leaseDone)
		made.close(ctx)
		return nil, err
	}
	if !options.Unary {
		open := func(ctx context.Context) (pb.Drafter_DriveClient, error) {
			return c.stub.Drive(made.transport.outgoing(ctx))
		}
		refused := func(ctx context.Context) bool { return isRefused(ctx, c.target) }
		made.transport.drive = startDrive(open, refused, made.terms.grace)
	}
	leaseContext, cancel := context.WithCancel(context.Background())
	made.endLease = cancel
	go made.keepAlive(leaseContext)
	return made, nil
}

// proveMapping maps the arena, if there is one, and shows it to the service before anything refers to it.
func (g *grant) proveMapping(ctx context.Context, c *Client, options SessionOptions, answer *pb.OpenSessionResponse) *Error {
	t := g.terms
	rowSize := t.width * elementSize(t.dtype)
	g.placement = &placement{
		maskWords:     t.maskWords,
		maxDrafts:     t.maxDrafts,
		inlineRowsMax: max(1, (t.messageMax-messageMargin)/(rowSize+tokenSize)),
	}
	var nonce []byte
	if t.kind != MemoryInline {
		var failed *Error
		if g.memory, failed = mapArena(ctx, c, options, answer.GetArena(), t.kind); failed != nil {
			return failed
		}
		g.placement.arena = newArena(g.memory, answer.GetArena(), rowSize, t.maxDrafts+1)
		var err error
		if nonce, err = g.placement.arena.nonce(); err != nil {
			return ErrorOf(arenaError(err))
		}
	}
	_, err := invoke(ctx, g.transport, rpcKeepAlive(), &pb.KeepAliveRequest{ArenaNonce: nonce})
	return err
}

func mapArena(ctx context.Context, c *Client, options SessionOptions, layout *pb.Arena, kind MemoryKind) (Memory, *Error) {
	if kind == MemoryCUDA {
		return importDevice(options.Device, layout)
	}
	ctx, cancel := context.WithTimeout(ctx, c.timeout)
	defer cancel()
	return mapHost(ctx, layout, socketPath(c.target))
}

func openRequest(options SessionOptions, info *pb.GetServerInfoResponse, ownSocket string) *pb.OpenSessionRequest {
	bootID := readBootID()
	request := &pb.OpenSessionRequest{
		ProtocolVersion: ProtocolVersion,
		HiddenSource:    options.HiddenSource,
		HiddenDtype:     options.HiddenDType,
		HiddenWidth:     uint32(options.HiddenWidth),
		LayerIds:        options.LayerIDs,
		VocabSize:       uint32(options.VocabSize),
		MemoryKind:      chooseMemory(options, info, ownSocket, bootID),
		SlotCount:       uint32(options.Slots),
		MaxDrafts:       uint32(options.MaxDrafts),
		PrefillRowCount: uint32(options.PrefillRows),
		WithMasks:       options.WithMasks,
		BootId:          bootID,
		Pid:             uint32(os.Getpid()),
		CarryKey:        options.CarryKey,
		ClientName:      options.ClientName,
	}
	if options.HiddenWidth == 0 {
		request.HiddenWidth = info.GetHead().GetHiddenWidth()
	}
	if options.Device != nil && options.Memory == MemoryCUDA {
		id := options.Device.UUID()
		request.DeviceUuid = id[:]
	}
	return request
}

// chooseMemory resolves a kind that was not said: shared memory on a Unix socket of the same host where it is granted.
func chooseMemory(options SessionOptions, info *pb.GetServerInfoResponse, ownSocket, bootID string) MemoryKind {
	if options.Memory != 0 {
		return options.Memory
	}
	sameHost := ownSocket != "" && bootID != "" && bootID == info.GetBootId()
	for _, kind := range info.GetMemoryKinds() {
		if kind == MemoryHost && sameHost {
			return MemoryHost
		}
	}
	return MemoryInline
}

func readBootID() string {
	text, err := os.ReadFile(bootIDPath)
	if err != nil {
		return "" // a host that has none shares no memory
	}
	return strings.TrimSpace(string(text))
}

func readTerms(options SessionOptions, info *pb.GetServerInfoResponse, answer *pb.OpenSessionResponse) terms {
	limits := info.GetLimits()
	read := terms{
		dtype:      options.HiddenDType,
		width:      options.HiddenWidth,
		maxDrafts:  int(answer.GetMaxDrafts()),
		entriesMax: max(1, int(limits.GetProposeBatchMax())),
		rowsMax:    int(limits.GetPrefillRowsMax()),
		messageMax: int(limits.GetMessageSizeMaxBytes()),
		lease:      time.Duration(answer.GetLeaseMs()) * time.Millisecond,
		grace:      time.Duration(limits.GetGraceMs()) * time.Millisecond,
		kind:       answer.GetMemoryKind(),
		layerCount: int(info.GetHead().GetLayerCount()),
		pageRows:   int(limits.GetKvPageRowCount()),
	}
	if read.width == 0 {
		read.width = int(info.GetHead().GetHiddenWidth())
	}
	if read.messageMax <= 0 {
		read.messageMax = defaultMessageSize
	}
	if staging := int(answer.GetArena().GetPrefillRowCount()); read.kind != MemoryInline && staging > 0 {
		read.rowsMax = min(read.rowsMax, staging)
	}
	if answer.GetArena().GetSlot().GetMaskOffsetBytes() > 0 {
		read.maskWords = (int(info.GetHead().GetVocabSize()) + 31) / 32
	}
	for _, one := range answer.GetCarries() {
		read.carries = append(read.carries, readCarry(one, ""))
	}
	return read
}

// keepAlive renews the lease until it is ended or the session is gone.
func (g *grant) keepAlive(ctx context.Context) {
	defer close(g.leaseDone)
	pause := g.terms.lease / leaseShare
	for {
		timer := time.NewTimer(pause)
		select {
		case <-timer.C:
		case <-ctx.Done():
			timer.Stop()
			return
		}
		callContext, cancel := context.WithTimeout(ctx, g.terms.lease/leaseShare)
		_, err := invoke(callContext, g.transport, rpcKeepAlive(), &pb.KeepAliveRequest{})
		cancel()
		switch {
		case err == nil:
			pause = g.terms.lease / leaseShare
		case err.Code == codes.NotFound:
			return // the session is gone; the next use of a sequence says so
		default:
			pause = g.terms.lease / retryShare
		}
	}
}

// closeOrLeave closes a sequence. One whose closing gets no answer is closed before the next one is opened.
func (g *grant) closeOrLeave(ctx context.Context, l *ledger, accepted *uint32) *Error {
	err := closeSequence(ctx, g, l, accepted)
	if err == nil {
		return nil
	}
	if isUncertain(err) {
		g.leftLock.Lock()
		g.left = append(g.left, l)
		g.leftLock.Unlock()
	} else {
		l.release()
	}
	return err
}

// closeLeft closes what was left; what still gets no answer waits for the next time.
func (g *grant) closeLeft(ctx context.Context) {
	g.leftLock.Lock()
	left := g.left
	g.left = nil
	g.leftLock.Unlock()
	for index, l := range left {
		if err := g.closeOrLeave(ctx, l, nil); err != nil && isUncertain(err) {
			g.leftLock.Lock()
			g.left = append(g.left, left[index+1:]...)
			g.leftLock.Unlock()
			return
		}
	}
}

func (g *grant) lost() bool { return g.transport.lost.Load() != nil }

// close ends the session. A service that cannot be reached ends it by itself when the lease runs out.
func (g *grant) close(ctx context.Context) error {
	var err error
	g.closing.Do(func() {
		g.endLease()
		<-g.leaseDone
		if g.transport.drive != nil { // first, so that it does not attach again to a session that is ending
			g.transport.drive.close()
		}
		if !g.lost() {
			_, failed := invoke(context.WithoutCancel(ctx), g.transport, rpcCloseSession(), &pb.CloseSessionRequest{})
			if failed != nil && !errors.Is(failed, ReasonSessionUnknown) {
				err = failed
			}
		}
		g.transport.closed.Store(true)
		if g.memory != nil {
			err = errors.Join(err, g.memory.Close())
		}
	})
	return err
}
