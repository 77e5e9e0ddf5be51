"""The engine: owns the books and the device, and does one step after another, in one thread at a time."""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

from drafter_service.engine.arrivals import Arrivals, is_one_missing
from drafter_service.engine.batch import PlannedWrite, RoundCost, Runner, RunResult, commit, fail, plan_write
from drafter_service.engine.in_flight import Entry, InFlight
from drafter_service.engine.ledger import Ledger
from drafter_service.engine.operations import Call, DraftWish, Operation, Outcome, Refusal, Stop, Write
from drafter_service.engine.scheduler import Job, Scheduler
from drafter_service.state import SequenceView
from specdraft.errors import Reason, SpecdraftError, make_error

_log = logging.getLogger(__name__)

DRAFT_SHARE = 0.1
"""Weight of a new batch in the running cost of a draft."""

TAKE_ALONG_SHARE = 0.5
TAKE_ALONG_S = 12e-3
"""A batch waits at most this share of a usual batch, and at most this long, for calls that are arriving."""

ABOUT_S = 0.5
TOGETHER_SHARE = 0.5
"""Sessions whose writes came within this share of a usual batch came together, and may again within so long."""

GLANCE_S = 300e-6
IN_VAIN_SHARE = 0.06
"""How long a glance at the door takes, and the share of a usual batch that glances may take without anybody there."""

YIELD_S = 50e-6
"""How long the decoding threads are let run in between."""

STOP_NAMES = {stop: stop.name for stop in Stop}

IDLE_BEAT_S = 0.5
"""The heartbeat of an idle engine."""


class StepObserver(Protocol):
    """What the engine tells to whoever counts."""

    def batch_run(self, num_entries: int, num_rows: int, seconds: float) -> None:
        """One forward."""

    def queued(self, seconds: float) -> None:
        """A write waited this long for its forward."""

    def write_done(self, num_drafts: int, stop: str | None) -> None:
        """One write went through; `stop` is None for a catch-up."""


class Engine:
    """Takes calls from any thread and answers them from its own, or from that of a caller who lends his.

    Whoever has the turn does a step; nobody else touches books and device meanwhile. A caller who finds the turn free
    takes it for one step: a call that meets an idle engine costs no change of threads. What is left when he goes is
    the engine's own thread's.

    Args:
        ledger: the books.
        scheduler: what runs next.
        runner: what runs it.
        in_flight: bound on the writes of one sequence that wait at once.
        observer: told of steps.
        clock: monotonic seconds.
        borrows: whether `work` may do a step in its caller's thread.

    Attributes:
        is_committing: a step's answers are being given and nothing is left to be computed in it.
    """

    def __init__(
        self,
        ledger: Ledger,
        scheduler: Scheduler,
        runner: Runner,
        *,
        in_flight: InFlight,
        observer: StepObserver,
        clock: Callable[[], float],
        borrows: bool = False,
    ) -> None:
        self.ledger = ledger
        self.runner = runner
        self.heartbeat = clock()
        self.is_committing = False
        self.arrivals = Arrivals()
        self._scheduler = scheduler
        self._in_flight = in_flight
        self._observer = observer
        self._clock = clock
        self._inbox: queue.SimpleQueue[Call | None] = queue.SimpleQueue()
        self._submit_lock = threading.Lock()
        self._stopping = False
        self._borrows = borrows
        self._turn = threading.Lock()
        self._wake = threading.Lock()  # held while the thread has nothing to wake up for
        self._wake.acquire()
        self._is_open = True
        self._has_failed = False
        self._draft_s = 0.0
        self._batch_s = 0.0
        self._num_glances = 0  # in a row, that a usual batch is worth; of short ones none
        self._seen_at: dict[bytes, float] = {}
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)

    def start(self) -> None:
        """Starts the thread."""
        self._thread.start()

    @property
    def is_alive(self) -> bool:
        """Whether the engine can go on: its thread runs, and no step has ended by a bug of its own."""
        return self._thread.is_alive() and not self._has_failed

    @property
    def is_at_work(self) -> bool:
        """Whether a step is being done: after `stop`, by a device that does not come back."""
        return self._turn.locked()

    def submit(self, call: Call) -> None:
        """Asks for a call. Entries beyond the in-flight bound are refused here and now."""
        self.accept(call)
        self._wake_up()

    def accept(self, call: Call) -> None:
        """As `submit`, but nothing happens before `work`, which the same thread has to call next."""
        is_new = False
        for index in call.open_indices():
            operation = call.operations[index]
            entry = self._in_flight.enter(operation, call, index) if isinstance(operation, Write) else Entry.NEW
            if entry is Entry.FULL:
                call.finish(index, Refusal(self._too_many(), None))
            is_new = is_new or entry is Entry.NEW
        if not is_new:
            return
        with self._submit_lock:
            if not self._stopping:
                self._inbox.put(call)
                return
        for index in call.open_indices():
            self._finish(Job(call, index), Refusal(draining(), None))

    def work(self) -> None:
        """Sees to it that what was accepted gets done: one step here if nobody is at work, the rest elsewhere."""
        if self._borrows and self._turn.acquire(blocking=False):
            try:
                self._do_step()
            finally:
                self._turn.release()
            if self._inbox.empty() and not self._scheduler.num_waiting:
                return
        self._wake_up()

    def ask(self, operation: Operation, timeout_s: float) -> Outcome:
        """Asks for one operation and waits for its outcome. Raises TIMEOUT."""
        outcomes: queue.SimpleQueue[list[Outcome]] = queue.SimpleQueue()
        now = self._clock()
        self.submit(Call([operation], now, now + timeout_s, outcomes.put))
        try:
            (outcome,) = outcomes.get(timeout=timeout_s)
        except queue.Empty:
            raise make_error(Reason.TIMEOUT, f"the engine did not answer within {timeout_s:g} s") from None
        return outcome

    def stop(self, timeout_s: float | None = None) -> None:
        """Finishes what was accepted, then ends the thread. What comes later is refused.

        Args:
            timeout_s: wait no longer than this; None = until it is done.
        """
        with self._submit_lock:
            if not self._stopping:
                self._stopping = True
                self._inbox.put(None)
        self._wake_up()
        if self._thread.ident is not None:
            self._thread.join(timeout_s)

    def _too_many(self) -> SpecdraftError:
        limit = self._in_flight.limit
        return make_error(
            Reason.IN_FLIGHT_EXHAUSTED,
            f"{limit} operations of the sequence are in flight, which is the limit",
            retry_delay_ms=10,
            limit=limit,
        )

    def _wake_up(self) -> None:
        with suppress(RuntimeError):  # it has been woken already
            self._wake.release()

    def _loop(self) -> None:
        while self._is_open or self._scheduler.num_waiting:
            is_woken = self._wake.acquire(timeout=IDLE_BEAT_S)
            # Without a reason to wait for it: whoever has the turn says with his heartbeat that he gets on.
            if not self._turn.acquire(blocking=is_woken):
                continue
            try:
                while self._do_step():
                    pass
                self.heartbeat = self._clock()
            finally:
                self._turn.release()

    def _do_step(self) -> bool:
        """Does what can be done now, with the turn; False if there was nothing."""
        try:
            self._take_in()
            if not self._scheduler.num_waiting:
                return False
            # Of one session alone nobody can be missing.
            if self.arrivals or (self._num_glances and len(self._seen_at) > 1):
                self._take_along()
            self.heartbeat = self._clock()
            self._step()
        except BaseException:
            self._has_failed = True
            raise
        return True

    def _take_along(self) -> None:
        """Takes in the calls that are just being decoded, if a batch is about to run."""
        most = self._num_glances
        if not self._scheduler.has_writes:
            return
        patience = min(TAKE_ALONG_SHARE * self._batch_s, TAKE_ALONG_S)
        until = self._clock() + patience
        # Where other sessions have written lately, glances whether they are at the door, until a few in a row have
        # found nobody: Python shows it only to those who let go of the interpreter.
        most = glances = most if most and self._others_are_about() else 0
        while self._is_open and (glances or self.arrivals) and self._clock() < until:
            num_waiting = self._scheduler.num_waiting
            time.sleep(GLANCE_S if glances else YIELD_S)
            self._take_in()
            if self._scheduler.num_waiting > num_waiting:
                glances = most if most and self._others_are_about() else 0
            else:
                glances = max(glances - 1, 0)

    def _others_are_about(self) -> bool:
        """Whether somebody is missing who wrote lately, and at nearly the same time as one of those that wait."""
        since, window = self._clock() - ABOUT_S, TOGETHER_SHARE * self._batch_s
        self._seen_at = {session: seen for session, seen in self._seen_at.items() if seen > since}
        return is_one_missing(self._seen_at, self._scheduler.has_jobs_of, window)

    def _take_in(self) -> None:
        """Moves everything that has arrived to the scheduler."""
        while not self._inbox.empty():  # only who has the turn takes from it
            call = self._inbox.get_nowait()
            if call is None:
                self._is_open = False
            else:
                self._scheduler.add(call)

    def _step(self) -> None:
        step = self._scheduler.next_step()
        planned: list[tuple[Job, PlannedWrite]] = []
        for job in (*step.bookkeeping, *step.writes):
            outcome = self._begin(job)
            if isinstance(outcome, PlannedWrite):
                planned.append((job, outcome))
            else:
                self._finish(job, outcome)
        if planned:
            self._run(planned)

    def _run(self, planned: list[tuple[Job, PlannedWrite]]) -> None:
        began = self._clock()
        entries = []
        for job, plan in planned:
            self._observer.queued(began - job.call.submitted_at)
            entries.append(plan.entry)
        try:
            results = self.runner.run(entries)
        except Exception:  # noqa: BLE001  # whatever the device raises, the engine answers and goes on
            _log.exception("a batch of %d failed", len(planned))
            self._run_apart(planned)
            return
        num_rows = num_steps = 0
        for _, plan in planned:
            num_rows += len(plan.entry.tokens)
            num_steps = max(num_steps, plan.entry.num_drafts)
        seconds = self._clock() - began
        self._batch_s += DRAFT_SHARE * (seconds - self._batch_s)
        self._num_glances = int(IN_VAIN_SHARE * self._batch_s / GLANCE_S)
        if self._num_glances:  # otherwise nobody looks who came when
            self._seen_at.update((job.operation.session_id, job.call.submitted_at) for job, _ in planned)
        self._observer.batch_run(len(planned), num_rows, seconds)
        if num_steps:
            self._draft_s += DRAFT_SHARE * (seconds / num_steps - self._draft_s)
        self.is_committing = True
        try:
            for (job, plan), result in zip(planned, results, strict=True):
                self._commit(job, plan, result)
        finally:
            self.is_committing = False

    def _run_apart(self, planned: list[tuple[Job, PlannedWrite]]) -> None:
        """A batch failed: each entry by itself, so that only those fail that are at fault."""
        for job, plan in planned:
            try:
                (result,) = self.runner.run([plan.entry])
            except Exception as failure:  # noqa: BLE001  # as above
                _log.exception("an operation failed")
                error = make_error(Reason.INTERNAL, "the operation failed inside the service")
                error = failure if isinstance(failure, SpecdraftError) else error
                fail(self.ledger, plan, error)
                self._finish(job, Refusal(error, plan.sequence.view()))
            else:
                self._commit(job, plan, result)

    def _commit(self, job: Job, plan: PlannedWrite, result: RunResult) -> None:
        drafts = plan.operation.drafts
        cost = self._cost(job, plan, drafts) if drafts is not None and drafts.recommend else None
        answer = commit(self.ledger, plan, result, cost)
        plan.sequence.answered_at = self._clock()
        stop = None if drafts is None else STOP_NAMES[result.stop or plan.limit]
        self._observer.write_done(len(result.drafts), stop)
        self._finish(job, answer)

    def _cost(self, job: Job, plan: PlannedWrite, drafts: DraftWish) -> RoundCost:
        told = drafts.verify_s
        answered_at = plan.sequence.answered_at
        since_answer = job.call.submitted_at - answered_at if answered_at else 0.0
        return RoundCost(self._draft_s, since_answer if told is None else told)

    def _begin(self, job: Job) -> Outcome | PlannedWrite:
        """Plans a write; does anything else."""
        operation = job.operation
        try:
            if not isinstance(operation, Write):
                return self.ledger.apply(operation)
            if job.call.deadline <= self._clock():
                late = make_error(Reason.TIMEOUT, "the deadline passed before the operation began")
                return Refusal(late, self._view(job))
            return plan_write(self.ledger, operation)
        except SpecdraftError as error:
            return Refusal(error, self._view(job))
        except Exception:  # noqa: BLE001  # a bug in one operation must not end the engine
            _log.exception("%s failed", type(job.operation).__name__)
            return Refusal(make_error(Reason.INTERNAL, "the operation failed inside the service"), self._view(job))

    def _view(self, job: Job) -> SequenceView | None:
        try:
            return self.ledger.sequences.find(job.operation.session_id, job.operation.sequence_id).view()
        except SpecdraftError:
            return None

    def _finish(self, job: Job, outcome: Outcome) -> None:
        if isinstance(job.operation, Write):
            for call, index in self._in_flight.leave(job.operation):
                call.finish(index, outcome)
        job.call.finish(job.index, outcome)


def draining() -> SpecdraftError:
    """What is said when the service is about to stop, or an operator wants it empty."""
    return make_error(Reason.DRAINING, "the service takes nothing new: it is draining", retry_delay_ms=1000)
