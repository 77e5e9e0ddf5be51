"""The projections as they are used: rounded to what was asked for, once, at load."""

from torch import Tensor

from drafter_kernels.quantize import dequantize_fp8, dequantize_nvfp4, quantize_fp8, quantize_nvfp4
from drafter_service.heads.levers import BodyPrecision, is_rounded


def round_projection(weight: Tensor, role: str, precision: BodyPrecision) -> Tensor:
    """The numbers that a projection [out, in] has in that precision, in its own type again; others pass unchanged."""
    if not is_rounded(role, precision):
        return weight
    if precision is BodyPrecision.FP8:
        return dequantize_fp8(quantize_fp8(weight)).to(weight.dtype)
    return dequantize_nvfp4(quantize_nvfp4(weight)).to(weight.dtype)
