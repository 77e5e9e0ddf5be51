"""Carries: rows taken out of a sequence, waiting to be installed in another. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from drafter_service.state.rows import Rows
from specdraft.errors import Reason, make_error


@dataclass(frozen=True, slots=True)
class Carry:
    """Rows without a sequence.

    Attributes:
        kv_id: 16 random bytes.
        session_id: the session that owns it.
        rows: which keys have a row.
        pages: their pages; held by the carry.
        label: the client's own name for it.
    """

    kv_id: bytes
    session_id: bytes
    rows: Rows
    pages: array[int]
    label: str


class CarryTable:
    """All carries. Owned by the engine thread."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Carry] = {}
        self._num_pages = 0

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_pages(self) -> int:
        """Pages held by carries."""
        return self._num_pages

    def add(self, carry: Carry) -> None:
        """Adds a carry."""
        self._by_id[carry.kv_id] = carry
        self._num_pages += len(carry.pages)

    def find(self, session_id: bytes, kv_id: bytes) -> Carry:
        """The session's carry; unknown and foreign ids alike raise CARRY_UNKNOWN."""
        carry = self._by_id.get(kv_id)
        if carry is None or carry.session_id != session_id:
            raise make_error(Reason.CARRY_UNKNOWN, "no such carry in this session")
        return carry

    def remove(self, carry: Carry) -> None:
        """Forgets a carry. Its pages are the caller's."""
        del self._by_id[carry.kv_id]
        self._num_pages -= len(carry.pages)

    def of_session(self, session_id: bytes) -> list[Carry]:
        """The session's carries."""
        return [carry for carry in self._by_id.values() if carry.session_id == session_id]
