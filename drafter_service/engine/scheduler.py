"""Which operations run next, and which of them share a forward. Pure: no torch, no clocks, no threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from drafter_service.engine.operations import Call, CloseSession, Operation, Write


@dataclass(frozen=True, slots=True)
class Job:
    """One operation of one call."""

    call: Call
    index: int

    @property
    def operation(self) -> Operation:
        """What to do."""
        return self.call.operations[self.index]


@dataclass(slots=True)
class Step:
    """What to do next: bookkeeping jobs one after the other, then the writes in one forward."""

    bookkeeping: list[Job] = field(default_factory=list)
    writes: list[Job] = field(default_factory=list)


class Scheduler:
    """Keeps operations of one sequence in order, and lets everything else share steps.

    Args:
        max_batch: most writes of one step.
        max_rows: most pairs of one step, unless a single write has more.
    """

    def __init__(self, max_batch: int, max_rows: int) -> None:
        self._max_batch = max_batch
        self._max_rows = max_rows
        self._waiting: deque[Job] = deque()

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, call: Call) -> None:
        """Takes up the open operations of a call, in their order."""
        self._waiting.extend(Job(call, index) for index in call.open_indices())

    def next_step(self) -> Step:
        """The longest prefix-fair step: each job goes in unless an earlier one that it must follow does not."""
        step = Step()
        held = _Held()
        num_rows = 0
        rest: deque[Job] = deque()
        while self._waiting:
            job = self._waiting.popleft()
            operation = job.operation
            if held.blocks(operation):
                held.add(operation)
                rest.append(job)
            elif not isinstance(operation, Write):
                held.add(operation)
                step.bookkeeping.append(job)
            else:
                rows = _num_rows(operation)
                full = len(step.writes) >= self._max_batch or (step.writes and num_rows + rows > self._max_rows)
                held.add(operation)
                if full:
                    rest.append(job)
                else:
                    step.writes.append(job)
                    num_rows += rows
        self._waiting = rest
        return step


class _Held:
    """The sequences and sessions that a later job has to wait for: each has a job in this step or before the next."""

    def __init__(self) -> None:
        self._sequences: set[bytes] = set()
        self._busy_sessions: set[bytes] = set()
        self._ending_sessions: set[bytes] = set()

    def blocks(self, operation: Operation) -> bool:
        if operation.session_id in self._ending_sessions:
            return True
        if isinstance(operation, CloseSession):
            return operation.session_id in self._busy_sessions
        return bool(operation.sequence_id) and operation.sequence_id in self._sequences

    def add(self, operation: Operation) -> None:
        if isinstance(operation, CloseSession):
            self._ending_sessions.add(operation.session_id)
        self._busy_sessions.add(operation.session_id)
        self._sequences.add(operation.sequence_id)


def _num_rows(operation: Write) -> int:
    return len(getattr(operation.pairs, "tokens", ()))
