package specdraft

import (
	"context"
	"errors"
	"sync/atomic"
	"time"

	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// transport performs the calls of one session, or without a token those before there is one.
type transport struct {
	stub    pb.DrafterClient
	token   []byte
	timeout time.Duration
	drive   *drive // nil = every call is unary
	lost    atomic.Pointer[Error]
	closed  atomic.Bool
}

// outgoing is the context with the session's token.
func (t *transport) outgoing(ctx context.Context) context.Context {
	if len(t.token) == 0 {
		return ctx
	}
	return metadata.AppendToOutgoingContext(ctx, TokenMetadataKey, string(t.token))
}

// failure is why nothing can be called any more; nil while it can.
func (t *transport) failure() *Error {
	if !t.closed.Load() {
		return nil
	}
	if lost := t.lost.Load(); lost != nil {
		return lost
	}
	return closedError()
}

// invoke performs one call, over the stream where that is possible. Its deadline is the context's or the transport's
// timeout, whichever comes first.
func invoke[Req, Resp any](ctx context.Context, t *transport, r rpc[Req, Resp], request *Req) (*Resp, *Error) {
	if failure := t.failure(); failure != nil {
		return nil, failure
	}
	ctx, cancel := context.WithTimeout(ctx, t.timeout)
	defer cancel()
	response, err := exchange(ctx, t, r, request)
	if err != nil && err.Reason == ReasonSessionUnknown {
		t.lost.CompareAndSwap(nil, err)
	}
	return response, err
}

func exchange[Req, Resp any](ctx context.Context, t *transport, r rpc[Req, Resp], request *Req) (*Resp, *Error) {
	if t.drive != nil && r.put != nil {
		frame := &pb.DriveRequest{TimeoutMs: timeoutMillis(ctx)}
		r.put(frame, request)
		answer, err := t.drive.call(ctx, frame, r.name)
		if !errors.Is(err, errDriveUnsupported) {
			return readAnswer(r, answer, err)
		}
	}
	response, err := r.call(t.stub, t.outgoing(ctx), request)
	if err != nil {
		return nil, unaryError(ctx, r.name, err)
	}
	return response, nil
}

func readAnswer[Req, Resp any](r rpc[Req, Resp], answer *pb.DriveResponse, err error) (*Resp, *Error) {
	if err != nil {
		return nil, ErrorOf(err)
	}
	if refused := EntryError(answer.GetStatus()); refused != nil {
		return nil, refused
	}
	response := r.get(answer)
	if response == nil {
		return nil, &Error{Code: codes.Internal, Message: "the answer to " + r.name + " is another one's"}
	}
	return response, nil
}

// unaryError keeps apart what the service said and what became of our own context.
func unaryError(ctx context.Context, name string, err error) *Error {
	read := ErrorOf(err)
	if read.Reason == 0 && ctx.Err() != nil && (read.Code == codes.DeadlineExceeded || read.Code == codes.Canceled) {
		return contextError(ctx, name)
	}
	return read
}

func timeoutMillis(ctx context.Context) uint32 {
	deadline, ok := ctx.Deadline()
	if !ok {
		return 1
	}
	return uint32(min(max(1, time.Until(deadline).Round(time.Millisecond).Milliseconds()), 1<<31))
}
