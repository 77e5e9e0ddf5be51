"""A write on its way: planned in the books, run on the device, entered in the books. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from drafter_service.engine.ledger import Ledger, accept, accept_failure, replayed
from drafter_service.engine.operations import Answer, DraftWish, Stop, Write, WriteWish, Written
from drafter_service.state import Round, Rows, Sequence
from specdraft.errors import Reason, SpecdraftError, make_error

if TYPE_CHECKING:
    from collections.abc import Sequence as Seq

    from torch import Tensor


@dataclass(frozen=True, slots=True)
class RunEntry:
    """What the device has to do for one sequence.

    Attributes:
        pages: the sequence's pages, enough for the rows below.
        row_begin: row index of the first pair; rows before it stay.
        num_live_rows: rows stored before; those from row_begin on are overwritten.
        first_key: key of the first pair.
        tokens: tokens of the pairs.
        hiddens: [len(tokens), hidden width].
        num_drafts: drafts to make, already limited to what pages and positions allow.
        min_logprob: stop after the first draft below it; None = do not stop.
        masks: bool [1 or num_drafts.., vocab]; None = everything is allowed.
    """

    pages: array[int]
    row_begin: int
    num_live_rows: int
    first_key: int
    tokens: tuple[int, ...]
    hiddens: Tensor
    num_drafts: int
    min_logprob: float | None
    masks: Tensor | None

    @property
    def num_rows(self) -> int:
        """Rows after the write, without scratch."""
        return self.row_begin + len(self.tokens)


@dataclass(frozen=True, slots=True)
class RunResult:
    """What the device made of it.

    Attributes:
        drafts: d_1 .. d_n.
        logprobs: one a draft.
        stop: CONFIDENCE or GRAMMAR if one of them ended the chain, else None.
    """

    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: Stop | None


class Runner(Protocol):
    """Runs entries of different sequences in one forward."""

    def run(self, entries: Seq[RunEntry]) -> list[RunResult]:
        """One result an entry. If it raises, every row that was stored before is as it was."""
        ...


@dataclass(frozen=True, slots=True)
class PlannedWrite:
    """A write that fits: pages are taken, nothing else has changed."""

    operation: Write
    sequence: Sequence
    wish: WriteWish
    drafts: DraftWish | None
    rows: Rows
    entry: RunEntry
    limit: Stop


def plan_write(ledger: Ledger, operation: Write) -> PlannedWrite | Answer:
    """Plans a write, or returns the stored answer of a retry. Raises SpecdraftError, having changed nothing."""
    sequence = ledger.sequences.find(operation.session_id, operation.sequence_id)
    if sequence.is_replay(operation.op, operation.digest):
        return replayed(sequence)
    wish = operation.pairs
    if isinstance(wish, SpecdraftError):
        raise wish
    _check(ledger, sequence, wish)
    kept = sequence.rows.below(wish.first_key)
    rows = sequence.rows.written(wish.first_key, len(wish.tokens))
    num_wanted = operation.drafts.num_drafts if operation.drafts else 0
    num_drafts, limit = _take_pages(ledger, sequence, rows, num_wanted)
    entry = RunEntry(
        pages=sequence.pages,
        row_begin=kept.row_count,
        num_live_rows=sequence.rows.row_count,
        first_key=wish.first_key,
        tokens=wish.tokens,
        hiddens=wish.hiddens,
        num_drafts=num_drafts,
        min_logprob=operation.drafts.min_logprob if operation.drafts else None,
        masks=operation.drafts.masks if operation.drafts else None,
    )
    return PlannedWrite(operation, sequence, wish, operation.drafts, rows, entry, limit)


def commit(ledger: Ledger, planned: PlannedWrite, result: RunResult) -> Answer:
    """Enters a write that was run."""
    sequence, wish = planned.sequence, planned.wish
    ledger.judge(sequence, wish.first_key, wish.tokens, wish.accepted_drafts)
    sequence.rows = planned.rows
    ledger.settle(sequence)
    if result.drafts:
        sequence.last_round = Round(planned.rows.last_key + 1, result.drafts)
    stop = (result.stop or planned.limit) if planned.drafts else None
    answer = Written(sequence.view(), result.drafts, result.logprobs, stop)
    return accept(sequence, planned.operation, answer)


def fail(ledger: Ledger, planned: PlannedWrite, error: SpecdraftError) -> None:
    """Enters a write on which the device failed: rows as before, the number used up."""
    ledger.settle(planned.sequence)
    accept_failure(planned.sequence, planned.operation, error)


def _check(ledger: Ledger, sequence: Sequence, wish: WriteWish) -> None:
    try:
        sequence.check_write(wish.first_key, len(wish.tokens), allow_gap=wish.allow_gap)
    except SpecdraftError as error:
        if error.reason is Reason.MISSING_ROWS:
            ledger.observer.gap("refused")
        raise
    if sequence.rows.gap_before(wish.first_key) is not None:
        ledger.observer.gap("declared")


def _take_pages(ledger: Ledger, sequence: Sequence, rows: Rows, num_wanted: int) -> tuple[int, Stop]:
    """Takes the pages of a write and of as many drafts as fit; returns how many those are, and what limits them.

    The first draft needs no row of its own; each further one needs the row of the draft before it.
    """
    num_drafts, limit = num_wanted, Stop.COMPLETE if num_wanted else Stop.NOT_ASKED
    num_positions = sequence.max_keys - rows.last_key
    if num_drafts > num_positions:
        num_drafts, limit = num_positions, Stop.POSITION_LIMIT
    num_scratch = max(num_drafts - 1, 0)
    num_missing = ledger.num_pages_for(rows.row_count) - len(sequence.pages)
    num_missing_all = ledger.num_pages_for(rows.row_count + num_scratch) - len(sequence.pages)
    num_free = ledger.allocator.num_free
    if num_missing > num_free:
        raise make_error(
            Reason.PAGES_EXHAUSTED,
            f"{num_missing} more pages are needed and {num_free} are free",
            retry_delay_ms=100,
            needed=num_missing,
            free=num_free,
        )
    if num_missing_all > num_free:
        num_rows = (len(sequence.pages) + num_free) * ledger.identity.page_rows
        num_drafts, limit = num_rows - rows.row_count + 1, Stop.PAGES
        num_missing_all = num_free
    sequence.pages.extend(ledger.allocator.allocate(max(num_missing_all, 0)))
    return num_drafts, limit
