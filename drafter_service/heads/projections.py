"""A weight of whatever kind: its size, its rows, its numbers, and several side by side."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from drafter_kernels.linear import LinearWeight
from drafter_kernels.quantize import FP8_BLOCK_SIZE, Fp8BlockWeight, Fp8Weight, PackedNvfp4, weight_shape, widen

_CHUNK_ROWS: Final = 16384


def runs_kernels(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether the kernels compute a head, so that narrow weights stay as they are: on a GPU, in bf16.

    Float32 heads are for comparison: narrow weights are multiplied with bf16 activations, so such a head would not
    be what its type says. They, and every head on a CPU, run in plain PyTorch.
    """
    return device.type == "cuda" and dtype is torch.bfloat16


def num_rows(weight: LinearWeight) -> int:
    """N of a weight [N, K]."""
    return weight_shape(weight)[0]


def tensors_of(weight: LinearWeight) -> tuple[Tensor, ...]:
    """The tensors that a weight consists of."""
    return (weight,) if isinstance(weight, Tensor) else tuple(vars(weight).values())


def narrowed(weight: LinearWeight, dtype: torch.dtype) -> Tensor:
    """The numbers of a weight in a type."""
    return (weight if isinstance(weight, Tensor) else widen(weight)).to(dtype)


def product(x: Tensor, weight: LinearWeight) -> Tensor:
    """x [M, K] times the weight, in plain PyTorch. Of a narrow weight some rows are widened at a time."""
    if isinstance(weight, Tensor):
        return linear(x, weight)
    parts = [
        linear(x.float(), widen(rows_of(weight, begin, begin + _CHUNK_ROWS)))
        for begin in range(0, num_rows(weight), _CHUNK_ROWS)
    ]
    return torch.cat(parts, dim=-1).to(x.dtype)


def rows_of(weight: LinearWeight, begin: int, end: int) -> LinearWeight:
    """Rows begin <= row < end, in the same memory; of a weight in blocks they begin with one."""
    part = slice(begin, end)
    match weight:
        case PackedNvfp4():
            return replace(weight, words=weight.words[part], block_scales=weight.block_scales[part])
        case Fp8Weight():
            return Fp8Weight(weight.values[part], weight.row_scales[part])
        case Fp8BlockWeight():
            assert begin % FP8_BLOCK_SIZE == 0
            scales = weight.block_scales[begin // FP8_BLOCK_SIZE : -(-end // FP8_BLOCK_SIZE)]
            return Fp8BlockWeight(weight.values[part], scales)
        case _:
            return weight[part]


def joined(weights: Sequence[LinearWeight]) -> LinearWeight | None:
    """The rows of several weights below each other, in new memory; None if no one weight can hold them."""
    first = weights[0]
    if any(type(weight) is not type(first) for weight in weights) or not _fit(weights):
        return None
    columns = [[tensors_of(weight)[index] for weight in weights] for index in range(len(tensors_of(first)))]
    match first:
        case PackedNvfp4():
            return PackedNvfp4(torch.cat(columns[0]), _cat_bytes(columns[1]), first.tensor_scale)
        case Fp8Weight():
            return Fp8Weight(_cat_bytes(columns[0]), torch.cat(columns[1]))
        case Fp8BlockWeight():
            return Fp8BlockWeight(_cat_bytes(columns[0]), torch.cat(columns[1]))
        case _:
            return torch.cat(columns[0])


def _fit(weights: Sequence[LinearWeight]) -> bool:
    """Whether weights of one kind can be one weight."""
    first = weights[0]
    if isinstance(first, PackedNvfp4):
        return all(torch.equal(tensors_of(weight)[2], first.tensor_scale) for weight in weights)
    if isinstance(first, Fp8BlockWeight):
        return not any(num_rows(weight) % FP8_BLOCK_SIZE for weight in weights)
    return True


def times(weight: LinearWeight, factor: Tensor) -> LinearWeight:
    """A narrow weight multiplied by a number, float32 [1], through its scales: nothing else is rounded."""
    match weight:
        case PackedNvfp4():
            return replace(weight, tensor_scale=weight.tensor_scale * factor)
        case Fp8Weight():
            return replace(weight, row_scales=weight.row_scales * factor)
        case Fp8BlockWeight():
            return replace(weight, block_scales=weight.block_scales * factor)
        case _:
            raise TypeError("a weight without scales cannot be multiplied without rounding")


def _cat_bytes(parts: Sequence[Tensor]) -> Tensor:
    """As bytes: eight-bit floats cannot be put side by side."""
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)
