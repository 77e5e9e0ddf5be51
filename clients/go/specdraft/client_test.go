package specdraft

import (
	"context"
	"errors"
	"slices"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"example.com/specdraft/clients/go/internal/fakedrafter"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

const width = fakedrafter.Width

func start(t *testing.T, options fakedrafter.Options) *fakedrafter.Service {
	t.Helper()
	service, err := fakedrafter.Start(options)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(service.Close)
	return service
}

func dial(t *testing.T, service *fakedrafter.Service, options ...Option) *Client {
	t.Helper()
	client, err := Dial(t.Context(), service.Target(), options...)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = client.Close() })
	return client
}

func open(t *testing.T, client *Client, options SessionOptions) *Session {
	t.Helper()
	session, err := client.OpenSession(t.Context(), options)
	if err != nil {
		t.Fatal(err)
	}
	return session
}

func sequenceOf(t *testing.T, session *Session) *Sequence {
	t.Helper()
	sequence, err := session.OpenSequence(t.Context(), SequenceOptions{})
	if err != nil {
		t.Fatal(err)
	}
	return sequence
}

func pair(key int64) Pairs {
	return Pairs{FirstKey: key, Tokens: []uint32{1}, Hiddens: rowsOf(1, width)}
}

func mustPropose(t *testing.T, sequence *Sequence, key int64) *Proposal {
	t.Helper()
	proposal, err := sequence.Propose(t.Context(), pair(key), Draft{Count: 2})
	if err != nil {
		t.Fatal(err)
	}
	return proposal
}

// waitFor polls until a condition holds.
func waitFor(t *testing.T, condition func() bool) {
	t.Helper()
	for deadline := time.Now().Add(10 * time.Second); !condition(); time.Sleep(time.Millisecond) {
		if time.Now().After(deadline) {
			t.Fatal("it did not happen")
		}
	}
}

// once makes a script that acts on the first request of one RPC.
func once(rpc string, act func() error) func(string, proto.Message) error {
	var first sync.Once
	return func(called string, _ proto.Message) (err error) {
		if called == rpc {
			first.Do(func() { err = act() })
		}
		return err
	}
}

func transports() map[string]SessionOptions {
	return map[string]SessionOptions{
		"drive-host":   {Memory: MemoryHost, Slots: 2},
		"drive-inline": {Memory: MemoryInline},
		"unary-host":   {Memory: MemoryHost, Slots: 2, Unary: true},
		"unary-inline": {Memory: MemoryInline, Unary: true},
	}
}

func TestAPromptArrivesPairByPairWhateverItsLength(t *testing.T) {
	service := start(t, fakedrafter.Options{HostMemory: true})
	for name, options := range transports() {
		t.Run(name, func(t *testing.T) {
			session := open(t, dial(t, service), options)
			for _, length := range []int{1, 2, 16, 17, 18, 50} {
				sequence, hiddens := sequenceOf(t, session), rowsOf(length, width)
				state, err := sequence.Prefill(t.Context(), count(length), hiddens)
				if err != nil || state.LastPairKey != int64(length-2) || state.RowCount != length-1 {
					t.Fatalf("%d tokens: %+v %v", length, state, err)
				}
				rows := service.Rows(sequence.ID())
				for key := range length - 1 {
					if rows[int64(key)] != string(hiddens.Slice(key, key+1).Bytes()) {
						t.Errorf("row %d of %d is another", key, length)
					}
				}
			}
			if used := session.present().placement.arena; used != nil && used.inUse() != 0 {
				t.Errorf("%d places are still taken", used.inUse())
			}
		})
	}
}

func TestMemoryIsSharedOnTheSameHostWhereItIsGranted(t *testing.T) {
	for _, host := range []bool{true, false} {
		session := open(t, dial(t, start(t, fakedrafter.Options{HostMemory: host})), SessionOptions{})
		if want := session.MemoryKind() == MemoryHost; want != host {
			t.Errorf("host memory %v: %v", host, session.MemoryKind())
		}
	}
}

func TestAfterADeadlineTheNextUseAsksWhereTheSequenceStands(t *testing.T) {
	for name, options := range transports() {
		t.Run(name, func(t *testing.T) {
			service := start(t, fakedrafter.Options{HostMemory: true})
			session := open(t, dial(t, service), options)
			sequence := sequenceOf(t, session)
			release := make(chan struct{})
			service.Script(nil, once("Propose", func() error { <-release; return nil }))
			ctx, cancel := context.WithTimeout(t.Context(), 50*time.Millisecond)
			_, err := sequence.Propose(ctx, pair(0), Draft{Count: 1})
			cancel()
			if !errors.Is(err, CodeDeadlineExceeded) || !errors.Is(err, context.DeadlineExceeded) {
				t.Errorf("%v", err)
			}
			if used := session.present().placement.arena; used != nil && used.inUse() != 1 {
				t.Error("the service may still read the place")
			}
			close(release)
			if proposal := mustPropose(t, sequence, 0); proposal.State.LastOp != 2 || len(service.Calls("GetSequence")) != 1 {
				t.Errorf("%+v after %d questions", proposal, len(service.Calls("GetSequence")))
			}
			if used := session.present().placement.arena; used != nil && used.inUse() != 0 {
				t.Errorf("%d places are still taken", used.inUse())
			}
		})
	}
}

func TestASequenceWhoseClosingGotNoAnswerIsClosedBeforeTheNextOneIsOpened(t *testing.T) {
	for name, options := range transports() {
		t.Run(name, func(t *testing.T) {
			service := start(t, fakedrafter.Options{HostMemory: true})
			session := open(t, dial(t, service), options)
			away := &fakedrafter.Refusal{Code: codes.Unavailable, Reason: pb.ErrorReason_ERROR_REASON_STARTING}
			left, other := sequenceOf(t, session), sequenceOf(t, session)
			service.Script(once("CloseSequence", func() error { return away }), nil)
			if err := left.Close(t.Context()); !errors.Is(err, CodeUnavailable) {
				t.Errorf("%v", err)
			}
			service.Script(once("GetSequence", func() error { return away }), nil)
			another := sequenceOf(t, session) // is opened all the same
			if count := service.SequenceCount(); count != 3 {
				t.Errorf("%d sequences", count)
			}
			service.Script(nil, nil)
			sequenceOf(t, session)
			if count := service.SequenceCount(); count != 3 {
				t.Errorf("%d sequences: what was left is still there", count)
			}
			mustPropose(t, other, 0)
			mustPropose(t, another, 0)
			if err := left.Close(t.Context()); err != nil {
				t.Errorf("a second time: %v", err)
			}
		})
	}
}

func TestACancelledCallSaysSoAndOthersGoOn(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	session := open(t, dial(t, service), SessionOptions{})
	slow, quick := sequenceOf(t, session), sequenceOf(t, session)
	ctx, cancel := context.WithCancel(t.Context())
	release := make(chan struct{})
	service.Script(once("Propose", func() error { cancel(); <-release; return nil }), nil)
	if _, err := slow.Propose(ctx, pair(0), Draft{}); !errors.Is(err, context.Canceled) || !errors.Is(err, CodeCanceled) {
		t.Error(err)
	}
	if _, err := slow.Propose(ctx, pair(0), Draft{}); !errors.Is(err, context.Canceled) {
		t.Error(err)
	}
	close(release)
	mustPropose(t, quick, 0)
	mustPropose(t, slow, 0)
}

func TestClosingWakesThoseWhoWait(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	client := dial(t, service)
	sequence := sequenceOf(t, open(t, client, SessionOptions{}))
	arrived, release := make(chan struct{}), make(chan struct{})
	service.Script(once("Propose", func() error { close(arrived); <-release; return nil }), nil)
	told := make(chan error)
	go func() {
		_, err := sequence.Propose(context.Background(), pair(0), Draft{})
		told <- err
	}()
	<-arrived
	closed := make(chan error)
	go func() { closed <- client.Close() }()
	if err := <-told; !errors.Is(err, ErrClosed) || !errors.Is(err, CodeUnavailable) {
		t.Error(err)
	}
	close(release)
	<-closed
	if _, err := sequence.Propose(t.Context(), pair(0), Draft{}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if _, err := client.OpenSession(t.Context(), SessionOptions{}); !errors.Is(err, ErrClosed) {
		t.Error(err)
	}
	if err := client.Close(); err != nil {
		t.Error(err)
	}
}

func TestALostSessionIsReplacedByTheNextSequence(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	session := open(t, dial(t, service), SessionOptions{})
	sequence, before := sequenceOf(t, session), session.ID()
	service.Restart()
	service.Cut(nil)
	if _, err := sequence.State(t.Context()); !errors.Is(err, ReasonSessionUnknown) && !errors.Is(err, ReasonSequenceUnknown) {
		t.Fatal(err)
	}
	waitFor(t, func() bool { return session.present().lost() })
	var all sync.WaitGroup
	for range 4 {
		all.Go(func() {
			fresh, err := session.OpenSequence(t.Context(), SequenceOptions{})
			if err != nil {
				t.Error(err)
				return
			}
			if _, err := fresh.Propose(t.Context(), pair(0), Draft{Count: 1}); err != nil {
				t.Error(err)
			}
		})
	}
	all.Wait()
	if slices.Equal(before, session.ID()) {
		t.Error("it is the same session")
	}
	if results, err := session.ProposeBatch(t.Context(), []ProposeItem{{sequence, pair(0), Draft{}}}); err != nil || !errors.Is(results[0].Err, ReasonSequenceUnknown) {
		t.Errorf("%+v %v", results, err)
	}
}

func TestARestartThatNobodyHasNoticedYetIsNoErrorOfTheNextSequence(t *testing.T) {
	for name, options := range transports() {
		t.Run(name, func(t *testing.T) {
			service := start(t, fakedrafter.Options{HostMemory: true})
			session := open(t, dial(t, service), options)
			before := session.ID()
			service.Restart()
			service.Cut(nil)
			mustPropose(t, sequenceOf(t, session), 0)
			service.Restart()
			service.Cut(nil)
			if resumed, err := session.Resume(t.Context(), count(5), ResumeOptions{}); err != nil || resumed.KeysKept != 0 {
				t.Errorf("%+v %v", resumed, err)
			}
			if slices.Equal(before, session.ID()) {
				t.Error("it is the same session")
			}
		})
	}
}

func TestTheLeaseIsRenewedUntilTheEnd(t *testing.T) {
	service := start(t, fakedrafter.Options{LeaseMs: 30})
	client := dial(t, service)
	open(t, client, SessionOptions{})
	waitFor(t, func() bool { return len(service.Calls("KeepAlive")) > 4 })
	if err := client.Close(); err != nil {
		t.Error(err)
	}
	if len(service.Calls("CloseSession")) != 1 {
		t.Error("the session was not closed")
	}
}

func TestOneBadEntryOfABatchLeavesTheOthersAlone(t *testing.T) {
	service := start(t, fakedrafter.Options{HostMemory: true})
	session := open(t, dial(t, service), SessionOptions{Slots: 2})
	good, bad, twice := sequenceOf(t, session), sequenceOf(t, session), sequenceOf(t, session)
	results, err := session.ProposeBatch(t.Context(), []ProposeItem{
		{good, pair(0), Draft{Count: 3}}, {bad, pair(5), Draft{}}, {twice, pair(0), Draft{}}, {twice, pair(0), Draft{}},
	})
	if err != nil {
		t.Fatal(err)
	}
	if results[0].Err != nil || len(results[0].Proposal.Drafts) != 3 {
		t.Errorf("%+v", results[0])
	}
	if !errors.Is(results[1].Err, ReasonMissingRows) || results[1].Proposal != nil {
		t.Errorf("%+v", results[1])
	}
	for _, one := range results[2:] {
		if !errors.Is(one.Err, ReasonDuplicateSequence) {
			t.Errorf("%+v", one)
		}
	}
	if used := session.present().placement.arena.inUse(); used != 0 {
		t.Errorf("%d places are still taken", used)
	}
	if _, err := session.CatchupBatch(t.Context(), []CatchupItem{{good, Pairs{Tokens: []uint32{1, 2}, Hiddens: rowsOf(1, width)}}}); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
}

func TestBatchesThatShareSequencesDoNotWaitForEachOther(t *testing.T) {
	session := open(t, dial(t, start(t, fakedrafter.Options{})), SessionOptions{})
	left, right := sequenceOf(t, session), sequenceOf(t, session)
	var all sync.WaitGroup
	for turn := range 8 {
		items := []CatchupItem{{left, pair(0)}, {right, pair(0)}}
		if turn%2 == 1 {
			slices.Reverse(items)
		}
		all.Go(func() {
			for range 10 {
				if results, err := session.CatchupBatch(t.Context(), items); err != nil || results[0].Err != nil || results[1].Err != nil {
					t.Errorf("%+v %v", results, err)
				}
			}
		})
	}
	all.Wait()
	if state, err := left.State(t.Context()); err != nil || state.LastOp != 80 {
		t.Errorf("%+v %v", state, err)
	}
}

func TestAWrongNumberIsPutRightOnce(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	sequence := sequenceOf(t, open(t, dial(t, service), SessionOptions{}))
	mustPropose(t, sequence, 0)
	sequence.ledger.lastOp = 7
	if proposal := mustPropose(t, sequence, 1); proposal.State.LastOp != 2 {
		t.Errorf("%+v", proposal)
	}
	sequence.ledger.lastOp = 1 // and another request than the last
	if proposal := mustPropose(t, sequence, 0); proposal.State.LastOp != 3 {
		t.Errorf("%+v", proposal)
	}
}

func TestConversationsGoOnWhereTheyWereParked(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	session := open(t, dial(t, service), SessionOptions{CarriesMax: 1})
	for _, conversation := range []string{"a", "b"} {
		sequence := sequenceOf(t, session)
		if _, err := sequence.Prefill(t.Context(), count(20), rowsOf(20, width)); err != nil {
			t.Fatal(err)
		}
		if _, err := session.Park(t.Context(), sequence, count(20), conversation); err != nil {
			t.Fatal(err)
		}
	}
	if service.Carries() != 1 || len(session.Parked()) != 1 {
		t.Error("what had to be forgotten was not given up")
	}
	resumed, err := session.Resume(t.Context(), count(25), ResumeOptions{Conversation: "b"})
	if err != nil || resumed.KeysKept != 19 || resumed.NextKey != 19 {
		t.Fatalf("%+v %v", resumed, err)
	}
	if fresh, err := session.Resume(t.Context(), count(25), ResumeOptions{}); err != nil || fresh.KeysKept != 0 {
		t.Errorf("%+v %v", fresh, err)
	}
}

func TestArgumentsAreRefusedBeforeAnythingIsSent(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	client := dial(t, service)
	if _, err := Dial(t.Context(), "/a/path"); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	for _, options := range []SessionOptions{{Memory: MemoryCUDA}, {HiddenDType: pb.DType_D_TYPE_FLOAT16}, {Slots: -1}} {
		if _, err := client.OpenSession(t.Context(), options); !errors.Is(err, ErrArgument) {
			t.Errorf("%+v: %v", options, err)
		}
	}
	sequence := sequenceOf(t, open(t, client, SessionOptions{}))
	if _, err := sequence.Catchup(t.Context(), Pairs{Tokens: []uint32{1}, Hiddens: rowsOf(1, width+1)}); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	if _, err := sequence.Propose(t.Context(), pair(0), Draft{Count: -1}); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	if _, err := sequence.Fork(t.Context(), 0, -1); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	negative := pair(0)
	negative.AcceptedDrafts = new(-1)
	if _, err := sequence.Catchup(t.Context(), negative); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	if len(service.Calls("Catchup")) != 0 {
		t.Error("it was sent")
	}
}
