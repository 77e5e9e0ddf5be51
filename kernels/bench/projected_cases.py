"""Attention of a projection: with norms, rotary positions, the new row and the gates."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

import torch
from cases import Bench, Case, gathered, pools_of, relative_error
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafter_kernels import Backend
from drafter_kernels.paged_attention import (
    AttentionWorkspace,
    paged_attention,
    plan_attention,
    projected_attention_into,
)
from drafter_kernels.qk_rope_write import HeadNorms, RopeTable, qk_rope_reference

_EPSILON: Final = 1e-6


def projected_cases(bench: Bench, shapes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """(sequences, rows each), the row that is written included."""
    for batch, rows in shapes:
        made = _inputs(bench, batch, rows)
        pages = made.table.shape[1]
        pools = pools_of(bench, batch * pages)
        dense = [tuple(gathered(part, made.table, rows) for part in pair) for pair in pools]
        name, size = f"projected_attention/B={batch}/rows={rows}", bench.size
        floor = batch * (rows * size.num_kv_heads * size.head_dim * 4 + size.shape.width * 2)
        call = _call(bench, made)
        calls = [partial(call, pair) for pair in pools]
        peers = [partial(_peer, bench, made, pair) for pair in dense]
        yield Case(name, floor, calls, peers, partial(_error, bench, made, call, pools[0]))


@dataclass(frozen=True)
class _Inputs:
    """Of one call, but for K and V."""

    projected: Tensor
    keys: Tensor
    slots: Tensor
    table: Tensor
    counts: Tensor
    norms: HeadNorms
    rope: RopeTable
    out: Tensor

    def heads(self, bench: Bench) -> tuple[Tensor, Tensor, Tensor]:
        """Queries as bf16, keys and values."""
        q, k, v = qk_rope_reference(self.projected, self.keys, bench.size.shape, self.norms, self.rope)
        return q.to(self.out.dtype), k, v


def _inputs(bench: Bench, batch: int, rows: int) -> _Inputs:
    size, device = bench.size, bench.device
    pages = -(-rows // size.page_rows)
    table = torch.randperm(batch * pages, device=device).to(torch.int32).view(batch, pages)
    scales = [bench.weights.normal(size.head_dim, scale=0.1, dtype=torch.float32) + 1 for _ in "qk"]
    return _Inputs(
        projected=bench.weights.normal(batch, size.shape.width),
        keys=torch.full((batch,), rows - 1, device=device),
        slots=table[:, -1].long() * size.page_rows + (rows - 1) % size.page_rows,
        table=table,
        counts=torch.full((batch,), rows, dtype=torch.int32, device=device),
        norms=HeadNorms(*scales, _EPSILON),
        rope=RopeTable.of([1e7 ** (-2 * i / size.rotary) for i in range(size.rotary // 2)], device),
        out=torch.empty(batch, size.num_heads, size.head_dim, dtype=torch.bfloat16, device=device),
    )


def _call(bench: Bench, made: _Inputs) -> partial[None]:
    size, batch = bench.size, len(made.out)
    plan = plan_attention(batch, size.num_kv_heads, made.table.shape[1] * size.page_rows)
    workspace = AttentionWorkspace(batch, size.num_heads, size.head_dim, plan.parts, bench.device)

    def call(pair: tuple[Tensor, Tensor]) -> None:
        rows = (made.projected, made.keys, made.slots, *pair, made.table, made.counts)
        how = (size.shape, made.norms, made.rope, size.head_dim**-0.5)
        projected_attention_into(*rows, *how, made.out, workspace, plan=plan, backend=Backend.TRITON)

    return partial(call)


def _error(bench: Bench, made: _Inputs, call: partial[None], pair: tuple[Tensor, Tensor]) -> float:
    """Of the output, and of the row that was written."""
    made.out.fill_(torch.nan)
    call(pair)
    q, k, v = made.heads(bench)
    attended = paged_attention(q.float(), *pair, made.table, made.counts, bench.size.head_dim**-0.5)
    attended *= torch.sigmoid(bench.size.shape.gate_of(made.projected).float())
    written = [part.flatten(0, 1)[made.slots] for part in pair]
    return max(relative_error(*each) for each in ((made.out, attended), (written[0], k), (written[1], v)))


def _peer(bench: Bench, made: _Inputs, pair: tuple[Tensor, Tensor]) -> None:
    q, *rows = made.heads(bench)
    for part, row in zip(pair, rows, strict=True):
        part[:, :, -1] = row
    scale, gate = bench.size.head_dim**-0.5, bench.size.shape.gate_of(made.projected)
    attended = scaled_dot_product_attention(q[:, :, None], *pair, scale=scale, enable_gqa=True)[:, :, 0]
    torch.mul(attended, torch.sigmoid(gate), out=made.out)
