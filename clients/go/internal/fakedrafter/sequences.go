package fakedrafter

import (
	"context"
	"crypto/rand"
	"maps"
	"slices"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

type sequence struct {
	lastOp      uint64
	rows        map[int64]string
	lastRequest []byte
	lastAnswer  proto.Message
}

func (q *sequence) state() *pb.SequenceState {
	said := &pb.SequenceState{LastOp: q.lastOp, RowCount: uint32(len(q.rows)), LastPairKey: -1, FirstApproximateKey: -1}
	for _, key := range slices.Sorted(maps.Keys(q.rows)) {
		said.LastPairKey = key
		if last := len(said.Ranges) - 1; last >= 0 && said.Ranges[last].End == key {
			said.Ranges[last].End++
			continue
		}
		said.Ranges = append(said.Ranges, &pb.KeyRange{Begin: key, End: key + 1})
	}
	return said
}

func (q *sequence) drop(firstKey int64) {
	maps.DeleteFunc(q.rows, func(key int64, _ string) bool { return key >= firstKey })
}

func newBytes() []byte {
	made := make([]byte, 16)
	_, _ = rand.Read(made) // never fails
	return made
}

func (s *Service) find(id []byte) (*sequence, error) {
	if found := s.sequences[string(id)]; found != nil {
		return found, nil
	}
	return nil, &Refusal{codes.NotFound, pb.ErrorReason_ERROR_REASON_SEQUENCE_UNKNOWN}
}

// open returns the sequence of an open_id, made if it is new.
func (s *Service) open(openID []byte, rows map[int64]string) ([]byte, *sequence) {
	id, known := s.opened[string(openID)]
	if !known {
		id = string(newBytes())
		s.opened[string(openID)] = id
		s.sequences[id] = &sequence{rows: rows}
	}
	return []byte(id), s.sequences[id]
}

// numbered does an operation once.
func numbered[Answer proto.Message](q *sequence, op uint64, request proto.Message, work func() (func() Answer, error)) (Answer, error) {
	var none Answer
	said, err := proto.MarshalOptions{Deterministic: true}.Marshal(request)
	if err != nil {
		return none, err
	}
	if op == q.lastOp && op > 0 {
		if string(said) != string(q.lastRequest) {
			return none, &Refusal{codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_OP_REUSED}
		}
		return q.lastAnswer.(Answer), nil
	}
	if op != q.lastOp+1 {
		return none, &Refusal{codes.Aborted, pb.ErrorReason_ERROR_REASON_OP_OUT_OF_ORDER}
	}
	answer, err := work()
	if err != nil {
		return none, err
	}
	q.lastOp, q.lastRequest = op, said
	made := answer()
	q.lastAnswer = made
	return made, nil
}

func (s *Service) entry(id []byte, op uint64, pairs *pb.Pairs, draftCount uint32, request proto.Message) *pb.ProposeResult {
	q, err := s.find(id)
	if err != nil {
		return &pb.ProposeResult{Status: err.(*Refusal).entry()}
	}
	answer, err := numbered(q, op, request, func() (func() *pb.ProposeResult, error) {
		if err := s.write(q, pairs); err != nil {
			return nil, err
		}
		return func() *pb.ProposeResult {
			said := &pb.ProposeResult{State: q.state(), StopReason: pb.StopReason_STOP_REASON_COMPLETE}
			for range draftCount {
				said.Drafts, said.Logprobs = append(said.Drafts, 7), append(said.Logprobs, -0.5)
			}
			return said
		}, nil
	})
	if refused, ok := err.(*Refusal); ok {
		return &pb.ProposeResult{Status: refused.entry(), State: q.state()}
	}
	return answer
}

func (s *Service) write(q *sequence, pairs *pb.Pairs) error {
	data, err := s.read(pairs.GetHiddens())
	if err != nil {
		return err
	}
	if len(data) != 4*Width*len(pairs.Tokens) {
		return &Refusal{codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_HIDDEN_SIZE_MISMATCH}
	}
	below := int64(-1)
	for key := range q.rows {
		if key < pairs.FirstKey {
			below = max(below, key)
		}
	}
	if pairs.FirstKey > below+1 && !pairs.AllowGap {
		return &Refusal{codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_MISSING_ROWS}
	}
	q.drop(pairs.FirstKey)
	for index := range pairs.Tokens {
		q.rows[pairs.FirstKey+int64(index)] = string(data[4*Width*index : 4*Width*(index+1)])
	}
	return nil
}

func (s *Service) read(ref *pb.TensorRef) ([]byte, error) {
	switch place := ref.GetMemory().(type) {
	case *pb.TensorRef_Inline:
		return place.Inline, nil
	case *pb.TensorRef_ArenaSlot:
		return s.side.arena.slot(int(place.ArenaSlot.Slot), int(ref.RowCount)), nil
	case *pb.TensorRef_ArenaStaging:
		return s.side.arena.staging(int(place.ArenaStaging.FirstRow), int(ref.RowCount)), nil
	}
	return nil, &Refusal{codes.InvalidArgument, pb.ErrorReason_ERROR_REASON_INVALID_FIELD}
}

// GetServerInfo says what the fake is.
func (s *Service) GetServerInfo(context.Context, *pb.GetServerInfoRequest) (*pb.GetServerInfoResponse, error) {
	said := &pb.GetServerInfoResponse{
		ServiceVersion: "0.0.0", ProtocolVersion: 1, BootId: bootID(), MemoryKinds: []pb.MemoryKind{pb.MemoryKind_MEMORY_KIND_INLINE},
		Head: &pb.HeadInfo{
			ModelType: "fake", Kind: "mtp", Fingerprint: "00", HiddenWidth: Width, VocabSize: 64, LayerCount: 1, MaxSeqLen: 4096,
			HiddenSource: pb.HiddenSource_HIDDEN_SOURCE_POST_NORM,
		},
		Limits: &pb.Limits{
			MaxDrafts: MaxDrafts, ProposeBatchMax: 4, PrefillRowsMax: PrefillRows, KvPageRowCount: 4, MessageSizeMaxBytes: 4 << 20,
			LeaseMs: s.options.LeaseMs, GraceMs: s.options.GraceMs,
		},
	}
	if s.options.HostMemory {
		said.MemoryKinds = append(said.MemoryKinds, pb.MemoryKind_MEMORY_KIND_HOST)
	}
	return said, nil
}

// OpenSession opens the one session.
func (s *Service) OpenSession(_ context.Context, request *pb.OpenSessionRequest) (*pb.OpenSessionResponse, error) {
	if request.HiddenWidth != Width {
		return nil, &Refusal{codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_HANDSHAKE_MISMATCH}
	}
	s.mu.Lock()
	defer s.mu.Unlock()
	s.token = newBytes()
	said := &pb.OpenSessionResponse{
		SessionId: newBytes(), SessionToken: s.token, LeaseMs: s.options.LeaseMs, MaxDrafts: MaxDrafts, MemoryKind: request.MemoryKind,
	}
	for _, carry := range s.carries {
		said.Carries = append(said.Carries, carry)
	}
	if request.MemoryKind == pb.MemoryKind_MEMORY_KIND_CUDA {
		if s.options.Device == nil || string(request.DeviceUuid) != string(s.options.Device.UUID[:]) {
			return nil, &Refusal{codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_GPU_UUID_NOT_VISIBLE}
		}
		said.Arena = s.side.newDeviceArena(int(request.SlotCount), s.options.Device)
	}
	if request.MemoryKind == pb.MemoryKind_MEMORY_KIND_HOST {
		arena, err := s.side.newArena(int(request.SlotCount))
		if err != nil {
			return nil, err
		}
		said.Arena = arena
	}
	return said, nil
}

// KeepAlive renews the lease.
func (s *Service) KeepAlive(ctx context.Context, request *pb.KeepAliveRequest) (*pb.KeepAliveResponse, error) {
	if err := s.checkToken(ctx); err != nil {
		return nil, err
	}
	if err := s.note("KeepAlive", request, false); err != nil {
		return nil, err
	}
	if len(request.ArenaNonce) > 0 && string(request.ArenaNonce) != string(s.side.arena.nonce()) {
		return nil, &Refusal{codes.FailedPrecondition, pb.ErrorReason_ERROR_REASON_MAPPING_NOT_PROVEN}
	}
	return &pb.KeepAliveResponse{LeaseMs: s.options.LeaseMs, MappingProven: true}, nil
}

// CloseSession ends the session.
func (s *Service) CloseSession(ctx context.Context, request *pb.CloseSessionRequest) (*pb.CloseSessionResponse, error) {
	if err := s.checkToken(ctx); err != nil {
		return nil, err
	}
	if err := s.note("CloseSession", request, false); err != nil {
		return nil, err
	}
	s.Restart()
	return &pb.CloseSessionResponse{}, nil
}
