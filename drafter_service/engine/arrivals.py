"""Calls that have arrived and are still being decoded: the engine may take them along, and waits for nobody else."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping


class Arrivals:
    """Counts the calls between their arrival and their submission: each is decoded in a `with` block."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._count = 0

    def __bool__(self) -> bool:
        return self._count > 0

    def __enter__(self) -> None:
        with self._lock:
            self._count += 1

    def __exit__(self, *_: object) -> None:
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
