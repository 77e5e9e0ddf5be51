"""How the LM head's first stage is cut into programs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from torch import Tensor

from drafter_kernels.dispatch import next_power_of_2
from drafter_kernels.hopper import HOPPER_MULTIPROCESSORS, hopper_multiprocessors
from drafter_kernels.lm_head.reference import LmHeadWeight
from drafter_kernels.quantize import Fp8Weight, PackedNvfp4

MAX_ROWS: Final = 64
"""Rows of x that one call takes."""

# Columns (in words) whose x fits the registers of a warp, and the least that a warp reads at once.
_VECTOR_WORDS: Final = (128, 256, 512)
# Up to here a tile of the weight's rows has one part: three programs share a multiprocessor.
_FEW_ROWS: Final = 32
# As many as 128 registers a thread allow on a multiprocessor.
_ALL_WARPS: Final = 16


@dataclass(frozen=True)
class LmHeadPlan:
    """How the first stage is cut: rows of the weight a program, columns (words for NVFP4) a step, and Triton's options.

    `is_vector`: without tensor cores, for one row of x and NVFP4; then a program takes `tiles` tiles one after the
    other. `overlaps`: kernels start while the one before them drains (programmatic dependent launch).
    """

    block_rows: int
    block_columns: int
    num_warps: int
    num_stages: int
    is_vector: bool = False
    tiles: int = 1
    overlaps: bool = False

    def num_programs(self, num_rows: int) -> int:
        """Programs of the first stage."""
        return -(-num_rows // (self.block_rows * self.tiles))

    def bucket(self, batch: int) -> int:
        """Rows of x that kernels are compiled for."""
        return max(16, next_power_of_2(batch))


@dataclass(frozen=True)
class HopperPlan(LmHeadPlan):
    """The same for `lm_head/hopper`: `programs` share the tiles evenly. NVFP4 only.

    For several rows of x a tile has 16 rows of the weight a warp, or twice as many in two parts, in steps of 32 words.
    """

    programs: int = HOPPER_MULTIPROCESSORS
    max_registers: int = 255

    def num_programs(self, num_rows: int) -> int:
        """Programs of the first stage: never one without a tile."""
        return min(self.programs, super().num_programs(num_rows))

    def bucket(self, batch: int) -> int:
        """Rows of x that kernels are compiled for."""
        return max(8, next_power_of_2(batch))

    @property
    def has_two_parts(self) -> bool:
        """Whether both parts of a tile share a step's x."""
        return not self.is_vector and self.block_rows == 32 * self.num_warps

    def with_masks(self) -> HopperPlan:
        """The same where masks take registers that 16 warps on a multiprocessor do not have: there it is 12."""
        if not self.is_vector or self.num_warps < _ALL_WARPS:
            return self
        return HopperPlan(
            self.block_rows // 4,
            self.block_columns,
            self.num_warps // 4,
            self.num_stages,
            is_vector=True,
            overlaps=self.overlaps,
            programs=3 * self.programs,
            max_registers=168,
        )


def plan_lm_head(weight: LmHeadWeight, batch: int, *, overlaps: bool = False) -> LmHeadPlan:
    """The plan for `batch` rows of x: one for each kind of weight and bucket of the batch (1, 8, 16, 32 or 64 rows).

    With `overlaps` the kernels that gain by it overlap: those for one row, and Hopper's for more than 32.
    """
    plan = _plan_apart(weight, batch)
    gains = plan.is_vector or (isinstance(plan, HopperPlan) and batch > _FEW_ROWS)
    return replace(plan, overlaps=overlaps and gains)


def _plan_apart(weight: LmHeadWeight, batch: int) -> LmHeadPlan:
    if isinstance(weight, PackedNvfp4):
        multiprocessors = hopper_multiprocessors(weight.words.device)
        hopper = _plan_hopper(weight.words.shape[1], batch, multiprocessors) if multiprocessors else None
        return hopper or plan_portable(batch)
    if isinstance(weight, Fp8Weight):
        return LmHeadPlan(128, 128, 8, 3)
    if weight.element_size() == 4:
        return LmHeadPlan(64, 32, 4, 2)
    return LmHeadPlan(64, 128, 4, 4) if batch <= 16 else LmHeadPlan(128, 64, 4, 3)


def plan_portable(batch: int) -> LmHeadPlan:
    """The plan for NVFP4 where Hopper's own kernels do not run."""
    if batch == 1:
        return LmHeadPlan(4, 512, num_warps=4, num_stages=2, is_vector=True, tiles=8)
    return LmHeadPlan(64, 32, 4, 3) if batch <= 32 else LmHeadPlan(128, 16, 8, 3)


def _plan_hopper(words: int, batch: int, multiprocessors: int) -> HopperPlan | None:
    """None where a row of `words` words does not divide into an even number of steps."""
    if batch == 1 and words in _VECTOR_WORDS:
        return HopperPlan(32, words, 16, 1, is_vector=True, programs=multiprocessors, max_registers=128)
    if words % 128 == 0 and batch <= 16:
        # Three programs a multiprocessor, or two where x takes the registers of the third.
        if batch <= 8:
            return HopperPlan(64, 64, 4, 2, programs=3 * multiprocessors, max_registers=168)
        return HopperPlan(64, 64, 4, 2, programs=2 * multiprocessors, max_registers=248)
    if words % 64:
        return None
    if batch <= _FEW_ROWS:
        return HopperPlan(64, 32, 4, 2, programs=3 * multiprocessors, max_registers=168)
    return HopperPlan(128, 32, 4, 2, programs=2 * multiprocessors, max_registers=248)


def weight_data(weight: LmHeadWeight) -> Tensor:
    """The numbers themselves, as they are stored."""
    match weight:
        case PackedNvfp4():
            return weight.words
        case Fp8Weight():
            return weight.values
        case _:
            return weight
