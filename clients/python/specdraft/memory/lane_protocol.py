"""The client's half of a lane: which ticket is next, whose outputs are believed. Pure: values, no threads, no CUDA.

A lane is one pair of counters, `ready` and `done`, in host memory that both processes map. Rounds carry tickets
n = 1, 2, 3 ..: the client's stream writes ready = n behind the verify, the service's waits for it, drafts, and writes
done = n, for which the client's stream waits. `drafter_service.memory.lane_protocol` is the other half.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

__all__ = ["RELEASED", "ClientLane"]

RELEASED: Final = (1 << 63) - 1
"""What a released lane's counters hold: waits compare signed, so that it satisfies every one of them."""


@dataclass(frozen=True, slots=True)
class ClientLane:
    """Where the client stands in one lane. A value: every step makes a new one.

    Attributes:
        last: the last ticket used; 0 = none.
        open: tickets whose calls have no answer yet.
        accepted: tickets whose calls were answered OK, and whose outputs may be believed.
        is_released: the lane is not used again, and nothing in it is believed.
    """

    last: int = 0
    open: frozenset[int] = frozenset()
    accepted: frozenset[int] = frozenset()
    is_released: bool = False

    def issued(self) -> ClientLane:
        """Takes the next ticket, which is then `last`.

        Raises:
            ValueError: the lane was released.
        """
        if self.is_released:
            raise ValueError("a released lane gives no tickets")
        ticket = self.last + 1
        return replace(self, last=ticket, open=self.open | {ticket})

    def answered(self, ticket: int, *, is_ok: bool) -> ClientLane:
        """The call came back in band: done, or refused (which still gets done = ticket, in lane order)."""
        if ticket not in self.open:
            return self  # a second answer, or one that comes after the call was given up
        accepted = self.accepted | {ticket} if is_ok else self.accepted
        return replace(self, open=self.open - {ticket}, accepted=accepted)

    def ended(self, ticket: int) -> ClientLane:
        """The call ended in any other way: nobody knows whether the service has it, so the lane is over."""
        return self.released() if ticket in self.open else self

    def released(self) -> ClientLane:
        """Gives the lane up; its waits are then ended by stores to `done`."""
        return replace(self, is_released=True)

    def settled(self, ticket: int) -> ClientLane:
        """Nothing more is kept of the round here: it knows by itself that it was accepted."""
        return replace(self, accepted=self.accepted - {ticket})

    def trusts(self, *, op: int, expected_op: int, status: int) -> bool:
        """Whether the outputs found in a slot, once the stream is past the wait for a round, are that round's.

        The round was accepted: what was not is never trusted.

        Args:
            op: found in the slot; it is written last.
            expected_op: the operation that was asked for.
            status: found in the slot, 0 = done.
        """
        return not self.is_released and op == expected_op and status == 0
