"""Weights in four and in eight bits: NVFP4 (E2M1 in blocks of 16) and FP8 (E4M3 with a scale a row)."""

from drafter_kernels.quantize.reference import (
    BLOCK_SIZE,
    Fp8Weight,
    Nvfp4Weight,
    dequantize_fp8,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    quantize_fp8,
    quantize_nvfp4,
)

__all__ = [
    "BLOCK_SIZE",
    "Fp8Weight",
    "Nvfp4Weight",
    "dequantize_fp8",
    "dequantize_nvfp4",
    "nvfp4_tensor_scale",
    "quantize_fp8",
    "quantize_nvfp4",
]
