package specdraft

import (
	"cmp"
	"context"
	"errors"
	"io"
	"slices"
	"sync"
	"time"

	"google.golang.org/protobuf/proto"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// errDriveUnsupported says that the service has no Drive: the request goes by a unary call.
var errDriveUnsupported = errors.New("specdraft: no Drive")

// waiter is one request that has no answer yet, and whoever waits for it.
type waiter struct {
	frame *pb.DriveRequest
	done  chan driveResult // of capacity 1: delivering never waits
}

type driveResult struct {
	answer *pb.DriveResponse
	err    error
}

// drive is one session's stream. It attaches at once, and again (with every unanswered request) when it breaks. While
// nobody listens at the target it goes on trying, and those who wait are told at once.
type drive struct {
	open      func(context.Context) (pb.Drafter_DriveClient, error)
	isRefused func(context.Context) bool
	cancel    context.CancelFunc
	stopped   chan struct{} // closed when the goroutine has ended
	wanted    chan struct{} // cuts the pause between two attempts short
	unsent    chan struct{} // the queue has got something

	mu      sync.Mutex
	lastID  uint64
	waiting map[uint64]*waiter
	queue   []*waiter // to be sent on the present stream, in order
	again   *reattachment
	final   error // every further call gets it
}

func startDrive(
	open func(context.Context) (pb.Drafter_DriveClient, error), isRefused func(context.Context) bool, grace time.Duration,
) *drive {
	ctx, cancel := context.WithCancel(context.Background())
	d := &drive{
		open:      open,
		isRefused: isRefused,
		cancel:    cancel,
		stopped:   make(chan struct{}),
		wanted:    make(chan struct{}, 1),
		unsent:    make(chan struct{}, 1),
		waiting:   map[uint64]*waiter{},
		again:     newReattachment(max(grace, reconnectedWithin)),
	}
	go d.run(ctx)
	return d
}

// call sends the request and waits for its answer, or for the end of the context.
func (d *drive) call(ctx context.Context, frame *pb.DriveRequest, name string) (*pb.DriveResponse, error) {
	one := &waiter{frame, make(chan driveResult, 1)}
	d.mu.Lock()
	if d.final != nil {
		defer d.mu.Unlock()
		return nil, d.final
	}
	d.lastID++
	frame.CorrelationId = d.lastID
	d.waiting[d.lastID] = one
	d.queue = append(d.queue, one)
	d.again.wanted(len(d.waiting))
	d.mu.Unlock()
	wake(d.unsent)
	wake(d.wanted)
	select {
	case result := <-one.done:
		return result.answer, result.err
	case <-ctx.Done():
	}
	if d.take(frame.CorrelationId) == nil {
		result := <-one.done // it came in between
		return result.answer, result.err
	}
	return nil, contextError(ctx, name)
}

// close ends the stream; callers that still wait get an error.
func (d *drive) close() {
	d.cancel()
	<-d.stopped
}

// isDriving says whether calls go over the stream.
func (d *drive) isDriving() bool {
	d.mu.Lock()
	defer d.mu.Unlock()
	return !errors.Is(d.final, errDriveUnsupported)
}

func wake(signal chan struct{}) {
	select {
	case signal <- struct{}{}:
	default:
	}
}

// take forgets a request; nil if it has been answered or given up.
func (d *drive) take(id uint64) *waiter {
	d.mu.Lock()
	defer d.mu.Unlock()
	one := d.waiting[id]
	delete(d.waiting, id)
	return one
}

// run attaches one stream after another until one ends for good.
func (d *drive) run(ctx context.Context) {
	defer close(d.stopped)
	for {
		err := d.attachOnce(ctx)
		d.mu.Lock()
		next := d.again.ended(err, time.Now())
		delay := d.again.nextDelay()
		d.mu.Unlock()
		switch {
		case ctx.Err() != nil:
			d.finish(closedError(), true)
			return
		case next == useUnary:
			d.finish(errDriveUnsupported, true)
			return
		case next == stop:
			d.finish(err, true)
			return
		case next == giveUp:
			d.finish(endOf(err), false)
			delay = -1 // until somebody wants it again
		case isOfTheConnection(err):
			d.tellIfNobodyListens(ctx)
		case isOfTheSize(err):
			d.tellTheLargest(err)
		}
		d.pause(ctx, delay)
	}
}

func endOf(err *Error) error {
	if err != nil {
		return err
	}
	return unavailable("the stream to the service has ended")
}

// pause waits before the next attempt; without end where delay is negative.
func (d *drive) pause(ctx context.Context, delay time.Duration) {
	var due <-chan time.Time
	if delay >= 0 {
		timer := time.NewTimer(delay)
		defer timer.Stop()
		due = timer.C
	}
	select {
	case <-due:
	case <-d.wanted:
	case <-ctx.Done():
	}
}

// finish tells all who wait; if it is final, those who come later as well.
func (d *drive) finish(err error, isFinal bool) {
	d.mu.Lock()
	if isFinal {
		d.final = err
	}
	waiting := d.waiting
	d.waiting, d.queue = map[uint64]*waiter{}, nil
	d.mu.Unlock()
	for _, one := range waiting {
		one.done <- driveResult{err: err}
	}
}

// tellTheLargest tells who sent the largest request, which is not sent again.
func (d *drive) tellTheLargest(err *Error) {
	d.mu.Lock()
	var largest *waiter
	for _, one := range d.waiting {
		if largest == nil || proto.Size(one.frame) > proto.Size(largest.frame) {
			largest = one
		}
	}
	if largest != nil {
		delete(d.waiting, largest.frame.GetCorrelationId())
	}
	d.mu.Unlock()
	if largest != nil {
		largest.done <- driveResult{err: err}
	}
}

func (d *drive) tellIfNobodyListens(ctx context.Context) {
	d.mu.Lock()
	count := len(d.waiting)
	d.mu.Unlock()
	if count > 0 && d.isRefused(ctx) {
		d.finish(unavailable("nobody listens there"), false)
	}
}

// attachOnce opens a stream, sends what is unanswered and reads until the end; nil where the service ended it in peace.
func (d *drive) attachOnce(ctx context.Context) *Error {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	d.mu.Lock()
	d.queue = d.unanswered()
	d.again.attached(time.Now())
	d.mu.Unlock()
	stream, err := d.open(ctx)
	if err != nil {
		return ErrorOf(err)
	}
	var sender sync.WaitGroup
	sender.Go(func() { d.send(ctx, stream) })
	defer sender.Wait()
	defer cancel()
	for {
		answer, err := stream.Recv()
		switch {
		case errors.Is(err, io.EOF):
			return nil
		case err != nil:
			return ErrorOf(err)
		}
		d.deliver(answer)
	}
}

// unanswered is what to send on a new stream: the same requests, and so the same ops, in order.
func (d *drive) unanswered() []*waiter {
	all := make([]*waiter, 0, len(d.waiting))
	for _, one := range d.waiting {
		all = append(all, one)
	}
	slices.SortFunc(all, func(left, right *waiter) int {
		return cmp.Compare(left.frame.GetCorrelationId(), right.frame.GetCorrelationId())
	})
	return all
}

func (d *drive) send(ctx context.Context, stream pb.Drafter_DriveClient) {
	for {
		for one := d.nextUnsent(); one != nil; one = d.nextUnsent() {
			if stream.Send(one.frame) != nil {
				return // reading the stream tells why
			}
		}
		select {
		case <-d.unsent:
		case <-ctx.Done():
			return
		}
	}
}

// nextUnsent is the next request whose caller still waits.
func (d *drive) nextUnsent() *waiter {
	d.mu.Lock()
	defer d.mu.Unlock()
	for len(d.queue) > 0 {
		one := d.queue[0]
		d.queue = d.queue[1:]
		if d.waiting[one.frame.GetCorrelationId()] == one {
			return one
		}
	}
	return nil
}

func (d *drive) deliver(answer *pb.DriveResponse) {
	one := d.take(answer.GetCorrelationId())
	d.mu.Lock()
	d.again.answered()
	d.mu.Unlock()
	if one != nil { // else it has given up
		one.done <- driveResult{answer: answer}
	}
}
