"""Attention of one query row per sequence over K/V rows kept in pages."""

from drafter_kernels.paged_attention.op import (
    AttentionPlan,
    AttentionWorkspace,
    paged_attention_into,
    plan_attention,
    projected_attention_into,
)
from drafter_kernels.paged_attention.reference import paged_attention

__all__ = [
    "AttentionPlan",
    "AttentionWorkspace",
    "paged_attention",
    "paged_attention_into",
    "plan_attention",
    "projected_attention_into",
]
