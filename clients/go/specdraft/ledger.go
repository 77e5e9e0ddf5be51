package specdraft

import (
	"context"
	"crypto/rand"
	"strconv"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const idSize = 16

// ledger is what a client knows of one sequence: its operation number, and whether that is certain. Whoever uses it holds
// the sequence's turn.
//
// After a timeout or a broken connection nobody knows whether the operation was done. The ledger is then unsure, and the
// next use of the sequence first asks GetSequence, which waits for whatever is in flight and tells the number. It does not
// send the old request again: its caller was told that it failed and no longer wants the answer. (A Drive stream that
// breaks within a call is another matter: there the same request is sent again, and answered from the service's memory if
// it was done.)
//
// Until then the places of the lost request stay taken: the service may still read them.
type ledger struct {
	id     []byte
	state  State
	lastOp uint64
	unsure bool
	held   []func()
}

func newLedger(id []byte, state State) *ledger {
	return &ledger{id: id, state: state, lastOp: state.LastOp}
}

// adopt takes over what an answer says.
func (l *ledger) adopt(state State) {
	l.state, l.lastOp = state, state.LastOp
}

// settle takes over what GetSequence says: nothing is in flight any more.
func (l *ledger) settle(state State) {
	l.adopt(state)
	l.unsure = false
	l.release()
}

// hold keeps a place whose request has an unknown outcome.
func (l *ledger) hold(release func()) {
	l.unsure = true
	l.held = append(l.held, release)
}

// release gives the kept places back.
func (l *ledger) release() {
	for _, release := range l.held {
		release()
	}
	l.held = nil
}

// renumber corrects the counter from a refusal; whether the same operation is worth one more try.
//
// The sequence belongs to this client alone and one operation runs at a time, so a wrong number only means that an earlier
// operation with an unknown outcome ended otherwise than assumed.
func (l *ledger) renumber(err *Error, op uint64, stateTold bool) bool {
	switch err.Reason {
	case ReasonOpOutOfOrder:
		told, parse := strconv.ParseUint(err.Details["last_op"], 10, 64)
		if parse == nil {
			l.lastOp = told
		}
		return stateTold || parse == nil
	case ReasonOpReused:
		l.lastOp = op
		return true
	}
	return false
}

// sure asks where the sequence stands if that is not certain.
func (l *ledger) sure(ctx context.Context, t *transport) *Error {
	if !l.unsure {
		return nil
	}
	return l.ask(ctx, t)
}

// ask asks where the sequence stands, after everything sent before; that ends any uncertainty.
func (l *ledger) ask(ctx context.Context, t *transport) *Error {
	answer, err := invoke(ctx, t, rpcGetSequence(), &pb.GetSequenceRequest{SequenceId: l.id})
	if err != nil {
		return err
	}
	l.settle(readState(answer.GetState()))
	return nil
}

// operate performs one numbered operation, with the number put right at most once.
func operate[Req, Resp any](
	ctx context.Context, l *ledger, t *transport, r rpc[Req, Resp], build func(op uint64) *Req,
) (*Resp, *Error) {
	if err := l.sure(ctx, t); err != nil {
		return nil, err
	}
	op := l.lastOp + 1
	answer, err := numbered(ctx, l, t, r, build(op))
	if err == nil || !l.renumber(err, op, false) {
		return answer, err
	}
	return numbered(ctx, l, t, r, build(l.lastOp+1))
}

func numbered[Req, Resp any](
	ctx context.Context, l *ledger, t *transport, r rpc[Req, Resp], request *Req,
) (*Resp, *Error) {
	answer, err := invoke(ctx, t, r, request)
	if err != nil && isUncertain(err) {
		l.unsure = true
	}
	return answer, err
}

// openSequence opens a sequence. The open_id makes a second try return the sequence that a lost first answer left behind.
func openSequence(ctx context.Context, granted *grant, options SequenceOptions) (*ledger, *Error) {
	request := &pb.OpenSequenceRequest{
		OpenId:       newID(),
		BudgetTokens: uint32(options.BudgetTokens),
		Reserve:      options.Reserve,
		RowsPolicy:   max(options.Rows, RowsExact),
	}
	answer, err := tryTwice(ctx, granted.transport, rpcOpenSequence(), request)
	if err != nil {
		return nil, err
	}
	return newLedger(answer.GetSequenceId(), readState(answer.GetState())), nil
}

// forkSequence opens a sequence that shares a prefix.
func forkSequence(ctx context.Context, granted *grant, from *ledger, keepKeysBelow int64, budget int) (*ledger, *Error) {
	request := &pb.ForkSequenceRequest{
		SequenceId:    from.id,
		OpenId:        newID(),
		KeepKeysBelow: keepKeysBelow,
		BudgetTokens:  uint32(budget),
	}
	answer, err := tryTwice(ctx, granted.transport, rpcForkSequence(), request)
	if err != nil {
		return nil, err
	}
	return newLedger(answer.GetSequenceId(), readState(answer.GetState())), nil
}

func tryTwice[Req, Resp any](ctx context.Context, t *transport, r rpc[Req, Resp], request *Req) (*Resp, *Error) {
	answer, err := invoke(ctx, t, r, request)
	if err == nil || !isUncertain(err) || err.Reason != 0 || ctx.Err() != nil {
		return answer, err
	}
	return invoke(ctx, t, r, request)
}

func newID() []byte {
	id := make([]byte, idSize)
	_, _ = rand.Read(id) // never fails
	return id
}
