package specdraft

import (
	"strings"
	"time"

	"google.golang.org/grpc/codes"
)

const (
	firstReattachDelay = 20 * time.Millisecond
	mostReattachDelay  = 500 * time.Millisecond
	// A stream that held for so long was good, whether or not it answered anything.
	goodAfter = time.Second
)

// after is what to do once a stream has ended.
type after int

const (
	attachAgain after = iota
	giveUp
	stop
	useUnary
)

// reattachment decides, from how and when a stream ended, whether the token may attach again.
//
// A broken stream starts a grace period at the service; within it the token attaches again. A stream that the service
// ended because of a later one (SESSION_FENCED) is never attached again: two clients would fence each other forever.
// Where the status was lost on the way (gRPC puts INTERNAL in its place), that may have been the reason: the session goes
// on by unary calls, which fence nobody.
type reattachment struct {
	grace       time.Duration
	delay       time.Duration
	attachedAt  time.Time
	brokenSince time.Time // zero = not broken
}

func newReattachment(grace time.Duration) *reattachment {
	return &reattachment{grace: grace, delay: firstReattachDelay}
}

// attached notes that a stream was opened; whether it holds is not known yet.
func (r *reattachment) attached(now time.Time) { r.attachedAt = now }

// wanted notes that somebody asks, and that they are waitingCount now: a lone one gets the whole grace, whatever went
// before.
func (r *reattachment) wanted(waitingCount int) {
	if waitingCount == 1 && !r.brokenSince.IsZero() {
		r.answered()
	}
}

// answered notes that an answer came: the stream is good.
func (r *reattachment) answered() {
	r.brokenSince = time.Time{}
	r.delay = firstReattachDelay
}

// ended decides after a stream; err is nil where the service closed it in peace, as it does when it drains.
func (r *reattachment) ended(err *Error, now time.Time) after {
	if err != nil {
		switch {
		case err.Code == codes.Unimplemented, err.Code == codes.Internal && err.Reason == 0:
			return useUnary
		case err.Reason != 0 && err.Code != codes.Unavailable:
			return stop
		case err.Reason == ReasonDeviceLost:
			return giveUp
		}
	}
	if now.Sub(r.attachedAt) >= goodAfter {
		r.answered()
	}
	if r.brokenSince.IsZero() {
		r.brokenSince = now
	}
	if now.Sub(r.brokenSince) < r.grace {
		return attachAgain
	}
	r.answered() // the next use starts afresh
	return giveUp
}

// nextDelay is how long to wait before the next attempt.
func (r *reattachment) nextDelay() time.Duration {
	delay := r.delay
	r.delay = min(2*delay, mostReattachDelay)
	return delay
}

// isOfTheSize says whether a request was larger than the service takes: it would end the next stream too, and is not done.
// Other limits of gRPC's own have the same code.
func isOfTheSize(err *Error) bool {
	return err != nil && err.Code == codes.ResourceExhausted && err.Reason == 0 && strings.Contains(err.Message, "message larger than max")
}

// isOfTheConnection says whether it may be that nobody listens any more: waiting callers need not wait for the next
// attempt then.
func isOfTheConnection(err *Error) bool {
	return err != nil && err.Code == codes.Unavailable && err.Reason == 0
}
