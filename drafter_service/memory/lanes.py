"""Lanes at run time: pages, streams and stores around the pure protocol."""

from __future__ import annotations

import fcntl
import os
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Protocol

from drafter_service.memory.hardware_queues import find_streams
from drafter_service.memory.lane_protocol import ServiceLane, Ticketed, Verdict
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.counters import COUNTER_PAGE_SIZE_BYTES, CounterPage
from specdraft.memory.cuda import CudaDriver, CudaError
from specdraft.memory.lane_protocol import RELEASED

if TYPE_CHECKING:
    from drafter_service.memory.arena import Offers
    from drafter_service.memory.streams import StreamWork

READY_OFFSET = 0
DONE_OFFSET = 64
"""Each counter of the shared page has a cache line of its own."""

FENCE_OFFSET = 0
PASSED_OFFSET = 64
"""The service's own page: nobody else maps it."""

OPEN_WAITS_MAX = 24
"""Waits that may hold hardware queues at once, of the 32 that the service asks for."""


@dataclass(frozen=True, slots=True)
class LaneTools:
    """What all lanes share.

    Attributes:
        driver: the driver calls.
        device: the GPU's ordinal.
        streams: what lanes run on.
        work: enqueues torch's work on streams.
        clock: monotonic seconds.
    """

    driver: CudaDriver
    device: int
    streams: StreamPool
    work: StreamWork
    clock: Callable[[], float]


@dataclass(frozen=True, slots=True)
class LaneWork:
    """What a round enqueues: whatever need not be between the verify and the drafts is not there.

    Attributes:
        prepare: before the wait for `ready`: what does not depend on the verify.
        run: between `ready` and `done`.
        collect: behind `done`: what only the service looks at.
    """

    prepare: Callable[[], None]
    run: Callable[[], None]
    collect: Callable[[], None]


class StreamPool:
    """The streams that lanes run on, few enough for each to have a hardware queue of its own.

    A lane holds one only while it has work there. So a wait stops nobody else, and a round whose verify has ended
    needs no stream on which somebody waits.

    Args:
        driver: made them.
        device: the GPU's ordinal.
        ready: carries no wait, and is shared.
        waiting: may carry waits, and stop neither each other nor `ready`.
    """

    def __init__(self, driver: CudaDriver, device: int, ready: int, waiting: Sequence[int]) -> None:
        self._driver = driver
        self._device = device
        self._lock = threading.Lock()
        self._free = list(waiting)
        self._all = [*waiting, ready]
        self.ready = ready

    @classmethod
    def made(cls, driver: CudaDriver, device: int, must_go: Sequence[int]) -> StreamPool:
        """New streams; those of `must_go` carry other work, and get on however many lanes wait."""
        driver.make_current(device)
        ready = driver.create_stream()
        return cls(driver, device, ready, find_streams(driver, device, OPEN_WAITS_MAX, [*must_go, ready]))

    def take(self) -> int | None:
        """A stream that may carry waits; None = all are in use."""
        with self._lock:
            return self._free.pop() if self._free else None

    def give(self, stream: int) -> None:
        """Gives a stream back, on which nothing is left."""
        if stream != self.ready:
            with self._lock:
                self._free.append(stream)

    def close(self) -> None:
        """Destroys them, when every lane is over."""
        self._driver.make_current(self._device)
        for stream in self._all:
            self._driver.destroy_stream(stream)


class Lane:
    """One lane: its counters, its stream and what the service knows of it. Shared between threads under its lock.

    Args:
        number: the lane's in its session.
        tools: what all lanes share.
        offers: where the page's descriptor is offered.

    Attributes:
        token: what the client shows to get the page's descriptor.
    """

    def __init__(self, number: int, tools: LaneTools, offers: Offers) -> None:
        self.number = number
        self.state = ServiceLane()
        self.lock = threading.Lock()
        self._tools = tools
        self._offers = offers
        descriptor = _sealed_page()
        try:
            self.token = offers.offer(descriptor)
            self._page = CounterPage(os.dup(descriptor))
        finally:
            os.close(descriptor)
        self._own = CounterPage()
        self._stream: int | None = None
        self._taken_at: dict[int, float] = {}
        driver = tools.driver
        try:
            driver.make_current(tools.device)
            self._shared_pointer = driver.register_host(self._page.address, COUNTER_PAGE_SIZE_BYTES)
            self._own_pointer = driver.register_host(self._own.address, COUNTER_PAGE_SIZE_BYTES)
        except CudaError as error:
            offers.withdraw(self.token)
            raise make_error(
                Reason.TRANSPORT_UNAVAILABLE, f"a lane cannot be made here ({error.name})", kind="lane"
            ) from None

    @property
    def ready_pointer(self) -> int:
        """Where the device finds `ready`."""
        return self._shared_pointer + READY_OFFSET

    @property
    def fence_pointer(self) -> int:
        """Where the device finds the fence: not 0 once the lane was released."""
        return self._own_pointer + FENCE_OFFSET

    @property
    def ready(self) -> int:
        """The client's counter, as the CPU sees it."""
        return self._page.load(READY_OFFSET)

    @property
    def passed(self) -> int:
        """The newest ticket that the stream is done with."""
        return self._own.load(PASSED_OFFSET)

    def take(self, ticket: int, ready_timeout_s: float, *, is_counted: bool = True) -> None:
        """Takes a ticket up, whose wait `waits_over` tells if it is counted. Raises TICKET_ORDER, LANE_RELEASED."""
        with self.lock:
            expected, now = self.state.last + 1, self._tools.clock()
            self.state, verdict = self.state.taken(ticket, now + ready_timeout_s)
            if verdict is Verdict.ACCEPTED and is_counted:
                self._taken_at[ticket] = now
        if verdict is Verdict.OUT_OF_ORDER:
            raise make_error(
                Reason.TICKET_ORDER, f"ticket {ticket}; the next is {expected}", ticket=ticket, expected=expected
            )
        if verdict is Verdict.RELEASED:
            raise released()

    def refuse(self, ticket: int) -> None:
        """The ticket's round will not run; it gets its `done` in its turn."""
        with self.lock:
            self.state = self.state.refused(ticket)

    def launch_next(self, works: dict[int, LaneWork]) -> Ticketed | None:
        """Puts the next round onto the stream, if there is one that may go.

        Args:
            works: what the rounds of accepted tickets do; the one that is launched is taken out. A ticket that has no
                work yet is waited for.
        """
        with self.lock:
            ready = self.ready
            # Once there, `ready` does not go back, unless to be released, which ends every wait.
            may_wait = self._stream is None or self._stream != self._tools.streams.ready
            one = self.state.next_launch(ready, has_room=may_wait)
            if one is None or (not one.is_refused and one.ticket not in works):
                return None
            stream = self._stream_for(one, ready)
            if stream is None:
                return None
            self._stream = stream
            self.state = self.state.launched(one.ticket)
            self._enqueue(stream, one.ticket, None if one.is_refused else works.pop(one.ticket))
            return one

    def _enqueue(self, stream: int, ticket: int, work: LaneWork | None) -> None:
        driver, streams = self._tools.driver, self._tools.work
        driver.make_current(self._tools.device)
        with streams.on(stream):
            if work is not None:
                streams.run(stream, work.prepare)
                if stream != self._tools.streams.ready:
                    driver.wait_value(stream, self.ready_pointer, ticket)
                streams.run(stream, work.run)
            driver.write_value(stream, self._shared_pointer + DONE_OFFSET, ticket)
            if work is not None:
                streams.run(stream, work.collect)
            driver.write_value(stream, self._own_pointer + PASSED_OFFSET, ticket)

    def _stream_for(self, one: Ticketed, ready: int) -> int | None:
        """The lane's stream while it has work there: rounds of a lane stay in order."""
        if self._stream is not None:
            return self._stream
        if one.is_refused or ready >= one.ticket:
            return self._tools.streams.ready
        return self._tools.streams.take()

    def release(self) -> tuple[int, ...]:
        """Ends the lane for good: the fence first, then the stores, which the watchdog repeats.

        Makes no CUDA call.

        Returns:
            The tickets that never came onto the stream.
        """
        with self.lock:
            self._own.store(FENCE_OFFSET, 1)
            self.state, dropped = self.state.released()
            self._store()
        return dropped

    def see(self) -> bool:
        """Takes in what the device has done; True if there is news. Makes no CUDA call."""
        with self.lock:
            before = self.state
            self.state = before.passed(self.passed)
            is_new = self.state != before
            if self._stream is not None and self.state.is_drained:
                self._tools.streams.give(self._stream)
                self._stream = None
            if self.state.is_released and not self.state.is_settled:
                # Seen first, stored then: nothing that comes after can overwrite it.
                is_drained = self.state.is_drained
                self._store()
                if is_drained:
                    self.state = self.state.settled()
            return is_new

    def waits_over(self) -> list[float]:
        """Seconds from taking a ticket up to its `ready`, of the tickets whose verify has ended since the last look."""
        with self.lock:
            ready, now = self.ready, self._tools.clock()
            over = [ticket for ticket in self._taken_at if ticket <= ready]
            waits = [now - self._taken_at.pop(ticket) for ticket in over]
            return [] if ready == RELEASED else waits

    @property
    def is_given_up(self) -> bool:
        """Whether the client has given the lane up and the service has not done so yet."""
        return not self.state.is_released and self.ready == RELEASED

    def is_overdue(self) -> bool:
        """Whether a verify takes too long."""
        with self.lock:
            return self.state.is_overdue(self.ready, self._tools.clock())

    @property
    def num_open_waits(self) -> int:
        """Waits on the stream that are not over."""
        return self.state.num_open_waits(self.ready)

    @property
    def has_work(self) -> bool:
        """Whether the watchdog has to look at it: also once more when it is over, whoever has seen that first."""
        state = self.state
        return bool(state.queue) or state.is_released

    @property
    def is_over(self) -> bool:
        """Whether it was released and nothing of it is left on the device."""
        return self.state.is_settled

    def take_down(self) -> None:
        """Gives the pages back, once `is_over`. May block; the reaper's."""
        driver = self._tools.driver
        driver.make_current(self._tools.device)
        for page in (self._page, self._own):
            driver.unregister_host(page.address)
            page.close()
        self._offers.withdraw(self.token)

    def _store(self) -> None:
        self._page.store(READY_OFFSET, RELEASED)
        self._page.store(DONE_OFFSET, RELEASED)


def released() -> SpecdraftError:
    """What is said about a lane that was given up."""
    return make_error(Reason.LANE_RELEASED, "the lane was released; open a new one")


def _sealed_page() -> int:
    descriptor = os.memfd_create("specdraft-lane", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, COUNTER_PAGE_SIZE_BYTES)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return descriptor


class LaneObserver(Protocol):
    """What lanes tell to whoever counts."""

    def ready_timed_out(self) -> None:
        """A verify did not end in time, and its lane was released."""

    def ready_waited(self, seconds: float) -> None:
        """A verify ended this long after its ticket had come."""


class Watchdog:
    """Looks after all lanes: releases those whose verify does not end, repeats the stores, tells of what is done.

    It makes no CUDA call: with every hardware queue waiting such a call could wait as well.

    Args:
        on_news: called in its thread with a lane in which something is done, ready or over; must be quick.
        observer: told of verifies that did not end; None = nobody is.
        tick_s: how often it looks while there is something to look at.
    """

    def __init__(
        self,
        on_news: Callable[[Lane, tuple[int, ...]], None],
        observer: LaneObserver | None = None,
        tick_s: float = 5e-4,
    ) -> None:
        self._on_news = on_news
        self._observer = observer
        self._tick_s = tick_s
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._lanes: set[Lane] = set()
        self._ready: dict[Lane, int] = {}
        self._wake = threading.Event()
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="watchdog", daemon=True)
        self._thread.start()

    def watch(self, lane: Lane) -> None:
        """Looks after a lane until it is over."""
        with self._lock:
            self._lanes.add(lane)
        self._wake.set()

    def wake(self) -> None:
        """There is something to look at."""
        self._wake.set()

    @property
    def num_open_waits(self) -> int:
        """Waits that are open, over all lanes."""
        with self._lock:
            lanes = list(self._lanes)
        return sum(lane.num_open_waits for lane in lanes)

    def release(self, lane: Lane) -> None:
        """Gives a lane up."""
        if lane.state.is_released:
            return
        dropped = lane.release()
        self._wake.set()
        self._on_news(lane, dropped)

    def close(self, timeout_s: float = 5.0) -> None:
        """Waits for the released lanes to be over, at most for the time, and ends the thread."""
        with self._changed:
            self._changed.wait_for(lambda: not self._lanes, timeout_s)
        self._is_closed = True
        self._wake.set()
        self._thread.join()

    def _loop(self) -> None:
        while not self._is_closed:
            with self._lock:
                lanes = [lane for lane in self._lanes if lane.has_work]
            if not lanes:
                self._wake.wait()
                self._wake.clear()
                continue
            for lane in lanes:
                self._look(lane)
            self._wake.wait(self._tick_s)
            self._wake.clear()

    def _look(self, lane: Lane) -> None:
        for seconds in lane.waits_over():
            if self._observer is not None:
                self._observer.ready_waited(seconds)
        if lane.is_overdue():
            if self._observer is not None:
                self._observer.ready_timed_out()
            self.release(lane)
        elif lane.is_given_up:
            self.release(lane)
        is_new = lane.see()
        ready = lane.ready
        if is_new or self._ready.get(lane) != ready:
            self._ready[lane] = ready
            self._on_news(lane, ())
        if lane.is_over:
            with self._changed:
                self._lanes.discard(lane)
                self._changed.notify_all()
            self._ready.pop(lane, None)
