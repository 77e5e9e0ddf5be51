"""The service's half of a lane: tickets, what goes on the stream and when, release. Pure: no threads, no CUDA.

The client's half is `specdraft.memory.lane_protocol`; `tests/lane_model.py` runs both through all interleavings.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import Enum

from specdraft.memory.lane_protocol import RELEASED


class Verdict(Enum):
    """What becomes of a ticket that arrives."""

    ACCEPTED = "accepted"
    OUT_OF_ORDER = "out of order"
    RELEASED = "released"


@dataclass(frozen=True, slots=True)
class Ticketed:
    """One round in a lane's queue.

    Attributes:
        ticket: its number.
        deadline: monotonic seconds until which `ready` must have reached it.
        is_refused: it only gets its `done`; nothing is waited for and nothing computed.
        is_launched: its work is on the stream.
    """

    ticket: int
    deadline: float
    is_refused: bool = False
    is_launched: bool = False


def may_run(*, is_fenced: bool, ready: int, ticket: int) -> bool:
    """What a round's first kernel decides, after the wait for `ready` has ended for whatever reason.

    Being past the wait is not enough, and neither is `ready` != RELEASED: a store of RELEASED ends the wait, and a
    write of an earlier ticket that was still queued in the client's stream may have come after it.
    """
    return not is_fenced and ticket <= ready < RELEASED


@dataclass(frozen=True, slots=True)
class ServiceLane:
    """Where the service stands in one lane. A value: every step makes a new one.

    Attributes:
        last: the last ticket taken up, done or refused; 0 = none.
        queue: rounds that the device is not known to be done with, the oldest first.
        is_released: no ticket is taken and nothing launched any more.
        is_settled: RELEASED has been stored after the stream was seen drained: nobody overwrites it again.
    """

    last: int = 0
    queue: tuple[Ticketed, ...] = ()
    is_released: bool = False
    is_settled: bool = False

    def taken(self, ticket: int, deadline: float) -> tuple[ServiceLane, Verdict]:
        """A ticket has arrived. Only last + 1 is accepted.

        A later one is refused and still gets its `done`, behind the rounds before it: the client waits for it. It
        becomes the last ticket, so that `done` never goes back when the missing one arrives after all. An earlier one
        has or will have its `done`.
        """
        if self.is_released:
            return self, Verdict.RELEASED
        if not self.last < ticket < RELEASED:
            return self, Verdict.OUT_OF_ORDER
        is_next = ticket == self.last + 1
        queue = (*self.queue, Ticketed(ticket, deadline, is_refused=not is_next))
        return replace(self, last=ticket, queue=queue), Verdict.ACCEPTED if is_next else Verdict.OUT_OF_ORDER

    def refused(self, ticket: int) -> ServiceLane:
        """An accepted round that was not launched will not be: it only gets its `done`, in its turn."""
        queue = tuple(
            replace(one, is_refused=True) if one.ticket == ticket and not one.is_launched else one for one in self.queue
        )
        return replace(self, queue=queue)

    def next_launch(self, ready: int, *, has_room: bool) -> Ticketed | None:
        """The round that can go onto the stream now; None = none.

        Args:
            ready: the counter, as the CPU sees it.
            has_room: whether one more wait may be open. A round that is refused, or whose `ready` is there, needs none.
        """
        if self.is_released:
            return None
        first = next((one for one in self.queue if not one.is_launched), None)
        if first is None or has_room or first.is_refused or ready >= first.ticket:
            return first
        return None

    def launched(self, ticket: int) -> ServiceLane:
        """The round's work is on the stream, from its wait to its `done`."""
        queue = tuple(replace(one, is_launched=True) if one.ticket == ticket else one for one in self.queue)
        return replace(self, queue=queue)

    def passed(self, ticket: int) -> ServiceLane:
        """The device is done with every launched round up to `ticket`."""
        queue = tuple(one for one in self.queue if one.ticket > ticket or not one.is_launched)
        return replace(self, queue=queue)

    def released(self) -> tuple[ServiceLane, tuple[int, ...]]:
        """Ends the lane. Returns it with the tickets that were never launched and never will be."""
        dropped = tuple(one.ticket for one in self.queue if not one.is_launched)
        launched = tuple(one for one in self.queue if one.is_launched)
        return replace(self, queue=launched, is_released=True), dropped

    def settled(self) -> ServiceLane:
        """RELEASED was stored once more after `is_drained` had been seen."""
        assert self.is_released, "only released lanes settle"
        assert self.is_drained, "the stream may still write to the counters"
        return replace(self, is_settled=True)

    @property
    def is_drained(self) -> bool:
        """Whether the stream holds nothing of this lane: then pages may return and the lane be taken down."""
        return not any(one.is_launched for one in self.queue)

    def num_open_waits(self, ready: int) -> int:
        """Waits of this lane that hold a hardware queue, or will."""
        return sum(one.is_launched and not one.is_refused and one.ticket > ready for one in self.queue)

    def is_overdue(self, ready: int, now: float) -> bool:
        """Whether a round has waited for `ready` longer than it may."""
        return not self.is_released and any(
            not one.is_refused and one.ticket > ready and one.deadline <= now for one in self.queue
        )
