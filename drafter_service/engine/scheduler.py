"""Which operations run next, and which of them share a forward. Pure: no torch, no clocks, no threads."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from drafter_service.engine.operations import Call, CloseSession, Operation, Write


class Job:
    """One operation of one call."""

    __slots__ = ("call", "index", "operation")

    def __init__(self, call: Call, index: int) -> None:
        self.call = call
        self.index = index
        self.operation: Operation = call.operations[index]


@dataclass(slots=True)
class Step:
    """What to do next: bookkeeping jobs one after the other, then the writes in one forward."""

    bookkeeping: list[Job] = field(default_factory=list)
    writes: list[Job] = field(default_factory=list)


class Scheduler:
    """Keeps operations of one sequence in order, lets everything else share steps, and treats sessions alike.

    A step takes one job of each session in turn until it is full, so that a session that has sent much waits for
    itself and not others for it. What has arrived goes together; nothing is waited for.

    Args:
        max_batch: most writes of one step.
        max_rows: most pairs of one step, unless a single write has more.

    Attributes:
        num_waiting: jobs that wait.
    """

    def __init__(self, max_batch: int, max_rows: int) -> None:
        self._max_batch = max_batch
        self._max_rows = max_rows
        self._waiting: dict[bytes, deque[Job]] = {}
        self.num_waiting = 0

    def __len__(self) -> int:
        return self.num_waiting

    @property
    def has_writes(self) -> bool:
        """Whether a session's next job is a write."""
        return any(isinstance(jobs[0].operation, Write) for jobs in self._waiting.values())

    def has_jobs_of(self, session_id: bytes) -> bool:
        """Whether a session has a job that waits."""
        return session_id in self._waiting

    def add(self, call: Call) -> None:
        """Takes up the open operations of a call, in their order."""
        for index in call.open_indices():
            job = Job(call, index)
            self._waiting.setdefault(job.operation.session_id, deque()).append(job)
            self.num_waiting += 1

    def next_step(self) -> Step:
        """What can be done now: each job goes in unless the step is full or an earlier job must come first."""
        if self.num_waiting == 1:  # the usual case, without the bookkeeping of the others
            ((job,),) = self._waiting.values()
            self._waiting, self.num_waiting = {}, 0
            is_write = isinstance(job.operation, Write)
            return Step(writes=[job]) if is_write else Step(bookkeeping=[job])
        room = _Room(self._max_batch, self._max_rows)
        queues = list(self._waiting.items())
        left: dict[bytes, deque[Job]] = {session: deque() for session, _ in queues}
        held = {session: _Held() for session, _ in queues}
        while queues:
            for session, jobs in queues:
                job = jobs.popleft()
                if held[session].blocks(job.operation) or not room.take(job):
                    left[session].append(job)
                held[session].add(job.operation)
            # A full step stops looking at further writes: what waits is looked at again in the next one.
            queues = [(session, jobs) for session, jobs in queues if jobs]
            if room.is_full:
                for session, jobs in queues:
                    left[session].extend(jobs)
                break
        # The session that came first goes last next time.
        order = [*list(left)[1:], *list(left)[:1]]
        self._waiting = {session: left[session] for session in order if left[session]}
        self.num_waiting -= len(room.step.bookkeeping) + len(room.step.writes)
        return room.step


class _Room:
    """A step, as it fills."""

    def __init__(self, max_batch: int, max_rows: int) -> None:
        self.step = Step()
        self._max_batch = max_batch
        self._max_rows = max_rows
        self._num_rows = 0

    @property
    def is_full(self) -> bool:
        return len(self.step.writes) >= self._max_batch or self._num_rows >= self._max_rows

    def take(self, job: Job) -> bool:
        operation = job.operation
        if not isinstance(operation, Write):
            self.step.bookkeeping.append(job)
            return True
        rows = len(getattr(operation.pairs, "tokens", ()))
        if self.is_full or (self.step.writes and self._num_rows + rows > self._max_rows):
            return False
        self.step.writes.append(job)
        self._num_rows += rows
        return True


class _Held:
    """What a later job of the session has to wait for: its sequence has a job in this step or before the next."""

    def __init__(self) -> None:
        self._sequences: set[bytes] = set()
        self._is_busy = False
        self._is_ending = False

    def blocks(self, operation: Operation) -> bool:
        if self._is_ending:
            return True
        if isinstance(operation, CloseSession):
            return self._is_busy
        return bool(operation.sequence_id) and operation.sequence_id in self._sequences

    def add(self, operation: Operation) -> None:
        self._is_ending = self._is_ending or isinstance(operation, CloseSession)
        self._is_busy = True
        self._sequences.add(operation.sequence_id)
