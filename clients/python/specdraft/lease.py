"""Keeping a session alive, for threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Final

from specdraft.errors import NotFoundError, SpecdraftError
from specdraft.exchanges import Exchange
from specdraft.v1 import session_pb2

__all__ = ["LEASE_SHARE", "RETRY_SHARE", "Lease", "keep_alive"]

LEASE_SHARE: Final = 3
"""`KeepAlive` is sent at this part of the lease."""

RETRY_SHARE: Final = 15
"""After a failure it is sent again at this part of the lease."""

_JOIN_TIMEOUT_S: Final = 5.0


def keep_alive(timeout_s: float, arena_nonce: bytes = b"") -> Exchange:
    """The call that renews the lease."""
    return Exchange("KeepAlive", session_pb2.KeepAliveRequest(arena_nonce=arena_nonce), timeout_s)


class Lease:
    """A thread that renews the lease until it is closed or the session is gone."""

    def __init__(self, call: Callable[[Exchange], object], lease_s: float, timeout_s: float) -> None:
        self._call = call
        self._lease_s = lease_s
        self._timeout_s = timeout_s
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="specdraft-lease", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread."""
        self._closed.set()
        self._thread.join(_JOIN_TIMEOUT_S)

    def _renew(self) -> None:
        pause_s = self._lease_s / LEASE_SHARE
        while not self._closed.wait(pause_s):
            try:
                self._call(keep_alive(min(self._timeout_s, self._lease_s / LEASE_SHARE)))
            except NotFoundError:
                return  # the session is gone; the next use of a sequence says so
            except SpecdraftError:
                pause_s = self._lease_s / RETRY_SHARE
            else:
                pause_s = self._lease_s / LEASE_SHARE
