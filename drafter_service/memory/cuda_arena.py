"""The CUDA arena: one allocation a session, exported to its client by an IPC handle."""

from __future__ import annotations

import logging
import secrets
import struct
import threading
from typing import TYPE_CHECKING

import torch

from drafter_service.memory.arena import SlotOutputs, check_rows, pack_outputs
from drafter_service.memory.device_view import Landing, bytes_at, rows_of
from drafter_service.memory.hiddens import DTYPES, FEW_BYTES, PackedRows, RowsToCome, checked_rows, hidden_rows
from drafter_service.memory.layout import NONCE_BYTES, ArenaLayout
from drafter_service.memory.reaper import Reaper
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.cuda import DEFAULT_STREAM, CudaDriver, CudaError

if TYPE_CHECKING:
    from torch import Tensor

_log = logging.getLogger(__name__)

FREEING_S = 1.0
"""How long a session's opening waits for memory that is being freed, where there is no other."""

PARTS_MAX = 256
"""Parts of an arena whose tensors are kept: the rows of its slots, in the usual case."""

GRANULE = 2 << 20
"""Allocations are whole multiples of this: smaller ones may share what is exported with others' memory."""


class ArenaPool:
    """Makes arenas' allocations within a budget, and has them freed.

    Allocating and freeing may block while a wait is open. So one allocation of the size asked for last is kept ready,
    and freeing is the reaper's. What was exported once is freed and never handed to another session: whoever had
    mapped it could still read and write it.

    Args:
        driver: allocates.
        device: the GPU's ordinal.
        budget: most bytes of all arenas, those included that are not freed yet.
        reaper: frees.

    Attributes:
        landings: host memory for the rows of calls, of which nobody makes use; arenas share it.
    """

    def __init__(self, driver: CudaDriver, device: int, budget: int, reaper: Reaper) -> None:
        self._driver = driver
        self._device = device
        self._budget = budget
        self._reaper = reaper
        self._lock = threading.Lock()
        self._num_bytes = 0
        self._spare: tuple[int, int] | None = None
        self._closed = threading.Event()
        self.landings: list[Landing] = []

    @property
    def num_bytes(self) -> int:
        """Bytes that are allocated, the spare one's too."""
        return self._num_bytes

    def take(self, size: int) -> tuple[int, int]:
        """An allocation of at least `size` bytes, zeroed: (pointer, bytes). Raises ARENA_EXHAUSTED."""
        rounded = -(-size // GRANULE) * GRANULE
        with self._lock:
            spare, self._spare = self._spare, None
        if spare is not None and spare[1] != rounded:
            self.give(*spare)  # freeing it here would wait for every lane that waits
            if self._num_bytes + rounded > self._budget:
                self._reaper.wait_idle(FREEING_S)
            spare = None
        pointer = self._allocate(rounded) if spare is None else spare[0]
        self._reaper.later(lambda: self._refill(rounded))
        return pointer, rounded

    def give(self, pointer: int, size: int) -> None:
        """Gives an allocation back, to be freed by the reaper."""
        self._reaper.later(lambda: self._free(pointer, size))

    def close(self) -> None:
        """Frees the spare one and keeps none any more."""
        with self._lock:
            self._closed.set()
            spare, self._spare = self._spare, None
        if spare is not None:
            self.give(*spare)

    def _allocate(self, size: int) -> int:
        with self._lock:
            if self._num_bytes + size > self._budget:
                raise make_error(
                    Reason.ARENA_EXHAUSTED,
                    f"arenas hold {self._num_bytes} of {self._budget} bytes; {size} more do not fit",
                    retry_delay_ms=1000,
                    bytes=size,
                    limit=self._budget,
                )
            self._num_bytes += size
        try:
            return self._zeroed(size)
        except CudaError as error:
            with self._lock:
                self._num_bytes -= size
            raise device_error(error, size, self._budget) from None

    def _zeroed(self, size: int) -> int:
        driver = self._driver
        driver.make_current(self._device)
        pointer = driver.allocate(size)
        try:
            driver.fill(DEFAULT_STREAM, pointer, 0, size)
            driver.synchronize(DEFAULT_STREAM)
        except CudaError:
            driver.free(pointer)
            raise
        return pointer

    def _refill(self, size: int) -> None:
        with self._lock:
            # Not where it would take the room of a session that comes.
            if self._spare is not None or self._closed.is_set() or self._num_bytes + 2 * size > self._budget:
                return
        spare = self._allocate(size), size
        with self._lock:
            if not self._closed.is_set():
                self._spare = spare  # nobody else makes one
                return
        self._free(*spare)

    def _free(self, pointer: int, size: int) -> None:
        self._driver.make_current(self._device)
        self._driver.free(pointer)
        with self._lock:
            self._num_bytes -= size


class CudaArena:
    """One session's arena in GPU memory. Beside the methods of `HostArena` it has `hidden_rows`, which go no way round.

    Args:
        layout: where everything lies.
        pool: where the memory comes from.
        driver: exports it.
        device: torch's name of the GPU.

    Attributes:
        nonce: what the service wrote into it.
        handle: the IPC handle: a secret.
    """

    def __init__(
        self,
        layout: ArenaLayout,
        pool: ArenaPool,
        driver: CudaDriver,
        device: torch.device,
    ) -> None:
        self.layout = layout
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self.size = 0
        self._pool = pool
        self._device = device
        self._lock = threading.Lock()
        self._parts: dict[tuple[int, int], Tensor] = {}
        if not pool.landings:  # before it is needed: making it takes a while
            pool.landings.append(Landing(FEW_BYTES, device))
        self._pointer, self.size = pool.take(layout.size)
        try:
            self.handle = driver.export_handle(self._pointer)
            self._memory: Tensor | None = bytes_at(self._pointer, self.size, device)
            self._write(layout.nonce, self.nonce)
        except CudaError as error:
            self._memory = None
            pool.give(self._pointer, self.size)
            raise device_error(error, self.size, self.size) from None

    @property
    def pointer(self) -> int:
        """Where it begins in this process."""
        return self._pointer

    @property
    def memory(self) -> Tensor:
        """All of it, uint8. Raises SESSION_UNKNOWN once the session has ended."""
        if self._memory is None:
            raise make_error(Reason.SESSION_UNKNOWN, "the session has ended")
        return self._memory

    def copy_rows(self, offset: int, stride: int, num_rows: int, row_bytes: int) -> bytearray:
        """A private copy of rows in host memory, packed: one copy, and a wait for it. Raises MEMORY_OUT_OF_BOUNDS."""
        check_rows(self.layout, offset, stride, num_rows, row_bytes)
        copied = bytearray(num_rows * row_bytes)
        target = torch.frombuffer(copied, dtype=torch.uint8)
        with self._lock:
            if stride == row_bytes or num_rows == 1:
                target.copy_(self.memory[offset : offset + len(copied)])
            else:
                rows = rows_of(self.memory, offset, stride, num_rows, row_bytes)
                target.view(num_rows, row_bytes).copy_(rows)
        return copied

    def hidden_rows(
        self, offset: int, num_rows: int, *, dtype: str, head_dtype: str, width: int
    ) -> Tensor | PackedRows:
        """A private, checked copy of hidden rows [num_rows, width], in the head's element type.

        A round's few rows are copied to the host and checked there: the copy is all that the device is asked for, and
        they go back with everything else that is said about the round. More rows stay on the device.

        Raises:
            MEMORY_OUT_OF_BOUNDS, HIDDEN_NOT_FINITE.
        """
        row_bytes, stride = width * DTYPES[dtype].itemsize, self.layout.row_stride
        if num_rows * row_bytes <= FEW_BYTES:
            return hidden_rows(self.copy_rows(offset, stride, num_rows, row_bytes), dtype, width, head_dtype)
        check_rows(self.layout, offset, stride, num_rows, row_bytes)
        with self._lock:
            copied = rows_of(self.memory, offset, stride, num_rows, row_bytes).clone(
                memory_format=torch.contiguous_format
            )
        return checked_rows(copied.view(DTYPES[dtype]), head_dtype)

    def start_hidden_rows(
        self, offset: int, num_rows: int, *, dtype: str, head_dtype: str, width: int
    ) -> Tensor | PackedRows:
        """As `hidden_rows`; where they are few and dense, the copy is only under way, and they have to be settled.

        Raises:
            MEMORY_OUT_OF_BOUNDS; HIDDEN_NOT_FINITE where it is known at once.
        """
        row_bytes = width * DTYPES[dtype].itemsize
        size = num_rows * row_bytes
        if size > FEW_BYTES or row_bytes != self.layout.row_stride:
            return self.hidden_rows(offset, num_rows, dtype=dtype, head_dtype=head_dtype, width=width)
        check_rows(self.layout, offset, row_bytes, num_rows, row_bytes)
        landings = self._pool.landings
        try:
            landing = landings.pop()
        except IndexError:
            landing = Landing(FEW_BYTES, self._device)
        with self._lock:
            landing.start(self._part(offset, size))

        def copied() -> bytearray:
            data = landing.take(size)
            landings.append(landing)  # one that nobody asks for its rows is not used again
            return data

        return RowsToCome(copied, dtype, width, head_dtype)

    def write_outputs(self, slot: int, outputs: SlotOutputs) -> None:
        """Writes a slot's outputs; `op` behind the rest."""
        fields = self.layout.fields
        base = self.layout.slots + slot * fields.stride
        packed = bytearray(fields.first_key)  # all outputs lie before the inputs
        pack_outputs(packed, 0, self.layout, outputs)
        with self._lock:
            self._write(base, packed)
            self._write(base + fields.op, struct.pack("<Q", outputs.op))

    def close(self) -> None:
        """Has the memory freed once nobody's work on the device can touch it. Safe to call twice."""
        with self._lock:
            if self._memory is None:
                return
            self._memory = None
            self._parts.clear()
        self._pool.give(self._pointer, self.size)

    def _part(self, offset: int, size: int) -> Tensor:
        """Bytes of the arena. Raises SESSION_UNKNOWN once the session has ended."""
        part = self._parts.get((offset, size))
        if part is None:
            part = self.memory[offset : offset + size]
            if len(self._parts) < PARTS_MAX:
                self._parts[offset, size] = part
        return part

    def _write(self, offset: int, data: bytes | bytearray) -> None:
        # From pageable memory: the copy has been made when this returns.
        source = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        self.memory[offset : offset + len(data)].copy_(source)


def device_error(error: CudaError, size: int, limit: int) -> SpecdraftError:
    """What a failed allocation or export means for who asked for it."""
    _log.warning("an arena of %d bytes failed: %s", size, error)
    if error.is_sticky:
        return make_error(Reason.DEVICE_LOST, f"the device is lost ({error.name})", retry_delay_ms=1000)
    if error.name == "CUDA_ERROR_OUT_OF_MEMORY":
        return make_error(
            Reason.ARENA_EXHAUSTED, f"the GPU has no {size} bytes", retry_delay_ms=1000, bytes=size, limit=limit
        )
    return make_error(Reason.MEMORY_NOT_SHAREABLE, f"the GPU's memory cannot be exported here ({error.name})")
