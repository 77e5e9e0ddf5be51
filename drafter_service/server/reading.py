"""Who reads a stream: one thread at a time, and whether he lets go before he works."""

from __future__ import annotations

import threading
from collections.abc import Callable

NUM_ALONE = 4
"""So many requests in a row that nobody joined are from a caller who asks for one thing at a time."""

LOOK_EVERY = 16
"""At every so manieth request of such a caller somebody reads on all the same: others may have come."""


class Reading:
    """The turn to read a stream's requests.

    A reader who has begun a request lets go before he works, so that another one reads what comes meanwhile. Where
    requests come one at a time nothing does, and waking the other costs the step more than it saves: two threads
    that change places at every operation of the forward. There the reader keeps the turn until he has answered.

    Args:
        clock: monotonic seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._turn = threading.Lock()
        self._guard = threading.Lock()
        self._keeper: int | None = None
        self._kept_at = 0.0
        self._num_alone = 0

    def take(self) -> None:
        """Waits for the turn. Who has kept it has it."""
        with self._guard:
            if self._keeper == threading.get_ident():
                self._keeper = None
                return
        self._turn.acquire()

    def give(self) -> None:
        """Lets go of the turn."""
        self._turn.release()

    def give_or_keep(self, num_unanswered: int, *, may_keep: bool) -> None:
        """Lets go of the turn before the work on a request, or keeps it until that is done.

        Args:
            num_unanswered: requests that wait for their answers, this one among them.
            may_keep: whether its work is short enough for reading nothing meanwhile.
        """
        self._num_alone = self._num_alone + 1 if num_unanswered <= 1 else 0
        if may_keep and self._num_alone >= NUM_ALONE and self._num_alone % LOOK_EVERY:
            with self._guard:
                self._keeper, self._kept_at = threading.get_ident(), self._clock()
        else:
            self._turn.release()

    def leave(self) -> None:
        """The calling thread reads no more: what it has kept it gives back."""
        with self._guard:
            if self._keeper != threading.get_ident():
                return
            self._keeper = None
        self._turn.release()

    def free(self, patience_s: float) -> None:
        """Gives others the turn that somebody has kept for `patience_s` seconds or more. For any thread."""
        with self._guard:
            if self._keeper is None or self._clock() - self._kept_at < patience_s:
                return
            self._keeper = None
        self._turn.release()
