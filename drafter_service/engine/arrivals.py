"""Calls that have arrived and are still being decoded: the engine may take them along, and waits for nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager


class Arrivals:
    """Counts the calls between their arrival and their submission."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    @contextmanager
    def one(self) -> Iterator[None]:
        """One call is being decoded."""
        with self._lock:
            self._count += 1
        try:
            yield
        finally:
            with self._lock:
                self._count -= 1


def is_one_missing(seen_at: Mapping[bytes, float], is_here: Callable[[bytes], bool], window_s: float) -> bool:
    """Whether a session is missing that last came within `window_s` seconds of one that is here.

    Args:
        seen_at: when each session's last write came, before those that are here now.
        is_here: whether a session has something waiting.
        window_s: how close they came who came together.
    """
    here: list[float] = []
    missing: list[float] = []
    for session, seen in seen_at.items():
        (here if is_here(session) else missing).append(seen)
    return any(abs(one - other) < window_s for one in missing for other in here)
