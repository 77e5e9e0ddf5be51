"""Launches of the kernels for one row of x on Hopper."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from drafter_kernels.dispatch import launch_options
from drafter_kernels.fuse_pair import PairNorms
from drafter_kernels.linear.plan import WavePlan, joined_waves
from drafter_kernels.linear.reference import InputNorm, PackedRows
from drafter_kernels.quantize import PackedNvfp4


def launch_wave(  # noqa: PLR0917  # what the launches of both kernels are made of
    x: Tensor | PackedRows,
    weight: Tensor | PackedNvfp4,
    num_out: int,
    norm: InputNorm | None,
    plan: WavePlan,
    epilogue: dict[str, Any],
) -> None:
    """One product; `epilogue` is what the kernels are told of what follows it."""
    from drafter_kernels.linear.one_row.hopper.kernel import dense_wave_kernel, nvfp4_wave_kernel

    grid = (plan.num_programs(num_out),)
    values = x.values if isinstance(x, PackedRows) else x
    options = {"x": values, "N": num_out, **_norm_options(values, norm), **epilogue, **_launch_options(plan)}
    if isinstance(weight, PackedNvfp4):
        words = _pairs(weight)
        nvfp4_wave_kernel[grid](
            words=words,
            block_scales=weight.block_scales,
            tensor_scale=weight.tensor_scale,
            KW=2 * words.shape[1],
            PACKED_X=isinstance(x, PackedRows),
            **plan.options(num_out, words.shape[1]),
            **options,
        )
        return
    columns = weight.shape[1]
    dense_wave_kernel[grid](weight=weight, K=columns, **plan.options(num_out, columns), **options)


def launch_joined_wave(  # noqa: PLR0917  # in the order of the call
    x: Tensor,
    first: PackedNvfp4,
    second: Tensor,
    out: Tensor,
    norm: InputNorm | None,
    row_count: Tensor | None,
    plans: tuple[WavePlan, WavePlan],
) -> None:
    """Both products side by side, by the plans of each alone."""
    from drafter_kernels.linear.one_row.hopper.kernel import joined_wave_kernel

    words = _pairs(first)
    sizes, columns = (len(words), len(second)), second.shape[1]
    plans = joined_waves(*plans, sizes)
    shares = [plan.num_programs(size) for plan, size in zip(plans, sizes, strict=True)]
    own = plans[0].options(sizes[0], words.shape[1])
    other = plans[1].options(sizes[1], columns)
    joined_wave_kernel[(sum(shares),)](
        x=x,
        words=words,
        block_scales=first.block_scales,
        tensor_scale=first.tensor_scale,
        weight=second,
        out=out,
        row_count=out if row_count is None else row_count,
        N=sizes[0],
        KW=2 * words.shape[1],
        N2=sizes[1],
        HAS_COUNT=row_count is not None,
        FIRST=shares[0],
        SECOND=shares[1],
        **own,
        **{f"{name}2": value for name, value in other.items()},
        **_norm_options(x, norm),
        **_launch_options(plans[0]),
    )


def launch_pair_wave(  # noqa: PLR0917  # in the order of the call
    pair: tuple[Tensor, Tensor, Tensor],
    norms: PairNorms,
    weight: Tensor,
    out: Tensor,
    row_count: Tensor | None,
    plan: WavePlan,
    *,
    hidden_first: bool,
) -> None:
    """A pair and its product."""
    from drafter_kernels.linear.one_row.hopper.kernel import pair_wave_kernel

    tokens, embedding, hiddens = pair
    pair_wave_kernel[(plan.num_programs(len(weight)),)](
        *pair,
        norms.embedding,
        norms.hidden,
        weight,
        out,
        tokens if row_count is None else row_count,
        norms.epsilon,
        N=len(weight),
        H=embedding.shape[1],
        W=hiddens.shape[1],
        HIDDEN_FIRST=hidden_first,
        HAS_COUNT=row_count is not None,
        **plan.options(*weight.shape),
        **_launch_options(plan),
    )


def _pairs(weight: PackedNvfp4) -> Tensor:
    """Words, two and two."""
    return weight.words.view(torch.int64)


def _norm_options(x: Tensor, norm: InputNorm | None) -> dict[str, Any]:
    if norm is None:
        return {"norm": x, "eps": 0.0, "HAS_NORM": False}
    return {"norm": norm.scale, "eps": norm.epsilon, "HAS_NORM": True}


def _launch_options(plan: WavePlan) -> dict[str, Any]:
    registers = {"num_warps": plan.num_warps, "maxnreg": plan.max_registers}
    return registers | launch_options(overlaps=plan.overlaps)
