"""Entries of batch calls."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from specdraft.answers import Proposal, SequenceState
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.hiddens import read_rows
from specdraft.ledger import Ledger
from specdraft.pairs import PairRun
from specdraft.terms import SessionTerms
from specdraft.writes import Draft, Job

__all__ = [
    "CatchupItem",
    "ProposeItem",
    "catchup_job",
    "draft",
    "proposal",
    "proposal_or_error",
    "propose_job",
    "state_or_error",
    "written",
]

S = TypeVar("S")


@dataclass(frozen=True, slots=True)
class CatchupItem(Generic[S]):
    """One sequence's part of `catchup_batch`; fields as the arguments of `Sequence.catchup`."""

    sequence: S
    first_key: int
    tokens: Sequence[int]
    hiddens: object
    allow_gap: bool = False
    accepted_drafts: int | None = None
    verified_tokens: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class ProposeItem(Generic[S]):
    """One sequence's part of `propose_batch`; fields as the arguments of `Sequence.propose`."""

    sequence: S
    first_key: int
    tokens: Sequence[int]
    hiddens: object
    num_drafts: int
    allow_gap: bool = False
    accepted_drafts: int | None = None
    min_logprob: float | None = None
    mask: Sequence[int] = ()
    verified_tokens: Sequence[int] = ()
    recommend: bool = False
    verify_us: int | None = None


def catchup_job(ledger: Ledger, item: CatchupItem[S], terms: SessionTerms) -> Job:
    """The job of an item.

    Raises:
        ValueError: hidden rows of another shape or type.
    """
    return Job(ledger, _run(item, terms))


def propose_job(ledger: Ledger, item: ProposeItem[S], terms: SessionTerms) -> Job:
    """The job of an item.

    Raises:
        ValueError: hidden rows of another shape or type, or a mask word that is negative or needs more than 32 bits.
    """
    wish = draft(item.num_drafts, item.min_logprob, item.mask, recommend=item.recommend, verify_us=item.verify_us)
    return Job(ledger, _run(item, terms), wish)


def proposal_or_error(job: Job) -> Proposal | SpecdraftError:
    """What came of a propose job."""
    if isinstance(job.outcome, Proposal | SpecdraftError):
        return job.outcome
    return make_error(Reason.INTERNAL, "the call ended without a result for this entry")


def state_or_error(job: Job) -> SequenceState | SpecdraftError:
    """What came of a catch-up job."""
    if isinstance(job.outcome, SequenceState | SpecdraftError):
        return job.outcome
    return make_error(Reason.INTERNAL, "the call ended without a result for this entry")


def proposal(job: Job) -> Proposal:
    """The proposal of a job, or its error raised."""
    result = proposal_or_error(job)
    if isinstance(result, SpecdraftError):
        raise result
    return result


def written(job: Job) -> SequenceState:
    """The state after a catch-up, or its error raised."""
    result = state_or_error(job)
    if isinstance(result, SpecdraftError):
        raise result
    return result


def _run(item: CatchupItem[S] | ProposeItem[S], terms: SessionTerms) -> PairRun:
    rows = read_rows(item.hiddens, terms.dtype, terms.width)
    return PairRun(item.first_key, item.tokens, rows, item.allow_gap, item.accepted_drafts, item.verified_tokens)


def draft(
    num_drafts: int, min_logprob: float | None, mask: Sequence[int], *, recommend: bool, verify_us: int | None
) -> Draft:
    """How to draft; arguments as those of `Sequence.propose`.

    Raises:
        ValueError: a mask word that is negative or needs more than 32 bits.
    """
    try:
        words = array("I", mask)
    except OverflowError as error:
        raise ValueError(f"mask words are 0 or more and fit into 32 bits: {error}") from None
    return Draft(num_drafts, min_logprob, words, recommend, verify_us)
