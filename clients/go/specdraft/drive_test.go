package specdraft

import (
	"errors"
	"sync"
	"testing"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/protobuf/proto"

	"example.com/specdraft/clients/go/internal/fakedrafter"
	pb "example.com/specdraft/clients/go/specdraft/v1"
)

func TestARequestWithoutAnAnswerIsSentAgainAndDoneOnce(t *testing.T) {
	for name, wasDone := range map[string]bool{"done": true, "not done": false} {
		t.Run(name, func(t *testing.T) {
			service := start(t, fakedrafter.Options{})
			sequence := sequenceOf(t, open(t, dial(t, service), SessionOptions{}))
			cut := once("Propose", func() error { service.Cut(nil); return nil })
			if wasDone {
				service.Script(nil, cut)
			} else {
				service.Script(cut, nil)
			}
			if proposal := mustPropose(t, sequence, 0); proposal.State.LastOp != 1 || len(proposal.Drafts) != 2 {
				t.Errorf("%+v", proposal)
			}
			calls := service.Calls("Propose")
			if len(calls) != 2 || !proto.Equal(calls[0].Request, calls[1].Request) {
				t.Errorf("%d calls", len(calls))
			}
			if mustPropose(t, sequence, 1); len(service.Calls("GetSequence")) != 0 {
				t.Error("nothing was uncertain")
			}
		})
	}
}

func TestManyWaitingRequestsSurviveACut(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	session := open(t, dial(t, service), SessionOptions{})
	var all sync.WaitGroup
	service.Script(once("Propose", func() error { service.Cut(nil); return nil }), nil)
	for range 16 {
		sequence := sequenceOf(t, session)
		all.Go(func() {
			for key := range int64(5) {
				proposal, err := sequence.Propose(t.Context(), pair(key), Draft{Count: 1})
				if err != nil || proposal.State.LastOp != uint64(key)+1 {
					t.Errorf("%+v %v", proposal, err)
				}
			}
		})
	}
	all.Wait()
}

func TestABrokenConnectionIsMendedWithinTheGrace(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	sequence := sequenceOf(t, open(t, dial(t, service), SessionOptions{}))
	for key := range int64(3) {
		mustPropose(t, sequence, key)
		service.Stop()
		if err := service.Listen(); err != nil {
			t.Fatal(err)
		}
	}
	if proposal := mustPropose(t, sequence, 3); proposal.State.LastOp != 4 {
		t.Errorf("%+v", proposal)
	}
}

func TestAnIdleStreamAttachesAgainByItself(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	open(t, dial(t, service), SessionOptions{})
	waitFor(t, func() bool { return service.StreamCount() == 1 })
	service.Cut(nil)
	waitFor(t, func() bool { return service.StreamCount() == 1 })
}

func TestWhenNobodyListensCallsAreToldAtOnceAndLaterOnesTryAnew(t *testing.T) {
	service := start(t, fakedrafter.Options{GraceMs: 60_000})
	sequence := sequenceOf(t, open(t, dial(t, service, WithTimeout(20*time.Second)), SessionOptions{}))
	service.Stop()
	began := time.Now()
	for range 5 {
		if _, err := sequence.Propose(t.Context(), pair(0), Draft{Count: 1}); !errors.Is(err, CodeUnavailable) {
			t.Errorf("%v", err)
		}
	}
	if took := time.Since(began); took > 5*time.Second {
		t.Errorf("that took %v", took)
	}
	if err := service.Listen(); err != nil {
		t.Fatal(err)
	}
	mustPropose(t, sequence, 0)
}

func TestAfterTheGraceTheNextUseTriesAnew(t *testing.T) {
	service := start(t, fakedrafter.Options{GraceMs: 1})
	session := open(t, dial(t, service), SessionOptions{})
	sequence := sequenceOf(t, session)
	waitFor(t, func() bool { return service.StreamCount() == 1 })
	for range 3 {
		service.Cut(nil)
		waitFor(t, func() bool { return service.StreamCount() == 0 })
		if proposal, err := sequence.Propose(t.Context(), pair(0), Draft{}); err != nil {
			t.Fatalf("%+v %v", proposal, err)
		}
	}
	if !session.IsDriving() {
		t.Error("it still has its stream")
	}
}

func TestAStreamThatWasTakenOverIsNotAttachedAgain(t *testing.T) {
	service := start(t, fakedrafter.Options{})
	session := open(t, dial(t, service), SessionOptions{})
	sequence := sequenceOf(t, session)
	service.Cut(&fakedrafter.Refusal{Code: codes.Aborted, Reason: pb.ErrorReason_ERROR_REASON_SESSION_FENCED})
	waitFor(t, func() bool {
		_, err := sequence.Propose(t.Context(), pair(0), Draft{})
		return errors.Is(err, ReasonSessionFenced)
	})
	if _, err := session.OpenSequence(t.Context(), SequenceOptions{}); !errors.Is(err, ReasonSessionFenced) {
		t.Error(err)
	}
	if service.StreamCount() != 0 {
		t.Error("it has attached again")
	}
}

func TestWithoutDriveAndWhereAStatusWasLostCallsAreUnary(t *testing.T) {
	without := start(t, fakedrafter.Options{NoDrive: true})
	session := open(t, dial(t, without), SessionOptions{})
	mustPropose(t, sequenceOf(t, session), 0)
	if session.IsDriving() || without.Calls("Propose")[0].OverDrive {
		t.Error("there is no stream")
	}
	service := start(t, fakedrafter.Options{})
	session = open(t, dial(t, service), SessionOptions{})
	sequence := sequenceOf(t, session)
	service.Script(once("Propose", func() error { service.Cut(&fakedrafter.Refusal{Code: codes.Internal}); return nil }), nil)
	for key := range int64(2) {
		if proposal := mustPropose(t, sequence, key); proposal.State.LastOp != uint64(key)+1 {
			t.Errorf("%+v", proposal)
		}
	}
	if session.IsDriving() || service.StreamCount() != 0 {
		t.Error("it might fence another")
	}
}
