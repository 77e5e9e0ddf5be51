"""Kernels under test: compiled on a GPU, interpreted on a CPU, and what both are given."""

import pytest
import torch

from drafter_kernels import Backend

DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]

TRITON = Backend.TRITON


def random(*shape, seed=0, dtype=torch.float32, device="cpu", scale=1.0):
    """Normal numbers, the same on every device."""
    values = torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * scale
    return values.to(dtype).to(device)


def on(device, value):
    """A tensor, or a dataclass of tensors and numbers, on a device; None stays."""
    if torch.is_tensor(value):
        return value.to(device)
    if value is None:
        return None
    parts = {name: part.to(device) if torch.is_tensor(part) else part for name, part in vars(value).items()}
    return type(value)(**parts)


def unwritten(*shape, dtype=torch.float32, device="cpu"):
    """An output that shows what was not written: NaN, or an integer that nobody computes."""
    return torch.full(shape, torch.nan if dtype.is_floating_point else -99, dtype=dtype, device=device)


def relative_error(found, expected):
    """Frobenius; NaN anywhere is infinite."""
    found, expected = found.double().cpu(), expected.double().cpu()
    if found.isnan().any():
        return float("inf")
    return float((found - expected).norm() / expected.norm())
