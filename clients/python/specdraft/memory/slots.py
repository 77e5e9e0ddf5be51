"""Who uses which part of an arena: free lists without memory of their own. Callers hold a lock."""

from __future__ import annotations

__all__ = ["SlotPool", "StagingRows"]


class SlotPool:
    """Free slots of an arena."""

    def __init__(self, slot_count: int) -> None:
        self._free = list(reversed(range(slot_count)))

    def take(self) -> int | None:
        """A free slot, or None."""
        return self._free.pop() if self._free else None

    def give(self, slot: int) -> None:
        """Returns a slot taken before."""
        self._free.append(slot)

    @property
    def free_count(self) -> int:
        """Slots that nobody uses."""
        return len(self._free)


class StagingRows:
    """Rows of the staging area, handed out from the front and recovered together.

    Claims are short (one call) and few, so that a bump pointer which returns to the front whenever nobody holds a claim
    does what an allocator would.
    """

    def __init__(self, row_count: int) -> None:
        self._row_count = row_count
        self._next_row = 0
        self._claim_count = 0

    def claim(self, row_count: int) -> int | None:
        """First of `row_count` free rows, or None if they do not fit now."""
        if self._next_row + row_count > self._row_count:
            return None
        first_row = self._next_row
        self._next_row += row_count
        self._claim_count += 1
        return first_row

    def release(self) -> None:
        """Ends one claim."""
        self._claim_count -= 1
        if self._claim_count == 0:
            self._next_row = 0

    @property
    def claim_count(self) -> int:
        """Claims not yet ended."""
        return self._claim_count
