"""A weight of whatever kind, looked at from outside: its size and its numbers."""

from torch import Tensor

from drafter_kernels.quantize.packed import PackedNvfp4, unpack_nvfp4
from drafter_kernels.quantize.reference import (
    Fp8BlockWeight,
    Fp8Weight,
    dequantize_fp8,
    dequantize_fp8_blocks,
    dequantize_nvfp4,
)

Weight = Tensor | Fp8Weight | Fp8BlockWeight | PackedNvfp4
"""[N, K]: of a float type as it is, E4M3 with a scale a row or a block, or NVFP4 packed for kernels."""


def weight_shape(weight: Weight) -> tuple[int, int]:
    """N and K."""
    rows, columns = weight.values.shape if isinstance(weight, Fp8Weight | Fp8BlockWeight) else weight.shape
    return rows, columns


def widen(weight: Weight) -> Tensor:
    """The weight [N, K] in float32."""
    match weight:
        case PackedNvfp4():
            return dequantize_nvfp4(unpack_nvfp4(weight))
        case Fp8Weight():
            return dequantize_fp8(weight)
        case Fp8BlockWeight():
            return dequantize_fp8_blocks(weight)
        case _:
            return weight.float()
