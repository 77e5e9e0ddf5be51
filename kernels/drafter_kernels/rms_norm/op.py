"""RMSNorm as it is called."""

from enum import IntEnum

from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_aligned,
    check_shape,
    launch_options,
    next_power_of_2,
    uses_triton,
)
from drafter_kernels.rms_norm.reference import RowNorm, rms_norm_reference


class Packing(IntEnum):
    """How rows are laid out for narrow weights; words of NVFP4 hold 8 neighbours along K.

    PAIRS: float16 [M, 4, K / 8, 2], scaled; ELEMENTS: float16 [M, 8, K / 8], scaled by a power of two a row so that the
    largest is near 4096; BFLOAT16: bfloat16 [M, 8, K / 8] as it is; FRAGMENTS: as PAIRS, but of each 32 words the
    eighth parts turned, [M, 4, K / 256, 8, 4, 2]: words 0, 8, 16, 24, then 1, 9, 17, 25 and so on;
    ROWS: float16 [M, K], scaled.
    """

    NONE = 0
    PAIRS = 1
    ELEMENTS = 2
    BFLOAT16 = 3
    FRAGMENTS = 4
    ROWS = 5


def rms_norm(x: Tensor, norm: RowNorm, *, overlaps: bool = False, backend: Backend | None = None) -> None:
    """Writes norm.out [M, K], x [M, K] of any float type. Raises ValueError naming what does not fit."""
    check_shape("norm.scale", norm.scale, x.shape[1])
    check_shape("norm.out", norm.out, *x.shape)
    if not uses_triton(x, backend):
        norm.out.copy_(rms_norm_reference(x, norm.scale, norm.epsilon))
        return
    check_aligned(x=x, scale=norm.scale, out=norm.out)
    launch_rms_norm(x, norm, overlaps=overlaps)


def launch_rms_norm(
    x: Tensor,
    norm: RowNorm | None,
    *,
    packing: Packing = Packing.NONE,
    packed: Tensor | None = None,
    row_scales: Tensor | None = None,
    overlaps: bool = False,
) -> None:
    """Launches the kernel for rows x [M, K]: normalised if there is a norm, and packed into `packed` if asked for."""
    from drafter_kernels.rms_norm.kernel import rms_norm_kernel

    columns = x.shape[1]
    rms_norm_kernel[(len(x),)](
        x,
        x if norm is None else norm.scale,
        x if norm is None else norm.out,
        x if packed is None else packed,
        x if row_scales is None else row_scales,
        0.0 if norm is None else norm.epsilon,
        K=columns,
        HAS_NORM=norm is not None,
        PACKING=int(packing),
        BLOCK=next_power_of_2(columns),
        num_warps=8 if columns >= 2048 else 4,
        **launch_options(overlaps=overlaps),
    )
