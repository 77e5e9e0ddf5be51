"""The end of a device: an error after which every call of the process fails. Only a new process helps."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.cuda import CudaError

_log = logging.getLogger(__name__)

STICKY_TEXTS = (
    "illegal memory access",
    "device-side assert",
    "unspecified launch failure",
    "misaligned address",
    "illegal instruction",
    "invalid program counter",
    "launch timed out",
    "hardware stack error",
    "uncorrectable",
    "context is destroyed",
    "mps client terminated",
)
"""How torch words them."""


def is_sticky(error: BaseException) -> bool:
    """Whether an error of the driver's or of torch's says that the device is lost."""
    if isinstance(error, CudaError):
        return error.is_sticky
    # What comes behind the first line is torch's advice, which names device-side assertions whatever has happened.
    text = str(error).partition("\n")[0].lower()
    return isinstance(error, RuntimeError) and "cuda" in text and any(one in text for one in STICKY_TEXTS)


class DeviceLoss:
    """Told of errors; remembers the first that means the end, and tells others at once.

    Attributes:
        is_lost: whether the device is lost.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.is_lost = False
        self._listeners: list[Callable[[], None]] = []

    def when_lost(self, listener: Callable[[], None]) -> None:
        """Has `listener` called once, in whatever thread finds out; it makes no CUDA call."""
        self._listeners.append(listener)

    def seen(self, error: BaseException) -> bool:
        """Looks at an error; True if the device is lost."""
        if not is_sticky(error):
            return self.is_lost
        self.mark(error)
        return True

    def mark(self, error: BaseException) -> bool:
        """Notes that the device is lost, as `error` says; False if that was known."""
        with self._lock:
            was_lost, self.is_lost = self.is_lost, True
        if not was_lost:
            _log.critical("the device is lost: %s", error)
            for listener in self._listeners:
                listener()
        return not was_lost


def device_lost() -> SpecdraftError:
    """What is said to callers from then on."""
    return make_error(Reason.DEVICE_LOST, "the device reported an error it does not recover from", retry_delay_ms=1000)
