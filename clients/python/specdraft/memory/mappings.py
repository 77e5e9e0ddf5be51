"""Mappings of other processes' GPU memory: one open per allocation, counted, closed when nobody uses it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.cuda import CudaError

if TYPE_CHECKING:
    from specdraft.memory.cuda import CudaDriver

__all__ = ["Mapping", "Mappings", "check_range"]

CLOSE_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Mapping:
    """An opened allocation.

    Attributes:
        base: where it lies in this process.
        size: of the whole allocation, in bytes.
        generation: counts the opens of this process: two with the same handle are not the same memory.
    """

    base: int
    size: int
    generation: int


@dataclass(slots=True)
class _Open:
    mapping: Mapping
    users: int
    is_closing: bool = False


class Mappings:
    """Opens each allocation once, however many sessions, regions and arenas lie in it.

    Args:
        driver: opens and closes.
        device: whose context the calls are made in.
        later: where closing is done, which may block; the default is here and now.
    """

    def __init__(
        self, driver: CudaDriver, device: int, later: Callable[[Callable[[], None]], None] = lambda job: job()
    ) -> None:
        self._driver = driver
        self._device = device
        self._later = later
        self._changed = threading.Condition()
        self._open: dict[bytes, _Open] = {}
        self._generation = 0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, handle: bytes, size: int) -> Mapping:
        """Maps an allocation, or counts one more user of the mapping that is there.

        Args:
            handle: its IPC handle.
            size: of the allocation, as its owner says.

        Raises:
            FailedPreconditionError: `MEMORY_NOT_SHAREABLE`: the driver does not open it; `SAME_PID`: both processes
                have the same pid.
            InvalidArgumentError: `MEMORY_OUT_OF_BOUNDS`: it is smaller than its owner says.
        """
        with self._changed:
            # A handle may have been given to other memory since: what is being closed is closed first.
            if not self._changed.wait_for(lambda: not self._is_closing(handle), CLOSE_TIMEOUT_S):
                raise make_error(
                    Reason.REGIONS_EXHAUSTED, "an older mapping is still being closed", retry_delay_ms=1000, limit=1
                )
            found = self._open.get(handle)
            if found is None:
                found = self._open[handle] = _Open(self._opened(handle), 0)
            if found.mapping.size < size:
                if not found.users:
                    self._close(handle, found)
                raise _too_small(found.mapping.size, size)
            found.users += 1
            return found.mapping

    def close(self, handle: bytes) -> None:
        """One user less; the last one closes the mapping."""
        with self._changed:
            found = self._open.get(handle)
            if found is None or found.is_closing:
                return
            found.users -= 1
            if found.users == 0:
                self._close(handle, found)

    def _is_closing(self, handle: bytes) -> bool:
        found = self._open.get(handle)
        return found is not None and found.is_closing

    def _opened(self, handle: bytes) -> Mapping:
        try:
            self._driver.make_current(self._device)
            pointer = self._driver.open_handle(handle)
        except CudaError as error:
            raise _refusal(error) from None
        try:
            base, size = self._driver.address_range(pointer)
        except CudaError as error:
            self._driver.close_handle(pointer)
            raise _refusal(error) from None
        self._generation += 1
        return Mapping(base, size, self._generation)

    def _close(self, handle: bytes, found: _Open) -> None:
        found.is_closing = True

        def close() -> None:
            self._driver.make_current(self._device)
            try:
                self._driver.close_handle(found.mapping.base)
            finally:
                with self._changed:
                    del self._open[handle]
                    self._changed.notify_all()

        self._later(close)


def check_range(size: int, offset: int, length: int) -> None:
    """Checks that a range lies inside an allocation; whatever the numbers, nothing wraps around.

    Raises:
        InvalidArgumentError: `MEMORY_OUT_OF_BOUNDS`.
    """
    for field, value, limit in (("offset_bytes", offset, size), ("length_bytes", length, size - offset)):
        if not 0 <= value <= limit:
            raise make_error(
                Reason.MEMORY_OUT_OF_BOUNDS, f"{field} {value} of {limit}", field=field, value=value, limit=limit
            )


def _too_small(size: int, claimed: int) -> SpecdraftError:
    return make_error(
        Reason.MEMORY_OUT_OF_BOUNDS,
        f"the allocation has {size} bytes, not {claimed}",
        field="allocation_size_bytes",
        value=claimed,
        limit=size,
    )


def _refusal(error: CudaError) -> SpecdraftError:
    if error.is_sticky:
        return make_error(Reason.DEVICE_LOST, f"the device is lost ({error.name})", retry_delay_ms=1000)
    if error.name == "CUDA_ERROR_INVALID_CONTEXT":
        return make_error(
            Reason.SAME_PID, f"the driver refuses the handle ({error.name}), as it does between equal pids", pid=""
        )
    if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
        text = f"the driver has no room to open the memory ({error.name}): too many processes use this GPU at once"
        return make_error(Reason.MEMORY_NOT_SHAREABLE, text)
    return make_error(
        Reason.MEMORY_NOT_SHAREABLE,
        f"the memory cannot be opened through a CUDA IPC handle ({error.name}): it must come from cuMemAlloc or "
        "cudaMalloc, not from virtual memory management (expandable segments, sleep mode)",
    )
