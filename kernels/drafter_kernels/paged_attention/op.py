"""Paged attention as it is called."""

from __future__ import annotations

import math
from collections.abc import Sequence
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
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable, qk_rope_write

_LOG2_E: Final = math.log2(math.e)
_MAX_PARTS: Final = 64
# Where each of so many parts has a block of 32 rows or two: waiting is all that they cost.
_SHORT_PARTS: Final = 32
_SHORT_ROWS: Final = 2048
# Parts that are read at once when they are put together.
_JOINED_PARTS: Final = 17
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

    def num_parts(self, *, is_projected: bool) -> int:
        """Programs a sequence and K/V head: of several parts, the new row of a projection is one of its own."""
        return self.parts + 1 if is_projected and self.parts > 1 else self.parts


def plan_attention(batch: int, num_kv_heads: int, max_rows: int) -> AttentionPlan:
    """The plan for a batch and the longest possible sequence: how long sequences are now plays no part in it."""
    wanted = next_power_of_2(max(1, _ENOUGH_PROGRAMS // (batch * num_kv_heads)))
    if wanted >= _SHORT_PARTS and 64 < max_rows <= _SHORT_ROWS:
        return AttentionPlan(min(_SHORT_PARTS, next_power_of_2(-(-max_rows // 32))), 32)
    return AttentionPlan(min(_MAX_PARTS, wanted, next_power_of_2(-(-max_rows // 64))), 64)


class AttentionWorkspace:
    """The parts' sums and counters on the device; serves one call at a time: calls on one stream may share it."""

    def __init__(self, batch: int, num_heads: int, head_dim: int, parts: int, device: torch.device) -> None:
        # Of several parts the row that a projection brings is one more.
        count = batch * num_heads * (parts if parts == 1 else 2 * parts)
        self.parts = torch.empty(count * head_dim, dtype=torch.float32, device=device)
        self.sums = torch.empty(2 * count, dtype=torch.float32, device=device)
        self.counters = torch.zeros(count, dtype=torch.int32, device=device)

    @property
    def tensors(self) -> dict[str, Tensor]:
        """By the kernel's names."""
        return {"parts": self.parts, "part_sums": self.sums, "counters": self.counters}


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
    takes packed rows. Nothing is allocated, nothing read back; `workspace` is needed by the kernel alone, whose
    counters are zero between calls. Raises ValueError naming what does not fit.
    """
    rows = _Rows(k_pages, v_pages, page_table, row_counts)
    _check(q.shape, rows, out, gate)
    if not uses_triton(q, backend):
        _run_reference(q, rows, scale, out, gate, packed_out=packed_out)
        return
    check_aligned(q=q, k_pages=k_pages, v_pages=v_pages, out=out)
    options: dict[str, Any] = {"scale": scale, "gate": gate, "packed_out": packed_out, "plan": plan}
    _launch(q, rows, out, workspace, _no_rotation(q), **options)


def projected_attention_into(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    projected: Tensor,
    keys: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    page_table: Tensor,
    row_counts: Tensor,
    shape: HeadShape,
    norms: HeadNorms,
    rope: RopeTable,
    scale: float,
    out: Tensor,
    workspace: AttentionWorkspace | None = None,
    *,
    packed_out: bool = False,
    plan: AttentionPlan | None = None,
    backend: Backend | None = None,
) -> None:
    """`qk_rope_write` and `paged_attention_into`, with the gates of the projection if it has some, in one kernel.

    projected [B, shape.width]; keys, slots int64 [B]. A slot that is not negative is that of the last row that counts,
    or of any row where none counts; it gets the projection's K and V. All else as the two take it. Raises ValueError
    naming what does not fit.
    """
    batch = len(projected)
    gate = shape.gate_of(projected) if shape.gated else None
    rows = _Rows(k_pages, v_pages, page_table, row_counts)
    _check((batch, shape.num_heads, shape.head_dim), rows, out, gate)
    if not uses_triton(projected, backend):
        q = torch.empty(batch, shape.num_heads, shape.head_dim, dtype=projected.dtype, device=projected.device)
        qk_rope_write(projected, keys, slots, k_pages, v_pages, shape, norms, rope, q_out=q, backend=backend)
        _run_reference(q, rows, scale, out, gate, packed_out=packed_out)
        return
    check_shape("projected", projected, batch, shape.width)
    check_shape("k_pages", k_pages, *k_pages.shape[:2], shape.num_kv_heads, shape.head_dim)
    check_tensor("keys", keys, torch.int64, batch)
    check_tensor("slots", slots, torch.int64, batch)
    if not 2 <= 2 * len(rope.turns) <= shape.head_dim:
        raise ValueError(f"paged_attention: {2 * len(rope.turns)} rotary elements of a head of {shape.head_dim}")
    check_aligned(projected=projected, k_pages=k_pages, v_pages=v_pages, out=out)
    rotation = _rotation(keys, slots, shape, norms, rope)
    options: dict[str, Any] = {"scale": scale, "gate": gate, "packed_out": packed_out, "plan": plan}
    _launch(projected, rows, out, workspace, rotation, **options)


@dataclass(frozen=True)
class _Rows:
    """Where K and V lie, and how many rows count."""

    k_pages: Tensor
    v_pages: Tensor
    page_table: Tensor
    row_counts: Tensor


def _no_rotation(q: Tensor) -> dict[str, Any]:
    """What the kernel is told of queries that are ready: any tensor stands for what is not read."""
    names = ("keys", "slots", "q_norm", "k_norm", "turns")
    numbers = {"position_offset": 0, "amplitude": 1.0, "eps": 0.0}
    options = {"ROTARY": 0, "Q_STEP": 0, "HAS_Q_NORM": False, "HAS_K_NORM": False}
    return dict.fromkeys(names, q) | numbers | options


def _rotation(keys: Tensor, slots: Tensor, shape: HeadShape, norms: HeadNorms, rope: RopeTable) -> dict[str, Any]:
    """What the kernel is told of a projection."""
    return {
        "keys": keys,
        "slots": slots,
        "q_norm": rope.turns if norms.q is None else norms.q,
        "k_norm": rope.turns if norms.k is None else norms.k,
        "turns": rope.turns,
        "position_offset": rope.position_offset,
        "amplitude": rope.amplitude,
        "eps": norms.epsilon,
        "ROTARY": 2 * len(rope.turns),
        "Q_STEP": 2 * shape.head_dim if shape.gated else shape.head_dim,
        "HAS_Q_NORM": norms.q is not None,
        "HAS_K_NORM": norms.k is not None,
    }


def _launch(
    q: Tensor,
    rows: _Rows,
    out: Tensor,
    workspace: AttentionWorkspace | None,
    rotation: dict[str, Any],
    *,
    scale: float,
    gate: Tensor | None,
    packed_out: bool,
    plan: AttentionPlan | None,
) -> None:
    from drafter_kernels.paged_attention.kernel import attention_kernel
    from drafter_kernels.rms_norm.kernel import dot_type

    batch, num_heads, _ = out.shape
    _, page_rows, num_kv_heads, _ = rows.k_pages.shape
    plan = plan or plan_attention(batch, num_kv_heads, rows.page_table.shape[1] * page_rows)
    parts = plan.num_parts(is_projected=rotation["ROTARY"] > 0)
    if workspace is None or workspace.sums.numel() < 2 * batch * num_heads * parts:
        raise ValueError("paged_attention: the workspace is too small for this call")
    attention_kernel[(batch, num_kv_heads, parts)](
        q,
        **vars(rows),
        **workspace.tensors,
        out=out,
        scale_log2=scale * _LOG2_E,
        max_pages=rows.page_table.shape[1],
        PARTS=parts,
        STEP=min(parts, _JOINED_PARTS),
        PACKED_OUT=packed_out,
        DOT=dot_type(rows.k_pages.dtype, interpreted=is_interpreted()),
        BLOCK_R=plan.block_rows,
        num_warps=plan.num_warps,
        num_stages=plan.num_stages,
        **_sizes(out, rows.k_pages),
        **_gating(out, gate),
        **rotation,
        **launch_options(overlaps=plan.overlaps),
    )


def _gating(out: Tensor, gate: Tensor | None) -> dict[str, Any]:
    """Where the gates are: any tensor stands for those that there are not."""
    if gate is None:
        return {"gate": out, "gate_row_stride": 0, "GATE_STEP": 0}
    return {"gate": gate, "gate_row_stride": gate.stride(0), "GATE_STEP": gate.stride(1)}


def _sizes(out: Tensor, k_pages: Tensor) -> dict[str, int]:
    """What the kernel is compiled for of a head."""
    _, num_heads, head_dim = out.shape
    _, page_rows, num_kv_heads, _ = k_pages.shape
    heads = next_power_of_2(num_heads // num_kv_heads)
    names = {"PAGE": page_rows, "NUM_HEADS": num_heads, "NUM_KV_HEADS": num_kv_heads, "D": head_dim}
    return names | {"GROUP": max(16, heads), "BLOCK_G": heads, "BLOCK_D": max(16, next_power_of_2(head_dim))}


def _run_reference(q: Tensor, rows: _Rows, scale: float, out: Tensor, gate: Tensor | None, *, packed_out: bool) -> None:
    value = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
    used = rows.row_counts > 0
    if bool(used.any()):
        pages, table = (rows.k_pages, rows.v_pages), rows.page_table[used]
        value[used] = paged_attention(q[used].float(), *pages, table, rows.row_counts[used], scale)
    if gate is not None:
        value = torch.where(used[:, None, None], value * torch.sigmoid(gate.float()), 0.0)
    flat = value.flatten(1)
    if packed_out:
        flat = flat.unflatten(1, (-1, 8)).transpose(1, 2).flatten(1)
    out.copy_(flat.view(out.shape))


def _check(shape: Sequence[int], rows: _Rows, out: Tensor, gate: Tensor | None) -> None:
    """Of queries [B, Hq, D]. Raises ValueError."""
    batch, num_heads, head_dim = shape
    num_kv_heads = rows.k_pages.shape[2]
    if num_heads % num_kv_heads:
        raise ValueError(f"paged_attention: {num_heads} heads do not divide among {num_kv_heads} K/V heads")
    check_shape("k_pages", rows.k_pages, *rows.k_pages.shape[:3], head_dim)
    check_shape("v_pages", rows.v_pages, *rows.k_pages.shape)
    check_tensor("page_table", rows.page_table, torch.int32, batch, rows.page_table.shape[1])
    check_tensor("row_counts", rows.row_counts, torch.int32, batch)
    check_shape("out", out, batch, num_heads, head_dim)
    if gate is not None:
        check_shape("gate", gate, batch, num_heads, head_dim)
        if gate.stride(2) != 1:
            raise ValueError("gate is not dense in its last dimension")
