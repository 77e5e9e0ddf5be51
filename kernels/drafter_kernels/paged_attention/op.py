"""Paged attention as it is called."""

from __future__ import annotations

import math
from dataclasses import dataclass
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
from drafter_kernels.paged_attention.reference import paged_attention

_LOG2_E: Final = math.log2(math.e)
_MAX_PARTS: Final = 64
# Programs that keep a device of 132 multiprocessors reading.
_ENOUGH_PROGRAMS: Final = 264


@dataclass(frozen=True)
class AttentionPlan:
    """Into how many parts sequences are cut, rows a step, and Triton's options."""

    parts: int
    block_rows: int
    num_warps: int = 4
    num_stages: int = 2
    overlaps: bool = False


def plan_attention(batch: int, num_kv_heads: int, max_rows: int) -> AttentionPlan:
    """The plan for a batch and the longest possible sequence: how long sequences are now plays no part in it."""
    block = 64
    wanted = max(1, _ENOUGH_PROGRAMS // (batch * num_kv_heads))
    return AttentionPlan(min(_MAX_PARTS, next_power_of_2(wanted), next_power_of_2(-(-max_rows // block))), block)


class AttentionWorkspace:
    """The parts' sums on the device; serves one call at a time: calls on one stream may share it."""

    def __init__(self, batch: int, num_heads: int, head_dim: int, parts: int, device: torch.device) -> None:
        count = batch * num_heads * parts
        self.parts = torch.empty(count * head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(2 * count, dtype=torch.float32, device=device)


def paged_attention_into(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    row_counts: Tensor,
    scale: float,
    out: Tensor,
    workspace: AttentionWorkspace | None = None,
    *,
    gate: Tensor | None = None,
    packed_out: bool = False,
    plan: AttentionPlan | None = None,
    backend: Backend | None = None,
) -> None:
    """`paged_attention` into out [B, Hq, D], times sigmoid(gate) if there is one; what a graph can capture.

    q [B, Hq, D]; page_table int32 [B, max_pages]; row_counts int32 [B] on the device, where 0 means a padding row of
    the batch: its output is zeros. gate [B, Hq, D] may be a view whose last dimension is dense and whose rows are
    strided alike. `packed_out`: out holds, for each sequence, element k of Hq * D at [k % 8, k // 8], as `linear`
    takes packed rows. Nothing is allocated, nothing read back; `workspace` is needed by the kernels alone. Raises
    ValueError naming what does not fit.
    """
    batch, num_heads, _ = q.shape
    num_kv_heads = _check(q, k_pages, v_pages, page_table, row_counts, out, gate)
    if not uses_triton(q, backend):
        _run_reference(q, (k_pages, v_pages), page_table, row_counts, scale, out, gate, packed_out=packed_out)
        return
    plan = plan or plan_attention(batch, num_kv_heads, page_table.shape[1] * k_pages.shape[1])
    if workspace is None or workspace.sums.numel() < 2 * batch * num_heads * plan.parts:
        raise ValueError("paged_attention: the workspace is too small for this call")
    check_aligned(q=q, k_pages=k_pages, v_pages=v_pages, out=out)
    epilogue = {
        "gate": q if gate is None else gate,
        "out": out,
        "gate_row_stride": 0 if gate is None else gate.stride(0),
        "GATE_STEP": 0 if gate is None else gate.stride(1),
        "PACKED_OUT": packed_out,
    }
    _launch_parts(q, (k_pages, v_pages), page_table, row_counts, scale, workspace, plan, epilogue)
    if plan.parts > 1:
        _launch_join(q, workspace, plan, epilogue)


def _launch_parts(  # noqa: PLR0917  # in the order of the call
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    row_counts: Tensor,
    scale: float,
    workspace: AttentionWorkspace,
    plan: AttentionPlan,
    epilogue: dict[str, Any],
) -> None:
    from drafter_kernels.paged_attention.kernel import part_kernel
    from drafter_kernels.rms_norm.kernel import dot_type

    batch, num_heads, head_dim = q.shape
    _, page_rows, num_kv_heads, _ = pages[0].shape
    part_kernel[(batch, num_kv_heads, plan.parts)](
        q,
        *pages,
        page_table,
        row_counts,
        workspace.parts,
        workspace.sums,
        scale_log2=scale * _LOG2_E,
        max_pages=page_table.shape[1],
        PAGE=page_rows,
        NUM_HEADS=num_heads,
        NUM_KV_HEADS=num_kv_heads,
        D=head_dim,
        PARTS=plan.parts,
        DOT=dot_type(pages[0].dtype, interpreted=is_interpreted()),
        GROUP=max(16, next_power_of_2(num_heads // num_kv_heads)),
        BLOCK_R=plan.block_rows,
        BLOCK_D=max(16, next_power_of_2(head_dim)),
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **epilogue,
        **launch_options(overlaps=plan.overlaps),
    )


def _launch_join(q: Tensor, workspace: AttentionWorkspace, plan: AttentionPlan, epilogue: dict[str, Any]) -> None:
    from drafter_kernels.paged_attention.kernel import join_kernel

    batch, num_heads, head_dim = q.shape
    join_kernel[(batch, num_heads)](
        workspace.parts,
        workspace.sums,
        NUM_HEADS=num_heads,
        D=head_dim,
        PARTS=plan.parts,
        BLOCK_P=next_power_of_2(plan.parts),
        BLOCK_D=next_power_of_2(head_dim),
        num_warps=4,
        **epilogue,
        **launch_options(overlaps=plan.overlaps),
    )


def _run_reference(  # noqa: PLR0917  # in the order of the call
    q: Tensor,
    pages: tuple[Tensor, Tensor],
    page_table: Tensor,
    row_counts: Tensor,
    scale: float,
    out: Tensor,
    gate: Tensor | None,
    *,
    packed_out: bool,
) -> None:
    value = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    used = row_counts > 0
    if bool(used.any()):
        value[used] = paged_attention(q[used].float(), *pages, page_table[used], row_counts[used], scale)
    if gate is not None:
        value = torch.where(used[:, None, None], value * torch.sigmoid(gate.float()), 0.0)
    rows = value.flatten(1)
    if packed_out:
        rows = rows.unflatten(1, (-1, 8)).transpose(1, 2).flatten(1)
    out.copy_(rows.view(out.shape))


def _check(  # noqa: PLR0917  # in the order of the call
    q: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    row_counts: Tensor,
    out: Tensor,
    gate: Tensor | None,
) -> int:
    """The number of K/V heads. Raises ValueError."""
    batch, num_heads, head_dim = q.shape
    num_kv_heads = k_pages.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"paged_attention: {num_heads} heads do not divide among {num_kv_heads} K/V heads")
    check_shape("k_pages", k_pages, *k_pages.shape[:3], head_dim)
    check_shape("v_pages", v_pages, *k_pages.shape)
    check_tensor("page_table", page_table, torch.int32, batch, page_table.shape[1])
    check_tensor("row_counts", row_counts, torch.int32, batch)
    check_shape("out", out, batch, num_heads, head_dim)
    if gate is not None:
        check_shape("gate", gate, batch, num_heads, head_dim)
        if gate.stride(2) != 1:
            raise ValueError("gate is not dense in its last dimension")
    return num_kv_heads
