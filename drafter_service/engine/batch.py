"""A write on its way: planned in the books, run on the device, entered in the books. Pure."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

from drafter_service.engine.ledger import Ledger, accept, accept_failure, replayed
from drafter_service.engine.operations import Answer, DraftWish, Stop, Write, WriteWish, Written
from drafter_service.engine.vault import require_pages
from drafter_service.state import Round, Rows, Sequence
from drafter_service.state.values import value
from specdraft.errors import Reason, SpecdraftError

if TYPE_CHECKING:
    from collections.abc import Mapping
    from collections.abc import Sequence as Seq

    from torch import Tensor

    from drafter_service.memory.hiddens import PackedRows


@value
class RunEntry:
    """What the device has to do for one sequence.

    Attributes:
        pages: the sequence's pages, enough for the rows below. None of those that are written is shared.
        row_begin: row index of the first pair; rows before it stay.
        num_live_rows: rows stored before; those from row_begin on are overwritten.
        first_key: key of the first pair.
        tokens: tokens of the pairs.
        hiddens: [len(tokens), hidden width].
        num_drafts: drafts to make, already limited to what pages and positions allow.
        min_logprob: stop after the first draft below it; None = do not stop.
        masks: bool [1 or num_drafts.., vocab]; None = everything is allowed.
        keeps_drafts: whether the last draft gets a row as well.
    """

    pages: array[int]
    row_begin: int
    num_live_rows: int
    first_key: int
    tokens: tuple[int, ...]
    hiddens: Tensor | PackedRows
    num_drafts: int
    min_logprob: float | None
    masks: Tensor | None
    keeps_drafts: bool = False

    @property
    def num_rows(self) -> int:
        """Rows after the write, without those of drafts."""
        return self.row_begin + len(self.tokens)

    @property
    def num_draft_rows(self) -> int:
        """Most rows that drafting writes: each draft's but the last one's, unless drafts are kept."""
        return self.num_drafts if self.keeps_drafts else max(self.num_drafts - 1, 0)


@value
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


@value
class PlannedWrite:
    """A write that fits: pages are taken, nothing else has changed.

    Attributes:
        operation: what was asked.
        sequence: its sequence.
        wish: its pairs.
        verified: the rows before the write, verified draft rows among them.
        rows: the rows after it.
        entry: what the device has to do.
        limit: why there will not be more drafts.
        replaced: pages that were shared and now have a copy in their place, by their index.
    """

    operation: Write
    sequence: Sequence
    wish: WriteWish
    verified: Rows
    rows: Rows
    entry: RunEntry
    limit: Stop
    replaced: dict[int, int]


def plan_write(ledger: Ledger, operation: Write) -> PlannedWrite | Answer:
    """Plans a write, or returns the stored answer of a retry. Raises SpecdraftError, having changed nothing."""
    sequence = ledger.sequences.find(operation.session_id, operation.sequence_id)
    if sequence.is_replay(operation.op, operation.digest):
        return replayed(sequence)
    wish = operation.pairs
    if isinstance(wish, SpecdraftError):
        raise wish
    # Rows on their way are waited for and checked here, where nothing has changed yet.
    hiddens = wish.hiddens.settled() if hasattr(wish.hiddens, "settled") else wish.hiddens
    verified = sequence.rows
    if wish.verified_tokens:
        verified = sequence.verified(wish.first_key, wish.verified_tokens)
    try:
        sequence.check_write(verified, wish.first_key, len(wish.tokens), allow_gap=wish.allow_gap)
    except SpecdraftError as error:
        if error.reason is Reason.MISSING_ROWS:
            ledger.observer.gap("refused")
        raise
    rows = verified.written(wish.first_key, len(wish.tokens))
    row_begin = rows.row_count - len(wish.tokens)
    drafts = operation.drafts
    num_wanted = drafts.num_drafts if drafts else 0
    num_drafts, limit, replaced = _take_pages(ledger, sequence, row_begin, rows, num_wanted)
    entry = RunEntry(
        pages=sequence.pages,
        row_begin=row_begin,
        num_live_rows=sequence.rows.row_count + len(sequence.draft_rows),
        first_key=wish.first_key,
        tokens=wish.tokens,
        hiddens=hiddens,
        num_drafts=num_drafts,
        min_logprob=drafts.min_logprob if drafts else None,
        masks=drafts.masks if drafts else None,
        keeps_drafts=sequence.keeps_drafts,
    )
    return PlannedWrite(operation, sequence, wish, verified, rows, entry, limit, replaced)


@value
class RoundCost:
    """What a round costs, in seconds.

    Attributes:
        draft_s: one more draft.
        verify_s: the rest of the round, the target's verify above all; 0 = not known.
    """

    draft_s: float
    verify_s: float


def commit(ledger: Ledger, planned: PlannedWrite, result: RunResult, cost: RoundCost | None) -> Answer:
    """Enters a write that was run; `cost` is needed where a number of drafts is to be recommended."""
    sequence, wish, drafts = planned.sequence, planned.wish, planned.operation.drafts
    told_from = wish.first_key - len(wish.verified_tokens)
    ledger.judge(sequence, told_from, wish.verified_tokens + wish.tokens, wish.accepted_drafts)
    if wish.allow_gap and planned.verified.gap_before(wish.first_key) is not None:
        ledger.observer.gap("declared")
    if planned.verified is not sequence.rows:
        ledger.observer.draft_rows_kept(planned.verified.row_count - sequence.rows.row_count)
        sequence.adopt_drafts(planned.verified)
    sequence.take_rows(planned.rows, wish.first_key, result.drafts if sequence.keeps_drafts else ())
    if planned.replaced:
        ledger.allocator.release(planned.replaced.values())
    ledger.settle(sequence)
    if result.drafts:
        sequence.last_round = Round(planned.rows.last_key + 1, result.drafts)
    stop = (result.stop or planned.limit) if drafts else None
    sequence.last_op = planned.operation.op  # the view tells it
    recommended = None if cost is None or drafts is None else _recommended(sequence, drafts, cost)
    answer = Written(sequence.view(), result.drafts, result.logprobs, stop, recommended)
    return accept(sequence, planned.operation, answer)


def _recommended(sequence: Sequence, drafts: DraftWish, cost: RoundCost) -> int:
    advice, most = sequence.advice, drafts.max_drafts
    if advice is None or cost.verify_s <= 0:
        return most
    return advice.best_count(most, cost.draft_s, cost.verify_s)


def fail(ledger: Ledger, planned: PlannedWrite, error: SpecdraftError) -> None:
    """Enters a write on which the device failed: rows as before, the number used up."""
    sequence = planned.sequence
    for index, page in planned.replaced.items():
        ledger.allocator.release([sequence.pages[index]])
        sequence.pages[index] = page
    ledger.settle(sequence)
    accept_failure(sequence, planned.operation, error)


def _take_pages(
    ledger: Ledger, sequence: Sequence, row_begin: int, rows: Rows, num_wanted: int
) -> tuple[int, Stop, dict[int, int]]:
    """Takes the pages of a write and of as many drafts as fit.

    The first draft needs no row of its own; each further one needs the row of the draft before it, and where drafts
    are kept the last one gets a row too.

    Returns:
        The number of drafts, what limits it, and the shared pages that got a private copy in their place.
    """
    num_drafts, limit = num_wanted, Stop.COMPLETE if num_wanted else Stop.NOT_ASKED
    rowless = 0 if sequence.keeps_drafts else 1
    num_positions = sequence.max_keys - 1 - rows.last_key + rowless
    if num_drafts > num_positions:
        num_drafts, limit = num_positions, Stop.POSITION_LIMIT
    most = num_drafts

    row_end = rows.row_count + max(num_drafts - rowless, 0)
    has_pages = row_end <= len(sequence.pages) * ledger.identity.page_rows
    is_any_shared = ledger.allocator.num_shared and _shared(ledger, sequence, row_begin, row_end, {})
    if has_pages and not is_any_shared:
        return num_drafts, limit, {}

    def needed(num_drafts: int, carried: Mapping[int, int]) -> int:
        """Pages that the write with so many drafts takes, once carries have let go of `carried`."""
        row_end = rows.row_count + max(num_drafts - rowless, 0)
        num_new = max(ledger.num_pages_for(row_end) - len(sequence.pages), 0)
        return num_new + len(_shared(ledger, sequence, row_begin, row_end, carried))

    if not ledger.vault.find_room(lambda carried: needed(most, carried)):
        if not ledger.vault.find_room(lambda carried: needed(0, carried)):
            require_pages(ledger.allocator, ledger.vault, needed(0, {}))
        while needed(num_drafts, {}) > ledger.allocator.num_free:
            num_drafts -= 1
        limit = Stop.PAGES
    taken = ledger.allocator.allocate(needed(num_drafts, {}))
    shared = _shared(ledger, sequence, row_begin, rows.row_count + max(num_drafts - rowless, 0), {})
    replaced = {}
    for index in shared:
        replaced[index], sequence.pages[index] = sequence.pages[index], taken.pop()
        # Rows before the write stay; and if the device fails, all of them must be there again.
        ledger.copy_page(replaced[index], sequence.pages[index])
    sequence.pages.extend(taken)
    return num_drafts, limit, replaced


def _shared(ledger: Ledger, sequence: Sequence, row_begin: int, row_end: int, carried: Mapping[int, int]) -> list[int]:
    """Indices of the sequence's pages that rows [row_begin, row_end) lie in and that others than `carried` hold too."""
    first = row_begin // ledger.identity.page_rows
    end = min(ledger.num_pages_for(row_end), len(sequence.pages))
    pages, allocator = sequence.pages, ledger.allocator
    return [index for index in range(first, end) if allocator.is_shared(pages[index], carried.get(pages[index], 0))]
