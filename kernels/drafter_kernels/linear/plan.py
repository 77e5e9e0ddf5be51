"""How a product is cut into programs. No torch at run time but for the weight's type."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from drafter_kernels.dispatch import next_power_of_2
from drafter_kernels.linear.reference import LinearWeight
from drafter_kernels.quantize import Fp8BlockWeight, Fp8Weight, PackedNvfp4, weight_shape

# Programs that keep a device of 132 multiprocessors reading, with two or three on each.
_ENOUGH_PROGRAMS: Final = 264
_MAX_SPLIT: Final = 8


@dataclass(frozen=True)
class LinearPlan:
    """Rows of the weight, rows of x and columns (words for NVFP4) a step; parts of K; and Triton's options.

    `overlaps`: kernels start while the one before them drains (programmatic dependent launch). `is_vector`: the kernels
    for one row of x, whose block_columns count pairs of words for NVFP4. `norms_first`: rows of x are normalised by a
    kernel of their own.
    """

    block_rows: int
    block_batch: int
    block_columns: int
    split: int
    num_warps: int
    num_stages: int
    overlaps: bool = False
    is_vector: bool = False
    norms_first: bool = False

    def num_tiles(self, batch: int, num_out: int) -> int:
        """Tiles of the output."""
        return -(-batch // self.block_batch) * -(-num_out // self.block_rows)


def plan_linear(
    weight: LinearWeight, batch: int, *, swiglu: bool = False, normed: bool = False, overlaps: bool = False
) -> LinearPlan:
    """The plan for `batch` rows of x: one for each bucket (1, 16, 32, 64, more), never for a live number of rows.

    K is cut into parts where the output alone makes too few programs, and where nothing has to be known of all of x.
    """
    rows, columns = weight_shape(weight)
    num_out = rows // 2 if swiglu else rows
    if batch == 1 and (plan := _vector_plan(weight, swiglu=swiglu, overlaps=overlaps)):
        return plan
    bucket = batch_bucket(batch)
    if isinstance(weight, PackedNvfp4):
        steps = 32 if bucket <= 32 else 16
        split = _split(num_out, 64, columns // 8, steps) if bucket <= 64 and not swiglu else 1
        return LinearPlan(64, min(bucket, 64), steps, split, 4, 3, overlaps)
    is_wide = not isinstance(weight, Fp8Weight | Fp8BlockWeight) and weight.element_size() == 4
    if is_wide:
        return LinearPlan(64, min(bucket, 32), 32, 1, 4, 2, overlaps)
    norms_first = normed and bucket > 16
    if bucket > 64:
        return LinearPlan(128, 128, 64, 1, 8, 3 if swiglu else 4, overlaps, norms_first=norms_first)
    steps = 128 if bucket == 16 else 64
    split = 1 if swiglu or (normed and not norms_first) else _split(num_out, 64, columns, steps)
    stages = 3 if swiglu else 4
    return LinearPlan(64, bucket, steps, split, 4, stages, overlaps, norms_first=norms_first)


def _vector_plan(weight: LinearWeight, *, swiglu: bool, overlaps: bool) -> LinearPlan | None:
    """For one row of x: no tensor cores, and so no shared memory: as many programs on a multiprocessor as can be."""
    _, columns = weight_shape(weight)
    if isinstance(weight, PackedNvfp4):
        rows, block = 4 if swiglu else 8, min(256, next_power_of_2(columns // 16))
    elif isinstance(weight, Fp8Weight | Fp8BlockWeight) or weight.element_size() == 4:
        return None
    else:
        rows, block = 2 if swiglu else 4, min(1024, next_power_of_2(columns))
    return LinearPlan(rows, 1, block, 1, 4, 1, overlaps, is_vector=True)


def batch_bucket(batch: int) -> int:
    """16, 32, 64, or 128 for any more rows of x."""
    return min(128, max(16, next_power_of_2(batch)))


def _split(num_out: int, block_rows: int, columns: int, block_columns: int) -> int:
    """Parts of K: a power of two, with four steps or more in each."""
    tiles = -(-num_out // block_rows)
    split = 1
    while split < _MAX_SPLIT and 2 * split * tiles <= _ENOUGH_PROGRAMS and columns // block_columns >= 4 * 2 * split:
        split *= 2
    return split
