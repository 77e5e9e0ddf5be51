"""A head's forward made of kernels: every tensor is made beforehand, so that a round allocates nothing.

Logits never exist: the LM head leaves an id and its log-probability. Where it leaves -1 nothing could be drafted.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter_kernels import Backend
from drafter_kernels.absorb import AbsorbWorkspace, absorb
from drafter_kernels.linear import (
    LinearPlan,
    LinearWeight,
    LinearWorkspace,
    linear,
    linear_joined,
    pair_linear,
    plan_linear,
)
from drafter_kernels.lm_head import GrammarMasks, LmHeadWorkspace, lm_head, plan_lm_head
from drafter_kernels.paged_attention import AttentionWorkspace, plan_attention, projected_attention_into
from drafter_kernels.rms_norm import RowNorm
from drafter_service.heads.kernel_weights import KernelWeights
from drafter_service.heads.projections import num_rows

LM_HEAD_ROWS = 64
"""Rows that the LM head takes at once."""

ABSORB_ROWS = 1024
"""Pairs absorbed at once: of a head of 4,096 each kernel then takes some 0.3 ms, and others get the GPU in between."""


@dataclass(frozen=True, slots=True)
class Draft:
    """The next draft of B chains.

    Attributes:
        ids: int64 [B], -1 where nothing could be drafted.
        logprobs: float32 [B], -inf there.
        recycle: [B, H], the hidden that a chain goes on with.
        witness: [B, W], NaN in a row for which the head computed NaN.
    """

    ids: Tensor
    logprobs: Tensor
    recycle: Tensor
    witness: Tensor


@dataclass(frozen=True, slots=True)
class Place:
    """Where the rows of a batch are.

    Attributes:
        page_table: int32 [B, P].
        row_counts: int32 [B], rows that each chain attends to; 0 = the chain drafts nothing.
        most_rows: what the longest may ever have, which attention is planned for; 0 = as many as the table holds.
    """

    page_table: Tensor
    row_counts: Tensor
    most_rows: int = 0


class KernelForward:
    """Buffers and plans for up to `batch` chains, and for up to `absorbed` pairs at once. Serves one call at a time.

    Args:
        weights: of the head.
        pages: K and V of the layer, [num_pages, page_rows, Hkv, D].
        batch: most chains.
        absorbed: most pairs of one call of `absorb`; more are absorbed part by part.
        backend: which implementation; None = the device's.
        overlaps: kernels that gain by it start while the one before them drains.

    Attributes:
        overlaps: as given, for what runs between its calls.
    """

    def __init__(
        self,
        weights: KernelWeights,
        pages: tuple[Tensor, Tensor],
        batch: int,
        absorbed: int,
        *,
        backend: Backend | None = None,
        overlaps: bool = True,
    ) -> None:
        self._weights = weights
        self._pages = pages
        self._batch = batch
        self._how: Mapping[str, Any] = {"overlaps": overlaps, "backend": backend}
        self.overlaps = overlaps
        self._backend = backend
        self._dtype, self._device = pages[0].dtype, pages[0].device
        self._absorbed = min(max(absorbed, batch), max(ABSORB_ROWS, batch))
        self._absorb_workspace = AbsorbWorkspace(weights.absorb, self._absorbed, self._dtype)
        self._make_rows()
        self._plans: dict[tuple[str, int], LinearPlan] = {}
        self._workspace = LinearWorkspace(self._needs(), self._device)
        self._lm_workspace = LmHeadWorkspace(weights.lm_head, min(batch, LM_HEAD_ROWS))
        self._attention_workspace = self._make_attention_workspace()

    def _make_rows(self) -> None:
        """Intermediate rows, one a chain."""
        weights, batch = self._weights, self._batch
        shape, ffn = weights.shape, num_rows(weights.projections.gate_up) // 2
        hidden = weights.absorb.embedding.shape[1]
        width = hidden + len(weights.absorb.pair_norms.hidden)

        def rows(*size: int) -> Tensor:
            return torch.empty(batch, *size, dtype=self._dtype, device=self._device)

        self._joined, self._ffn, self._attended = rows(width), rows(ffn), rows(shape.num_heads * shape.head_dim)
        self._x, self._middle, self._final, self._normed = (rows(hidden) for _ in range(4))
        # Zeros: keys and values of queries that are projected alone are looked at, though they go nowhere.
        self._projected = torch.zeros(batch, shape.width, dtype=self._dtype, device=self._device)
        self._ids = torch.zeros(batch, dtype=torch.int64, device=self._device)
        self._logprobs = torch.empty(batch, device=self._device)
        self._nowhere = torch.full((batch,), -1, dtype=torch.int64, device=self._device)

    def _projections(self) -> Mapping[str, tuple[LinearWeight, bool]]:
        """By name: the weight, and whether the product begins with a norm."""
        weights, parts = self._weights, self._weights.projections
        both = {"kv": (parts.kv, True)} if parts.qkv is None else {"qkv": (parts.qkv, True)}
        return both | {
            "join": (weights.absorb.join_proj, False),
            "q": (parts.q, True),
            "o": (weights.o_proj, False),
            "gate_up": (parts.gate_up, True),
            "down": (parts.down, False),
        }

    def _needs(self) -> list[tuple[LinearPlan, int, int, int]]:
        """What the workspace of the products has to hold."""
        batches = sorted({min(self._batch, bucket) for bucket in (16, 32, 64, self._batch)})
        inputs = {"join": self._joined, "o": self._attended, "down": self._ffn}
        return [
            (self._plan(name, batch), batch, num_rows(weight), inputs.get(name, self._x).shape[1])
            for name, (weight, _) in self._projections().items()
            for batch in batches
        ]

    def _plan(self, name: str, batch: int) -> LinearPlan:
        if (name, batch) not in self._plans:
            weight, is_normed = self._projections()[name]
            self._plans[name, batch] = plan_linear(
                weight, batch, swiglu=name == "gate_up", normed=is_normed, overlaps=self.overlaps
            )
        return self._plans[name, batch]

    def _make_attention_workspace(self) -> AttentionWorkspace:
        """For every batch up to the largest: fewer chains are cut into more parts."""
        shape, powers = self._weights.shape, [1 << bits for bits in range((self._batch - 1).bit_length() + 1)]
        most = max(power * plan_attention(power, shape.num_kv_heads, 1 << 30).parts for power in powers)
        return AttentionWorkspace(1, shape.num_heads, shape.head_dim, most, self._device)

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """Writes the rows of N pairs; returns the decoder layer's input of the pairs `ends` int64 [B], [B, H].

        tokens, keys, slots int64 [N]: a negative token is no pair, a negative slot is not written. hiddens [N, W] in
        the head's type.
        """
        x = torch.empty(len(tokens), self._x.shape[1], dtype=self._dtype, device=self._device)
        for begin in range(0, len(tokens), self._absorbed):
            part = slice(begin, begin + self._absorbed)
            self._absorb_rows(tokens[part], hiddens[part], keys[part], slots[part], x[part])
        return x.index_select(0, ends)

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Writes one row a chain; returns the layer's inputs [B, H]."""
        x = self._x[: len(tokens)]
        self._absorb_rows(tokens, hiddens, keys, slots, x)
        return x

    def draft(self, x: Tensor, keys: Tensor, place: Place, masks: GrammarMasks | None = None) -> Draft:
        """The draft of each chain from x [B, H] of `absorb`, at keys int64 [B]. Good until the next call."""
        self._project_queries(x)
        self._attend(keys, self._nowhere[: len(x)], place)
        return self._finish(x, masks)

    def extend(  # noqa: PLR0917  # a row and a draft
        self,
        tokens: Tensor,
        hiddens: Tensor,
        keys: Tensor,
        slots: Tensor,
        place: Place,
        masks: GrammarMasks | None = None,
    ) -> Draft:
        """`absorb_drafts`, and the draft from there."""
        count, given = len(tokens), self._weights.absorb
        x, plan = self._x[:count], self._plan("join", count)
        pair_linear(
            tokens,
            given.embedding,
            hiddens,
            given.pair_norms,
            given.join_proj,
            x,
            self._joined[:count],
            self._workspace,
            hidden_first=given.hidden_first,
            plan=plan,
            backend=self._backend,
        )
        self._project_all(x)
        self._attend(keys, slots, place)
        return self._finish(x, masks)

    def _absorb_rows(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, x: Tensor) -> None:
        workspace = self._absorb_workspace
        absorb(tokens, hiddens, keys, slots, self._weights.absorb, *self._pages, x, workspace, **self._how)

    def _project(self, name: str, weight: LinearWeight, x: Tensor, out: Tensor, **more: Any) -> None:
        plan = self._plan(name, len(x))
        linear(x, weight, out, self._workspace, plan=plan, backend=self._backend, **more)

    def _project_queries(self, x: Tensor) -> None:
        """Queries and gates alone."""
        out = self._projected[: len(x), : self._weights.shape.query_width]
        self._project("q", self._weights.projections.q, x, out, norm=self._weights.absorb.input_norm)

    def _project_all(self, x: Tensor) -> None:
        """Queries, gates, keys and values."""
        parts, count, norm = self._weights.projections, len(x), self._weights.absorb.input_norm
        if parts.qkv is not None:
            self._project("qkv", parts.qkv, x, self._projected[:count], norm=norm)
            return
        linear_joined(
            x,
            [parts.q, parts.kv],
            self._projected[:count],
            self._workspace,
            norm=norm,
            plans=[self._plan(name, count) for name in ("q", "kv")],
            backend=self._backend,
        )

    def _finish(self, x: Tensor, masks: GrammarMasks | None) -> Draft:
        weights, count = self._weights, len(x)
        attended, middle = self._attended[:count], self._middle[:count]
        ffn, final = self._ffn[:count], self._final[:count]
        self._project("o", weights.o_proj, attended, middle, residual=x)
        self._project("gate_up", weights.projections.gate_up, middle, ffn, norm=weights.ffn_norm, swiglu=True)
        self._project("down", weights.projections.down, ffn, final, residual=middle)
        for begin in range(0, count, LM_HEAD_ROWS):
            self._choose(begin, min(begin + LM_HEAD_ROWS, count), masks)
        normed = self._normed[:count]
        recycle = normed if weights.recycles_normed else final
        return Draft(self._ids[:count], self._logprobs[:count], recycle, normed)

    def _attend(self, keys: Tensor, slots: Tensor, place: Place) -> None:
        """Norms and positions of what was projected, keys and values to slots, and attention."""
        weights, shape, count = self._weights, self._weights.shape, len(keys)
        most_rows = place.most_rows or place.page_table.shape[1] * self._pages[0].shape[1]
        projected_attention_into(
            self._projected[:count],
            keys,
            slots,
            *self._pages,
            place.page_table,
            place.row_counts,
            shape,
            weights.head_norms,
            weights.absorb.rope,
            weights.scale,
            self._attended[:count].view(count, shape.num_heads, shape.head_dim),
            self._attention_workspace,
            plan=plan_attention(1 << (count - 1).bit_length(), shape.num_kv_heads, most_rows),
            backend=self._backend,
        )

    def _choose(self, begin: int, end: int, masks: GrammarMasks | None) -> None:
        """The final norm and the LM head of some rows."""
        weights, part = self._weights, slice(begin, end)
        lm_head(
            self._final[part],
            weights.lm_head,
            self._ids[part],
            self._logprobs[part],
            self._lm_workspace,
            norm=RowNorm(weights.final_norm, weights.ffn_norm.epsilon, self._normed[part]),
            draft_ids=weights.draft_ids,
            masks=None if masks is None else GrammarMasks(masks.words, masks.rows[part]),
            plan=plan_lm_head(weights.lm_head, end - begin, overlaps=self.overlaps),
            backend=self._backend,
        )
