"""Attention of one query row per sequence over K/V rows kept in pages."""

from drafter_kernels.paged_attention.reference import paged_attention

__all__ = ["paged_attention"]
