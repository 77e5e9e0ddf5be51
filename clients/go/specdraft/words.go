package specdraft

import (
	"time"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// ProtocolVersion is the version of the protocol that this client speaks.
const ProtocolVersion = 1

// TokenMetadataKey is the binary metadata that carries the session's token.
const TokenMetadataKey = "specdraft-token-bin"

// HiddenSource says where in the target the hidden states are taken.
type HiddenSource = pb.HiddenSource

// The places.
const (
	PreNorm  = pb.HiddenSource_HIDDEN_SOURCE_PRE_NORM
	PostNorm = pb.HiddenSource_HIDDEN_SOURCE_POST_NORM
	Layers   = pb.HiddenSource_HIDDEN_SOURCE_LAYERS
)

// DType is the element type of hidden rows.
type DType = pb.DType

// The element types that a session may agree on.
const (
	Float32  = pb.DType_D_TYPE_FLOAT32
	BFloat16 = pb.DType_D_TYPE_BFLOAT16
)

// MemoryKind says how hidden rows reach the service.
type MemoryKind = pb.MemoryKind

// The kinds.
const (
	MemoryInline = pb.MemoryKind_MEMORY_KIND_INLINE
	MemoryHost   = pb.MemoryKind_MEMORY_KIND_HOST
	MemoryCUDA   = pb.MemoryKind_MEMORY_KIND_CUDA
)

// RowsPolicy says which rows a sequence keeps.
type RowsPolicy = pb.RowsPolicy

// The policies.
const (
	RowsExact       = pb.RowsPolicy_ROWS_POLICY_EXACT
	RowsApproximate = pb.RowsPolicy_ROWS_POLICY_APPROXIMATE
)

// StopReason says why there are not more drafts.
type StopReason = pb.StopReason

// KeyRange is the keys Begin <= key < End.
type KeyRange struct {
	Begin, End int64
}

// State is where a sequence stands after an operation.
type State struct {
	// LastOp is the last accepted operation number.
	LastOp uint64
	// RowCount is the number of rows stored.
	RowCount int
	// LastPairKey is the key of the newest exact pair; -1 = none.
	LastPairKey int64
	// Ranges are the keys that have a row, ascending, neighbours merged.
	Ranges []KeyRange
	// FirstApproximateKey is the first key of the approximate rows; -1 = none.
	FirstApproximateKey int64
}

func readState(message *pb.SequenceState) State {
	return State{
		LastOp:              message.GetLastOp(),
		RowCount:            int(message.GetRowCount()),
		LastPairKey:         message.GetLastPairKey(),
		Ranges:              readRanges(message.GetRanges()),
		FirstApproximateKey: message.GetFirstApproximateKey(),
	}
}

func readRanges(messages []*pb.KeyRange) []KeyRange {
	ranges := make([]KeyRange, len(messages))
	for index, one := range messages {
		ranges[index] = KeyRange{one.GetBegin(), one.GetEnd()}
	}
	return ranges
}

// Proposal is the drafts for one sequence.
type Proposal struct {
	// Drafts d_1..d_n are guesses for t_{P+1}..t_{P+n}, where P - 1 is the key of the last pair given.
	Drafts []uint32
	// Logprobs are the natural logarithms of their probabilities.
	Logprobs []float32
	// StopReason says why there are not more.
	StopReason StopReason
	// State is where the sequence stands.
	State State
	// RecommendedDrafts is, if asked for, the number of drafts with which the most tokens a second are to be expected in
	// the next round; 0 = do not draft now. Nil = not asked for.
	RecommendedDrafts *int
}

func readProposal(message *pb.ProposeResult, state State) *Proposal {
	read := &Proposal{
		Drafts:     message.GetDrafts(),
		Logprobs:   message.GetLogprobs(),
		StopReason: message.GetStopReason(),
		State:      state,
	}
	if message.RecommendedDrafts != nil {
		read.RecommendedDrafts = new(int(message.GetRecommendedDrafts()))
	}
	return read
}

// StoredDrafts are the drafts of a sequence's last round, from the service's own copy.
type StoredDrafts struct {
	Drafts     []uint32
	Logprobs   []float32
	StopReason StopReason
	// LastEmbedding is the embedding of the last draft, elements of the session's type, little-endian; nil where it was
	// not asked for, or there is no draft.
	LastEmbedding []byte
}

// Carry is rows taken out of a sequence, waiting to be installed in another.
type Carry struct {
	// ID names it, 16 bytes.
	ID []byte
	// Ranges are the keys that it holds.
	Ranges []KeyRange
	// Label is the name given in TakeKV.
	Label string
	// ExpiresIn says how long after the answer it is given up; 0 = with the session.
	ExpiresIn time.Duration
	// HeadFingerprint is the head that made the rows; empty where the service did not say.
	HeadFingerprint string
}

// LastKey is its largest key; -1 = it has none.
func (c Carry) LastKey() int64 {
	if len(c.Ranges) == 0 {
		return -1
	}
	return c.Ranges[len(c.Ranges)-1].End - 1
}

func readCarry(message *pb.CarryInfo, fingerprint string) Carry {
	return Carry{
		ID:              message.GetKvId(),
		Ranges:          readRanges(message.GetRanges()),
		Label:           message.GetLabel(),
		ExpiresIn:       time.Duration(message.GetExpiresInMs()) * time.Millisecond,
		HeadFingerprint: fingerprint,
	}
}
