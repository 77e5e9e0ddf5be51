package specdraft

import (
	"context"
	"errors"

	"google.golang.org/grpc/codes"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Resumed is a sequence that goes on where an earlier one was parked.
type Resumed struct {
	Sequence *Sequence
	// KeysKept are the rows that it holds already; 0 = everything has to be written.
	KeysKept int
	// NextKey is the first key that is missing at the end: write the pairs from here on. It equals KeysKept, unless the
	// carry had gaps.
	NextKey int64
}

// ResumeOptions say how a turn is resumed.
type ResumeOptions struct {
	// Conversation is the name that Park was given; empty = none.
	Conversation string
	// BudgetTokens and Rows are those of SequenceOptions.
	BudgetTokens int
	Rows         RowsPolicy
	// KeepCarry keeps the carry for further prompts that begin like it, whatever is used of it.
	KeepCarry bool
}

// Park moves a sequence's rows out, remembers what they were made from, and closes the sequence.
//
// Write the pairs of the last verify first (Catchup, with its AcceptedDrafts): what is not written by now has to be
// written in the next turn. Tokens are t_0.. of the sequence, at least as many as its rows depend on; more do no harm. The
// conversation is a short name (64 bytes at most, no secret) that the caller can find its history by; it is the carry's
// label. Within one conversation a later turn may drop what an earlier one held.
//
// What is remembered is bounded (SessionOptions.CarriesMax, CarryTokensMax); what has to be forgotten is given up at the
// service too. After an error of taking the rows the sequence stays open.
func (s *Session) Park(ctx context.Context, sequence *Sequence, tokens []uint32, conversation string) (Carry, error) {
	carry, err := sequence.TakeKV(ctx, conversation)
	if err != nil {
		return Carry{}, err
	}
	_ = sequence.Close(ctx) // what cannot be closed ends with the session
	g := sequence.grant
	freeCarries(ctx, g, s.book.add(makeKnown(carry, tokens, g.terms.layerCount)))
	return carry, nil
}

// Resume opens a sequence for a prompt, with the rows of the known carry that has the longest prefix in common.
//
// With c common tokens the keys below c - layer_count survive. The carry moves into the sequence if no row of it is lost by
// that, or if it is of the same conversation; otherwise it is shared and stays for its own. A carry that the service no
// longer has is forgotten, and the next best is tried; at worst nothing is kept. Tokens are t_0..t_{n-1}, the whole prompt.
func (s *Session) Resume(ctx context.Context, tokens []uint32, options ResumeOptions) (*Resumed, error) {
	if err := checkBudget(options.BudgetTokens); err != nil {
		return nil, err
	}
	resumed, err := onLive(ctx, s, func(g *grant) (*Resumed, *Error) {
		want := wanted{tokens, options.Conversation, g.terms.layerCount, g.terms.pageRows, options.KeepCarry}
		opened, err := s.resume(ctx, g, want, options)
		if err != nil {
			return nil, err
		}
		return &Resumed{newSequence(g, opened), opened.state.RowCount, opened.state.LastPairKey + 1}, nil
	})
	if err != nil {
		return nil, err
	}
	return resumed, nil
}

// Parked are the carries that this session knows, the longest unused first. Some may have expired at the service.
func (s *Session) Parked() []Carry { return s.book.carries() }

// Adopt makes a carry known that was not parked by this session: one of Carries, found under the carry key. Tokens are
// exactly those that its rows were made from, as given to Park.
func (s *Session) Adopt(ctx context.Context, carry Carry, tokens []uint32) error {
	g, err := s.live(ctx)
	if err != nil {
		return err
	}
	freeCarries(ctx, g, s.book.add(makeKnown(carry, tokens, g.terms.layerCount)))
	return nil
}

// Forget forgets a carry; the service keeps it until it expires. FreeKV gives it up at once.
func (s *Session) Forget(carry Carry) { s.book.forget(carry.ID) }

// resume opens a sequence with as many rows as a known carry has for it. After an error other than that the carry is lost
// it is known again, unless the service may have installed it before the error.
func (s *Session) resume(ctx context.Context, g *grant, want wanted, options ResumeOptions) (*ledger, *Error) {
	for {
		chosen, ok := s.book.claim(want)
		if !ok {
			return openSequence(ctx, g, SequenceOptions{BudgetTokens: options.BudgetTokens, Rows: options.Rows})
		}
		opening := SequenceOptions{BudgetTokens: options.BudgetTokens, Rows: options.Rows}
		keep := &chosen.keepKeysBelow
		if chosen.isShared { // installed whole, and maybe longer than the new sequence is meant to be
			opening.BudgetTokens, keep = 0, nil
		}
		opened, err := openSequence(ctx, g, opening)
		if err != nil {
			s.book.add(chosen.known)
			return nil, err
		}
		if err := installKV(ctx, g, opened, chosen.known.carry, keep); err != nil {
			// It expired, was evicted, went with its session, or belongs to another head: it will never be of use.
			isLost := errors.Is(err, ReasonCarryUnknown) || errors.Is(err, ReasonKVMismatch)
			if !isLost && !isUncertain(err) {
				s.book.add(chosen.known)
			}
			_ = g.closeOrLeave(ctx, opened, nil)
			if isLost {
				continue
			}
			return nil, err
		}
		if chosen.isShared {
			return s.share(ctx, g, chosen, opened, options.BudgetTokens)
		}
		return opened, nil
	}
}

// share forks from the installed carry and takes it again. No step copies more than the last page.
func (s *Session) share(ctx context.Context, g *grant, chosen claim, donor *ledger, budget int) (*ledger, *Error) {
	opened, err := forkSequence(ctx, g, donor, chosen.keepKeysBelow, budget)
	if err != nil && err.Code == codes.ResourceExhausted {
		// No page or sequence for a second one: the rows that are wanted now go before those that may be.
		if err := truncate(ctx, g, donor, chosen.keepKeysBelow, nil); err != nil {
			return nil, err
		}
		return donor, nil
	}
	s.parkAgain(ctx, g, chosen.known, donor)
	return opened, err
}

// parkAgain gives the carry back; the new sequence stands, whatever becomes of it.
func (s *Session) parkAgain(ctx context.Context, g *grant, known knownCarry, donor *ledger) {
	if carry, err := takeKV(ctx, g, donor, known.carry.Label); err == nil {
		freeCarries(ctx, g, s.book.add(knownCarry{carry, known.tokens}))
	}
	_ = g.closeOrLeave(ctx, donor, nil)
}

// freeCarries gives carries up that nobody remembers; those that cannot be reached expire by themselves.
func freeCarries(ctx context.Context, g *grant, carries []Carry) {
	for _, one := range carries {
		_, _ = invoke(ctx, g.transport, rpcFreeKV(), &pb.FreeKVRequest{KvId: one.ID})
	}
}
