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
