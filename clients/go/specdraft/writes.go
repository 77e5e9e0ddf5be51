package specdraft

import (
	"bytes"
	"context"
	"slices"

	"google.golang.org/grpc/codes"

	pb "example.com/specdraft/clients/go/specdraft/v1"
)

// CatchupItem is one sequence's part of CatchupBatch.
type CatchupItem struct {
	Sequence *Sequence
	Pairs    Pairs
}

// CatchupResult is how one item went.
type CatchupResult struct {
	State State
	Err   error
}

// ProposeItem is one sequence's part of ProposeBatch.
type ProposeItem struct {
	Sequence *Sequence
	Pairs    Pairs
	Draft    Draft
}

// ProposeResult is how one item went: a proposal or an error.
type ProposeResult struct {
	Proposal *Proposal
	Err      error
}

// CatchupBatch is Sequence.Catchup for several sequences in one call. It brings one result an item, in their order; an
// error of the whole call is every item's. Its own error is ErrArgument, or the context's: nothing was sent then.
func (s *Session) CatchupBatch(ctx context.Context, items []CatchupItem) ([]CatchupResult, error) {
	return catchupBatch(ctx, s.present(), items)
}

// ProposeBatch is Sequence.Propose for several sequences in one call, which shares one forward. Results and errors are as
// those of CatchupBatch.
func (s *Session) ProposeBatch(ctx context.Context, items []ProposeItem) ([]ProposeResult, error) {
	return proposeBatch(ctx, s.present(), items)
}

func catchupBatch(ctx context.Context, g *grant, items []CatchupItem) ([]CatchupResult, error) {
	jobs, sequences := make([]*job, len(items)), make([]*Sequence, len(items))
	for index, item := range items {
		jobs[index], sequences[index] = &job{ledger: item.Sequence.ledger, pairs: item.Pairs}, item.Sequence
	}
	if err := runJobs(ctx, g, jobs, sequences, g.catchup); err != nil {
		return nil, err
	}
	results := make([]CatchupResult, len(jobs))
	for index, one := range jobs {
		results[index] = CatchupResult{State: one.state, Err: one.failure()}
	}
	return results, nil
}

func proposeBatch(ctx context.Context, g *grant, items []ProposeItem) ([]ProposeResult, error) {
	jobs, sequences := make([]*job, len(items)), make([]*Sequence, len(items))
	for index, item := range items {
		draft := item.Draft
		jobs[index] = &job{ledger: item.Sequence.ledger, pairs: item.Pairs, draft: &draft}
		sequences[index] = item.Sequence
	}
	if err := runJobs(ctx, g, jobs, sequences, g.propose); err != nil {
		return nil, err
	}
	results := make([]ProposeResult, len(jobs))
	for index, one := range jobs {
		results[index] = ProposeResult{Proposal: one.proposal, Err: one.failure()}
	}
	return results, nil
}

// runJobs checks every job, waits for the turns of all sequences and runs the jobs. Turns are taken in the order of the
// ids, each once: two batches that share sequences cannot wait for each other.
func runJobs(ctx context.Context, g *grant, jobs []*job, sequences []*Sequence, run func(context.Context, []*job)) error {
	for index, one := range jobs {
		if err := one.pairs.Hiddens.check(g.terms.dtype, g.terms.width); err != nil {
			return err
		}
		if err := one.pairs.check(); err != nil {
			return err
		}
		if one.draft != nil && one.draft.Count < 0 {
			return argumentError("%d drafts", one.draft.Count)
		}
		if sequences[index].grant != g {
			one.fail(&Error{Code: codes.NotFound, Reason: ReasonSequenceUnknown, Message: "a sequence of another session"})
		}
	}
	ordered := slices.Clone(sequences)
	slices.SortFunc(ordered, func(left, right *Sequence) int { return bytes.Compare(left.ledger.id, right.ledger.id) })
	for _, one := range slices.Compact(ordered) {
		err := one.begin(ctx)
		if err == nil {
			defer one.end()
			continue
		}
		if ctx.Err() != nil {
			return err
		}
		for index, sequence := range sequences {
			if sequence == one {
				jobs[index].fail(ErrorOf(err))
			}
		}
	}
	run(ctx, jobs)
	return nil
}

// job is one sequence's part of a call: what is left to write, and what came of it.
type job struct {
	ledger     *ledger
	pairs      Pairs
	draft      *Draft // nil = only write
	done       bool
	renumbered bool
	state      State
	proposal   *Proposal
	err        *Error
}

func (j *job) fail(err *Error) { j.done, j.err = true, err }

func (j *job) failure() error {
	if j.err == nil {
		return nil
	}
	return j.err
}

func waiting(jobs []*job) []*job {
	return slices.DeleteFunc(slices.Clone(jobs), func(one *job) bool { return one.done })
}

// catchup writes every job's pairs, long ones in chunks.
func (g *grant) catchup(ctx context.Context, jobs []*job) {
	g.prepare(ctx, jobs)
	g.writeAll(ctx, jobs)
}

func (g *grant) writeAll(ctx context.Context, jobs []*job) {
	for left := waiting(jobs); len(left) > 0; left = waiting(left) {
		g.send(ctx, left, false)
	}
}

// propose writes every job's pairs and drafts. Pairs that one propose does not take go ahead.
func (g *grant) propose(ctx context.Context, jobs []*job) {
	g.prepare(ctx, jobs)
	most := min(g.terms.maxDrafts+1, g.placement.inlineRowsMax)
	var ahead, whole []*job
	for _, one := range waiting(jobs) {
		if count := len(one.pairs.Tokens) - most; count > 0 {
			ahead = append(ahead, &job{ledger: one.ledger, pairs: one.pairs.first(count)})
			whole = append(whole, one)
		}
	}
	g.writeAll(ctx, ahead)
	for index, first := range ahead {
		if first.err != nil {
			whole[index].fail(first.err)
			continue
		}
		whole[index].pairs = whole[index].pairs.after(len(whole[index].pairs.Tokens) - most)
	}
	for left := waiting(jobs); len(left) > 0; left = waiting(left) {
		g.send(ctx, left, true)
	}
}

// prepare refuses sequences that stand twice and asks where those stand that are not certain.
func (g *grant) prepare(ctx context.Context, jobs []*job) {
	count := map[*ledger]int{}
	for _, one := range jobs {
		count[one.ledger]++
	}
	for _, one := range waiting(jobs) {
		if count[one.ledger] > 1 {
			one.fail(&Error{
				Code:    codes.InvalidArgument,
				Reason:  ReasonDuplicateSequence,
				Message: "a sequence stands twice in one call",
			})
		} else if err := one.ledger.sure(ctx, g.transport); err != nil {
			one.fail(err)
		}
	}
}

// entry is a job's part of one call, and where its rows lie.
type entry struct {
	*job
	placed
}

// send makes one call with as many of the jobs as it takes.
func (g *grant) send(ctx context.Context, jobs []*job, drafting bool) {
	batch := g.gather(jobs)
	if len(batch) == 0 {
		return
	}
	results, err := g.exchange(ctx, batch, drafting)
	if err != nil {
		for _, one := range batch {
			one.fail(err)
			one.settle(isUncertain(err))
		}
		return
	}
	for index, one := range batch {
		if index >= len(results) {
			one.fail(internalError("%d results for %d entries", len(results), len(batch)))
			one.settle(true)
			continue
		}
		one.settle(one.read(results[index]))
	}
}

// gather places the rows of as many jobs as one call takes; at least one, unless all that come first have failed.
func (g *grant) gather(jobs []*job) []entry {
	var batch []entry
	size := 0
	for _, one := range jobs {
		if len(batch) == g.terms.entriesMax {
			break
		}
		rows := one.pairs.Hiddens
		if g.terms.rowsMax > 0 {
			rows = rows.Slice(0, min(rows.Len(), g.terms.rowsMax))
		}
		place, err := g.placement.place(rows)
		if err == nil && one.draft != nil && len(one.draft.Mask) > 0 {
			if err = g.placement.placeMask(&place, one.draft.Mask); err != nil {
				place.release()
			}
		}
		if err != nil {
			one.fail(ErrorOf(err))
			continue
		}
		size += place.messageSize
		if len(batch) > 0 && size > g.terms.messageMax {
			place.release()
			break
		}
		batch = append(batch, entry{one, place})
	}
	return batch
}

// exchange sends the batch. A result of Catchup is one of Propose without drafts.
func (g *grant) exchange(ctx context.Context, batch []entry, drafting bool) ([]*pb.ProposeResult, *Error) {
	if drafting {
		request := &pb.ProposeRequest{}
		for _, one := range batch {
			request.Entries = append(request.Entries, one.proposeEntry())
		}
		answer, err := invoke(ctx, g.transport, rpcPropose(), request)
		return answer.GetResults(), err
	}
	request := &pb.CatchupRequest{}
	for _, one := range batch {
		request.Entries = append(request.Entries, &pb.CatchupEntry{
			SequenceId:     one.ledger.id,
			Op:             one.ledger.lastOp + 1,
			Pairs:          one.message(),
			AcceptedDrafts: count32(one.pairs.AcceptedDrafts),
		})
	}
	answer, err := invoke(ctx, g.transport, rpcCatchup(), request)
	var results []*pb.ProposeResult
	for _, one := range answer.GetResults() {
		results = append(results, &pb.ProposeResult{Status: one.GetStatus(), State: one.GetState()})
	}
	return results, err
}

func (e entry) message() *pb.Pairs {
	return &pb.Pairs{
		FirstKey:       e.pairs.FirstKey,
		Tokens:         slices.Clone(e.pairs.Tokens[:e.rows]),
		Hiddens:        e.ref,
		AllowGap:       e.pairs.AllowGap,
		VerifiedTokens: slices.Clone(e.pairs.VerifiedTokens),
	}
}

func (e entry) proposeEntry() *pb.ProposeEntry {
	return &pb.ProposeEntry{
		SequenceId:     e.ledger.id,
		Op:             e.ledger.lastOp + 1,
		Pairs:          e.message(),
		DraftCount:     uint32(e.draft.Count),
		AcceptedDrafts: count32(e.pairs.AcceptedDrafts),
		MinLogprob:     e.draft.MinLogprob,
		Mask:           e.mask,
		Recommend:      e.draft.Recommend,
		VerifyUs:       e.draft.VerifyMicros,
	}
}

// settle gives the place back, or keeps it where the operation may still be in flight.
func (e entry) settle(inFlight bool) {
	if inFlight {
		e.ledger.hold(e.release)
		return
	}
	e.release()
}

// read takes an entry's result over; whether its operation may still be in flight.
func (e entry) read(result *pb.ProposeResult) bool {
	op, told := e.ledger.lastOp+1, result.GetState() != nil
	if told {
		e.ledger.adopt(readState(result.GetState()))
	}
	if err := EntryError(result.GetStatus()); err != nil {
		if !e.renumbered && e.ledger.renumber(err, op, told) {
			e.renumbered = true
			return false
		}
		e.fail(err)
		return isUncertain(err) && !told
	}
	if e.rows < len(e.pairs.Tokens) {
		e.pairs = e.pairs.after(e.rows)
		return false
	}
	e.done, e.state = true, e.ledger.state
	if e.draft != nil {
		e.proposal = readProposal(result, e.ledger.state)
	}
	return false
}

func count32(count *int) *uint32 {
	if count == nil {
		return nil
	}
	return new(uint32(*count))
}
