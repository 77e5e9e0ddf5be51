"""How a product is cut into programs. No torch at run time but for the weight's type."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Final

from drafter_kernels.dispatch import next_power_of_2
from drafter_kernels.hopper import hopper_multiprocessors
from drafter_kernels.linear.reference import LinearWeight
from drafter_kernels.quantize import Fp8BlockWeight, Fp8Weight, PackedNvfp4, weight_shape

# Programs that keep a device of 132 multiprocessors reading, with two or three on each; or one with many steps ahead.
_ENOUGH_PROGRAMS: Final = 264
_ENOUGH_DEEP_PROGRAMS: Final = 132
_MAX_SPLIT: Final = 8
# Elements of x that fit the registers of a program of Hopper's kernels for one row.
_WAVE_COLUMNS: Final = 16_384


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


@dataclass(frozen=True)
class WavePlan(LinearPlan):
    """For one row of x on Hopper (`one_row/hopper`): `programs`, all running at once, share the weight's rows evenly.

    Each goes through its rows `block_rows` at a time, and through those in steps of block_columns (pairs of words for
    NVFP4), of which `steps_ahead` are under way.
    """

    programs: int = 0
    steps_ahead: int = 1
    max_registers: int = 255

    def options(self, num_out: int, columns: int) -> dict[str, Any]:
        """What a kernel is told of a weight with num_out rows of `columns` columns (pairs of words for NVFP4)."""
        is_one = -(-num_out // self.num_programs(num_out)) <= self.block_rows
        steps = -(-columns // self.block_columns)
        ahead = min(self.steps_ahead, steps) if is_one else self.steps_ahead
        return {"BN": self.block_rows, "AHEAD": ahead, "ONE_TILE": is_one}

    def num_programs(self, num_out: int) -> int:
        """Never one without a row."""
        return min(self.programs, num_out)


def plan_linear(
    weight: LinearWeight, batch: int, *, swiglu: bool = False, normed: bool = False, overlaps: bool = False
) -> LinearPlan:
    """The plan for `batch` rows of x: one for each bucket (1, 16, 32, 64, more), never for a live number of rows.

    K is cut into parts where the output alone makes too few programs; x is normalised first then. With `overlaps` the
    kernels that gain by it overlap: those in which all programs run at once, for one row of x on Hopper.
    """
    rows, columns = weight_shape(weight)
    num_out = rows // 2 if swiglu else rows
    if batch == 1 and (plan := _one_row_plan(weight, swiglu=swiglu, normed=normed, overlaps=overlaps)):
        return plan
    bucket = batch_bucket(batch)
    if isinstance(weight, PackedNvfp4):
        steps = 32 if bucket <= 32 else 16
        split = _split(num_out, 64, columns // 8, steps) if bucket <= 64 and not swiglu else 1
        return LinearPlan(64, min(bucket, 64), steps, split, 4, 3)
    is_wide = not isinstance(weight, Fp8Weight | Fp8BlockWeight) and weight.element_size() == 4
    if is_wide:
        return LinearPlan(64, min(bucket, 32), 32, 1, 4, 2)
    if bucket > 64:
        return LinearPlan(128, 128, 64, 1, 8, 3 if swiglu else 4, norms_first=normed)
    if bucket == 64 and not isinstance(weight, Fp8Weight | Fp8BlockWeight):
        return _plan_many(num_out, columns, swiglu=swiglu, normed=normed)
    steps = 128 if bucket == 16 else 64
    split = 1 if swiglu else _split(num_out, 64, columns, steps)
    # Up to 16 rows the norm is taken on the way, unless that would keep K whole where the output alone is too little.
    norms_first = normed and (bucket > 16 or split > 1)
    stages = 3 if swiglu else 4
    return LinearPlan(64, bucket, steps, split, 4, stages, norms_first=norms_first)


def _plan_many(num_out: int, columns: int, *, swiglu: bool, normed: bool) -> LinearPlan:
    """For 33 to 64 rows of x, weights of two bytes: steps of 16 kB, or 24 for SwiGLU, in about 100 kB of buffers."""
    split = 1 if swiglu else _split(num_out, 64, columns, 64, enough=_ENOUGH_DEEP_PROGRAMS)
    stages = 4 if swiglu else 7 if split > 1 else 6
    return LinearPlan(64, 64, 64, split, 4, stages, norms_first=normed)


def _one_row_plan(weight: LinearWeight, *, swiglu: bool, normed: bool, overlaps: bool) -> LinearPlan | None:
    """None where there is no kernel for one row of x."""
    if isinstance(weight, Fp8Weight | Fp8BlockWeight):
        return None
    device = weight.words.device if isinstance(weight, PackedNvfp4) else weight.device
    multiprocessors = hopper_multiprocessors(device)
    if multiprocessors:
        plan = _wave_plan(weight, multiprocessors, swiglu=swiglu, normed=normed, overlaps=overlaps)
        if plan:
            return plan
    return plan_portable(weight, swiglu=swiglu)


def _wave_plan(
    weight: LinearWeight, multiprocessors: int, *, swiglu: bool, normed: bool, overlaps: bool
) -> WavePlan | None:
    """None where there is no such kernel, and where x and the norm's scale do not fit the registers of a program."""
    rows, columns = weight_shape(weight)
    if next_power_of_2(columns) > _WAVE_COLUMNS // (2 if normed else 1):
        return None
    num_out = rows // 2 if swiglu else rows
    programs = 2 * multiprocessors
    if isinstance(weight, PackedNvfp4):
        if num_out <= 16 * programs or swiglu:
            steps = (64, 2 if swiglu else 6)
            return _wave(16, steps, 16, programs, 64, overlaps=overlaps)
        return _wave(32, (64, 2), 8, programs, 128, overlaps=overlaps)
    if isinstance(weight, Fp8Weight | Fp8BlockWeight) or weight.element_size() != 2:
        return None
    if num_out <= 8 * programs:
        return _wave(8, (256, 3 if swiglu else 6), 8, programs, 128, overlaps=overlaps)
    return _wave(16, (256, 3 if swiglu else 5), 8, programs, 128, overlaps=overlaps)


def _wave(
    block_rows: int, steps: tuple[int, int], num_warps: int, programs: int, max_registers: int, *, overlaps: bool
) -> WavePlan:
    """`steps`: their columns, and how many are under way. Two programs share a multiprocessor's registers."""
    return WavePlan(
        block_rows,
        1,
        steps[0],
        1,
        num_warps,
        1,
        overlaps,
        is_vector=True,
        programs=programs,
        steps_ahead=steps[1],
        max_registers=max_registers,
    )


def joined_waves(first: WavePlan, second: WavePlan, sizes: tuple[int, int]) -> tuple[WavePlan, WavePlan]:
    """The plans of an NVFP4 weight and of one of two bytes for a single launch, with `sizes` rows each.

    Programs of one tile, of about as many bytes in both, and small: those of a second wave begin when any is done.
    """
    tiles = [-(-size // rows) for size, rows in zip(sizes, (16, 8), strict=True)]
    return (
        replace(first, block_rows=16, num_warps=4, programs=tiles[0], steps_ahead=2, max_registers=128),
        replace(second, block_rows=8, num_warps=4, programs=tiles[1], steps_ahead=4, max_registers=128),
    )


def plan_portable(weight: LinearWeight, *, swiglu: bool = False) -> LinearPlan | None:
    """The plan for one row of x where Hopper's own kernels do not run; None where there is no such kernel.

    No tensor cores, and so no shared memory: as many programs on a multiprocessor as can be.
    """
    _, columns = weight_shape(weight)
    if isinstance(weight, PackedNvfp4):
        rows, block = 4 if swiglu else 8, min(256, next_power_of_2(columns // 16))
    elif isinstance(weight, Fp8Weight | Fp8BlockWeight) or weight.element_size() == 4:
        return None
    else:
        rows, block = 2 if swiglu else 4, min(1024, next_power_of_2(columns))
    return LinearPlan(rows, 1, block, 1, 4, 1, is_vector=True)


def batch_bucket(batch: int) -> int:
    """16, 32, 64, or 128 for any more rows of x."""
    return min(128, max(16, next_power_of_2(batch)))


def _split(num_out: int, block_rows: int, columns: int, block_columns: int, *, enough: int = _ENOUGH_PROGRAMS) -> int:
    """Parts of K: a power of two, with four steps or more in each."""
    tiles = -(-num_out // block_rows)
    split = 1
    while split < _MAX_SPLIT and 2 * split * tiles <= enough and columns // block_columns >= 4 * 2 * split:
        split *= 2
    return split
