"""Streams that stop nobody while they wait. Which streams share a hardware queue no call tells: it is tried out."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from specdraft.memory.counters import COUNTER_PAGE_SIZE_BYTES, CounterPage
from specdraft.memory.cuda import CudaDriver

_log = logging.getLogger(__name__)

WORD_BYTES = 8
CANDIDATES_MAX = COUNTER_PAGE_SIZE_BYTES // WORD_BYTES // 4
REFUSED_MAX = 16
"""So many candidates in a row that cannot be used, and there are no more hardware queues."""

GONE_S = 0.25
"""An empty stream that is not held up does a store within this time, other processes' kernels included."""

TRIAL_S = 20.0
"""By then no wait of the trial is open any more, whatever call blocks."""

_POLL_S = 20e-6


def find_streams(driver: CudaDriver, device: int, count: int, must_go: Sequence[int]) -> list[int]:
    """New streams that can all carry a wait at once while those of `must_go` still get on.

    Args:
        driver: makes them.
        device: the GPU's ordinal.
        count: how many are wanted; fewer are returned where the GPU has fewer hardware queues left.
        must_go: streams that carry other work.
    """
    driver.make_current(device)
    trial = _Trial(driver)
    # All of them, and used once, before the first wait: while one is open, making a stream may block.
    candidates = [driver.create_stream() for _ in range(2 * count)]
    for stream in candidates:
        trial.use(stream)
    kept: list[int] = []
    num_refused = 0
    try:
        for number, stream in enumerate(candidates):
            if len(kept) == count or num_refused == REFUSED_MAX:
                break
            is_fine = trial.admit(number, stream, must_go)
            num_refused = 0 if is_fine else num_refused + 1
            if is_fine:
                kept.append(stream)
    finally:
        trial.close([*candidates, *must_go])
    for stream in set(candidates).difference(kept):
        driver.destroy_stream(stream)
    if len(kept) < count:
        _log.warning("only %d of %d streams can wait at once: too few hardware queues", len(kept), count)
    return kept


class _Trial:
    """Waits that stay open while one candidate after the other is tried."""

    def __init__(self, driver: CudaDriver) -> None:
        self._driver = driver
        self._page = CounterPage()
        self._pointer = driver.register_host(self._page.address, COUNTER_PAGE_SIZE_BYTES)
        self._num_stores = 0
        self._alarm = threading.Timer(TRIAL_S, self._end_waits)
        self._alarm.daemon = True
        self._alarm.start()

    def use(self, stream: int) -> None:
        """Has the stream do something, and waits for it."""
        self._driver.write_value(stream, self._pointer, 0)
        self._driver.synchronize(stream)

    def admit(self, number: int, stream: int, must_go: Sequence[int]) -> bool:
        """Has the stream wait, unless it is held up by those that wait already or would hold up one of `must_go`."""
        if not self._goes(stream):
            return False
        gate = (1 + number) * WORD_BYTES
        self._driver.wait_value(stream, self._pointer + gate, 1)
        if all(self._goes(one) for one in must_go):
            return True
        self._page.store(gate, 1)
        self._driver.synchronize(stream)
        return False

    def close(self, streams: Sequence[int]) -> None:
        """Ends all waits."""
        self._alarm.cancel()
        self._end_waits()
        for stream in streams:
            self._driver.synchronize(stream)
        self._driver.unregister_host(self._page.address)
        self._page.close()

    def _end_waits(self) -> None:
        for number in range(CANDIDATES_MAX):
            self._page.store((1 + number) * WORD_BYTES, 1)

    def _goes(self, stream: int) -> bool:
        """Whether a store in the stream is done soon. Each has a word of its own, since some come late."""
        word = (1 + CANDIDATES_MAX + self._num_stores % (2 * CANDIDATES_MAX)) * WORD_BYTES
        self._num_stores += 1
        self._page.store(word, 0)
        self._driver.write_value(stream, self._pointer + word, 1)
        until = time.monotonic() + GONE_S
        while not self._page.load(word):
            if time.monotonic() > until:
                return False
            time.sleep(_POLL_S)
        return True
