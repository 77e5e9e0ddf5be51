package specdraft

import (
	"context"
	"errors"
	"fmt"
	"maps"
	"strings"
	"time"

	"google.golang.org/genproto/googleapis/rpc/errdetails"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/status"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// Domain is the google.rpc.ErrorInfo domain of every error that the service raises.
const Domain = "specdraft"

const reasonPrefix = "ERROR_REASON_"

// ErrClosed is the cause of errors of a client, session or sequence that was closed.
var ErrClosed = errors.New("specdraft: closed")

// ErrArgument is the cause of errors of arguments that were refused before anything was sent.
var ErrArgument = errors.New("specdraft: invalid argument")

// Code is a status code as an error, for errors.Is.
type Code codes.Code

// The codes that the service answers with.
const (
	CodeCanceled           = Code(codes.Canceled)
	CodeUnknown            = Code(codes.Unknown)
	CodeInvalidArgument    = Code(codes.InvalidArgument)
	CodeDeadlineExceeded   = Code(codes.DeadlineExceeded)
	CodeNotFound           = Code(codes.NotFound)
	CodeResourceExhausted  = Code(codes.ResourceExhausted)
	CodeFailedPrecondition = Code(codes.FailedPrecondition)
	CodeAborted            = Code(codes.Aborted)
	CodeOutOfRange         = Code(codes.OutOfRange)
	CodeUnimplemented      = Code(codes.Unimplemented)
	CodeInternal           = Code(codes.Internal)
	CodeUnavailable        = Code(codes.Unavailable)
)

// Error says the code's name.
func (c Code) Error() string { return codes.Code(c).String() }

// Reason says why the service refused, as an error, for errors.Is. The proto says what each one means.
type Reason pb.ErrorReason

// String is the name of the reason without its prefix, for example "MISSING_ROWS".
func (r Reason) String() string {
	return strings.TrimPrefix(pb.ErrorReason(r).String(), reasonPrefix)
}

// Error says the reason's name.
func (r Reason) Error() string { return r.String() }

// Error is an answer other than OK, or what became of the connection.
//
//	errors.Is(err, specdraft.ReasonMissingRows)  // why
//	errors.Is(err, specdraft.CodeUnavailable)    // of which kind
//	var failed *specdraft.Error
//	errors.As(err, &failed)                      // with its figures
//
// status.Code and status.FromError understand it too.
type Error struct {
	// Code is the status code.
	Code codes.Code
	// Reason is why; 0 where gRPC or this client made the status (size, deadline, cancellation, connection).
	Reason Reason
	// Message is one sentence for a person.
	Message string
	// Details are the figures behind it, by the names that error_reason.proto documents.
	Details map[string]string
	// RetryDelay says when trying again makes sense; 0 = not said.
	RetryDelay time.Duration

	cause error
}

// Error is the reason, or else the code, and the message.
func (e *Error) Error() string {
	name := e.Code.String()
	if e.Reason != 0 {
		name = e.Reason.String()
	}
	return "specdraft: " + name + ": " + e.Message
}

// Is matches a Reason, a Code, and nothing else.
func (e *Error) Is(target error) bool {
	switch wanted := target.(type) {
	case Reason:
		return wanted != 0 && e.Reason == wanted
	case Code:
		return e.Code == codes.Code(wanted)
	}
	return false
}

// Unwrap is what caused an error that this client made: ErrClosed, ErrArgument, or the context's error.
func (e *Error) Unwrap() error { return e.cause }

// GRPCStatus is the error as a status.
func (e *Error) GRPCStatus() *status.Status { return status.New(e.Code, e.Message) }

// ErrorOf reads the error of a call that was made with the generated stubs; nil for nil.
func ErrorOf(err error) *Error {
	if err == nil {
		return nil
	}
	var known *Error
	if errors.As(err, &known) {
		return known
	}
	found, ok := status.FromError(err)
	if !ok {
		found = status.FromContextError(err)
	}
	read := &Error{Code: found.Code(), Message: found.Message()}
	switch found.Code() {
	case codes.DeadlineExceeded:
		read.cause = context.DeadlineExceeded
	case codes.Canceled:
		read.cause = context.Canceled
	}
	for _, detail := range found.Details() {
		switch one := detail.(type) {
		case *errdetails.ErrorInfo:
			if one.Domain == Domain {
				// A newer service may know reasons that this client does not.
				read.Reason = Reason(pb.ErrorReason_value[reasonPrefix+one.Reason])
				read.Details = maps.Clone(one.Metadata)
			}
		case *errdetails.RetryInfo:
			read.RetryDelay = one.RetryDelay.AsDuration()
		}
	}
	return read
}

// EntryError reads the status of one entry of a call, or of an answer on a Drive stream; nil when it is OK.
func EntryError(entry *pb.EntryStatus) *Error {
	if entry.GetCode() == int32(codes.OK) {
		return nil
	}
	reason := entry.GetReason()
	if _, known := pb.ErrorReason_name[int32(reason)]; !known {
		reason = 0
	}
	return &Error{
		Code:       codes.Code(entry.GetCode()),
		Reason:     Reason(reason),
		Message:    entry.GetMessage(),
		Details:    maps.Clone(entry.GetDetails()),
		RetryDelay: time.Duration(entry.GetRetryDelayMs()) * time.Millisecond,
	}
}

func closedError() *Error {
	return &Error{Code: codes.Unavailable, Message: "this client is closed", cause: ErrClosed}
}

func unavailable(format string, values ...any) *Error {
	return &Error{Code: codes.Unavailable, Message: fmt.Sprintf(format, values...)}
}

// contextError is the error of a call whose context ended before its answer came.
func contextError(ctx context.Context, rpc string) *Error {
	cause := context.Cause(ctx)
	if errors.Is(ctx.Err(), context.DeadlineExceeded) {
		return &Error{Code: codes.DeadlineExceeded, Message: "no answer to " + rpc + " in time", cause: context.DeadlineExceeded}
	}
	return &Error{Code: codes.Canceled, Message: rpc + " was cancelled", cause: errors.Join(context.Canceled, cause)}
}

func internalError(format string, values ...any) *Error {
	return &Error{Code: codes.Internal, Reason: ReasonInternal, Message: fmt.Sprintf(format, values...)}
}

func argumentError(format string, values ...any) error {
	return fmt.Errorf("%w: %s", ErrArgument, fmt.Sprintf(format, values...))
}

// isUncertain says whether the operation that failed so may have been done, or may still be.
func isUncertain(err *Error) bool {
	switch err.Code {
	case codes.Unavailable, codes.DeadlineExceeded, codes.Canceled, codes.Unknown, codes.Internal:
		return true
	}
	return false
}
