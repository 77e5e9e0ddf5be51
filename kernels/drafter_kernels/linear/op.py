"""Projections as they are called: checks, the choice of the implementation, and the launches."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_aligned,
    check_shape,
    check_tensor,
    is_interpreted,
    launch_options,
    uses_triton,
)
from drafter_kernels.linear.plan import LinearPlan, WavePlan, plan_linear
from drafter_kernels.linear.reference import InputNorm, LinearWeight, PackedRows, linear_reference
from drafter_kernels.linear.waves import launch_wave
from drafter_kernels.quantize import FP8_BLOCK_SIZE, Fp8BlockWeight, Fp8Weight, PackedNvfp4, weight_shape
from drafter_kernels.rms_norm import RowNorm
from drafter_kernels.rms_norm.op import Packing, launch_rms_norm


class LinearWorkspace:
    """Parts of sums, their counters, and rows packed for NVFP4, for the largest of several calls; allocated once.

    A workspace serves one call at a time: calls on one stream may share it.

    Args:
        needs: (plan, rows of x, N, K) of every call that it shall serve.
        device: where.
    """

    def __init__(self, needs: Iterable[tuple[LinearPlan, int, int, int]], device: torch.device) -> None:
        needs = list(needs)
        tiles = [(plan.num_tiles(batch, num_out), plan) for plan, batch, num_out, _ in needs if plan.split > 1]
        sums = [count * plan.split * plan.block_rows * plan.block_batch for count, plan in tiles]
        self.partials = torch.empty(max(sums, default=0), dtype=torch.float32, device=device)
        self.counters = torch.zeros(max((count for count, _ in tiles), default=0), dtype=torch.int32, device=device)
        packed = max((batch * columns for _, batch, _, columns in needs), default=0)
        self.packed = torch.empty(packed, dtype=torch.bfloat16, device=device)
        self.normed = torch.empty(packed, dtype=torch.bfloat16, device=device)


def linear(
    x: Tensor | PackedRows,
    weight: LinearWeight,
    out: Tensor | PackedRows,
    workspace: LinearWorkspace | None = None,
    *,
    norm: InputNorm | None = None,
    swiglu: bool = False,
    gate: Tensor | None = None,
    residual: Tensor | None = None,
    row_count: Tensor | None = None,
    plan: LinearPlan | None = None,
    backend: Backend | None = None,
) -> None:
    """out = residual + sigmoid(gate) * (silu(a) * b, or a), where a (and b) = RMSNorm(x) weight^T; None is left out.

    x [M, K], M >= 1; weight [N, K], or [2 N, K] with `swiglu`: rows of a, then rows of b. out [M, N], which must not
    share memory with x but may with residual [M, N]. gate [M, N] or [M, 1]. row_count int32 [1] on the device: rows
    of out from there on keep what they hold. Packed rows go with NVFP4 weights: what the next such product takes.
    Sums are float32.

    `workspace` is needed by the kernels for NVFP4 and where the plan splits K; its counters are zero between calls.
    Nothing is allocated and nothing read back: the call can be captured in a graph. Raises ValueError naming what
    does not fit.
    """
    batch, num_out = _check(x, weight, out, swiglu=swiglu)
    _check_rest(batch, num_out, weight, norm, gate, residual, row_count)
    if not uses_triton(_data(out), backend):
        value = linear_reference(_rows(x), weight, norm=norm, swiglu=swiglu, gate=gate, residual=residual)
        _put(value, out, row_count)
        return
    plan = plan or plan_linear(weight, batch, swiglu=swiglu, normed=norm is not None)
    if workspace is None:
        workspace = LinearWorkspace([], _data(out).device)
    if plan.split > 1 and len(workspace.counters) < plan.num_tiles(batch, num_out):
        raise ValueError("linear: the workspace is too small for this call")
    options = _epilogue(out, swiglu=swiglu, gate=gate, residual=residual, row_count=row_count)
    check_aligned(out=_data(out)[:1], x=_data(x), gate=gate, residual=residual)
    if isinstance(plan, WavePlan):
        launch_wave(x, _one_row_weight(x, weight, plan), num_out, norm, plan, options)
        return
    options |= {"OUT_STRIDE": _row_stride(out), "N": num_out, "BN": plan.block_rows, "BK": plan.block_columns}
    options |= {"num_warps": plan.num_warps, "num_stages": plan.num_stages, **launch_options(overlaps=plan.overlaps)}
    if plan.is_vector:
        _launch_vector(x, weight, norm, plan, options)
        return
    if norm is not None and isinstance(x, Tensor) and not isinstance(weight, PackedNvfp4):
        x, norm = _normed(x, workspace, norm, plan)
    parts = {"partials": workspace.partials, "counters": workspace.counters} if plan.split > 1 else {}
    options |= {"partials": _data(out), "counters": _data(out), "SPLIT": plan.split} | parts
    _launch(x, weight, workspace, norm, plan, options | {"M": batch, "BM": plan.block_batch})


def _epilogue(
    out: Tensor | PackedRows,
    *,
    swiglu: bool,
    gate: Tensor | None,
    residual: Tensor | None,
    row_count: Tensor | None,
) -> dict[str, Any]:
    """What all kernels are told of what follows the product. What is absent is not read: any tensor stands for it."""
    target = _data(out)
    return {
        "gate": target if gate is None else gate,
        "residual": target if residual is None else residual,
        "out": target,
        "row_count": target if row_count is None else row_count,
        "GATE_COLUMNS": 0 if gate is None else min(gate.shape[1], 2),
        "HAS_RESIDUAL": residual is not None,
        "SWIGLU": swiglu,
        "PACKED_OUT": isinstance(out, PackedRows),
        "HAS_COUNT": row_count is not None,
    }


def _row_stride(out: Tensor | PackedRows) -> int:
    return out.stride(0) if isinstance(out, Tensor) and len(out) > 1 else _data(out)[0].numel()


def _one_row_weight(x: Tensor | PackedRows, weight: LinearWeight, plan: LinearPlan) -> Tensor | PackedNvfp4:
    """Raises ValueError where the kernels for one row do not fit."""
    if len(_data(x)) != 1 or isinstance(weight, Fp8Weight | Fp8BlockWeight) or plan.split != 1:
        raise ValueError("linear: a plan for one row, and bf16 or NVFP4 weights")
    return weight


def _launch_vector(
    x: Tensor | PackedRows, weight: LinearWeight, norm: InputNorm | None, plan: LinearPlan, options: dict[str, Any]
) -> None:
    """The kernels for one row of x that run anywhere."""
    from drafter_kernels.linear.one_row import kernel

    weight = _one_row_weight(x, weight, plan)
    grid = (plan.num_tiles(1, options["N"]),)
    options |= {
        "x": _data(x),
        "norm": _data(x) if norm is None else norm.scale,
        "eps": 0.0 if norm is None else norm.epsilon,
        "HAS_NORM": norm is not None,
    }
    if isinstance(weight, PackedNvfp4):
        kernel.nvfp4_row_kernel[grid](
            words=weight.words,
            block_scales=weight.block_scales,
            tensor_scale=weight.tensor_scale,
            zero=0,
            KW=weight.words.shape[1],
            PACKED_X=isinstance(x, PackedRows),
            PTX=not is_interpreted(),
            **options,
        )
        return
    kernel.dense_row_kernel[grid](weight=weight, K=weight.shape[1], **options)


def _launch(  # noqa: PLR0917  # what the launches of the two kernels are made of
    x: Tensor | PackedRows,
    weight: LinearWeight,
    workspace: LinearWorkspace,
    norm: InputNorm | None,
    plan: LinearPlan,
    options: dict[str, Any],
) -> None:
    from drafter_kernels.linear import kernel
    from drafter_kernels.rms_norm.kernel import dot_type

    grid = (plan.num_tiles(options["M"], options["N"]), plan.split)
    if isinstance(weight, PackedNvfp4):
        packed = x.values if isinstance(x, PackedRows) else _pack(x, workspace, norm, plan)
        kernel.nvfp4_kernel[grid](
            packed,
            weight.words,
            weight.block_scales,
            weight.tensor_scale,
            KW=weight.words.shape[1],
            DOT=dot_type(torch.bfloat16, interpreted=is_interpreted()),
            PTX=not is_interpreted(),
            **options,
        )
        return
    assert isinstance(x, Tensor)
    values, scales, kind = _dense_parts(weight)
    kernel.dense_kernel[grid](
        x,
        values,
        x if scales is None else scales,
        x if norm is None else norm.scale,
        eps=0.0 if norm is None else norm.epsilon,
        K=values.shape[1],
        SCALES=kind,
        HAS_NORM=norm is not None,
        DOT=dot_type(values.dtype, interpreted=is_interpreted()),
        **options,
    )


def _normed(
    x: Tensor, workspace: LinearWorkspace, norm: InputNorm, plan: LinearPlan
) -> tuple[Tensor, InputNorm | None]:
    """x and the norm that is left to the product: with `norms_first` none, and x normalised in the workspace."""
    if not plan.norms_first:
        if plan.split > 1:
            raise ValueError("linear: parts of K do not know the norm of x")
        return x, norm
    if workspace.normed.numel() < x.numel():
        raise ValueError("linear: the workspace is too small for this call")
    normed = workspace.normed[: x.numel()].view(x.shape)
    launch_rms_norm(x, RowNorm(norm.scale, norm.epsilon, normed), overlaps=plan.overlaps)
    return normed, None


def _pack(x: Tensor, workspace: LinearWorkspace, norm: InputNorm | None, plan: LinearPlan) -> Tensor:
    """x, normalised if there is a norm, as the NVFP4 kernel takes it."""
    if workspace.packed.numel() < x.numel():
        raise ValueError("linear: the workspace is too small for this call")
    normed = workspace.normed[: x.numel()].view(x.shape)
    row_norm = None if norm is None else RowNorm(norm.scale, norm.epsilon, normed)
    launch_rms_norm(x, row_norm, packing=Packing.BFLOAT16, packed=workspace.packed, overlaps=plan.overlaps)
    return workspace.packed


def _dense_parts(weight: Tensor | Fp8Weight | Fp8BlockWeight) -> tuple[Tensor, Tensor | None, int]:
    """Values, scales, and what the kernel calls their kind."""
    match weight:
        case Fp8Weight():
            return weight.values, weight.row_scales, 1
        case Fp8BlockWeight():
            return weight.values, weight.block_scales, 2
        case _:
            return weight, None, 0


def _put(value: Tensor, out: Tensor | PackedRows, row_count: Tensor | None) -> None:
    """Writes the reference's rows, those below the count."""
    count = len(value) if row_count is None else int(row_count)
    if isinstance(out, PackedRows):
        out.values[:count] = PackedRows.pack(value[:count]).values.to(out.values.dtype)
    else:
        out[:count] = value[:count].to(out.dtype)


def _data(rows: Tensor | PackedRows) -> Tensor:
    return rows.values if isinstance(rows, PackedRows) else rows


def _rows(x: Tensor | PackedRows) -> Tensor:
    return x.unpack() if isinstance(x, PackedRows) else x


def _rows_shape(rows: Tensor | PackedRows) -> tuple[int, int]:
    return len(_data(rows)), _data(rows)[0].numel()


def _check(x: Tensor | PackedRows, weight: LinearWeight, out: Tensor | PackedRows, *, swiglu: bool) -> tuple[int, int]:
    """Rows of x and N. Raises ValueError."""
    rows, columns = weight_shape(weight)
    if swiglu and rows % 2:
        raise ValueError(f"linear: SwiGLU needs an even number of rows, not {rows}")
    batch, num_out = _rows_shape(x)[0], rows // 2 if swiglu else rows
    if _rows_shape(x) != (batch, columns):
        raise ValueError(f"x has {_rows_shape(x)[1]} columns, expected {columns}")
    if _rows_shape(out) != (batch, num_out):
        raise ValueError(f"out is {list(_rows_shape(out))}, expected {[batch, num_out]}")
    if isinstance(out, Tensor) and out.stride(1) != 1:
        raise ValueError("out is not dense in its last dimension")
    if isinstance(weight, PackedNvfp4):
        return batch, num_out
    if isinstance(x, PackedRows):
        raise ValueError("linear: packed rows go with NVFP4 weights")  # noqa: TRY004  # one kind of error for all
    if isinstance(weight, Fp8BlockWeight):
        check_shape("block_scales", weight.block_scales, *Fp8BlockWeight.scale_shape(rows, columns))
        if swiglu and num_out % FP8_BLOCK_SIZE:
            raise ValueError(f"linear: SwiGLU in blocks needs halves of a multiple of {FP8_BLOCK_SIZE}, not {num_out}")
    return batch, num_out


def _check_rest(  # noqa: PLR0917  # in the order of the call
    batch: int,
    num_out: int,
    weight: LinearWeight,
    norm: InputNorm | None,
    gate: Tensor | None,
    residual: Tensor | None,
    row_count: Tensor | None,
) -> None:
    if norm is not None:
        check_tensor("norm.scale", norm.scale, torch.float32, weight_shape(weight)[1])
    if gate is not None and tuple(gate.shape) != (batch, 1):
        check_shape("gate", gate, batch, num_out)
    if residual is not None:
        check_shape("residual", residual, batch, num_out)
    if row_count is not None:
        check_tensor("row_count", row_count, torch.int32, 1)
