"""The projections as they are used: rounded to what was asked for, once, at load."""

from torch import Tensor

from drafter_kernels.linear import LinearWeight
from drafter_kernels.quantize import pack_nvfp4, quantize_fp8, quantize_nvfp4
from drafter_service.heads.levers import BodyPrecision, is_rounded
from drafter_service.heads.projections import narrowed


def round_projection(weight: Tensor, role: str, precision: BodyPrecision, *, packed: bool = False) -> LinearWeight:
    """A projection [out, in] in that precision; others pass unchanged.

    `packed`: in as many bits as it has; else the same numbers in its own type again.
    """
    if not is_rounded(role, precision):
        return weight
    narrow = quantize_fp8(weight) if precision is BodyPrecision.FP8 else pack_nvfp4(quantize_nvfp4(weight))
    return narrow if packed else narrowed(narrow, weight.dtype)
