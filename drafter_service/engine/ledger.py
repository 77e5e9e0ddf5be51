"""The books: sequences and pages, and what every operation but a write does to them. Pure; one thread owns them."""

from __future__ import annotations

from array import array
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Protocol

from drafter_service.engine.operations import (
    Answer,
    CarryView,
    Close,
    CloseSession,
    Done,
    Expire,
    Fork,
    Free,
    Get,
    Install,
    ListCarries,
    Listed,
    NumberedOperation,
    Open,
    Opened,
    Operation,
    Read,
    Take,
    Taken,
    Task,
    Truncate,
    Viewed,
    Written,
)
from drafter_service.engine.vault import CarryObserver, Vault, require_pages
from drafter_service.state import Carry, PageAllocator, Sequence, SequenceTable
from specdraft.errors import Reason, SpecdraftError, make_error


class Observer(CarryObserver, Protocol):
    """What the books tell to whoever counts."""

    def round_judged(self, num_drafts: int, num_accepted: int) -> None:
        """The target accepted num_accepted of num_drafts drafts."""

    def round_unjudged(self) -> None:
        """A round ended without saying what was accepted."""

    def gap(self, outcome: str) -> None:
        """A write left a gap: "refused", or "declared" and carried out."""

    def draft_rows_kept(self, num_rows: int) -> None:
        """So many draft rows were verified and count as approximate rows."""


@dataclass(frozen=True, slots=True)
class HeadIdentity:
    """What rows depend on.

    Attributes:
        fingerprint: of the loaded head.
        page_rows: rows in a page.
    """

    fingerprint: str
    page_rows: int


_VIEWING = (Written, Viewed, Taken)
"""Answers that tell where the sequence stands."""


class Ledger:
    """Sequences and pages.

    Args:
        allocator: the pages.
        identity: the loaded head's.
        vault: the carries.
        observer: told of rounds and gaps.
        copy_page: copies all rows of a page to another.
    """

    def __init__(
        self,
        allocator: PageAllocator,
        identity: HeadIdentity,
        vault: Vault,
        observer: Observer,
        copy_page: Callable[[int, int], None],
    ) -> None:
        self.allocator = allocator
        self.identity = identity
        self.sequences = SequenceTable()
        self.vault = vault
        self.observer = observer
        self.copy_page = copy_page
        self._handlers: Mapping[type[Operation], Callable[..., Answer]] = {
            Open: self._open,
            Fork: self._fork,
            Get: self._get,
            Read: self._read,
            Truncate: self._truncate,
            Close: self._close,
            Take: self._take,
            Install: self._install,
            Free: self._free,
            ListCarries: self._list_carries,
            Expire: self._expire,
            CloseSession: self._close_session,
            Task: self._do_task,
        }

    def apply(self, operation: Operation) -> Answer:
        """Does anything but a write. Raises SpecdraftError, having changed nothing."""
        handler = self._handlers[type(operation)]
        if not isinstance(operation, NumberedOperation):
            return handler(operation)
        key = operation.session_id, operation.sequence_id
        if isinstance(operation, Close) and self.sequences.was_closed_by(*key, operation.op, operation.digest):
            return Done()
        sequence = self.sequences.find(operation.session_id, operation.sequence_id)
        if sequence.is_replay(operation.op, operation.digest):
            return replayed(sequence)
        return accept(sequence, operation, handler(operation, sequence))

    def num_pages_for(self, num_rows: int) -> int:
        """Pages that hold num_rows rows."""
        return -(-num_rows // self.identity.page_rows)

    def settle(self, sequence: Sequence) -> None:
        """Gives back the pages that the sequence's rows do not need."""
        num_rows = sequence.rows.row_count + len(sequence.draft_rows)
        needed = max(self.num_pages_for(num_rows), sequence.reserved_pages)
        if needed < len(sequence.pages):
            surplus = sequence.pages[needed:]
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
            if sequence.advice is not None:
                sequence.advice.judged(len(last.drafts), accepted)

    def _open(self, operation: Open) -> Answer:
        opening = (operation.max_keys, operation.reserve, operation.keeps_drafts)
        known = self.sequences.opened_as(operation.session_id, operation.open_id, opening)
        if known is not None:
            return Opened(known.sequence_id, known.view(), is_new=False)
        sequence = self._new_sequence(operation, opening)
        if operation.reserve:
            sequence.reserved_pages = self.num_pages_for(operation.max_keys)
            sequence.pages.extend(require_pages(self.allocator, self.vault, sequence.reserved_pages))
        self.sequences.add(sequence)
        return Opened(sequence.sequence_id, sequence.view(), is_new=True)

    def _new_sequence(self, operation: Open | Fork, opening: tuple[object, ...]) -> Sequence:
        self.sequences.check_session(operation.session_id)
        limit = operation.max_sequences
        if self.sequences.count(operation.session_id) >= limit:
            text = f"the session has {limit} sequences, which is the limit"
            raise make_error(Reason.SEQUENCES_EXHAUSTED, text, retry_delay_ms=1000, limit=limit)
        return Sequence(
            operation.new_id,
            operation.session_id,
            operation.open_id,
            operation.max_keys,
            opening,
            keeps_drafts=operation.keeps_drafts,
            advice=self.sequences.advice_of(operation.session_id),
        )

    def _fork(self, operation: Fork) -> Answer:
        # First: a fork that was done is answered again, though its source may have been closed since.
        opening = (operation.sequence_id, operation.keep_keys_below, operation.max_keys)
        known = self.sequences.opened_as(operation.session_id, operation.open_id, opening)
        if known is not None:
            return Opened(known.sequence_id, known.view(), is_new=False)
        source = self.sequences.find(operation.session_id, operation.sequence_id)
        source.check_idle()
        rows = source.rows.below(operation.keep_keys_below)
        if rows.last_key >= operation.max_keys:
            raise past_limit(rows.last_key, operation.max_keys)
        sequence = self._new_sequence(replace(operation, keeps_drafts=source.keeps_drafts), opening)
        num_full, num_left = divmod(rows.row_count, self.identity.page_rows)
        # Whoever goes on writes into the last page: the fork gets a copy of it. Full pages are shared.
        own = require_pages(self.allocator, self.vault, 1) if num_left else []
        for page in own:
            self.copy_page(source.pages[num_full], page)
            source.num_forks += 1
        shared = source.pages[:num_full]
        self.allocator.retain(shared)
        sequence.rows, sequence.pages = rows, shared + array("i", own)
        if 0 <= source.first_approximate_key <= rows.last_key:
            sequence.first_approximate_key = source.first_approximate_key
        self.sequences.add(sequence)
        return Opened(sequence.sequence_id, sequence.view(), is_new=True)

    def _get(self, operation: Get) -> Answer:
        return Viewed(self.sequences.find(operation.session_id, operation.sequence_id).view())

    def _read(self, operation: Read) -> Answer:
        sequence = self.sequences.find(operation.session_id, operation.sequence_id)
        outcome = sequence.last_outcome
        if operation.op != sequence.last_op or not isinstance(outcome, Written) or outcome.stop is None:
            raise sequence.out_of_order(operation.op, f"the drafts of operation {operation.op} are not kept")
        return outcome

    def _truncate(self, operation: Truncate, sequence: Sequence) -> Answer:
        last = sequence.last_round
        if last is not None and (operation.accepted_drafts is not None or operation.first_key < last.first_key):
            self.judge(sequence, -1, (), operation.accepted_drafts)
        sequence.drop_rows(operation.first_key)
        self.settle(sequence)
        return Viewed(sequence.view())

    def _close(self, operation: Close, sequence: Sequence) -> Answer:
        self.judge(sequence, -1, (), operation.accepted_drafts)
        self.sequences.close(sequence, operation.op, operation.digest)
        self._release(sequence)
        return Done()

    def _take(self, operation: Take, sequence: Sequence) -> Answer:
        self.judge(sequence, -1, (), None)
        # What was reserved and holds no row stays with the sequence; otherwise the pages go as they are, in no time.
        pages = sequence.pages
        spare = pages[self.num_pages_for(sequence.rows.row_count) :]
        if spare:
            del pages[-len(spare) :]
        carry = self.vault.put(operation.owner, sequence, pages, operation.label)
        sequence.drop_rows(0)
        sequence.pages = spare
        self.settle(sequence)
        # As freshly opened: what went with the carry is reserved anew, as far as there are pages.
        num_missing = min(sequence.reserved_pages - len(sequence.pages), self.allocator.num_free)
        sequence.pages.extend(self.allocator.allocate(max(num_missing, 0)))
        return Taken(self._carry_view(carry), sequence.view())

    def _install(self, operation: Install, sequence: Sequence) -> Answer:
        if sequence.rows.row_count:
            raise make_error(
                Reason.SEQUENCE_NOT_EMPTY,
                f"the sequence holds rows up to key {sequence.rows.last_key}",
                last_pair_key=sequence.rows.last_key,
            )
        carry = self.vault.find(operation.owner, operation.kv_id)
        self._check_fingerprint(operation.fingerprint)
        keep = operation.keep_keys_below
        rows = carry.rows if keep is None else carry.rows.below(keep)
        if rows.last_key >= sequence.max_keys:
            raise past_limit(rows.last_key, sequence.max_keys)
        self.vault.release(carry)
        spare, sequence.pages = sequence.pages, carry.pages
        sequence.pages.extend(spare)
        sequence.rows, sequence.first_approximate_key = rows, -1
        if 0 <= carry.first_approximate_key <= rows.last_key:
            sequence.first_approximate_key = carry.first_approximate_key
        self.settle(sequence)
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
        self.vault.give_up(self.vault.find(operation.owner, operation.kv_id), "freed")
        return Done()

    def _list_carries(self, operation: ListCarries) -> Answer:
        return Listed(tuple(self._carry_view(carry) for carry in self.vault.listed(operation.owner)))

    def _expire(self, _: Expire) -> Answer:
        self.vault.expire()
        return Done()

    @staticmethod
    def _do_task(operation: Task) -> Answer:
        operation.action()
        return Done()

    def _close_session(self, operation: CloseSession) -> Answer:
        for sequence in self.sequences.of_session(operation.session_id):
            self.judge(sequence, -1, (), None)
            self.sequences.remove(sequence)
            self._release(sequence)
        # A carry under a key belongs to the key; those of the session itself are out of everybody's reach now.
        for carry in self.vault.listed(operation.session_id):
            self.vault.give_up(carry, "lost")
        self.sequences.end_session(operation.session_id)
        return Done()

    def _carry_view(self, carry: Carry) -> CarryView:
        return CarryView(carry.kv_id, carry.rows.spans, carry.label, self.vault.left_ms(carry))

    def _release(self, sequence: Sequence) -> None:
        self.allocator.release(sequence.pages)
        sequence.pages = array("i")


def past_limit(key: int, limit: int) -> SpecdraftError:
    """POSITION_LIMIT."""
    return make_error(Reason.POSITION_LIMIT, f"pair {key} is past the limit of {limit}", key=key, limit=limit)


def accept(sequence: Sequence, operation: NumberedOperation, answer: Answer) -> Answer:
    """Makes the operation the sequence's last one and keeps its answer for retries."""
    sequence.last_op = operation.op
    sequence.last_digest = operation.digest
    if isinstance(answer, _VIEWING) and answer.view.last_op != operation.op:
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
    assert isinstance(outcome, Written | Viewed | Taken | Done), "only answers are stored"
    return outcome
