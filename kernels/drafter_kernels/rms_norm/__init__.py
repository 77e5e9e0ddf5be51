"""RMSNorm of rows in float32, alone or as the first step of another operation."""

from drafter_kernels.rms_norm.op import rms_norm
from drafter_kernels.rms_norm.reference import RowNorm, rms_norm_reference

__all__ = ["RowNorm", "rms_norm", "rms_norm_reference"]
