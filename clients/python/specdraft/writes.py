"""The steps of writing pairs: `catchup` and `propose`, for one sequence or for many."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from specdraft.answers import Proposal, SequenceState
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.exchanges import Exchange, Steps
from specdraft.ledger import Ledger
from specdraft.operations import read_state
from specdraft.pairs import PairRun
from specdraft.placement import Placed, Placement
from specdraft.statuses import error_of_entry, is_uncertain
from specdraft.terms import SessionTerms
from specdraft.v1 import drafter_pb2
from specdraft.values import value

__all__ = ["Draft", "Job", "catchup_jobs", "propose_jobs"]


def _no_words() -> array[int]:
    return array("I")


@value
class Draft:
    """How to draft after the pairs are written.

    Attributes:
        num_drafts: K.
        min_logprob: stop after the first draft below it.
        mask: grammar mask, 32-bit words, [W] or [K, W] flattened; empty = none.
        recommend: whether to be told how many drafts are worth asking for.
        verify_us: how long a verify takes, in microseconds; None = the service measures.
    """

    num_drafts: int
    min_logprob: float | None = None
    mask: array[int] = field(default_factory=_no_words)
    recommend: bool = False
    verify_us: int | None = None


@dataclass(slots=True)
class Job:
    """One sequence's part of a call: what is left to write, and what came of it."""

    ledger: Ledger
    run: PairRun
    draft: Draft | None = None
    outcome: Proposal | SequenceState | SpecdraftError | None = None
    renumbered: bool = field(default=False)


def catchup_jobs(jobs: Sequence[Job], terms: SessionTerms, placement: Placement) -> Steps[None]:
    """Writes every job's pairs, long ones in chunks; fills in the outcomes."""
    yield from _prepare(jobs, terms)
    while waiting := [job for job in jobs if job.outcome is None]:
        yield from _call("Catchup", waiting, terms, placement)


def propose_jobs(jobs: Sequence[Job], terms: SessionTerms, placement: Placement) -> Steps[None]:
    """Writes every job's pairs and drafts; fills in the outcomes. Pairs that one propose does not take go ahead."""
    yield from _prepare(jobs, terms)
    most = min(terms.max_drafts + 1, placement.inline_rows_max)
    ahead = [
        (job, Job(job.ledger, job.run.first(len(job.run.tokens) - most)))
        for job in jobs
        if job.outcome is None and len(job.run.tokens) > most
    ]
    if ahead:
        yield from catchup_jobs([first for _, first in ahead], terms, placement)
    for job, first in ahead:
        if isinstance(first.outcome, SpecdraftError):
            job.outcome = first.outcome
        else:
            job.run = job.run.after(len(job.run.tokens) - most) or job.run
    while waiting := [job for job in jobs if job.outcome is None]:
        yield from _call("Propose", waiting, terms, placement)


def _prepare(jobs: Sequence[Job], terms: SessionTerms) -> Steps[None]:
    for job in jobs:
        if len(jobs) > 1 and sum(job.ledger is other.ledger for other in jobs) > 1:
            job.outcome = make_error(Reason.DUPLICATE_SEQUENCE, "a sequence stands twice in one call")
        elif job.ledger.unsure and job.outcome is None:
            try:
                yield from read_state(job.ledger, terms.timeout_s)
            except SpecdraftError as error:
                job.outcome = error


def _call(rpc: str, jobs: Sequence[Job], terms: SessionTerms, placement: Placement) -> Steps[None]:
    """One call with as many of the jobs as it takes."""
    batch = _gather(jobs, terms, placement)
    settled = False
    try:
        request = _request(rpc, batch)
        placement.wait_for([placed for _, placed in batch])
        answer = yield Exchange(rpc, request, terms.timeout_s)
        settled = True
    except SpecdraftError as error:
        settled = not is_uncertain(error)
        for job, placed in batch:
            job.outcome = error
            if settled:
                placement.release(placed)
        return
    finally:
        if not settled:
            for job, placed in batch:
                job.ledger.hold(placement, placed)
    results = answer.results
    for index, (job, placed) in enumerate(batch):
        if index < len(results):
            in_flight = _read_result(job, placed, results[index])
        else:
            job.outcome = make_error(Reason.INTERNAL, f"{len(results)} results for {len(batch)} entries")
            in_flight = True
        if in_flight:
            job.ledger.hold(placement, placed)
        else:
            placement.release(placed)


def _gather(jobs: Sequence[Job], terms: SessionTerms, placement: Placement) -> list[tuple[Job, Placed]]:
    batch: list[tuple[Job, Placed]] = []
    size_bytes = 0
    try:
        for job in jobs[: terms.entries_max or 1]:
            rows = job.run.hiddens
            placed = placement.place(rows.rows(0, min(rows.row_count, terms.rows_max or rows.row_count)))
            if job.draft is not None and job.draft.mask:
                placed = placement.place_mask(placed, job.draft.mask)
            size_bytes += placed.message_size_bytes
            if batch and size_bytes > terms.message_size_max_bytes:
                placement.release(placed)
                break
            batch.append((job, placed))
    except BaseException:  # nothing was sent: nobody reads what was placed before
        for _, placed in batch:
            placement.release(placed)
        raise
    return batch


def _request(rpc: str, batch: Sequence[tuple[Job, Placed]]) -> Any:
    # In place: a message that is put into another is copied, and inline rows are large.
    request: Any = drafter_pb2.CatchupRequest() if rpc == "Catchup" else drafter_pb2.ProposeRequest()
    for job, placed in batch:
        _fill_entry(request.entries.add(), job, placed)
    return request


def _fill_entry(entry: Any, job: Job, placed: Placed) -> None:
    run, ledger, draft, pairs = job.run, job.ledger, job.draft, entry.pairs
    entry.sequence_id, entry.op = ledger.sequence_id, ledger.next_op
    pairs.first_key, pairs.allow_gap = run.first_key, run.allow_gap
    pairs.tokens.extend(run.tokens[: placed.row_count])
    pairs.verified_tokens.extend(run.verified_tokens)
    pairs.hiddens.CopyFrom(placed.ref)
    if run.accepted_drafts is not None:
        entry.accepted_drafts = run.accepted_drafts
    if draft is None:
        return
    entry.draft_count, entry.recommend = draft.num_drafts, draft.recommend
    if draft.min_logprob is not None:
        entry.min_logprob = draft.min_logprob
    if placed.mask is not None:
        entry.mask.CopyFrom(placed.mask)
    if draft.verify_us is not None:
        entry.verify_us = draft.verify_us


def _read_result(job: Job, placed: Placed, result: Any) -> bool:
    """Takes an entry's result over; whether its operation may still be in flight."""
    ledger, op = job.ledger, job.ledger.next_op
    error, state_told = error_of_entry(result.status), result.HasField("state")
    if state_told:
        ledger.adopt(SequenceState.read(result.state))
    if error is not None:
        if not job.renumbered and ledger.renumber(error, op, state_told=state_told):
            job.renumbered = True
        else:
            job.outcome = error
        return is_uncertain(error) and not state_told
    rest = job.run.after(placed.row_count)
    if rest is not None:
        job.run = rest
    else:
        job.outcome = ledger.state if job.draft is None else Proposal.read(result, ledger.state)
    return False
