"""Weights that others have quantised: what compressed-tensors, modelopt and DeepSeek store, as ours.

What a weight is follows from the tensors that are there, not from a config's list of what was left out.

Sources: compressed-tensors `nvfp4-pack-quantized` and `float-quantized`; modelopt's `NVFP4` and `FP8` exports;
DeepSeek-V3's `weight_scale_inv`, by which the values are multiplied in spite of its name.
"""

from collections.abc import Mapping
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.quantize.reference import BLOCK_SIZE, Fp8BlockWeight, Fp8Weight, Nvfp4Weight

# Scales of activations: a weight can be read without them.
_OF_ACTIVATIONS: Final = frozenset({"input_scale", "input_global_scale"})

_FP8: Final = torch.float8_e4m3fn


def read_stored_weight(tensors: Mapping[str, Tensor]) -> Tensor | Nvfp4Weight | Fp8Weight | Fp8BlockWeight:
    """A projection of whatever kind from its stored tensors, by what follows the projection's name and a dot.

    * `weight` of a float type of 16 bits or more: itself.
    * `weight_packed` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_global_scale` float32 [] or [1], the
      reciprocal of our tensor scale: NVFP4 of compressed-tensors.
    * `weight` uint8 [N, K / 2], `weight_scale` E4M3 [N, K / 16], `weight_scale_2` float32 [] or [1]: NVFP4 of modelopt.
    * `weight` E4M3 [N, K] with `weight_scale` of one element (a tensor's), [N] or [N, 1] (a row's), or
      [ceil(N / 128), ceil(K / 128)] (a block's), or with `weight_scale_inv` of the latter shape: FP8.

    Raises ValueError naming the tensor that is missing, not known, misshapen, or not a possible scale.
    """
    names = set(tensors) - _OF_ACTIVATIONS
    if "weight_packed" in names:
        _expect(names, {"weight_packed", "weight_scale", "weight_global_scale"})
        return _nvfp4(tensors, "weight_packed", "weight_global_scale")
    if "weight" not in names:
        raise ValueError(f"weight is missing (there are {', '.join(sorted(tensors)) or 'no tensors'})")
    weight = tensors["weight"]
    if weight.dtype == torch.uint8:
        _expect(names, {"weight", "weight_scale", "weight_scale_2"})
        return _nvfp4(tensors, "weight", "weight_scale_2")
    if weight.dtype == _FP8:
        scale = "weight_scale_inv" if "weight_scale_inv" in names else "weight_scale"
        _expect(names, {"weight", scale})
        return _fp8(weight, tensors[scale], scale)
    if not weight.is_floating_point() or weight.element_size() < 2:
        raise ValueError(f"weight is {_name(weight.dtype)}: not a type that is supported")
    _expect(names, {"weight"})
    return weight


def _expect(names: set[str], expected: set[str]) -> None:
    if missing := expected - names:
        raise ValueError(f"{', '.join(sorted(missing))} is missing beside {', '.join(sorted(names))}")
    if unknown := names - expected:
        raise ValueError(f"{', '.join(sorted(unknown))} beside {', '.join(sorted(expected))} is not known")


def _nvfp4(tensors: Mapping[str, Tensor], codes_name: str, global_name: str) -> Nvfp4Weight:
    codes, block_scales, stored = tensors[codes_name], tensors["weight_scale"], tensors[global_name]
    if codes.dtype != torch.uint8 or codes.dim() != 2 or not codes.numel() or codes.shape[1] * 2 % BLOCK_SIZE:
        raise ValueError(f"{codes_name} is {_name(codes.dtype)} {list(codes.shape)}, expected uint8 [N, K / 2]")
    shape = (codes.shape[0], codes.shape[1] * 2 // BLOCK_SIZE)
    if block_scales.dtype != _FP8 or tuple(block_scales.shape) != shape:
        found = f"{_name(block_scales.dtype)} {list(block_scales.shape)}"
        raise ValueError(f"weight_scale is {found}, expected float8_e4m3fn {list(shape)}")
    _check_scales("weight_scale", block_scales.float(), may_be_zero=True)
    if stored.numel() != 1 or stored.dtype != torch.float32:
        raise ValueError(f"{global_name} is {_name(stored.dtype)} {list(stored.shape)}, expected one float32")
    _check_scales(global_name, stored)
    scale = stored.reshape(())
    return Nvfp4Weight(codes, block_scales, scale.reciprocal() if global_name == "weight_global_scale" else scale)


def _fp8(values: Tensor, stored: Tensor, name: str) -> Fp8Weight | Fp8BlockWeight:
    if values.dim() != 2 or not values.numel():
        raise ValueError(f"weight is {list(values.shape)}, expected [output, input], not empty")
    if not stored.is_floating_point() or stored.element_size() < 2:
        raise ValueError(f"{name} is {_name(stored.dtype)}, expected floating point")
    scales, (rows, columns) = stored.float(), values.shape
    _check_scales(name, scales)
    blocks = Fp8BlockWeight.scale_shape(rows, columns)
    if name == "weight_scale" and scales.numel() == 1:
        return Fp8Weight(values, scales.reshape(1).expand(rows).contiguous())
    if name == "weight_scale" and tuple(scales.shape) in {(rows,), (rows, 1)}:
        return Fp8Weight(values, scales.reshape(rows))
    if tuple(scales.shape) == blocks:
        return Fp8BlockWeight(values, scales)
    raise ValueError(f"{name} is {list(scales.shape)} for a weight {list(values.shape)}, expected {list(blocks)}")


def _check_scales(name: str, scales: Tensor, *, may_be_zero: bool = False) -> None:
    fits = scales.isfinite() & ((scales >= 0) if may_be_zero else (scales > 0))
    if not bool(fits.all()):
        raise ValueError(f"{name} holds what is no scale: NaN, infinite, negative or zero")


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
