"""A CUDA arena mapped into this process, and GPU memory as arrays that torch and others take without a copy."""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from typing import TYPE_CHECKING, Any, Final

from specdraft.errors import Reason, make_error
from specdraft.memory.arena import SlotOutputs
from specdraft.memory.cuda import DEFAULT_STREAM, CudaError
from specdraft.memory.descriptors import NONCE_SIZE_BYTES
from specdraft.memory.mappings import Mappings

if TYPE_CHECKING:
    from array import array
    from collections.abc import Sequence

    from specdraft.memory.cuda import CudaDriver
    from specdraft.memory.layout import ArenaLayout

__all__ = ["ClientGpu", "CudaArena", "DeviceRange"]

_FIELD_SIZE_BYTES: Final = 8


class DeviceRange:
    """A range of GPU memory. `torch.as_tensor(range, device=...)` makes a uint8 tensor of it without a copy.

    Attributes:
        pointer: where it begins in this process.
        nbytes: its length.
        owner: whatever keeps the memory alive.
    """

    def __init__(self, pointer: int, nbytes: int, owner: object = None) -> None:
        self.pointer = pointer
        self.nbytes = nbytes
        self.owner = owner

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        """Bytes; bfloat16 has no name there, so that rows are viewed as their type by whoever knows it."""
        return {"shape": (self.nbytes,), "typestr": "|u1", "data": (self.pointer, False), "version": 3}

    def __getitem__(self, part: slice) -> DeviceRange:
        """The bytes begin <= i < end."""
        begin, end, _ = part.indices(self.nbytes)
        return DeviceRange(self.pointer + begin, end - begin, self.owner)

    def __bytes__(self) -> bytes:
        raise ValueError("rows in GPU memory travel in a CUDA arena or a region, and this session has neither free")

    @classmethod
    def of(cls, value: Any) -> DeviceRange:
        """The memory of a dense array on a GPU: a torch tensor, or anything with `__cuda_array_interface__`.

        Raises:
            ValueError: it has none, or gaps.
        """
        if isinstance(value, DeviceRange):
            return value
        if hasattr(value, "data_ptr"):
            if not value.is_contiguous():
                raise ValueError("the tensor is not contiguous")
            return cls(value.data_ptr(), value.numel() * value.element_size(), value)
        interface = getattr(value, "__cuda_array_interface__", None)
        if interface is None or interface.get("strides"):
            raise ValueError(f"a {type(value).__name__} is no dense array in GPU memory")
        nbytes = int(interface["typestr"][2:])
        for length in interface["shape"]:
            nbytes *= length
        return cls(interface["data"][0], nbytes, value)


class ClientGpu:
    """The GPU that this process works on, as far as memory is shared through it.

    Args:
        driver: driver calls; None = cuda-bindings.
        device: the GPU's ordinal in this process.
        pid: of this process, as it sees itself; 0 = the real one.

    Raises:
        ImportError: cuda-bindings is not installed.
        CudaError: there is no driver.
    """

    def __init__(self, driver: CudaDriver | None = None, device: int = 0, pid: int = 0) -> None:
        if driver is None:
            from specdraft.memory.cuda_bindings import CudaBindingsDriver

            driver = CudaBindingsDriver()
        self.driver = driver
        self.device = device
        self.pid = pid or os.getpid()
        self.uuid = driver.devices()[device]
        self.mappings = Mappings(driver, device)

    def copy(self, target: int, source: int, size: int) -> None:
        """Copies between any two addresses, behind what the default stream holds, and waits for it."""
        self.driver.make_current(self.device)
        self.driver.copy(DEFAULT_STREAM, target, source, size)
        self.driver.synchronize(DEFAULT_STREAM)

    def start_copies(self, copies: Sequence[tuple[int, int, int]]) -> None:
        """Copies several (target, source, size) behind what the default stream holds; `wait` waits for them."""
        self.driver.make_current(self.device)
        for target, source, size in copies:
            self.driver.copy(DEFAULT_STREAM, target, source, size)

    def wait(self) -> None:
        """Waits for what the default stream holds. For the thread that started it."""
        self.driver.synchronize(DEFAULT_STREAM)

    def read(self, pointer: int, size: int) -> bytes:
        """Bytes of GPU memory."""
        block = ctypes.create_string_buffer(size)
        self.copy(ctypes.addressof(block), pointer, size)
        return block.raw

    def export(self, memory: DeviceRange) -> tuple[bytes, int, int]:
        """What the service needs to open an allocation: its handle, its size, and where in it `memory` begins.

        Everything in the allocation can then be read and written by the service: a buffer of its own is best.

        Raises:
            FailedPreconditionError: `MEMORY_NOT_SHAREABLE`.
        """
        try:
            self.driver.make_current(self.device)
            base, size = self.driver.address_range(memory.pointer)
            if memory.pointer + memory.nbytes > base + size:
                raise ValueError("the memory does not lie in one allocation")
            return self.driver.export_handle(base), size, memory.pointer - base
        except CudaError as error:
            raise make_error(
                Reason.MEMORY_NOT_SHAREABLE,
                f"this memory cannot be exported by a CUDA IPC handle ({error.name}): it must come from cudaMalloc, "
                "not from virtual memory management (expandable_segments, sleep mode)",
            ) from None


class CudaArena:
    """The mapping of one session's CUDA arena. It has the methods of `HostArena`; its views are `DeviceRange`s.

    Args:
        gpu: maps it.
        handle: its IPC handle.
        layout: where everything lies.

    Raises:
        FailedPreconditionError: `MEMORY_NOT_SHAREABLE`, `SAME_PID`.
    """

    def __init__(self, gpu: ClientGpu, handle: bytes, layout: ArenaLayout) -> None:
        self.layout = layout
        self.gpu = gpu
        self._handle = handle
        self._base = gpu.mappings.open(handle, layout.size_bytes).base
        self._lock = threading.Lock()
        self._is_closed = False

    @property
    def pointer(self) -> int:
        """Where it begins in this process."""
        return self._base

    def close(self) -> None:
        """Gives the mapping up; nobody may use its views any more. May be called twice."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self.gpu.mappings.close(self._handle)

    def nonce(self) -> bytes:
        """The 16 bytes that prove to the service that this is its arena."""
        return self.gpu.read(self.nonce_pointer, NONCE_SIZE_BYTES)

    @property
    def nonce_pointer(self) -> int:
        """Where they lie in this process."""
        return self._base + self.layout.nonce_offset_bytes

    def slot_rows(self, slot: int, row_count: int) -> DeviceRange:
        """The first `row_count` hidden rows of a slot, `hidden_row_stride_bytes` apart. Raises IndexError."""
        return self._rows(self.layout.slot_rows_offset_bytes(slot, row_count), row_count)

    def staging_rows(self, first_row: int, row_count: int) -> DeviceRange:
        """Rows of the staging area, `hidden_row_stride_bytes` apart. Raises IndexError."""
        return self._rows(self.layout.staging_rows_offset_bytes(first_row, row_count), row_count)

    def slot_field(self, slot: int, name: str, nbytes: int) -> DeviceRange:
        """A field of a slot, by its name in `SlotLayout` without the suffix, for kernels of the target."""
        offset = getattr(self.layout.slot, f"{name}_offset_bytes")
        return DeviceRange(self._base + self.layout.slot_offset_bytes(slot) + offset, nbytes, self)

    def write_rows(self, rows: memoryview | DeviceRange, target: DeviceRange) -> None:
        """Copies dense rows from host or GPU into `slot_rows` or `staging_rows`, and waits.

        Raises:
            ValueError: the sizes differ.
        """
        source, keep = _address(rows)
        self.start_rows(DeviceRange(source, rows.nbytes, keep), target)
        self.gpu.wait()
        del keep

    def start_rows(self, rows: DeviceRange, target: DeviceRange) -> None:
        """As `write_rows`; does not wait. The rows stay where they are until `gpu.wait()` has returned.

        Raises:
            ValueError: the sizes differ.
        """
        size, stride = self.layout.row_size_bytes, self.layout.hidden_row_stride_bytes
        if rows.nbytes % size or rows.nbytes // size * stride != target.nbytes:
            message = f"{rows.nbytes} bytes are not {target.nbytes // stride} rows of {size} bytes"
            raise ValueError(message)
        if stride == size:
            self.gpu.start_copies(((target.pointer, rows.pointer, rows.nbytes),))
        else:
            count = rows.nbytes // size
            self.gpu.start_copies([(target.pointer + i * stride, rows.pointer + i * size, size) for i in range(count)])

    def write_mask(self, slot: int, words: array[int]) -> None:
        """Writes the grammar mask of a slot, row after row; the session must have asked for masks."""
        target = self.slot_field(slot, "mask", len(words) * words.itemsize)
        self.gpu.copy(target.pointer, words.buffer_info()[0], target.nbytes)

    def slot_outputs(self, slot: int) -> SlotOutputs:
        """Reads what the last round left in a slot. Raises IndexError."""
        fields, limit = self.layout.slot, self.layout.max_drafts
        offsets = (
            fields.status_offset_bytes,
            fields.op_offset_bytes,
            fields.draft_count_offset_bytes,
            fields.stop_reason_offset_bytes,
            fields.drafts_offset_bytes,
            fields.logprobs_offset_bytes,
            fields.row_count_offset_bytes,
            fields.last_pair_key_offset_bytes,
        )
        begin, end = min(offsets), max(offsets) + max(_FIELD_SIZE_BYTES, 4 * limit)
        data = self.gpu.read(self._base + self.layout.slot_offset_bytes(slot) + begin, end - begin)
        status, op, count, stop, drafts, logprobs, rows, key = (offset - begin for offset in offsets)
        num_drafts = min(max(struct.unpack_from("<i", data, count)[0], 0), limit)
        return SlotOutputs(
            status=struct.unpack_from("<i", data, status)[0],
            op=struct.unpack_from("<Q", data, op)[0],
            drafts=struct.unpack_from(f"<{num_drafts}i", data, drafts),
            logprobs=struct.unpack_from(f"<{num_drafts}f", data, logprobs),
            stop_reason=struct.unpack_from("<i", data, stop)[0],
            row_count=struct.unpack_from("<i", data, rows)[0],
            last_pair_key=struct.unpack_from("<q", data, key)[0],
        )

    def _rows(self, offset: int, row_count: int) -> DeviceRange:
        return DeviceRange(self._base + offset, row_count * self.layout.hidden_row_stride_bytes, self)


def _address(rows: memoryview | DeviceRange) -> tuple[int, object]:
    """Where bytes lie, and what keeps them there."""
    if isinstance(rows, DeviceRange):
        return rows.pointer, rows
    if rows.readonly:
        copied = bytearray(rows)
        return ctypes.addressof(ctypes.c_char.from_buffer(copied)), copied
    block = ctypes.c_char.from_buffer(rows)
    return ctypes.addressof(block), block
