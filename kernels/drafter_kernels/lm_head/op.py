"""The LM head as it is called: checks, the choice of the implementation, and the launches."""

from __future__ import annotations

from typing import Any, Final

import torch
from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_aligned,
    check_shape,
    check_tensor,
    is_interpreted,
    launch_options,
    next_power_of_2,
    uses_triton,
)
from drafter_kernels.lm_head.plan import (
    MAX_ROWS,
    HopperPlan,
    LmHeadPlan,
    plan_lm_head,
    weight_data,
)
from drafter_kernels.lm_head.reference import GrammarMasks, LmHeadWeight, lm_head_reference
from drafter_kernels.quantize import BLOCK_SIZE, Fp8Weight, PackedNvfp4, weight_shape
from drafter_kernels.rms_norm import RowNorm
from drafter_kernels.rms_norm.op import Packing, launch_rms_norm

_REDUCE_BLOCK: Final = 1024
# Words of a row that a warp multiplies at a time.
_HOPPER_WORDS: Final = 32
# One for each thread of the widest program.
_LEAST_PARTIALS: Final = 512


class LmHeadWorkspace:
    """What the two stages and the packing of x need on the device, for up to `max_batch` rows of x; allocated once.

    A workspace serves one call at a time: calls on one stream may share it. Its counter is zero between calls.
    """

    def __init__(self, weight: LmHeadWeight, max_batch: int, plans: tuple[LmHeadPlan, ...] | None = None) -> None:
        if not 1 <= max_batch <= MAX_ROWS:
            raise ValueError(f"an LM head takes 1 to {MAX_ROWS} rows, not {max_batch}")
        rows, columns = weight_shape(weight)
        device = weight_data(weight).device
        plans = plans or tuple(plan_lm_head(weight, batch) for batch in (1, 8, 16, 32, max_batch))
        plans += tuple(plan.with_masks() for plan in plans if isinstance(plan, HopperPlan))
        programs = max(plan.num_programs(rows) for plan in plans)
        self.max_batch = max_batch
        self.num_programs = programs
        self.partials = torch.empty(2 * max_batch * programs, dtype=torch.float32, device=device)
        self.partial_rows = torch.empty(max_batch * programs, dtype=torch.int32, device=device)
        self.counter = torch.zeros(1, dtype=torch.int32, device=device)
        is_packed = isinstance(weight, PackedNvfp4 | Fp8Weight)
        self.packed = torch.empty(max_batch * columns if is_packed else 0, dtype=torch.float16, device=device)
        self.row_scales = torch.empty(max_batch, dtype=torch.float32, device=device)


def lm_head(
    x: Tensor,
    weight: LmHeadWeight,
    out_ids: Tensor,
    out_logprobs: Tensor,
    workspace: LmHeadWorkspace | None = None,
    *,
    num_rows: int | None = None,
    norm: RowNorm | None = None,
    draft_ids: Tensor | None = None,
    masks: GrammarMasks | None = None,
    plan: LmHeadPlan | None = None,
    backend: Backend | None = None,
) -> None:
    """The best id of each row and its natural log-probability, over what may be drafted; the logits are never stored.

    x [M, K], 1 <= M <= 64, float32, float16 or bfloat16. weight [N, K]; of it only the first `num_rows` rows count
    (padding behind them never wins). out_ids int64 [M], out_logprobs float32 [M]. draft_ids int32 [N]: the target id
    of each row, ascending; None = row i is id i. Of equal logits the lowest id wins; NaN never wins and has no share
    in the normaliser; infinity counts as the largest number. Where the mask allows nothing, or no allowed logit is a
    number, the id is -1 and the log-probability -infinity. Rows of x beyond the batch in use cost nothing and may
    hold anything: no row reads another.

    `workspace` is needed by the kernels alone. Nothing is allocated, nothing is read back: the call can be captured
    in a graph. Raises ValueError naming what does not fit.
    """
    count = weight_shape(weight)[0] if num_rows is None else num_rows
    _check(x, weight=weight, out_ids=out_ids, out_logprobs=out_logprobs, count=count, norm=norm)
    _check_choice(weight, out_ids, draft_ids, masks)
    if not uses_triton(x, backend):
        ids, logprobs = lm_head_reference(x, weight, num_rows=count, norm=norm, draft_ids=draft_ids, masks=masks)
        out_ids.copy_(ids)
        out_logprobs.copy_(logprobs)
        return
    plan = plan or plan_lm_head(weight, len(x))
    if masks is not None and isinstance(plan, HopperPlan):
        plan = plan.with_masks()
    programs = plan.num_programs(count)
    if workspace is None or len(x) > workspace.max_batch or programs > workspace.num_programs:
        raise ValueError(f"lm_head: no workspace for {len(x)} rows of x and {programs} programs")
    check_aligned(x=x, weight=weight_data(weight))
    options = _first_stage_options(workspace, count, draft_ids, masks, plan)
    if isinstance(plan, HopperPlan) and plan.is_vector:
        assert isinstance(weight, PackedNvfp4)
        options |= {"out_ids": out_ids, "out_logprobs": out_logprobs, "counter": workspace.counter}
        _only_stage(x, weight, norm, plan, options, programs)
        return
    _prepare(x, weight, workspace, norm, plan)
    options["row_scales"] = workspace.row_scales
    _first_stage(x if norm is None else norm.out, weight, workspace, plan, options, (programs,))
    _second_stage(out_ids, out_logprobs, workspace, draft_ids, programs, overlaps=plan.overlaps)


def _prepare(
    x: Tensor, weight: LmHeadWeight, workspace: LmHeadWorkspace, norm: RowNorm | None, plan: LmHeadPlan
) -> None:
    packing = _packing(weight, plan)
    if packing is not Packing.NONE or norm is not None:
        launch_rms_norm(
            x,
            norm,
            packing=packing,
            packed=workspace.packed,
            row_scales=workspace.row_scales,
            overlaps=plan.overlaps,
        )


def _packing(weight: LmHeadWeight, plan: LmHeadPlan) -> Packing:
    """How the first stage takes x."""
    if isinstance(weight, Fp8Weight):
        return Packing.ROWS
    if not isinstance(weight, PackedNvfp4):
        return Packing.NONE
    if plan.is_vector:
        return Packing.PAIRS
    return Packing.FRAGMENTS if isinstance(plan, HopperPlan) else Packing.ELEMENTS


def _first_stage_options(
    workspace: LmHeadWorkspace, count: int, draft_ids: Tensor | None, masks: GrammarMasks | None, plan: LmHeadPlan
) -> dict[str, Any]:
    """What all kernels of the first stage take."""
    placeholder = workspace.partial_rows
    return {
        "draft_ids": placeholder if draft_ids is None else draft_ids,
        "masks": placeholder if masks is None else masks.words,
        "mask_index": placeholder if masks is None else masks.rows,
        "partials": workspace.partials,
        "partial_rows": workspace.partial_rows,
        "num_rows": count,
        "mask_words": 0 if masks is None else masks.words.shape[1],
        "HAS_IDS": draft_ids is not None,
        "HAS_MASK": masks is not None,
        "BN": plan.block_rows,
        "num_warps": plan.num_warps,
        "num_stages": plan.num_stages,
        **launch_options(overlaps=plan.overlaps),
    }


def _first_stage(  # noqa: PLR0917  # what the launches of the kernels are made of
    x: Tensor,
    weight: LmHeadWeight,
    workspace: LmHeadWorkspace,
    plan: LmHeadPlan,
    options: dict[str, Any],
    grid: tuple[int],
) -> None:
    bucket = {"M": len(x), "BM": plan.bucket(len(x))}
    if not isinstance(weight, PackedNvfp4):
        _dense_stage(x, weight, workspace, options | bucket | {"BK": plan.block_columns}, grid)
        return
    assert len(x) == 1 or not plan.is_vector
    options |= _scales(weight)
    if isinstance(plan, HopperPlan):
        from drafter_kernels.lm_head.hopper.kernel import stream_kernel

        steps = {
            "NSUB": plan.block_columns // _HOPPER_WORDS,
            "KW": weight.words.shape[1],
            "maxnreg": plan.max_registers,
        }
        boxes = _boxes(workspace, weight, plan, **bucket)
        stream_kernel[grid](workspace.packed, words=weight.words, **options | bucket | steps | boxes)
        return
    from drafter_kernels.lm_head import kernel

    options |= {"words": weight.words, "KW": weight.words.shape[1], "BK": plan.block_columns}
    options["PTX"] = not is_interpreted()
    if plan.is_vector:
        kernel.nvfp4_vector_kernel[grid](workspace.packed.view(torch.int32), TILES=plan.tiles, **options)
    else:
        kernel.nvfp4_kernel[grid](workspace.packed, **bucket, **options)


def _boxes(workspace: LmHeadWorkspace, weight: PackedNvfp4, plan: HopperPlan, M: int, BM: int) -> dict[str, Any]:
    """Packed x, words and scales with the boxes of them that a step copies; or what stands for them."""
    words, scales = weight.words, weight.block_scales
    if not plan.has_two_parts:
        return {"x_boxes": workspace.packed, "word_boxes": words, "scale_boxes": scales}
    from triton.experimental.gluon import language as gl
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

    check_aligned(block_scales=scales)
    rows, columns = plan.block_rows, 2 * words.shape[1]
    packed = workspace.packed[: M * 4 * columns].view(M, 4, columns).transpose(0, 1)
    return {
        "x_boxes": TensorDescriptor.from_tensor(packed, [4, BM, 64], gl.NVMMASharedLayout(128, 16, 3)),
        "word_boxes": TensorDescriptor.from_tensor(words, [rows, 32], gl.NVMMASharedLayout(128, 32)),
        "scale_boxes": TensorDescriptor.from_tensor(scales, [rows, 16], gl.NVMMASharedLayout(0, 8)),
    }


def _only_stage(  # noqa: PLR0917  # what the launch is made of
    x: Tensor,
    weight: PackedNvfp4,
    norm: RowNorm | None,
    plan: HopperPlan,
    options: dict[str, Any],
    programs: int,
) -> None:
    """For one row of x: each program does what `_prepare` would, and the last one what the second stage would."""
    from drafter_kernels.lm_head.hopper.kernel import vector_kernel

    assert len(x) == 1
    vector_kernel[(programs,)](
        x,
        x if norm is None else norm.scale,
        x if norm is None else norm.out,
        0.0 if norm is None else norm.epsilon,
        words=weight.words.view(torch.int64),
        PAIRS=weight.words.shape[1] // 2,
        HAS_NORM=norm is not None,
        BLOCK=max(_LEAST_PARTIALS, next_power_of_2(plan.programs)),
        maxnreg=plan.max_registers,
        **options,
        **_scales(weight),
    )


def _scales(weight: PackedNvfp4) -> dict[str, Tensor]:
    return {"block_scales": weight.block_scales, "tensor_scale": weight.tensor_scale}


def _dense_stage(
    x: Tensor,
    weight: Tensor | Fp8Weight,
    workspace: LmHeadWorkspace,
    options: dict[str, Any],
    grid: tuple[int],
) -> None:
    from drafter_kernels.lm_head.kernel import dense_kernel
    from drafter_kernels.rms_norm.kernel import dot_type

    is_fp8 = isinstance(weight, Fp8Weight)
    values = weight.values if isinstance(weight, Fp8Weight) else weight
    dense_kernel[grid](
        workspace.packed if is_fp8 else x,
        values,
        weight.row_scales if isinstance(weight, Fp8Weight) else x,
        K=values.shape[1],
        HAS_SCALES=is_fp8,
        DOT=dot_type(torch.float16 if is_fp8 else values.dtype, interpreted=is_interpreted()),
        **options,
    )


def _second_stage(
    out_ids: Tensor,
    out_logprobs: Tensor,
    workspace: LmHeadWorkspace,
    draft_ids: Tensor | None,
    num_programs: int,
    *,
    overlaps: bool,
) -> None:
    from drafter_kernels.lm_head.kernel import reduce_kernel

    reduce_kernel[(len(out_ids),)](
        workspace.partials,
        workspace.partial_rows,
        workspace.partial_rows if draft_ids is None else draft_ids,
        out_ids,
        out_logprobs,
        num_programs,
        len(out_ids),
        HAS_IDS=draft_ids is not None,
        BLOCK=_REDUCE_BLOCK,
        num_warps=4,
        **launch_options(overlaps=overlaps),
    )


def _check(
    x: Tensor, *, weight: LmHeadWeight, out_ids: Tensor, out_logprobs: Tensor, count: int, norm: RowNorm | None
) -> None:
    rows, columns = weight_shape(weight)
    batch = len(x)
    if not 1 <= batch <= MAX_ROWS:
        raise ValueError(f"lm_head: x has {batch} rows, expected 1 to {MAX_ROWS}")
    if not 1 <= count <= rows:
        raise ValueError(f"lm_head: {count} rows of a weight that has {rows}")
    if isinstance(weight, PackedNvfp4) and columns % BLOCK_SIZE:
        raise ValueError(f"lm_head: K = {columns} is not a multiple of {BLOCK_SIZE}")
    check_shape("x", x, batch, columns)
    check_tensor("out_ids", out_ids, torch.int64, batch)
    check_tensor("out_logprobs", out_logprobs, torch.float32, batch)
    if norm is not None:
        check_tensor("norm.scale", norm.scale, torch.float32, columns)
        check_shape("norm.out", norm.out, batch, columns)


def _check_choice(weight: LmHeadWeight, out_ids: Tensor, draft_ids: Tensor | None, masks: GrammarMasks | None) -> None:
    if draft_ids is not None:
        check_tensor("draft_ids", draft_ids, torch.int32, weight_shape(weight)[0])
    if masks is not None:
        check_tensor("masks.words", masks.words, torch.int32, *masks.words.shape[:2])
        check_tensor("masks.rows", masks.rows, torch.int32, len(out_ids))
