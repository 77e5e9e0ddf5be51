"""Pages of 64-bit counters in host memory that CPUs and GPUs of two processes read and write."""

from __future__ import annotations

import ctypes
import mmap
import os
from contextlib import suppress
from typing import Final

from specdraft.memory.descriptors import check_descriptor
from specdraft.memory.lane_protocol import RELEASED

__all__ = ["COUNTER_PAGE_SIZE_BYTES", "CounterPage"]

COUNTER_PAGE_SIZE_BYTES: Final = 4096


class CounterPage:
    """One mapped page. Single aligned 64-bit loads and stores, which the processor does in one piece.

    Args:
        descriptor: of a memfd that is sealed against resizing; closed here, also on failure. None = memory of this
            process alone.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE`: the file is not sealed, or too small.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        if descriptor is None:
            self._mapping = mmap.mmap(-1, COUNTER_PAGE_SIZE_BYTES)
        else:
            try:
                check_descriptor(descriptor, COUNTER_PAGE_SIZE_BYTES)
                self._mapping = mmap.mmap(descriptor, COUNTER_PAGE_SIZE_BYTES)
            finally:
                os.close(descriptor)
        words = COUNTER_PAGE_SIZE_BYTES // ctypes.sizeof(ctypes.c_int64)
        self._words: ctypes.Array[ctypes.c_int64] | None = (ctypes.c_int64 * words).from_buffer(self._mapping)
        self.address = ctypes.addressof(self._words)

    def load(self, offset_bytes: int) -> int:
        """The counter at a multiple of 8 bytes; `RELEASED` once the page is closed: nobody waits for it any more."""
        words = self._words
        return RELEASED if words is None else int(words[offset_bytes // 8])

    def store(self, offset_bytes: int, value: int) -> None:
        """Stores a counter; nothing happens once the page is closed."""
        words = self._words
        if words is not None:
            words[offset_bytes // 8] = value

    def close(self) -> None:
        """Unmaps the page. Whoever registered it with a driver has ended that before. May be called twice."""
        self._words = None
        with suppress(BufferError):
            self._mapping.close()
