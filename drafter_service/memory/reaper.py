"""The reaper: one thread that frees, unmaps and takes down. Any of that may block while a wait is open somewhere."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

_log = logging.getLogger(__name__)

CHORE_S = 5e-3
"""How often chores that are not due yet are looked at again."""


class Reaper:
    """Does what nobody else may wait for.

    Args:
        begin: called once in the thread, before anything else; makes a CUDA context current.
    """

    def __init__(self, begin: Callable[[], None] = lambda: None) -> None:
        self._begin = begin
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._chores: list[Callable[[], bool]] = []
        self._lock = threading.Lock()
        self._num_open = 0
        self._idle = threading.Condition(self._lock)
        self._is_closed = False
        self._thread = threading.Thread(target=self._loop, name="memory-reaper", daemon=True)
        self._thread.start()

    def later(self, job: Callable[[], None]) -> None:
        """Has `job` done, after everything that was asked for before."""
        with self._lock:
            self._num_open += 1
        self._jobs.put(job)

    def once(self, chore: Callable[[], bool]) -> None:
        """Has `chore` tried again and again until it returns True."""
        self.later(lambda: self._chores.append(chore))

    def wait_idle(self, timeout_s: float) -> bool:
        """Whether everything that was asked for is done within the time."""
        with self._idle:
            return self._idle.wait_for(lambda: self._num_open == 0 and not self._chores, timeout_s)

    def close(self, timeout_s: float = 5.0) -> None:
        """Does what is left and ends. What still blocks after the time ends with the process."""
        if not self._is_closed:
            self._is_closed = True
            self._jobs.put(None)
        self._thread.join(timeout_s)

    def _loop(self) -> None:
        self._guard(self._begin)
        is_open = True
        while is_open or self._chores or not self._jobs.empty():
            try:
                job = self._jobs.get(timeout=CHORE_S if self._chores or not is_open else None)
            except queue.Empty:
                pass
            else:
                if job is None:
                    is_open = False
                else:
                    self._guard(job)
                    with self._idle:
                        self._num_open -= 1
            self._chores = [chore for chore in self._chores if not self._tried(chore)]
            with self._idle:
                self._idle.notify_all()

    def _tried(self, chore: Callable[[], bool]) -> bool:
        try:
            return chore()
        except Exception:  # noqa: BLE001  # as below
            _log.exception("a chore failed")
            return True

    def _guard(self, job: Callable[[], None]) -> None:
        try:
            job()
        except Exception:  # noqa: BLE001  # what cannot be freed must not keep the rest from being freed
            _log.exception("memory could not be given back")
