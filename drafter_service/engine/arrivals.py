"""Calls that have arrived and are still being decoded: the engine may take them along, and waits for nobody else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
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
