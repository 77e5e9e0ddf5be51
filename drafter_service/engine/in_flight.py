"""The writes that are in flight: how many a sequence may have, and who waits for which."""

from __future__ import annotations

import threading
from enum import Enum, auto

from drafter_service.engine.operations import Call, Write

Key = tuple[bytes, bytes]
"""Session and sequence. With its session: whoever names a foreign sequence neither uses up its places nor learns
whether they are used."""

Tag = tuple[int, bytes]
"""Number and digest of an operation: equal for an operation and its retries."""

Follower = tuple[Call, int]


class Entry(Enum):
    """What became of a write that asked for a place."""

    NEW = auto()
    JOINED = auto()
    FULL = auto()


class InFlight:
    """Writes between their submission and their outcome.

    Args:
        limit: most different operations of one sequence.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self._lock = threading.Lock()
        self._flying: dict[Key, dict[Tag, list[Follower]]] = {}  # the first of a list is the one that flies

    def __len__(self) -> int:
        return len(self._flying)

    @property
    def num_operations(self) -> int:
        """Operations in flight, retries not counted."""
        with self._lock:
            return sum(len(tags) for tags in self._flying.values())

    def enter(self, operation: Write, call: Call, index: int) -> Entry:
        """Takes a place, or joins the same operation if that is in flight: entry `index` then gets its outcome."""
        key, tag = (operation.session_id, operation.sequence_id), (operation.op, operation.digest)
        with self._lock:
            tags = self._flying.setdefault(key, {})
            if tag in tags:
                call.join(index)
                first, _ = tags[tag][0]
                first.deadline = max(first.deadline, call.deadline)
                tags[tag].append((call, index))
                return Entry.JOINED
            if len(tags) >= self.limit:
                return Entry.FULL
            tags[tag] = [(call, index)]
            return Entry.NEW

    def leave(self, operation: Write) -> list[Follower]:
        """Gives the place back and tells who had joined."""
        key, tag = (operation.session_id, operation.sequence_id), (operation.op, operation.digest)
        with self._lock:
            tags = self._flying[key]
            _, *followers = tags.pop(tag)
            if not tags:
                del self._flying[key]
            return followers
