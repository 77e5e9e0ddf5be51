"""What a client knows of one sequence: its operation number, and whether that is certain."""

from __future__ import annotations

from specdraft.answers import SequenceState
from specdraft.errors import Reason, SpecdraftError
from specdraft.placement import Placed, Placement

__all__ = ["Ledger"]


class Ledger:
    """The `op` counter of one sequence.

    After a timeout or a broken connection nobody knows whether the operation was done. The ledger is then *unsure*, and
    the next use of the sequence first asks `GetSequence`, which waits for whatever is in flight and tells the number.
    It does not send the old request again: its caller was told that it failed and no longer wants the answer, and its
    hidden rows would have to be kept. (A `Drive` stream that breaks *within* a call is another matter: there the same
    request is sent again, and answered from the service's memory if it was done.)

    Until then the places of the lost request stay taken: the service may still read them.
    """

    def __init__(self, sequence_id: bytes, state: SequenceState) -> None:
        self.sequence_id = sequence_id
        self.state = state
        self.last_op = state.last_op
        self.unsure = False
        self._held: list[tuple[Placement, Placed]] = []

    @property
    def next_op(self) -> int:
        """Number of the next operation."""
        return self.last_op + 1

    def adopt(self, state: SequenceState) -> None:
        """Takes over what an answer says."""
        self.state = state
        self.last_op = state.last_op

    def settle(self, state: SequenceState) -> None:
        """Takes over what `GetSequence` says: nothing is in flight any more."""
        self.adopt(state)
        self.unsure = False
        self.release()

    def hold(self, placement: Placement, placed: Placed) -> None:
        """Keeps a place whose request has an unknown outcome."""
        self.unsure = True
        self._held.append((placement, placed))

    def release(self) -> None:
        """Gives the kept places back."""
        held, self._held = self._held, []
        for placement, placed in held:
            placement.release(placed)

    def renumber(self, error: SpecdraftError, op: int, *, state_told: bool = False) -> bool:
        """Corrects the counter from a refusal; whether the same operation is worth one more try.

        The sequence belongs to this client alone and one operation runs at a time, so a wrong number only means that an
        earlier operation with an unknown outcome ended otherwise than assumed.

        Args:
            error: the refusal.
            op: the number that was refused.
            state_told: whether the refusal came with the sequence's state, already adopted.
        """
        if error.reason is Reason.OP_OUT_OF_ORDER:
            told = error.details.get("last_op", "")
            if told.isdigit():
                self.last_op = int(told)
            return state_told or told.isdigit()
        if error.reason is Reason.OP_REUSED:
            self.last_op = op
            return True
        return False
