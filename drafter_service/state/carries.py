"""Carries: rows taken out of a sequence, waiting to be installed in another. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from dataclasses import dataclass

from drafter_service.state.rows import Rows
from specdraft.errors import Reason, make_error


@dataclass(frozen=True, slots=True)
class Carry:
    """Rows without a sequence.

    Attributes:
        kv_id: 16 random bytes.
        owner: who may install it: a session's id, or the hash of a carry key, which outlives sessions.
        rows: which keys have a row.
        first_approximate_key: first key whose row is approximate, -1 = none.
        pages: their pages; held by the carry.
        label: the client's own name for it.
        expires_at: monotonic seconds after which it is given up.
    """

    kv_id: bytes
    owner: bytes
    rows: Rows
    first_approximate_key: int
    pages: array[int]
    label: str
    expires_at: float


class CarryTable:
    """All carries, the one taken longest ago first. Owned by the engine thread."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Carry] = {}
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._by_id)

    def __iter__(self) -> Iterator[Carry]:
        return iter(list(self._by_id.values()))

    @property
    def num_pages(self) -> int:
        """Pages held by carries; one that several hold counts for each."""
        return self._num_pages

    def add(self, carry: Carry) -> None:
        """Adds a carry as the youngest."""
        self._by_id[carry.kv_id] = carry
        self._num_pages += len(carry.pages)

    def find(self, owner: bytes, kv_id: bytes) -> Carry:
        """The owner's carry; unknown and foreign ids alike raise CARRY_UNKNOWN."""
        carry = self._by_id.get(kv_id)
        if carry is None or carry.owner != owner:
            raise make_error(Reason.CARRY_UNKNOWN, "no such carry in this session")
        return carry

    def remove(self, carry: Carry) -> None:
        """Forgets a carry. Its pages are the caller's."""
        del self._by_id[carry.kv_id]
        self._num_pages -= len(carry.pages)

    def oldest(self) -> Carry | None:
        """The carry that was taken longest ago, None = there is none."""
        return next(iter(self._by_id.values()), None)

    def of_owner(self, owner: bytes) -> list[Carry]:
        """The owner's carries, the oldest first."""
        return [carry for carry in self._by_id.values() if carry.owner == owner]

    def expired(self, now: float) -> list[Carry]:
        """The carries whose time is over: taken in order and with one TTL, so these are the oldest ones."""
        over = []
        for carry in self._by_id.values():
            if carry.expires_at > now:
                break
            over.append(carry)
        return over
