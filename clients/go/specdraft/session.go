package specdraft

import (
	"context"
	"math"
	"slices"
	"sync"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Session is a lease under which sequences live. It keeps itself alive until it is closed. Its methods are safe for
// concurrent use.
//
// When the service has lost the session (it restarted), its sequences answer SESSION_UNKNOWN; the next OpenSequence opens
// a new one by itself.
type Session struct {
	client  *Client
	options SessionOptions
	book    *carryBook
	opening chan struct{} // held while a new grant is asked for

	mu     sync.Mutex
	grant  *grant
	closed bool
}

// Close gives up everything that the session owns. It may be called twice. Its error tells of a service that could not be
// reached; that one ends the session when its lease runs out.
func (s *Session) Close(ctx context.Context) error {
	s.mu.Lock()
	s.closed = true
	granted := s.grant
	s.mu.Unlock()
	s.client.forget(s)
	return granted.close(ctx)
}

// ID is the session's id for logs and listings, 16 bytes. It is no secret.
func (s *Session) ID() []byte { return slices.Clone(s.present().id) }

// MemoryKind says how hidden rows travel.
func (s *Session) MemoryKind() MemoryKind { return s.present().terms.kind }

// HiddenWidth is the number of elements of one hidden row.
func (s *Session) HiddenWidth() int { return s.present().terms.width }

// MaxDrafts is the most drafts of one Propose.
func (s *Session) MaxDrafts() int { return s.present().terms.maxDrafts }

// Carries are those that were found under the carry key when the session opened.
func (s *Session) Carries() []Carry { return slices.Clone(s.present().terms.carries) }

// IsDriving says whether calls go over the Drive stream; false: by unary calls.
func (s *Session) IsDriving() bool {
	drive := s.present().transport.drive
	return drive != nil && drive.isDriving()
}

// Reopen opens a new session in the place of the present one, whose sequences are lost.
func (s *Session) Reopen(ctx context.Context) error {
	present := s.present()
	if _, err := s.replace(ctx, present); err != nil {
		return err
	}
	return nil
}

// SequenceOptions say how a sequence is opened.
type SequenceOptions struct {
	// BudgetTokens is the most tokens that it will hold; 0 = the head's longest.
	BudgetTokens int
	// Reserve takes the memory of the whole budget now.
	Reserve bool
	// Rows says which rows it keeps; 0 = RowsExact.
	Rows RowsPolicy
}

// OpenSequence opens a sequence.
func (s *Session) OpenSequence(ctx context.Context, options SequenceOptions) (*Sequence, error) {
	if err := checkBudget(options.BudgetTokens); err != nil {
		return nil, err
	}
	sequence, err := onLive(ctx, s, func(g *grant) (*Sequence, *Error) {
		opened, err := openSequence(ctx, g, options)
		if err != nil {
			return nil, err
		}
		return newSequence(g, opened), nil
	})
	if err != nil {
		return nil, err
	}
	return sequence, nil
}

// onLive does work with a grant, and once more with another where the service turns out to have lost the first: nothing
// was done then.
func onLive[T any](ctx context.Context, s *Session, work func(*grant) (T, *Error)) (T, *Error) {
	var none T
	granted, err := s.live(ctx)
	if err != nil {
		return none, err
	}
	granted.closeLeft(ctx)
	result, err := work(granted)
	if err == nil || !granted.lost() {
		return result, err
	}
	if granted, err = s.live(ctx); err != nil {
		return none, err
	}
	return work(granted)
}

func checkBudget(tokens int) error {
	if tokens < 0 || tokens > math.MaxInt32 {
		return argumentError("a budget of %d tokens", tokens)
	}
	return nil
}

// FreeKV gives a carry up.
func (s *Session) FreeKV(ctx context.Context, carry Carry) error {
	if _, err := invoke(ctx, s.present().transport, rpcFreeKV(), &pb.FreeKVRequest{KvId: carry.ID}); err != nil {
		return err
	}
	return nil
}

func (s *Session) present() *grant {
	s.mu.Lock()
	defer s.mu.Unlock()
	return s.grant
}

// live is a grant that the service is not known to have lost.
func (s *Session) live(ctx context.Context) (*grant, *Error) {
	present := s.present()
	if !present.lost() {
		return present, nil
	}
	return s.replace(ctx, present)
}

// replace opens another grant in the place of a given one, unless somebody has done so.
func (s *Session) replace(ctx context.Context, old *grant) (*grant, *Error) {
	select {
	case s.opening <- struct{}{}:
		defer func() { <-s.opening }()
	case <-ctx.Done():
		return nil, contextError(ctx, "OpenSession")
	}
	if present := s.present(); present != old {
		return present, nil
	}
	s.mu.Lock()
	closed := s.closed
	s.mu.Unlock()
	if closed {
		return nil, closedError()
	}
	_ = old.close(ctx) // it is lost, or about to be replaced
	granted, err := s.client.openGrant(ctx, s.options)
	if err != nil {
		return nil, err
	}
	s.mu.Lock()
	if !s.closed {
		s.grant = granted
		s.mu.Unlock()
		return granted, nil
	}
	s.mu.Unlock()
	_ = granted.close(ctx) // nobody will use it
	return nil, closedError()
}
