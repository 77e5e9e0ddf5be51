"""NVFP4 and FP8 weights in plain PyTorch: the specification that kernels are tested against."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

BLOCK_SIZE: Final = 16
"""Neighbours along the input dimension that share an NVFP4 block scale."""

FP8_BLOCK_SIZE: Final = 128
"""Rows and columns that share a scale in an FP8 weight of blocks."""

_E2M1_MAX: Final = 6.0
_E4M3_MAX: Final = 448.0
_E4M3_SMALLEST: Final = 2.0**-9
_FLOAT32: Final = torch.finfo(torch.float32)


@dataclass(frozen=True)
class Nvfp4Weight:
    """A weight [N, K], K a multiple of 16; element = magnitude and sign of its code * block scale * tensor scale.

    `codes` uint8 [N, K / 2]: the low nibble is the even index, the high nibble the odd one; bit 3 of a nibble is the
    sign, bits 0 to 2 choose 0, 0.5, 1, 1.5, 2, 3, 4 or 6. `block_scales` float8_e4m3fn [N, K / 16], never negative.
    `tensor_scale` float32 [].
    """

    codes: Tensor
    block_scales: Tensor
    tensor_scale: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes stored: 4.5 bits an element, and the tensor's scale."""
        return self.codes.nbytes + self.block_scales.nbytes + self.tensor_scale.nbytes


@dataclass(frozen=True)
class Fp8Weight:
    """A weight [N, K]; element = value * its row's scale. `values` float8_e4m3fn [N, K], `row_scales` float32 [N]."""

    values: Tensor
    row_scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes stored."""
        return self.values.nbytes + self.row_scales.nbytes


@dataclass(frozen=True)
class Fp8BlockWeight:
    """A weight [N, K] as DeepSeek ships it; element = value * the scale of its block of 128 x 128.

    `values` float8_e4m3fn [N, K], `block_scales` float32 [ceil(N / 128), ceil(K / 128)].
    """

    values: Tensor
    block_scales: Tensor

    @property
    def num_bytes(self) -> int:
        """Bytes stored."""
        return self.values.nbytes + self.block_scales.nbytes

    @staticmethod
    def scale_shape(rows: int, columns: int) -> tuple[int, int]:
        """The shape of the scales of a weight."""
        return -(-rows // FP8_BLOCK_SIZE), -(-columns // FP8_BLOCK_SIZE)


def nvfp4_tensor_scale(weight: Tensor) -> Tensor:
    """absmax / (6 * 448), float32 []: what a weight has to share that is quantised a part at a time.

    At least the smallest normal float32, so that nothing is divided by zero, nor by a number that a device may flush
    to it. Raises ValueError for an empty, integer or non-finite weight.
    """
    return (_absmax(weight, "nvfp4_tensor_scale").max() / (_E2M1_MAX * _E4M3_MAX)).clamp(min=_FLOAT32.tiny)


def quantize_nvfp4(weight: Tensor, tensor_scale: Tensor | None = None) -> Nvfp4Weight:
    """The nearest NVFP4 weight, halves to even codes; weight [N, K] is of any float type.

    `tensor_scale` is that of `nvfp4_tensor_scale` unless the weight is a part of a larger one. The block scale is
    block absmax / (6 * tensor_scale), rounded to E4M3. Quantising what `dequantize_nvfp4` gave changes nothing.
    Raises ValueError naming what is wrong: not a matrix, K no multiple of 16, integers, NaN or infinity.
    """
    absmax = _absmax(weight, "quantize_nvfp4")
    rows, columns = weight.shape
    if columns % BLOCK_SIZE:
        raise ValueError(f"quantize_nvfp4: the input dimension {columns} is not a multiple of {BLOCK_SIZE}")
    scale = nvfp4_tensor_scale(weight) if tensor_scale is None else tensor_scale
    blocks = weight.float().view(rows, columns // BLOCK_SIZE, BLOCK_SIZE)
    block_scales = _block_scales(absmax.view(blocks.shape).amax(-1) / (_E2M1_MAX * scale))
    # A block without a scale holds zeros only; any divisor will do.
    divisors = torch.where(block_scales.float() == 0, 1.0, block_scales.float() * scale)
    codes = _e2m1_codes(blocks / divisors[..., None]).view(rows, columns)
    return Nvfp4Weight(codes[:, 0::2] | codes[:, 1::2] << 4, block_scales, scale)


def dequantize_nvfp4(weight: Nvfp4Weight) -> Tensor:
    """The weight [N, K], float32: (value * block scale) * tensor scale, the first product exact."""
    magnitudes = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], device=weight.codes.device)
    table = torch.cat((magnitudes, -magnitudes))
    values = table[torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).int()].flatten(1)
    scaled = values.view(*weight.block_scales.shape, BLOCK_SIZE) * weight.block_scales.float()[..., None]
    return (scaled.flatten(1) * weight.tensor_scale).clamp(-_FLOAT32.max, _FLOAT32.max)


def quantize_fp8(weight: Tensor) -> Fp8Weight:
    """The nearest E4M3 weight with a scale of absmax / 448 a row, halves to even; weight [N, K] is of any float type.

    A row of zeros has the smallest scale. Quantising what `dequantize_fp8` gave changes nothing. Raises ValueError
    naming what is wrong: not a matrix, integers, NaN or infinity.
    """
    scales = (_absmax(weight, "quantize_fp8").amax(-1) / _E4M3_MAX).clamp(min=_FLOAT32.tiny)
    return Fp8Weight(_to_e4m3(weight.float() / scales[:, None]), scales)


def dequantize_fp8(weight: Fp8Weight) -> Tensor:
    """The weight [N, K], float32."""
    return (weight.values.float() * weight.row_scales[:, None]).clamp(-_FLOAT32.max, _FLOAT32.max)


def dequantize_fp8_blocks(weight: Fp8BlockWeight) -> Tensor:
    """The weight [N, K], float32."""
    rows, columns = weight.values.shape
    by_row = weight.block_scales.repeat_interleave(FP8_BLOCK_SIZE, 0)[:rows]
    return weight.values.float() * by_row.repeat_interleave(FP8_BLOCK_SIZE, 1)[:, :columns]


def _absmax(weight: Tensor, name: str) -> Tensor:
    """|weight| in float32. Raises ValueError."""
    if weight.dim() != 2 or not weight.numel():
        raise ValueError(f"{name}: the weight is {list(weight.shape)}, expected [output, input], not empty")
    if not weight.is_floating_point():
        raise ValueError(f"{name}: the weight holds {weight.dtype}, expected floating point")
    magnitudes = weight.float().abs()
    if not bool(magnitudes.isfinite().all()):
        raise ValueError(f"{name}: the weight holds NaN or infinity")
    return magnitudes


def _block_scales(ratios: Tensor) -> Tensor:
    """E4M3 of the ratios, none so large that its block's largest element would be stored as less than 6.

    Only the two smallest scales could be: there the nearest may be half as large again as the ratio, and the element
    would come out as one that a second round trip stores differently. And a block of anything but zeros has a scale.
    """
    nearest = _to_e4m3(ratios)
    smallest = torch.full_like(ratios, _E4M3_SMALLEST).to(torch.float8_e4m3fn)
    is_small = (ratios > 0) & (ratios <= _E4M3_SMALLEST * 5 / 3)
    # As bytes: float8 has no `where`.
    return torch.where(is_small, smallest.view(torch.uint8), nearest.view(torch.uint8)).view(torch.float8_e4m3fn)


def _to_e4m3(values: Tensor) -> Tensor:
    """Rounded half to even. Clamped first: the conversion makes NaN of what is too large."""
    return values.clamp(-_E4M3_MAX, _E4M3_MAX).to(torch.float8_e4m3fn)


def _e2m1_codes(values: Tensor) -> Tensor:
    """Nibbles, uint8, rounded half to even codes; beyond 6 is 6, and zero has no sign."""
    size = values.abs()
    codes = (size > 0.25).byte() + (size >= 0.75).byte() + (size > 1.25).byte() + (size >= 1.75).byte()
    codes += (size > 2.5).byte() + (size >= 3.5).byte() + (size > 5.0).byte()
    return codes | ((values < 0) & (codes > 0)).byte() << 3
