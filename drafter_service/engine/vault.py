"""What happens to rows between two turns of a conversation. Pure; the engine thread owns it."""

from __future__ import annotations

import secrets
from array import array
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Protocol

from drafter_service.state import Carry, CarryTable, PageAllocator, Rows, Sequence
from specdraft.errors import Reason, make_error


class CarryObserver(Protocol):
    """What the vault tells to whoever counts."""

    def carry(self, outcome: str) -> None:
        """A carry was "taken", "installed", "freed", "lost" with its session, "expired" or "evicted"."""


@dataclass(frozen=True, slots=True)
class CarryLimits:
    """How long and how many carries are kept.

    Attributes:
        ttl_s: a carry is given up after this.
        max_pages: ... and the oldest ones when carries hold more pages than this.
        max_carries: ... or when there are more than this; a carry of no rows holds no page.
    """

    ttl_s: float
    max_pages: int
    max_carries: int = 4096


class Vault:
    """Keeps carries, and gives them up when their time is over or their pages are needed.

    Args:
        allocator: the pages.
        limits: how long and how many.
        observer: told of every carry's end.
        clock: monotonic seconds.
    """

    def __init__(
        self, allocator: PageAllocator, limits: CarryLimits, observer: CarryObserver, clock: Callable[[], float]
    ) -> None:
        self.carries = CarryTable()
        self._allocator = allocator
        self._limits = limits
        self._observer = observer
        self._clock = clock

    def put(self, owner: bytes, sequence: Sequence, pages: array[int], label: str) -> Carry:
        """Makes a carry of a sequence's rows; `pages` hold them and are the vault's from now on."""
        self.expire()
        carry = Carry(
            kv_id=secrets.token_bytes(16),
            owner=owner,
            rows=sequence.rows,
            first_approximate_key=sequence.first_approximate_key,
            pages=pages,
            label=label,
            expires_at=self._clock() + self._limits.ttl_s,
        )
        self.carries.add(carry)
        self._observer.carry("taken")
        while self._is_too_much() and len(self.carries) > 1:
            self._give_up_oldest()
        return carry

    def find(self, owner: bytes, kv_id: bytes) -> Carry:
        """The owner's carry. Raises CARRY_UNKNOWN."""
        self.expire()
        return self.carries.find(owner, kv_id)

    def release(self, carry: Carry) -> Rows:
        """Hands a carry out: its pages are the caller's from now on."""
        self.carries.remove(carry)
        self._observer.carry("installed")
        return carry.rows

    def give_up(self, carry: Carry, outcome: str) -> None:
        """Forgets a carry and frees its pages."""
        self.carries.remove(carry)
        self._allocator.release(carry.pages)
        self._observer.carry(outcome)

    def listed(self, owner: bytes) -> list[Carry]:
        """The owner's carries, the oldest first."""
        self.expire()
        return self.carries.of_owner(owner)

    def expire(self) -> None:
        """Gives up the carries whose time is over."""
        for carry in self.carries.expired(self._clock()):
            self.give_up(carry, "expired")

    def find_room(self, num_needed: Callable[[Mapping[int, int]], int]) -> bool:
        """Gives up the oldest carries until enough pages are free; none, and False, if that would not be enough.

        Args:
            num_needed: pages needed once carries have let go of the given ones, with how many of them held each. What
                carries alone share with a sequence has to be copied no more when they are gone.
        """
        if num_needed({}) <= self._allocator.num_free:
            return True
        held = Counter(page for carry in self.carries for page in carry.pages)
        if self._allocator.num_free + self._allocator.num_freed(held) < num_needed(held):
            return False
        while num_needed({}) > self._allocator.num_free:
            self._give_up_oldest()
        return True

    @property
    def num_own_pages(self) -> int:
        """Pages that nobody but carries holds."""
        return self._allocator.num_freed(Counter(page for carry in self.carries for page in carry.pages))

    def left_ms(self, carry: Carry) -> int:
        """Time until a carry is given up, in milliseconds."""
        return max(int((carry.expires_at - self._clock()) * 1000), 1)

    def _is_too_much(self) -> bool:
        return self.carries.num_pages > self._limits.max_pages or len(self.carries) > self._limits.max_carries

    def _give_up_oldest(self) -> None:
        oldest = self.carries.oldest()
        assert oldest is not None, "the caller knows that there is one"
        self.give_up(oldest, "evicted")


def require_pages(allocator: PageAllocator, vault: Vault, count: int) -> list[int]:
    """Takes pages, from carries if need be. Raises PAGES_EXHAUSTED, having taken none."""
    if not vault.find_room(lambda _: count):
        num_free = allocator.num_free
        raise make_error(
            Reason.PAGES_EXHAUSTED,
            f"{count} more pages are needed and {num_free} are free",
            retry_delay_ms=100,
            needed=count,
            free=num_free,
        )
    return allocator.allocate(count)
