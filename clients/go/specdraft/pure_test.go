package specdraft

import (
	"context"
	"errors"
	"go/ast"
	"go/parser"
	"go/token"
	"maps"
	"net"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"
	"google.golang.org/protobuf/types/known/durationpb"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

func TestEveryReasonOfTheEnumHasAConstant(t *testing.T) {
	file, err := parser.ParseFile(token.NewFileSet(), "reasons.go", nil, 0)
	if err != nil {
		t.Fatal(err)
	}
	named := map[string]bool{}
	ast.Inspect(file, func(node ast.Node) bool {
		if selector, ok := node.(*ast.SelectorExpr); ok {
			named[strings.TrimPrefix(selector.Sel.Name, "ErrorReason_")] = true
		}
		return true
	})
	for _, name := range slices.Sorted(maps.Values(pb.ErrorReason_name)) {
		if name != "ERROR_REASON_UNSPECIFIED" && !named[name] {
			t.Errorf("%s has no constant", name)
		}
	}
}

func TestErrorsAnswerIsAndAsWithReasonAndCode(t *testing.T) {
	made, err := status.New(codes.FailedPrecondition, "a gap").WithDetails(
		&errdetails.ErrorInfo{Domain: Domain, Reason: "MISSING_ROWS", Metadata: map[string]string{"gap_begin": "3"}},
		&errdetails.RetryInfo{RetryDelay: durationpb.New(time.Second)},
	)
	if err != nil {
		t.Fatal(err)
	}
	read := error(ErrorOf(made.Err()))
	if !errors.Is(read, ReasonMissingRows) || !errors.Is(read, CodeFailedPrecondition) {
		t.Errorf("%v is neither its reason nor its code", read)
	}
	if errors.Is(read, ReasonOpReused) || errors.Is(read, CodeNotFound) || errors.Is(read, ErrClosed) {
		t.Errorf("%v is something else", read)
	}
	var failed *Error
	if !errors.As(read, &failed) || failed.Details["gap_begin"] != "3" || failed.RetryDelay != time.Second {
		t.Errorf("%+v", failed)
	}
	if status.Code(read) != codes.FailedPrecondition || read.Error() != "specdraft: MISSING_ROWS: a gap" {
		t.Errorf("%v, %v", status.Code(read), read)
	}
}

func TestErrorsOfAnotherDomainOrANewerReasonKeepTheirCode(t *testing.T) {
	for _, info := range []*errdetails.ErrorInfo{{Domain: "other", Reason: "MISSING_ROWS"}, {Domain: Domain, Reason: "NEWER"}} {
		made, err := status.New(codes.Aborted, "x").WithDetails(info)
		if err != nil {
			t.Fatal(err)
		}
		if read := ErrorOf(made.Err()); read.Reason != 0 || read.Code != codes.Aborted {
			t.Errorf("%+v", read)
		}
	}
	if read := EntryError(&pb.EntryStatus{Code: 9, Reason: 9999}); read.Reason != 0 || read.Code != codes.FailedPrecondition {
		t.Errorf("%+v", read)
	}
	if EntryError(nil) != nil || EntryError(&pb.EntryStatus{}) != nil || ErrorOf(nil) != nil {
		t.Error("OK is no error")
	}
}

func TestErrorsOfTheContextUnwrapToIt(t *testing.T) {
	for _, cause := range []error{context.DeadlineExceeded, context.Canceled} {
		if read := ErrorOf(cause); !errors.Is(read, cause) || !isUncertain(read) {
			t.Errorf("%v", read)
		}
	}
}

func TestWhatFollowsTheEndOfAStream(t *testing.T) {
	cases := []struct {
		err  *Error
		want after
	}{
		{nil, attachAgain},
		{&Error{Code: codes.Unavailable}, attachAgain},
		{&Error{Code: codes.Unavailable, Reason: ReasonDraining}, attachAgain},
		{&Error{Code: codes.Unavailable, Reason: ReasonDeviceLost}, giveUp},
		{&Error{Code: codes.ResourceExhausted}, attachAgain},
		{&Error{Code: codes.Internal}, useUnary},
		{&Error{Code: codes.Internal, Reason: ReasonInternal}, stop},
		{&Error{Code: codes.Unimplemented}, useUnary},
		{&Error{Code: codes.Aborted, Reason: ReasonSessionFenced}, stop},
		{&Error{Code: codes.NotFound, Reason: ReasonSessionUnknown}, stop},
	}
	now := time.Now()
	for _, one := range cases {
		again := newReattachment(5 * time.Second)
		again.attached(now)
		if got := again.ended(one.err, now); got != one.want {
			t.Errorf("%v: %v, not %v", one.err, got, one.want)
		}
	}
}

func TestGraceBeginsWhenTheStreamBreaksAndEndsWithAGoodOne(t *testing.T) {
	broken, began := &Error{Code: codes.Unavailable}, time.Now()
	at := func(seconds float64) time.Time { return began.Add(time.Duration(seconds * float64(time.Second))) }
	again := newReattachment(5 * time.Second)
	expect := func(seconds float64, want after) {
		t.Helper()
		if got := again.ended(broken, at(seconds)); got != want {
			t.Errorf("at %v s: %v, not %v", seconds, got, want)
		}
	}
	again.attached(at(0))
	expect(100, attachAgain)
	for _, seconds := range []float64{101, 103, 104.9} {
		again.attached(at(seconds))
		expect(seconds, attachAgain)
	}
	again.attached(at(105))
	again.answered()
	expect(105.1, attachAgain)
	again.attached(at(110.1))
	expect(110.2, giveUp)
	again.attached(at(120))
	expect(120.1, attachAgain)
	again.attached(at(125))
	again.wanted(2)
	expect(125.2, giveUp)
	again.attached(at(130))
	expect(130.1, attachAgain)
	again.attached(at(135))
	again.wanted(1)
	expect(135.2, attachAgain)
	var delays []time.Duration
	for range 8 {
		delays = append(delays, again.nextDelay())
	}
	if !slices.IsSorted(delays) || delays[7] > mostReattachDelay {
		t.Error(delays)
	}
}

func TestOnlyARefusedConnectionMeansThatNobodyListens(t *testing.T) {
	path := filepath.Join(t.TempDir(), "s.sock")
	if !isRefused(t.Context(), "unix://"+path) {
		t.Error("no such socket")
	}
	listener, err := net.Listen("unix", path)
	if err != nil {
		t.Fatal(err)
	}
	defer listener.Close()
	if isRefused(t.Context(), "unix:"+path) {
		t.Error("somebody listens")
	}
	tcp, err := net.Listen("tcp", "127.0.0.1:0")
	if err != nil {
		t.Fatal(err)
	}
	address := tcp.Addr().String()
	if isRefused(t.Context(), address) {
		t.Error("somebody listens")
	}
	tcp.Close()
	if !isRefused(t.Context(), address) {
		t.Error("nobody listens any more")
	}
	if isRefused(t.Context(), "dns:///somewhere") {
		t.Error("who knows")
	}
}

func rowsOf(count, width int) Rows {
	values := make([]float32, count*width)
	for index := range values {
		values[index] = float32(index)
	}
	return Float32Rows(values, width)
}

func TestNextPairsAreTheAcceptedDraftsAndTheBonus(t *testing.T) {
	pairs, position, err := NextPairs(10, []uint32{4, 5, 6}, 2, 17, rowsOf(4, 2))
	if err != nil || pairs.FirstKey != 10 || position != 13 || !slices.Equal(pairs.Tokens, []uint32{4, 5, 17}) {
		t.Errorf("%+v %v %v", pairs, position, err)
	}
	if pairs.Hiddens.Len() != 3 || string(pairs.Hiddens.Bytes()) != string(rowsOf(3, 2).Bytes()) {
		t.Error("h_P .. h_{P+a}")
	}
	for _, accepted := range []int{-1, 4} {
		if _, _, err := NextPairs(10, []uint32{4, 5, 6}, accepted, 17, rowsOf(4, 2)); !errors.Is(err, ErrArgument) {
			t.Errorf("%d accepted: %v", accepted, err)
		}
	}
	if _, _, err := NextPairs(10, []uint32{4, 5, 6}, 3, 17, rowsOf(3, 2)); !errors.Is(err, ErrArgument) {
		t.Errorf("too few rows: %v", err)
	}
}

func TestPromptPairsJoinAHiddenWithTheTokenAfterIt(t *testing.T) {
	pairs, err := promptPairs([]uint32{9, 8, 7}, rowsOf(3, 2))
	if err != nil || !slices.Equal(pairs.Tokens, []uint32{8, 7}) || pairs.Hiddens.Len() != 2 || pairs.FirstKey != 0 {
		t.Errorf("%+v %v", pairs, err)
	}
	if _, err := promptPairs(nil, Rows{}); !errors.Is(err, ErrArgument) {
		t.Error(err)
	}
	rest := pairs.after(1)
	if rest.FirstKey != 1 || !slices.Equal(rest.Tokens, []uint32{7}) || rest.Hiddens.Len() != 1 {
		t.Errorf("%+v", rest)
	}
}

func TestRowsOfAnotherShapeAreRefused(t *testing.T) {
	for _, rows := range []Rows{rowsOf(2, 3), BFloat16Rows(make([]uint16, 8), 4), RawRows(make([]byte, 17), Float32, 4), {}} {
		if err := rows.check(Float32, 4); !errors.Is(err, ErrArgument) {
			t.Errorf("%v rows of %v: %v", rows.Len(), rows.width, err)
		}
	}
	if err := rowsOf(2, 4).check(Float32, 4); err != nil {
		t.Error(err)
	}
}

func carryOf(name, label string, end int64) Carry {
	return Carry{ID: []byte(name), Label: label, Ranges: []KeyRange{{0, end}}}
}

func count(length int) []uint32 {
	tokens := make([]uint32, length)
	for index := range tokens {
		tokens[index] = uint32(index)
	}
	return tokens
}

func TestTheCarryWithTheLongestPrefixIsClaimed(t *testing.T) {
	book := newCarryBook(10, 1000)
	book.add(makeKnown(carryOf("short", "", 5), count(6), 1))
	book.add(makeKnown(carryOf("long", "", 9), count(10), 1))
	book.add(makeKnown(carryOf("other", "", 9), make([]uint32, 10), 1))
	chosen, ok := book.claim(wanted{tokens: count(30), layerCount: 1, pageRows: 4})
	if !ok || string(chosen.known.carry.ID) != "long" || chosen.keys != 9 || chosen.isShared {
		t.Errorf("%+v %v", chosen, ok)
	}
	if len(book.carries()) != 2 {
		t.Error("a claimed carry is in nobody else's reach")
	}
}

func TestACarryThatWouldLoseKeysMovesOnlyWithinItsConversation(t *testing.T) {
	for _, one := range []struct {
		conversation string
		shared       bool
	}{{"a", false}, {"b", true}, {"", true}} {
		book := newCarryBook(10, 1000)
		book.add(makeKnown(carryOf("k", "a", 20), count(21), 1))
		chosen, ok := book.claim(wanted{tokens: append(count(10), 99), conversation: one.conversation, layerCount: 1, pageRows: 4})
		if !ok || chosen.isShared != one.shared || chosen.keys != 9 || chosen.keepKeysBelow != 9 {
			t.Errorf("%+v: %+v %v", one, chosen, ok)
		}
	}
	book := newCarryBook(10, 1000)
	book.add(makeKnown(carryOf("k", "a", 20), count(21), 1))
	if _, ok := book.claim(wanted{tokens: count(4), conversation: "b", layerCount: 1, pageRows: 4}); ok {
		t.Error("below a page there is nothing to win by sharing")
	}
}

func TestTheBookForgetsTheLongestUnused(t *testing.T) {
	book := newCarryBook(2, 25)
	for index, name := range []string{"a", "b", "c"} {
		forgotten := book.add(makeKnown(carryOf(name, "", 9), count(10), 1))
		if want := index == 2; (len(forgotten) == 1) != want {
			t.Errorf("%s: %v", name, forgotten)
		}
	}
	if forgotten := book.add(makeKnown(carryOf("d", "", 20), count(21), 1)); len(forgotten) != 2 {
		t.Errorf("by tokens: %v", forgotten)
	}
	if forgotten := book.add(makeKnown(carryOf("e", "", 30), count(31), 1)); len(forgotten) != 1 || string(forgotten[0].ID) != "e" {
		t.Errorf("larger than the book: %v", forgotten)
	}
	if forgotten := book.add(knownCarry{carry: Carry{ID: []byte("f")}}); len(forgotten) != 1 {
		t.Errorf("without keys: %v", forgotten)
	}
}

func TestTooLargeAMessageIsToldAndNotSentAgain(t *testing.T) {
	refused := &Error{Code: codes.ResourceExhausted, Message: "SERVER: Received message larger than max (9 vs. 4)"}
	for err, want := range map[*Error]bool{
		nil:     false,
		refused: true,
		{Code: codes.ResourceExhausted, Message: "Concurrent RPC limit exceeded!"}:              false,
		{Code: codes.ResourceExhausted, Message: refused.Message, Reason: ReasonPagesExhausted}: false,
	} {
		if got := isOfTheSize(err); got != want {
			t.Errorf("%v: %v", err, got)
		}
	}
	small := &waiter{&pb.DriveRequest{CorrelationId: 1}, make(chan driveResult, 1)}
	large := &waiter{&pb.DriveRequest{CorrelationId: 2, TimeoutMs: 1000}, make(chan driveResult, 1)}
	d := &drive{waiting: map[uint64]*waiter{1: small, 2: large}}
	d.tellTheLargest(refused)
	if told := <-large.done; !errors.Is(told.err, refused) {
		t.Error(told.err)
	}
	if again := d.unanswered(); len(again) != 1 || again[0] != small {
		t.Error(again)
	}
}
