"""Between the projections and attention: head norms, rotary positions, and K and V into their pages."""

from drafter_kernels.qk_rope_write.op import qk_rope_write
from drafter_kernels.qk_rope_write.reference import HeadNorms, HeadShape, RopeTable, qk_rope_reference

__all__ = ["HeadNorms", "HeadShape", "RopeTable", "qk_rope_reference", "qk_rope_write"]
