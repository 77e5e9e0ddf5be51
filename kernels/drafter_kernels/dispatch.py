"""Which implementation of an operation runs: its reference, or its Triton kernel."""

import os
from enum import StrEnum

import torch
from torch import Tensor

# What Triton assumes of a pointer decides how wide it loads; a tensor that is a slice may begin anywhere.
_ALIGNMENT_BYTES = 16


class Backend(StrEnum):
    """An implementation. Without a wish the device decides: Triton for CUDA tensors, the reference for all others."""

    REFERENCE = "reference"
    TRITON = "triton"


def uses_triton(tensor: Tensor, backend: Backend | None) -> bool:
    """Whether the Triton kernel runs for a tensor: for one on a CPU on a wish, and in Triton's interpreter only."""
    return tensor.is_cuda if backend is None else backend is Backend.TRITON


def is_interpreted() -> bool:
    """Whether kernels run in Triton's interpreter; to be decided before Triton is first imported."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"


def check_aligned(**tensors: Tensor | None) -> None:
    """Raises ValueError naming a tensor that is not contiguous or does not begin at a multiple of 16 bytes."""
    for name, tensor in tensors.items():
        if tensor is None:
            continue
        if not tensor.is_contiguous():
            raise ValueError(f"{name} is not contiguous")
        if tensor.data_ptr() % _ALIGNMENT_BYTES:
            raise ValueError(f"{name} does not begin at a multiple of {_ALIGNMENT_BYTES} bytes")


def check_shape(name: str, tensor: Tensor, *shape: int) -> None:
    """Raises ValueError naming the tensor and both shapes."""
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name} is {list(tensor.shape)}, expected {list(shape)}")


def check_tensor(name: str, tensor: Tensor, dtype: torch.dtype, *shape: int) -> None:
    """Raises ValueError naming the tensor if its type or shape is another."""
    if tensor.dtype != dtype:
        raise ValueError(f"{name} holds {tensor.dtype}, expected {dtype}")
    check_shape(name, tensor, *shape)


def launch_options(*, overlaps: bool) -> dict[str, bool]:
    """Triton's options for a kernel that starts while the one before it drains (programmatic dependent launch), or not.

    Such a kernel waits for the one before it before it reads or writes anything, so results do not depend on this.
    """
    return {"PDL": True, "launch_pdl": True} if overlaps and not is_interpreted() else {"PDL": False}


def next_power_of_2(number: int) -> int:
    """The smallest power of two that is not less; number >= 1."""
    return 1 << (number - 1).bit_length()
