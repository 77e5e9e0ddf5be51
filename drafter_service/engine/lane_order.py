"""In which order calls and rounds about the same sequences come to the engine. Pure, and locked."""

from __future__ import annotations

import math
import threading
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter_service.engine.in_flight import Key
from drafter_service.engine.operations import Call, CloseSession, LaneWrite, Operation, Task


@dataclass(frozen=True, slots=True)
class _Handed:
    """What is on its way to the engine.

    Attributes:
        call: for it to do.
        round_keys: of the round that the call plans: whose other calls wait from then on. Nothing of other calls.
    """

    call: Call
    round_keys: tuple[Key, ...] = ()

    @property
    def is_round(self) -> bool:
        return bool(self.round_keys)


def _round_of(writes: Sequence[LaneWrite], plan: Callable[[], None]) -> _Handed:
    """A call that plans a round, once the engine has done what it was asked before about each of its sequences."""
    keys = tuple((write.session_id, write.sequence_id) for write in writes)
    num_left = len(keys)

    def reach() -> None:
        nonlocal num_left
        num_left -= 1
        if num_left == 0:
            plan()

    tasks = [Task(*key, reach) for key in keys] or [Task(b"", b"", plan)]
    return _Handed(Call(tasks, 0.0, math.inf, lambda _: None), keys)


class LaneOrder:
    """Keeps calls waiting until rounds of their sequences are over, and rounds until the calls before them are done.

    Args:
        submit: gives the engine a call; must be quick.
    """

    def __init__(self, submit: Callable[[Call], None]) -> None:
        self._submit = submit
        self._lock = threading.Lock()
        self._pending: Counter[Key] = Counter()
        self._parked: list[_Handed] = []

    @property
    def num_parked(self) -> int:
        """Calls and rounds that wait here."""
        return len(self._parked)

    def hand_over(self, call: Call, take: Callable[[Call], None]) -> None:
        """Has the call taken at once; where it has to wait it is submitted when its time has come."""
        self._hand_over(_Handed(call), take)

    def plan(self, writes: Sequence[LaneWrite], plan: Callable[[], None]) -> None:
        """Has a round planned with the engine's turn. Other calls about its sequences wait until `rounds_over`."""
        self._hand_over(_round_of(writes, plan), self._submit)

    def rounds_over(self, writes: Sequence[LaneWrite]) -> None:
        """The rounds of these are over: whoever waited for them goes on, in the order in which they came."""
        with self._lock:
            self._pending.subtract((write.session_id, write.sequence_id) for write in writes)
            self._pending = +self._pending
            waiting, self._parked = self._parked, []
            for handed in waiting:
                if self._must_wait(handed, self._parked):
                    self._parked.append(handed)
                else:
                    self._let_in(handed, self._submit)

    def _hand_over(self, handed: _Handed, take: Callable[[Call], None]) -> None:
        with self._lock:
            if self._must_wait(handed, self._parked):
                self._parked.append(handed)
            else:
                self._let_in(handed, take)

    def _let_in(self, handed: _Handed, take: Callable[[Call], None]) -> None:
        self._pending.update(handed.round_keys)
        take(handed.call)

    def _must_wait(self, handed: _Handed, parked: Sequence[_Handed]) -> bool:
        """Whether rounds of a call's sequences are under way, or somebody waits who came before and is about them.

        A round follows the rounds before it at once: the device keeps them in order.
        """
        operations = handed.call.operations
        if not handed.is_round and self._pending and any(self._blocks(operation) for operation in operations):
            return True
        if not parked:
            return False
        earlier = {(one.session_id, one.sequence_id) for before in parked for one in before.call.operations}
        return any((one.session_id, one.sequence_id) in earlier for one in operations)

    def _blocks(self, operation: Operation) -> bool:
        if isinstance(operation, CloseSession):
            return any(session == operation.session_id for session, _ in self._pending)
        return (operation.session_id, operation.sequence_id) in self._pending
