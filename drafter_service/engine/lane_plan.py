"""What the books say about a device-resident round: planned for the worst case, entered when it has come back. Pure."""

from __future__ import annotations

from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import Final

from drafter_service.engine.ledger import Ledger, accept, accept_failure, replayed
from drafter_service.engine.operations import Answer, LaneWrite, Stop, Written
from drafter_service.engine.vault import require_pages
from drafter_service.state import Round, Sequence
from specdraft.errors import Reason, SpecdraftError, make_error

PENDING_MAX: Final = 2
"""Rounds of a sequence that the books may lag behind."""


@dataclass(frozen=True, slots=True)
class SlotState:
    """What the device has to know of a sequence before its first round.

    Attributes:
        begin_key: first key that a round may begin at: of the last unbroken run, behind pages that others share.
        begin_row: its row index.
        last_key: the newest.
    """

    begin_key: int
    begin_row: int
    last_key: int


@dataclass(frozen=True, slots=True)
class PlannedSlot:
    """An entry that may run.

    Attributes:
        operation: what was asked.
        sequence: whose.
        state: to be told to the device; None = it knows, since a round of the sequence is under way.
        num_drafts: drafts that the pages allow.
        stop: why not more.
        pages: the sequence's pages, as they are now.
        num_rows_max: rows that these hold.
        has_new_pages: whether it did not hold all of them since its last round.
    """

    operation: LaneWrite
    sequence: Sequence
    state: SlotState | None
    num_drafts: int
    stop: Stop
    pages: tuple[int, ...]
    num_rows_max: int
    has_new_pages: bool


@dataclass(frozen=True, slots=True)
class SlotResult:
    """What a round left for one entry, as read from its mirror.

    Attributes:
        reason: why it was refused on the device; None = it was done.
        first_key: of the pairs.
        tokens: of the pairs.
        drafts: made.
        logprobs: of the drafts.
        stop: why there are not more.
    """

    reason: Reason | None
    first_key: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop: Stop | None


def plan_slot(ledger: Ledger, operation: LaneWrite, num_pending: int, num_pairs: int) -> PlannedSlot | Answer:
    """Plans an entry, or returns the stored answer of a retry. Raises SpecdraftError, having changed nothing.

    Args:
        ledger: the books.
        operation: the entry.
        num_pending: rounds of its sequence that the books do not know yet.
        num_pairs: R, most pairs of a round.
    """
    sequence = ledger.sequences.find(operation.session_id, operation.sequence_id)
    expected = sequence.last_op + num_pending + 1
    if num_pending == 0 and sequence.is_replay(operation.op, operation.digest):
        return replayed(sequence)
    if operation.op != expected:
        raise sequence.out_of_order(operation.op, f"operation {operation.op} came where {expected} is the next")
    if sequence.keeps_drafts:
        raise make_error(
            Reason.NOT_IMPLEMENTED, "approximate rows have no device-resident rounds", name="LaneTicket, APPROXIMATE"
        )
    if num_pending >= PENDING_MAX:
        raise make_error(
            Reason.IN_FLIGHT_EXHAUSTED,
            f"{PENDING_MAX} rounds of the sequence are under way, which is the limit",
            retry_delay_ms=10,
            limit=PENDING_MAX,
        )
    num_rows = min(sequence.rows.row_count + (num_pending + 1) * num_pairs, sequence.max_keys)
    num_held = len(sequence.pages)
    is_copied = _unshare(ledger, sequence, num_rows + max(operation.num_drafts - 1, 0))
    num_drafts, stop = _take_pages(ledger, sequence, num_rows, operation.num_drafts)
    return PlannedSlot(
        operation,
        sequence,
        None if num_pending else _state(ledger, sequence),
        num_drafts,
        stop,
        tuple(sequence.pages),
        len(sequence.pages) * ledger.identity.page_rows,
        is_copied or len(sequence.pages) > num_held,
    )


def _unshare(ledger: Ledger, sequence: Sequence, row_end: int) -> bool:
    """Gives the pages that the next rows go to a copy in their place where others share them; whether there are such.

    They are shared once a sequence has lost rows that a fork still has.
    """
    allocator, pages = ledger.allocator, sequence.pages
    if not allocator.num_shared:
        return False
    begin = sequence.rows.row_count // ledger.identity.page_rows
    end = min(ledger.num_pages_for(row_end), len(pages))
    shared = [index for index in range(begin, end) if allocator.is_shared(pages[index])]
    for index, own in zip(shared, require_pages(allocator, ledger.vault, len(shared)), strict=True):
        ledger.copy_page(pages[index], own)
        allocator.release([pages[index]])
        pages[index] = own
    return bool(shared)


def _take_pages(ledger: Ledger, sequence: Sequence, num_rows: int, num_wanted: int) -> tuple[int, Stop]:
    """Takes the pages of the worst case: as many pairs as there can be, and the rows of the drafts behind them."""
    stop = Stop.COMPLETE if num_wanted else Stop.NOT_ASKED
    held = len(sequence.pages)

    def needed(num_drafts: int) -> int:
        return max(ledger.num_pages_for(num_rows + max(num_drafts - 1, 0)) - held, 0)

    num_drafts = num_wanted
    if not ledger.vault.find_room(lambda _: needed(num_wanted)):
        own = require_pages(ledger.allocator, ledger.vault, needed(0))
        sequence.pages.extend(own)
        room = len(sequence.pages) * ledger.identity.page_rows - num_rows
        return min(num_wanted, room + 1), Stop.PAGES
    sequence.pages.extend(ledger.allocator.allocate(needed(num_drafts)))
    return num_drafts, stop


def _state(ledger: Ledger, sequence: Sequence) -> SlotState:
    rows, page_rows = sequence.rows, ledger.identity.page_rows
    if not rows.spans:
        return SlotState(0, 0, -1)
    span = rows.spans[-1]
    begin_row = rows.row_count - (span.end - span.begin)
    used = sequence.pages[: ledger.num_pages_for(rows.row_count)]
    shared = [i for i, page in enumerate(used) if ledger.allocator.is_shared(page)]
    # Drafting never writes a shared page, and neither may a rewind that only the device knows of.
    first_row = max(begin_row, (shared[-1] + 1) * page_rows if shared else 0)
    return SlotState(span.begin + first_row - begin_row, first_row, rows.last_key)


def enter_slot(ledger: Ledger, planned: PlannedSlot, result: SlotResult) -> None:
    """Enters a round that has come back. What the device refused has used its number; its followers fail as a gap."""
    operation, sequence = planned.operation, planned.sequence
    if result.reason is not None:
        if result.reason is Reason.INTERNAL:
            sequence.drop_rows(result.first_key)
        accept_failure(sequence, operation, refusal(result.reason))
        return
    ledger.judge(sequence, result.first_key, result.tokens, operation.accepted_drafts)
    sequence.drop_rows(result.first_key)
    sequence.rows = sequence.rows.written(result.first_key, len(result.tokens))
    if result.drafts:
        sequence.last_round = Round(sequence.rows.last_key + 1, result.drafts)
    accept(sequence, operation, Written(sequence.view(), result.drafts, result.logprobs, result.stop))


def refusal(reason: Reason) -> SpecdraftError:
    """What is told of a round that the device refused; the slot holds no more than the reason."""
    return make_error(reason, "the device refused what the slot held", retry_delay_ms=100)


def read_mirror(
    words: Seq[int], logprobs: Seq[float], num_pairs: int, num_head_words: int, reasons: dict[int, Reason]
) -> SlotResult:
    """One entry's mirror as a result.

    Args:
        words: status, first key, pair count, draft count, stop, tokens, drafts.
        logprobs: one a draft.
        num_pairs: R.
        num_head_words: words before the tokens.
        reasons: by their numbers.
    """
    status, first_key, pair_count, draft_count, stop = words[:num_head_words]
    begin = num_head_words + num_pairs
    if status:
        return SlotResult(reasons[status], first_key, (), (), (), None)
    tokens = tuple(words[num_head_words : num_head_words + pair_count])
    drafts = tuple(words[begin : begin + draft_count])
    return SlotResult(None, first_key, tokens, drafts, tuple(logprobs[:draft_count]), Stop(stop))
