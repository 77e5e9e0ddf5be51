"""Projections of few rows: weights in bf16, FP8 or NVFP4, read once; norm, gate, SwiGLU and residual come along."""

from drafter_kernels.linear.joined import linear_joined, pair_linear
from drafter_kernels.linear.op import LinearWorkspace, linear
from drafter_kernels.linear.plan import LinearPlan, plan_linear
from drafter_kernels.linear.reference import InputNorm, LinearWeight, PackedRows, linear_reference

__all__ = [
    "InputNorm",
    "LinearPlan",
    "LinearWeight",
    "LinearWorkspace",
    "PackedRows",
    "linear",
    "linear_joined",
    "linear_reference",
    "pair_linear",
    "plan_linear",
]
