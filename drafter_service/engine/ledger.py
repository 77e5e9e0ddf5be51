"""The books: sequences, carries and pages, and what every operation does to them. Pure; the engine thread owns it."""

from __future__ import annotations

import secrets
from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from drafter_service.engine.operations import (
    Answer,
    Close,
    CloseSession,
    Done,
    Free,
    Get,
    Install,
    NumberedOperation,
    Open,
    Opened,
    Operation,
    Take,
    Taken,
    Truncate,
    Viewed,
    Written,
)
from drafter_service.state import (
    Carry,
    CarryTable,
    PageAllocator,
    PagesExhausted,
    Rows,
    Sequence,
    SequenceTable,
)
from specdraft.errors import Reason, SpecdraftError, make_error


class Observer(Protocol):
    """What the books tell to whoever counts."""

    def round_judged(self, num_drafts: int, num_accepted: int) -> None:
        """The target accepted num_accepted of num_drafts drafts."""

    def round_unjudged(self) -> None:
        """A round ended without saying what was accepted."""

    def gap(self, outcome: str) -> None:
        """A write left a gap: "refused" or "declared"."""

    def carry(self, outcome: str) -> None:
        """A carry was "taken", "installed", "freed" or "lost"."""


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """What rows depend on.

    Attributes:
        fingerprint: of the loaded head.
        page_rows: rows in a page.
    """

    fingerprint: str
    page_rows: int


class Ledger:
    """Sequences, carries and pages.

    Args:
        allocator: the pages.
        identity: the loaded head's.
        observer: told of rounds, gaps and carries.
    """

    def __init__(self, allocator: PageAllocator, identity: HeadIdentity, observer: Observer) -> None:
        self.allocator = allocator
        self.identity = identity
        self.sequences = SequenceTable()
        self.carries = CarryTable()
        self.observer = observer
        self._handlers: Mapping[type[Operation], Callable[..., Answer]] = {
            Open: self._open,
            Get: self._get,
            Truncate: self._truncate,
            Close: self._close,
            Take: self._take,
            Install: self._install,
            Free: self._free,
            CloseSession: self._close_session,
        }

    def apply(self, operation: Operation) -> Answer:
        """Does anything but a write. Raises SpecdraftError, having changed nothing."""
        handler = self._handlers[type(operation)]
        if not isinstance(operation, NumberedOperation):
            return handler(operation)
        sequence = self.sequences.find(operation.session_id, operation.sequence_id)
        if sequence.is_replay(operation.op, operation.digest):
            return replayed(sequence)
        return accept(sequence, operation, handler(operation, sequence))

    def num_pages_for(self, num_rows: int) -> int:
        """Pages that hold num_rows rows."""
        return -(-num_rows // self.identity.page_rows)

    def settle(self, sequence: Sequence) -> None:
        """Gives back the pages that the sequence's rows do not need."""
        needed = max(self.num_pages_for(sequence.rows.row_count), sequence.reserved_pages)
        surplus = sequence.pages[needed:]
        if surplus:
            del sequence.pages[needed:]
            self.allocator.release(surplus)

    def judge(self, sequence: Sequence, first_key: int, tokens: tuple[int, ...], declared: int | None) -> None:
        """Counts the last round's acceptance, now that the next operation tells it."""
        last = sequence.last_round
        if last is None:
            return
        sequence.last_round = None
        accepted = last.accepted(first_key, tokens, declared)
        if accepted is None:
            self.observer.round_unjudged()
        else:
            self.observer.round_judged(len(last.drafts), accepted)

    def _open(self, operation: Open) -> Answer:
        known = self.sequences.opened_as(operation.session_id, operation.open_id)
        if known is not None:
            return Opened(known.sequence_id, known.view(), is_new=False)
        limit = operation.max_sequences
        if self.sequences.count(operation.session_id) >= limit:
            text = f"the session has {limit} sequences, which is the limit"
            raise make_error(Reason.SEQUENCES_EXHAUSTED, text, retry_delay_ms=1000, limit=limit)
        sequence = Sequence(operation.sequence_id, operation.session_id, operation.open_id, operation.max_keys)
        if operation.reserve:
            sequence.reserved_pages = self.num_pages_for(operation.max_keys)
            sequence.pages.extend(self.take_pages(sequence.reserved_pages))
        self.sequences.add(sequence)
        return Opened(sequence.sequence_id, sequence.view(), is_new=True)

    def take_pages(self, count: int) -> list[int]:
        """Takes pages. Raises PAGES_EXHAUSTED."""
        try:
            return self.allocator.allocate(count)
        except PagesExhausted as error:
            raise make_error(
                Reason.PAGES_EXHAUSTED,
                f"{error.num_needed} more pages are needed and {error.num_free} are free",
                retry_delay_ms=100,
                needed=error.num_needed,
                free=error.num_free,
            ) from error

    def _get(self, operation: Get) -> Answer:
        return Viewed(self.sequences.find(operation.session_id, operation.sequence_id).view())

    def _truncate(self, operation: Truncate, sequence: Sequence) -> Answer:
        last = sequence.last_round
        if last is not None and (operation.accepted_drafts is not None or operation.first_key < last.first_key):
            self.judge(sequence, -1, (), operation.accepted_drafts)
        sequence.rows = sequence.rows.below(operation.first_key)
        self.settle(sequence)
        return Viewed(sequence.view())

    def _close(self, operation: Close, sequence: Sequence) -> Answer:
        self.judge(sequence, -1, (), operation.accepted_drafts)
        self._remove(sequence)
        return Done()

    def _take(self, operation: Take, sequence: Sequence) -> Answer:
        self.judge(sequence, -1, (), None)
        rows, pages = sequence.rows, sequence.pages
        # What was reserved and holds no row stays with the sequence; otherwise the pages go as they are, in no time.
        spare = pages[self.num_pages_for(rows.row_count) :]
        if spare:
            del pages[-len(spare) :]
        carry = Carry(secrets.token_bytes(16), operation.session_id, rows, pages, operation.label)
        sequence.rows, sequence.pages, sequence.reserved_pages = Rows(), spare, len(spare)
        self.carries.add(carry)
        self.observer.carry("taken")
        return Taken(carry.kv_id, rows.spans, operation.label, sequence.view())

    def _install(self, operation: Install, sequence: Sequence) -> Answer:
        if sequence.rows.row_count:
            raise make_error(
                Reason.SEQUENCE_NOT_EMPTY,
                f"the sequence holds rows up to key {sequence.rows.last_key}",
                last_pair_key=sequence.rows.last_key,
            )
        carry = self.carries.find(operation.session_id, operation.kv_id)
        self._check_fingerprint(operation.fingerprint)
        keep = operation.keep_keys_below
        rows = carry.rows if keep is None else carry.rows.below(keep)
        if rows.last_key >= sequence.max_keys:
            raise make_error(
                Reason.POSITION_LIMIT,
                f"the carry holds key {rows.last_key}, past the sequence's limit of {sequence.max_keys}",
                key=rows.last_key,
                limit=sequence.max_keys,
            )
        self.carries.remove(carry)
        spare, sequence.pages = sequence.pages, carry.pages
        sequence.pages.extend(spare)
        sequence.rows = rows
        self.settle(sequence)
        self.observer.carry("installed")
        return Viewed(sequence.view())

    def _check_fingerprint(self, theirs: str) -> None:
        ours = self.identity.fingerprint
        if theirs and theirs != ours:
            raise make_error(
                Reason.KV_MISMATCH,
                f"the rows belong to head {theirs}, this service runs {ours}",
                field="head_fingerprint",
                ours=ours,
                theirs=theirs,
            )

    def _free(self, operation: Free) -> Answer:
        carry = self.carries.find(operation.session_id, operation.kv_id)
        self._give_up(carry, "freed")
        return Done()

    def _close_session(self, operation: CloseSession) -> Answer:
        for sequence in self.sequences.of_session(operation.session_id):
            self.judge(sequence, -1, (), None)
            self._remove(sequence)
        for carry in self.carries.of_session(operation.session_id):
            self._give_up(carry, "lost")
        return Done()

    def _give_up(self, carry: Carry, outcome: str) -> None:
        self.carries.remove(carry)
        self.allocator.release(carry.pages)
        self.observer.carry(outcome)

    def _remove(self, sequence: Sequence) -> None:
        self.sequences.remove(sequence)
        self.allocator.release(sequence.pages)
        sequence.pages = array("i")


def accept(sequence: Sequence, operation: NumberedOperation, answer: Answer) -> Answer:
    """Makes the operation the sequence's last one and keeps its answer for retries."""
    sequence.last_op = operation.op
    sequence.last_digest = operation.digest
    if not isinstance(answer, Done):
        answer = replace(answer, view=sequence.view())
    sequence.last_outcome = answer
    return answer


def accept_failure(sequence: Sequence, operation: NumberedOperation, error: SpecdraftError) -> None:
    """The device failed on the operation: its number is used up, and a retry gets the same failure."""
    sequence.last_op = operation.op
    sequence.last_digest = operation.digest
    sequence.last_outcome = error


def replayed(sequence: Sequence) -> Answer:
    """The stored answer of the last operation. Raises what that had raised."""
    outcome = sequence.last_outcome
    if isinstance(outcome, SpecdraftError):
        raise outcome
    assert isinstance(outcome, Written | Viewed | Taken | Opened | Done), "only answers are stored"
    return outcome
