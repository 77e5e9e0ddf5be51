"""Weights in four and in eight bits: NVFP4 (E2M1 in blocks of 16) and FP8 (E4M3 with a scale a row or a block)."""

from drafter_kernels.quantize.packed import PackedNvfp4, pack_nvfp4, unpack_nvfp4
from drafter_kernels.quantize.reference import (
    BLOCK_SIZE,
    FP8_BLOCK_SIZE,
    Fp8BlockWeight,
    Fp8Weight,
    Nvfp4Weight,
    dequantize_fp8,
    dequantize_fp8_blocks,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    quantize_fp8,
    quantize_nvfp4,
)
from drafter_kernels.quantize.stored import read_stored_weight
from drafter_kernels.quantize.weights import Weight, weight_shape, widen

__all__ = [
    "BLOCK_SIZE",
    "FP8_BLOCK_SIZE",
    "Fp8BlockWeight",
    "Fp8Weight",
    "Nvfp4Weight",
    "PackedNvfp4",
    "Weight",
    "dequantize_fp8",
    "dequantize_fp8_blocks",
    "dequantize_nvfp4",
    "nvfp4_tensor_scale",
    "pack_nvfp4",
    "quantize_fp8",
    "quantize_nvfp4",
    "read_stored_weight",
    "unpack_nvfp4",
    "weight_shape",
    "widen",
]
