"""Calls that have arrived and are still being decoded: the engine may take them along, and waits for nobody else."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping

Arrivals = deque[None]
"""The calls between their arrival and their submission: one None each, which whoever decodes it puts in and takes out.
A deque, as what counts for several threads without a lock and without a function of Python's."""


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
