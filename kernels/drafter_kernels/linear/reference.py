"""The projections of a head in plain PyTorch: the specification that kernels are tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.quantize import Weight, widen
from drafter_kernels.rms_norm import rms_norm_reference

LinearWeight = Weight
"""[N, K], or [2 N, K] for SwiGLU: the gate's rows, then those that it multiplies."""


@dataclass(frozen=True)
class PackedRows:
    """Rows [M, K] as NVFP4 weights want them: `values` bfloat16 [M, 8, K / 8], element k at [k % 8, k // 8]."""

    values: Tensor

    def unpack(self) -> Tensor:
        """[M, K]."""
        return self.values.transpose(1, 2).flatten(1)

    @staticmethod
    def pack(rows: Tensor) -> "PackedRows":
        """Of rows [M, K], K a multiple of 8."""
        return PackedRows(rows.unflatten(1, (-1, 8)).transpose(1, 2).contiguous())


@dataclass(frozen=True)
class InputNorm:
    """RMSNorm of x before the product: `scale` float32 [K] as it multiplies, and epsilon."""

    scale: Tensor
    epsilon: float


def linear_reference(
    x: Tensor,
    weight: LinearWeight,
    *,
    norm: InputNorm | None = None,
    swiglu: bool = False,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """See `linear`; returns float32 [M, N]."""
    wide = x.float() if norm is None else rms_norm_reference(x, norm.scale, norm.epsilon)
    value = wide @ widen(weight).T
    if swiglu:
        first, second = value.chunk(2, dim=-1)
        value = torch.nn.functional.silu(first) * second
    if gate is not None:
        value = value * torch.sigmoid(gate.float())
    return value if residual is None else value + residual.float()
