"""A lane at run time, on a simulated GPU: order, release by stores, the bound on open waits, what is given back."""

import os
import time

import pytest

from drafter_service.memory.lanes import (
    DONE_OFFSET,
    OPEN_WAITS_MAX,
    READY_OFFSET,
    Lane,
    LaneTools,
    LaneWork,
    StreamPool,
    Watchdog,
)
from drafter_service.memory.streams import SimulatedWork
from specdraft.errors import Reason, SpecdraftError
from specdraft.memory.counters import CounterPage
from specdraft.memory.lane_protocol import RELEASED
from specdraft.memory.simulated import SimulatedDriver


class Offered:
    """A side socket's table of offers."""

    def __init__(self):
        self.descriptors = {}

    def offer(self, descriptor):
        token = os.urandom(16)
        self.descriptors[token] = os.dup(descriptor)
        return token

    def withdraw(self, token):
        descriptor = self.descriptors.pop(token, None)
        if descriptor is not None:
            os.close(descriptor)


class Clock:
    def __init__(self):
        self.now = 100.0

    def __call__(self):
        return self.now


def stream_pool(driver):
    ready, *waiting = [driver.create_stream() for _ in range(1 + OPEN_WAITS_MAX)]
    return StreamPool(driver, 0, ready, waiting)


class World:
    """Lanes of one service, and the client's side of each page."""

    def __init__(self, directory, **options):
        self.driver = SimulatedDriver(directory, **options)
        self.driver.make_current(0)
        self.clock = Clock()
        self.offers = Offered()
        self.streams = stream_pool(self.driver)
        self.tools = LaneTools(self.driver, 0, self.streams, SimulatedWork(self.driver), self.clock)
        self.news = []
        self.watchdog = Watchdog(lambda lane, dropped: self.news.append((lane, dropped)))
        self.lanes = []
        self.pages = []
        self.done, self.prepared, self.collected = [], [], []

    def lane(self):
        lane = Lane(len(self.lanes), self.tools, self.offers)
        page = CounterPage(self.offers.descriptors.pop(lane.token))
        self.watchdog.watch(lane)
        self.lanes.append(lane)
        self.pages.append(page)
        return lane, page

    def accept(self, lane, ticket, timeout_s=2.0):
        lane.take(ticket, timeout_s)
        run = lambda: self.done.append((lane.number, ticket))  # noqa: E731  # as the others
        return {ticket: LaneWork(lambda: self.prepared.append(ticket), run, lambda: self.collected.append(ticket))}

    def until(self, condition):
        deadline = time.monotonic() + 5
        while not condition():
            assert time.monotonic() < deadline, "it did not come true"
            time.sleep(1e-4)

    def close(self):
        for lane in self.lanes:
            self.watchdog.release(lane)
        self.until(lambda: all(lane.is_over for lane in self.lanes))
        self.watchdog.close()
        for lane, page in zip(self.lanes, self.pages, strict=True):
            lane.take_down()
            page.close()
        self.streams.close()
        assert self.driver.num_registered == self.driver.num_streams == 0
        assert not self.offers.descriptors
        self.driver.close()


@pytest.fixture
def make(tmp_path):
    made = []

    def make_one(**options):
        made.append(World(tmp_path, **options))
        return made[-1]

    yield make_one
    for world in made:
        world.close()


def refused(reason, call, *arguments):
    with pytest.raises(SpecdraftError) as caught:
        call(*arguments)
    assert caught.value.reason is reason


def test_rounds_run_in_lane_order_each_behind_its_verify(make):
    world = make()
    lane, page = world.lane()
    for ticket in (1, 2, 3):
        works = world.accept(lane, ticket)
        assert lane.launch_next(works).ticket == ticket
        world.watchdog.wake()
    world.until(lambda: world.prepared == [1])
    assert world.done == []
    for ticket in (1, 2, 3):
        page.store(READY_OFFSET, ticket)
        world.until(lambda ticket=ticket: page.load(DONE_OFFSET) == ticket)
    assert world.done == [(0, 1), (0, 2), (0, 3)]
    world.until(lambda: world.collected == [1, 2, 3])
    world.until(lambda: lane.state.is_drained)
    assert world.news


def test_a_ticket_out_of_order_is_refused_and_one_that_is_refused_gets_its_done(make):
    world = make()
    lane, page = world.lane()
    works = world.accept(lane, 1)
    refused(Reason.TICKET_ORDER, lane.take, 3, 2.0)
    refused(Reason.TICKET_ORDER, lane.take, 2, 2.0)
    lane.take(4, 2.0)
    lane.refuse(4)
    while lane.launch_next(works):
        pass
    assert page.load(DONE_OFFSET) == 0, "a refusal does not overtake the round before it"
    page.store(READY_OFFSET, 1)
    world.until(lambda: page.load(DONE_OFFSET) == 4)
    assert world.done == [(0, 1)]


def test_a_verify_that_does_not_end_is_released_by_a_store_although_every_queue_waits(make):
    world = make(num_queues=2)
    lanes = [world.lane() for _ in range(3)]
    for lane, _ in lanes:
        lane.launch_next(world.accept(lane, 1, timeout_s=2.0))
    world.until(lambda: world.driver.num_open_waits == 2)
    world.clock.now += 1.9
    world.watchdog.wake()
    time.sleep(2e-3)
    assert not any(lane.state.is_released for lane, _ in lanes)
    world.clock.now += 0.2
    world.watchdog.wake()
    world.until(lambda: all(lane.is_over for lane, _ in lanes))
    assert [page.load(DONE_OFFSET) for _, page in lanes] == [RELEASED] * 3
    for lane, _ in lanes:
        refused(Reason.LANE_RELEASED, lane.take, 2, 2.0)
        assert lane.launch_next({}) is None


def test_a_release_outlives_what_the_stream_still_writes(make):
    world = make(runs=False)
    lane, page = world.lane()
    for ticket in (1, 2):
        lane.launch_next(world.accept(lane, ticket))
    world.watchdog.release(lane)
    assert page.load(DONE_OFFSET) == RELEASED
    page.store(READY_OFFSET, 1)  # the client's stream, behind the store
    world.until(lambda: world.driver.drain() or lane.is_over)
    assert page.load(DONE_OFFSET) == RELEASED
    assert lane.state.is_drained


def test_only_so_many_waits_are_open_and_a_round_that_is_ready_needs_none(make):
    world = make()
    lanes = [world.lane() for _ in range(OPEN_WAITS_MAX + 6)]
    works = {}
    for lane, _ in lanes:
        works[lane] = world.accept(lane, 1)
        lane.launch_next(works[lane])
    assert world.watchdog.num_open_waits == OPEN_WAITS_MAX
    held = [(lane, page) for lane, page in lanes if works[lane]]
    assert len(held) == 6
    held[3][1].store(READY_OFFSET, 1)
    assert held[3][0].launch_next(works[held[3][0]]).ticket == 1
    world.until(lambda: world.done == [(held[3][0].number, 1)])
    lanes[0][1].store(READY_OFFSET, 1)
    world.until(lambda: world.watchdog.num_open_waits == OPEN_WAITS_MAX - 1)
    world.until(lambda: held[0][0].launch_next(works[held[0][0]]))


def test_a_lane_whose_end_another_thread_has_seen_first_is_forgotten_too(make):
    world = make()
    lane, _ = world.lane()
    lane.release()
    assert lane.see() is False
    assert lane.is_over
    world.watchdog.wake()
    world.until(lambda: not world.watchdog._lanes)


def test_what_was_never_launched_is_named_by_the_release(make):
    world = make()
    lane, _ = world.lane()
    lane.launch_next(world.accept(lane, 1))
    world.accept(lane, 2)
    world.accept(lane, 3)
    world.watchdog.release(lane)
    assert world.news[-1] == (lane, (2, 3)) or (lane, (2, 3)) in world.news


def test_a_page_that_cannot_be_registered_is_told_and_leaves_nothing(tmp_path):
    driver = SimulatedDriver(tmp_path)
    driver.make_current(0)
    tools = LaneTools(driver, 0, stream_pool(driver), SimulatedWork(driver), Clock())
    driver.break_device("CUDA_ERROR_INVALID_VALUE")
    offers = Offered()
    refused(Reason.TRANSPORT_UNAVAILABLE, Lane, 0, tools, offers)
    assert not offers.descriptors
    driver.close()


def test_a_page_that_was_closed_says_that_nobody_waits():
    page = CounterPage()
    page.store(64, 5)
    assert page.load(64) == 5
    page.close()
    page.store(64, 6)
    assert page.load(64) == RELEASED
    page.close()
