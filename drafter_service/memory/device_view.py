"""GPU memory that torch did not allocate, as tensors. On a simulated GPU pointers are addresses of the host."""

from __future__ import annotations

import ctypes
from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor


class _CudaArray:
    """What torch asks of foreign GPU memory."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


class Landing:
    """Host memory that a device copies into while whoever asked goes on. For one copy at a time.

    Args:
        size: bytes.
        device: torch's name of it; where it is a CPU, the copy has been made when `start` returns.
    """

    def __init__(self, size: int, device: torch.device) -> None:
        is_gpu = device.type == "cuda"
        self._memory = torch.empty(size, dtype=torch.uint8, pin_memory=is_gpu)
        self._view = memoryview((ctypes.c_uint8 * size).from_address(self._memory.data_ptr())).cast("B")
        self._parts: dict[int, Tensor] = {}
        self._stream = torch.cuda.default_stream(device) if is_gpu else None
        self._event = torch.cuda.Event() if is_gpu else None

    def start(self, source: Tensor) -> None:
        """Has the bytes of a dense uint8 tensor copied, behind what the device's default stream holds."""
        size = source.shape[0]
        part = self._parts.get(size)
        if part is None:  # few sizes: one a number of rows
            part = self._parts[size] = self._memory[:size]
        part.copy_(source, non_blocking=True)
        if self._event is not None:
            self._event.record(self._stream)

    def take(self, size: int) -> bytearray:
        """The first `size` bytes, once they are there."""
        if self._event is not None:
            self._event.synchronize()
        return bytearray(self._view[:size])


def on_device(device: torch.device) -> AbstractContextManager[object]:
    """Makes the device this thread's current one, on which kernels are launched that torch does not launch itself."""
    return torch.cuda.device(device.index or 0) if device.type == "cuda" else nullcontext()


def bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """Memory as uint8 [size] that `device` reaches, not copied. Whoever owns it keeps it until the tensor is gone."""
    if device.type == "cuda":
        seen = torch.as_tensor(_CudaArray(pointer, size))
        # A peer's memory: asked for on this device, torch would copy it there.
        return seen if seen.device.index == (device.index or 0) else peer_bytes_at(pointer, size, device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)


def peer_bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """A peer's memory as uint8 [size] for kernels of `device`, wherever it lies."""
    storage = torch._C._construct_storage_from_data_pointer(pointer, device, size)  # noqa: SLF001  # nothing else does it
    return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)


def rows_of(memory: Tensor, offset: int, stride: int, num_rows: int, row_bytes: int) -> Tensor:
    """Rows of a uint8 memory, uint8 [num_rows, row_bytes], not copied. The caller has checked the bounds."""
    return torch.as_strided(memory, (num_rows, row_bytes), (stride, 1), memory.storage_offset() + offset)
