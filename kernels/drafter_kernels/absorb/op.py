"""The catch-up row writer: four kernels, three for a single row, and what they hand to each other."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.absorb.reference import AbsorbWeights
from drafter_kernels.dispatch import Backend, check_shape
from drafter_kernels.linear import LinearWorkspace, linear, pair_linear, plan_linear
from drafter_kernels.qk_rope_write import qk_rope_write


class AbsorbWorkspace:
    """Intermediate rows for up to `max_rows` pairs, in `dtype`; serves one call at a time."""

    def __init__(self, weights: AbsorbWeights, max_rows: int, dtype: torch.dtype) -> None:
        device = weights.embedding.device
        height, width = weights.embedding.shape[1], len(weights.pair_norms.hidden)
        self.max_rows = max_rows
        self.joined = torch.empty(max_rows, height + width, dtype=dtype, device=device)
        self.projected = torch.empty(max_rows, weights.shape.width, dtype=dtype, device=device)
        needs = []
        for rows in sorted({min(max_rows, bucket) for bucket in (16, 32, 64, max_rows)}):
            needs.append((plan_linear(weights.join_proj, rows), rows, height, height + width))
            needs.append((plan_linear(weights.kv_proj, rows, normed=True), rows, weights.shape.width, height))
        self.linear = LinearWorkspace(needs, device)


def absorb(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    tokens: Tensor,
    hiddens: Tensor,
    keys: Tensor,
    slots: Tensor,
    weights: AbsorbWeights,
    k_pages: Tensor,
    v_pages: Tensor,
    x_out: Tensor,
    workspace: AbsorbWorkspace,
    *,
    row_count: Tensor | None = None,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Writes the K/V rows of M pairs, and x [M, H], what the decoder layer goes on from. No query, attention or FFN.

    tokens, keys, slots int64 [M] (a negative token or slot: no pair, nothing written to pages), hiddens [M, W] of any
    float type, x_out [M, H]. row_count int32 [1] on the device: rows from there on write nothing. M is the bucket,
    row_count the live number: one graph a bucket. Raises ValueError naming what does not fit.
    """
    batch = len(tokens)
    if batch > workspace.max_rows:
        raise ValueError(f"absorb: {batch} rows, the workspace has {workspace.max_rows}")
    check_shape("x_out", x_out, batch, weights.embedding.shape[1])
    projected = workspace.projected[:batch]
    on = _On(row_count, overlaps, backend)
    _join(tokens, hiddens, weights, x_out, workspace, on)
    plan = plan_linear(weights.kv_proj, batch, normed=True, overlaps=overlaps)
    linear(
        x_out,
        weights.kv_proj,
        projected,
        workspace.linear,
        norm=weights.input_norm,
        row_count=row_count,
        plan=plan,
        backend=backend,
    )
    where = (projected, keys, slots, k_pages, v_pages)
    how = (weights.shape, weights.head_norms, weights.rope)
    qk_rope_write(*where, *how, row_count=row_count, overlaps=overlaps, backend=backend)


@dataclass(frozen=True)
class _On:
    """What every kernel is told."""

    row_count: Tensor | None
    overlaps: bool
    backend: Backend | None


def _join(  # noqa: PLR0917  # in the order of the call
    tokens: Tensor, hiddens: Tensor, weights: AbsorbWeights, x_out: Tensor, workspace: AbsorbWorkspace, on: _On
) -> None:
    """x, the input of the decoder layer."""
    pair_linear(
        tokens,
        weights.embedding,
        hiddens,
        weights.pair_norms,
        weights.join_proj,
        x_out,
        workspace.joined[: len(tokens)],
        workspace.linear,
        hidden_first=weights.hidden_first,
        row_count=on.row_count,
        plan=plan_linear(weights.join_proj, len(tokens), overlaps=on.overlaps),
        backend=on.backend,
    )
