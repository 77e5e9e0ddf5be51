"""The steps of resuming a conversation: choosing a carry, installing or sharing it, and doing without one."""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass
from typing import Final, Generic, TypeVar

from specdraft import operations
from specdraft.answers import Carry, SequenceState
from specdraft.carry_book import CarryBook, Claim, KnownCarry, Wanted
from specdraft.errors import Reason, ResourceExhaustedError, SpecdraftError
from specdraft.exchanges import Steps
from specdraft.ledger import Ledger
from specdraft.statuses import is_uncertain
from specdraft.words import RowsPolicy

__all__ = ["Opening", "Resumed", "free_carries", "resume"]

S = TypeVar("S")

_LOST: Final = frozenset({Reason.CARRY_UNKNOWN, Reason.KV_MISMATCH})
"""The carry expired, was evicted, went with its session, or belongs to another head: it will never be of use."""


@dataclass(frozen=True, slots=True)
class Resumed(Generic[S]):
    """A sequence that goes on where an earlier one was parked.

    Attributes:
        sequence: the new sequence.
        num_keys_kept: rows that it holds already; 0 = everything has to be written.
        next_key: the first key that is missing at the end: write the pairs from here on. It is `num_keys_kept`, unless
            the carry had gaps.
    """

    sequence: S
    num_keys_kept: int
    next_key: int

    @classmethod
    def of(cls, sequence: S, state: SequenceState) -> Resumed[S]:
        """Reads it from where the sequence stands."""
        return cls(sequence, state.row_count, state.last_pair_key + 1)


@dataclass(frozen=True, slots=True)
class Opening:
    """How the resumed sequence is opened; as the arguments of `Client.open_sequence`."""

    budget_tokens: int
    rows_policy: RowsPolicy
    timeout_s: float


def resume(book: CarryBook, wanted: Wanted, opening: Opening) -> Steps[Ledger]:
    """Opens a sequence with as many rows as a known carry has for it.

    A carry that is lost is forgotten and the next best is tried; at worst the sequence is a fresh one. After any other
    error the carry is known again, unless the service may have installed it before the error.
    """
    ledger: Ledger | None = None  # kept for the next try: of many carries that have expired each costs one call
    budget_tokens = 0
    while (claim := book.claim(wanted)) is not None:
        # A carry that is shared is installed whole, and may be longer than the new sequence is meant to be.
        needed = 0 if claim.is_shared else opening.budget_tokens
        try:
            ledger = yield from _opened(ledger if budget_tokens == needed else None, ledger, needed, opening)
        except SpecdraftError:
            book.add(claim.known)
            raise
        budget_tokens = needed
        keep = None if claim.is_shared else claim.keep_keys_below
        try:
            yield from operations.install_kv(ledger, claim.known.carry, keep, opening.timeout_s)
        except SpecdraftError as error:
            if error.reason in _LOST:
                continue
            if not is_uncertain(error):
                book.add(claim.known)
            yield from _close(ledger, opening.timeout_s)
            raise
        return (yield from _share(book, claim, ledger, opening)) if claim.is_shared else ledger
    usable = ledger if budget_tokens == opening.budget_tokens else None
    return (yield from _opened(usable, ledger, opening.budget_tokens, opening))


def _opened(usable: Ledger | None, before: Ledger | None, budget_tokens: int, opening: Opening) -> Steps[Ledger]:
    """The sequence that is there, if it is usable; otherwise another, in its place."""
    if usable is not None:
        return usable
    if before is not None:
        yield from _close(before, opening.timeout_s)
    return (yield from _open(budget_tokens, opening))


def free_carries(carries: Iterable[Carry], timeout_s: float) -> Steps[None]:
    """Gives carries up that nobody remembers; those that cannot be reached expire by themselves."""
    for carry in carries:
        with suppress(SpecdraftError):
            yield from operations.free_kv(carry, timeout_s)


def _open(budget_tokens: int, opening: Opening) -> Steps[Ledger]:
    return operations.open_sequence(budget_tokens, opening.rows_policy, reserve=False, timeout_s=opening.timeout_s)


def _share(book: CarryBook, claim: Claim, donor: Ledger, opening: Opening) -> Steps[Ledger]:
    """Forks from the installed carry and takes it again. No step copies more than the last page."""
    timeout_s, keep = opening.timeout_s, claim.keep_keys_below
    try:
        ledger = yield from operations.fork_sequence(donor, keep, opening.budget_tokens, timeout_s)
    except ResourceExhaustedError:
        # No page or sequence for a second one: the rows that are wanted now go before those that may be.
        yield from operations.truncate(donor, keep, None, timeout_s)
        return donor
    except SpecdraftError:
        yield from _park_again(book, claim, donor, timeout_s)
        raise
    yield from _park_again(book, claim, donor, timeout_s)
    return ledger


def _park_again(book: CarryBook, claim: Claim, donor: Ledger, timeout_s: float) -> Steps[None]:
    known = claim.known
    with suppress(SpecdraftError):  # the new sequence stands, whatever becomes of the carry
        carry = yield from operations.take_kv(donor, known.carry.label, timeout_s)
        yield from free_carries(book.add(KnownCarry(carry, known.tokens)), timeout_s)
    yield from _close(donor, timeout_s)


def _close(ledger: Ledger, timeout_s: float) -> Steps[None]:
    with suppress(SpecdraftError):  # what cannot be closed ends with the session
        yield from operations.close_sequence(ledger, None, timeout_s)
