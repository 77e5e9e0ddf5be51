"""RMSNorm in plain PyTorch: the specification that the kernel is tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RowNorm:
    """RMSNorm of rows: `scale` float32 [K] as it multiplies (the 1 of "1 + w" added), and epsilon.

    `out` [M, K] gets the normalised rows, rounded to its own type.
    """

    scale: Tensor
    epsilon: float
    out: Tensor


def rms_norm_reference(x: Tensor, scale: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * scale over the last dimension, float32."""
    wide = x.float()
    return wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + epsilon) * scale
