"""Who reads a stream while a request is worked on."""

from __future__ import annotations

import threading
import time

from drafter_service.server.reading import LOOK_EVERY, NUM_ALONE, Reading

PATIENCE_S = 5.0


class Clock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Waiting:
    """Another reader, who has the turn once `has_it` is set and gives it back at once."""

    def __init__(self, reading: Reading) -> None:
        self.has_it = threading.Event()
        self._reading = reading
        self._thread = threading.Thread(target=self._wait)
        self._thread.start()

    def _wait(self) -> None:
        self._reading.take()
        self.has_it.set()
        self._reading.give()

    def gets_it(self) -> bool:
        """Whether it has had the turn."""
        return self.has_it.wait(0.05)

    def ends(self) -> None:
        """It has had the turn, or the test fails."""
        assert self.has_it.wait(PATIENCE_S)
        self._thread.join(PATIENCE_S)
        assert not self._thread.is_alive()


def kept(reading: Reading, num_unanswered: int, *, may_keep: bool = True) -> bool:
    """Takes the turn for one request; whether it was kept afterwards. Whoever waits has it by then if it was not."""
    reading.take()
    reading.give_or_keep(num_unanswered, may_keep=may_keep)
    other = Waiting(reading)
    keeps = not other.gets_it()
    if keeps:
        reading.take()  # at once: it has been kept
        reading.give()
    other.ends()
    return keeps


def test_the_turn_is_kept_once_so_many_requests_have_come_alone() -> None:
    reading = Reading(time.monotonic)
    assert [kept(reading, 1) for _ in range(NUM_ALONE + 1)] == [False] * (NUM_ALONE - 1) + [True, True]


def test_the_turn_is_not_kept_where_requests_come_together() -> None:
    reading = Reading(time.monotonic)
    assert not any(kept(reading, 1 + number % 2) for number in range(3 * NUM_ALONE))


def test_others_are_looked_for_now_and_then() -> None:
    reading = Reading(time.monotonic)
    given = [number for number in range(1, 2 * LOOK_EVERY + 2) if not kept(reading, 1)]
    assert given == [*range(1, NUM_ALONE), LOOK_EVERY, 2 * LOOK_EVERY]


def test_the_turn_is_not_kept_for_long_work() -> None:
    reading = Reading(time.monotonic)
    assert not any(kept(reading, 1, may_keep=False) for _ in range(2 * NUM_ALONE))


def kept_reading(clock: Clock) -> Reading:
    reading = Reading(clock)
    for _ in range(NUM_ALONE - 1):
        reading.take()
        reading.give_or_keep(1, may_keep=True)
    reading.take()
    reading.give_or_keep(1, may_keep=True)
    return reading


def test_who_has_kept_the_turn_for_long_loses_it_and_waits_for_it_again() -> None:
    clock = Clock()
    reading = kept_reading(clock)
    other = Waiting(reading)
    clock.now = 0.9
    reading.free(1.0)
    assert not other.gets_it()
    clock.now = 1.0
    reading.free(1.0)
    other.ends()
    reading.take()
    reading.give()


def test_who_leaves_gives_back_what_he_has_kept() -> None:
    reading = kept_reading(Clock())
    other = Waiting(reading)
    assert not other.gets_it()
    reading.leave()
    other.ends()
    reading.leave()  # nothing is kept any more
    reading.take()
    reading.give()


def test_nobody_is_robbed_of_a_turn_that_is_not_kept() -> None:
    clock = Clock()
    reading = Reading(clock)
    reading.take()
    clock.now = 100.0
    reading.free(0)
    reading.leave()
    other = Waiting(reading)
    assert not other.gets_it()
    reading.give()
    other.ends()
