"""GPU memory that torch did not allocate, as tensors. On a simulated GPU pointers are addresses of the host."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor


class _CudaArray:
    """What torch asks of foreign GPU memory."""

    def __init__(self, pointer: int, size: int) -> None:
        self.__cuda_array_interface__ = {"shape": (size,), "typestr": "|u1", "data": (pointer, False), "version": 3}


def bytes_at(pointer: int, size: int, device: torch.device) -> Tensor:
    """Memory as uint8 [size], not copied. Whoever owns it keeps it until the tensor is gone."""
    if device.type == "cuda":
        return torch.as_tensor(_CudaArray(pointer, size), device=device)
    return torch.frombuffer((ctypes.c_uint8 * size).from_address(pointer), dtype=torch.uint8)


def rows_of(memory: Tensor, offset: int, stride: int, num_rows: int, row_bytes: int) -> Tensor:
    """Rows of a uint8 memory, uint8 [num_rows, row_bytes], not copied. The caller has checked the bounds."""
    return torch.as_strided(memory, (num_rows, row_bytes), (stride, 1), memory.storage_offset() + offset)
