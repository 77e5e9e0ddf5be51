package specdraft

import (
	"context"
	"slices"

	"google.golang.org/grpc/codes"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Sequence is one token sequence known to the service. Its methods are safe for concurrent use; they take turns. After a
// timeout or a broken connection the next one first asks the service where the sequence stands.
type Sequence struct {
	grant  *grant
	ledger *ledger
	turn   chan struct{} // held by whoever uses the ledger
	closed bool          // guarded by the turn
}

func newSequence(granted *grant, opened *ledger) *Sequence {
	return &Sequence{grant: granted, ledger: opened, turn: make(chan struct{}, 1)}
}

// ID names the sequence, 16 bytes.
func (q *Sequence) ID() []byte { return slices.Clone(q.ledger.id) }

// Prefill writes the pairs of a prompt: prompt[1:] with all hidden rows but the last. Hiddens has one row a token. A long
// prompt is written in chunks; after an error those before it are written. A prompt of one token writes nothing.
func (q *Sequence) Prefill(ctx context.Context, prompt []uint32, hiddens Rows) (State, error) {
	if err := hiddens.check(q.grant.terms.dtype, q.grant.terms.width); err != nil {
		return State{}, err
	}
	pairs, err := promptPairs(prompt, hiddens)
	if err != nil {
		return State{}, err
	}
	if len(pairs.Tokens) == 0 {
		return q.KnownState(ctx)
	}
	return q.Catchup(ctx, pairs)
}

// Catchup writes pairs: rows with keys >= FirstKey are dropped, then one row a pair is appended.
func (q *Sequence) Catchup(ctx context.Context, pairs Pairs) (State, error) {
	results, err := catchupBatch(ctx, q.grant, []CatchupItem{{q, pairs}})
	if err != nil {
		return State{}, err
	}
	return results[0].State, results[0].Err
}

// Propose writes pairs like Catchup, then drafts from the last one.
func (q *Sequence) Propose(ctx context.Context, pairs Pairs, draft Draft) (*Proposal, error) {
	results, err := proposeBatch(ctx, q.grant, []ProposeItem{{q, pairs, draft}})
	if err != nil {
		return nil, err
	}
	return results[0].Proposal, results[0].Err
}

// KnownState is where the sequence stood after the last answer, without asking.
func (q *Sequence) KnownState(ctx context.Context) (State, error) {
	if err := q.begin(ctx); err != nil {
		return State{}, err
	}
	defer q.end()
	return q.ledger.state, nil
}

// State asks the service where the sequence stands.
func (q *Sequence) State(ctx context.Context) (State, error) {
	if err := q.begin(ctx); err != nil {
		return State{}, err
	}
	defer q.end()
	if err := q.ledger.ask(ctx, q.grant.transport); err != nil {
		return State{}, err
	}
	return q.ledger.state, nil
}

// A Judgement says how the last round went, where no further write will tell.
type Judgement func(accepted *uint32) *uint32

// Accepted says how many drafts of the last round the target accepted.
func Accepted(drafts int) Judgement {
	return func(*uint32) *uint32 { return new(uint32(drafts)) }
}

func judged(judgements []Judgement) (accepted *uint32) {
	for _, judgement := range judgements {
		accepted = judgement(accepted)
	}
	return accepted
}

// Truncate drops the rows with keys >= firstKey; 0 empties the sequence.
func (q *Sequence) Truncate(ctx context.Context, firstKey int64, judgements ...Judgement) (State, error) {
	if err := q.begin(ctx); err != nil {
		return State{}, err
	}
	defer q.end()
	err := truncate(ctx, q.grant, q.ledger, firstKey, judged(judgements))
	if err != nil {
		return State{}, err
	}
	return q.ledger.state, nil
}

// ReadDraftsOptions say which drafts are read again.
type ReadDraftsOptions struct {
	// Op is the operation that drafted; 0 = the last one. Only the last operation's drafts are kept.
	Op uint64
	// WithLastEmbedding asks for the embedding of the last draft.
	WithLastEmbedding bool
}

// ReadDrafts reads the drafts of the last round, from the service's own copy. It answers OP_OUT_OF_ORDER where the last
// operation is another one, or drafted nothing.
func (q *Sequence) ReadDrafts(ctx context.Context, options ReadDraftsOptions) (*StoredDrafts, error) {
	if err := q.begin(ctx); err != nil {
		return nil, err
	}
	defer q.end()
	if options.Op == 0 {
		if err := q.ledger.sure(ctx, q.grant.transport); err != nil {
			return nil, err
		}
		options.Op = q.ledger.lastOp
	}
	request := &pb.ReadDraftsRequest{
		SequenceId: q.ledger.id, Op: options.Op, WithLastEmbedding: options.WithLastEmbedding,
	}
	answer, err := invoke(ctx, q.grant.transport, rpcReadDrafts(), request)
	if err != nil {
		return nil, err
	}
	return &StoredDrafts{
		answer.GetDrafts(), answer.GetLogprobs(), answer.GetStopReason(), answer.GetLastEmbedding(),
	}, nil
}

// TakeKV moves all rows out; the sequence is empty then. The label is the caller's own name, at most 64 bytes.
func (q *Sequence) TakeKV(ctx context.Context, label string) (Carry, error) {
	if err := q.begin(ctx); err != nil {
		return Carry{}, err
	}
	defer q.end()
	carry, err := takeKV(ctx, q.grant, q.ledger, label)
	if err != nil {
		return Carry{}, err
	}
	return carry, nil
}

// InstallKV moves a carry into this empty sequence. With c tokens in common keep the keys below c - layer_count; nil =
// keep all.
func (q *Sequence) InstallKV(ctx context.Context, carry Carry, keepKeysBelow *int64) (State, error) {
	if err := q.begin(ctx); err != nil {
		return State{}, err
	}
	defer q.end()
	if err := installKV(ctx, q.grant, q.ledger, carry, keepKeysBelow); err != nil {
		return State{}, err
	}
	return q.ledger.state, nil
}

// Fork opens a sequence that shares the rows with keys below keepKeysBelow. A budget of 0 tokens = the head's longest.
func (q *Sequence) Fork(ctx context.Context, keepKeysBelow int64, budgetTokens int) (*Sequence, error) {
	if err := checkBudget(budgetTokens); err != nil {
		return nil, err
	}
	if err := q.begin(ctx); err != nil {
		return nil, err
	}
	defer q.end()
	opened, err := forkSequence(ctx, q.grant, q.ledger, keepKeysBelow, budgetTokens)
	if err != nil {
		return nil, err
	}
	return newSequence(q.grant, opened), nil
}

// Close gives the sequence up. It may be called twice. One whose closing gets no answer is closed before the session's
// next one is opened.
func (q *Sequence) Close(ctx context.Context, judgements ...Judgement) error {
	select {
	case q.turn <- struct{}{}:
		defer q.end()
	case <-ctx.Done():
		return contextError(ctx, "CloseSequence")
	}
	if q.closed {
		return nil
	}
	q.closed = true
	if err := q.grant.closeOrLeave(ctx, q.ledger, judged(judgements)); err != nil {
		return err
	}
	return nil
}

// begin waits for the sequence's turn.
func (q *Sequence) begin(ctx context.Context) error {
	if ctx.Err() != nil {
		return contextError(ctx, "an operation")
	}
	select {
	case q.turn <- struct{}{}:
	case <-ctx.Done():
		return contextError(ctx, "an operation")
	}
	if q.closed {
		q.end()
		return &Error{Code: codes.NotFound, Message: "this sequence is closed", cause: ErrClosed}
	}
	return nil
}

func (q *Sequence) end() { <-q.turn }

func truncate(ctx context.Context, g *grant, l *ledger, firstKey int64, accepted *uint32) *Error {
	answer, err := operate(ctx, l, g.transport, rpcTruncate(), func(op uint64) *pb.TruncateRequest {
		return &pb.TruncateRequest{SequenceId: l.id, Op: op, FirstKey: firstKey, AcceptedDrafts: accepted}
	})
	if err == nil {
		l.adopt(readState(answer.GetState()))
	}
	return err
}

func takeKV(ctx context.Context, g *grant, l *ledger, label string) (Carry, *Error) {
	answer, err := operate(ctx, l, g.transport, rpcTakeKV(), func(op uint64) *pb.TakeKVRequest {
		return &pb.TakeKVRequest{SequenceId: l.id, Op: op, Label: label}
	})
	if err != nil {
		return Carry{}, err
	}
	l.adopt(readState(answer.GetState()))
	return readCarry(answer.GetCarry(), answer.GetHeadFingerprint()), nil
}

func installKV(ctx context.Context, g *grant, l *ledger, carry Carry, keepKeysBelow *int64) *Error {
	answer, err := operate(ctx, l, g.transport, rpcInstallKV(), func(op uint64) *pb.InstallKVRequest {
		return &pb.InstallKVRequest{
			SequenceId:      l.id,
			Op:              op,
			KvId:            carry.ID,
			KeepKeysBelow:   keepKeysBelow,
			HeadFingerprint: carry.HeadFingerprint,
		}
	})
	if err == nil {
		l.adopt(readState(answer.GetState()))
	}
	return err
}

func closeSequence(ctx context.Context, g *grant, l *ledger, accepted *uint32) *Error {
	_, err := operate(ctx, l, g.transport, rpcCloseSequence(), func(op uint64) *pb.CloseSequenceRequest {
		return &pb.CloseSequenceRequest{SequenceId: l.id, Op: op, AcceptedDrafts: accepted}
	})
	if err == nil {
		l.release()
	}
	return err
}
