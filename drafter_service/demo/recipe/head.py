"""The MTP head: its arithmetic, and drafting unrolled over every position of a window at once."""

from collections.abc import Sequence
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DecoderLayer, Norm, Rows, rotary
from .shapes import Shape

__all__ = ["Head"]


class Head(nn.Module):
    """Pair k, the embedding of token k + 1 beside the target's final-normed hidden state k, predicts token k + 2."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.shape = shape
        self.pre_fc_norm_embedding = Norm(shape.hidden_size, shape.norm_eps)
        self.pre_fc_norm_hidden = Norm(shape.hidden_size, shape.norm_eps)
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        self.layers = nn.ModuleList([DecoderLayer(shape)])
        self.norm = Norm(shape.hidden_size, shape.norm_eps)

    def join(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """The decoder layer's input [B, S, H] for pairs of these parts."""
        parts = (self.pre_fc_norm_embedding(embedding), self.pre_fc_norm_hidden(hidden))
        joined: Tensor = self.fc(torch.cat(parts, dim=-1))
        return joined

    def forward(self, embedding: Tensor, hidden: Tensor) -> Tensor:
        """y [B, S, H] of pairs 0.. in order, each at its own rotary position and causal over the pairs."""
        turn = rotary(self.shape, torch.arange(embedding.shape[1], device=embedding.device))
        y: Tensor = self.norm(self._layer()(self.join(embedding, hidden), turn))
        return y

    def unroll(self, table: Tensor, tokens: Tensor, hidden: Tensor, drafted: Sequence[Tensor]) -> list[Tensor]:
        """Draft from every position i at once, as serving would: one list entry [B, S, H] a depth.

        tokens, hidden: t_{i+1} [B, S] and h_i [B, S, H] of the window, which give the exact rows. drafted[d] [B, S]:
        the token that depth d + 1 appends at i. Depth 1 pairs it with h_i, deeper ones with the head's own last state;
        each sees the exact rows before i and its own rows, and sits d positions further.
        """
        index = torch.arange(tokens.shape[1], device=tokens.device)
        base = self._exact(F.embedding(tokens, table), hidden, rotary(self.shape, index))
        own: list[Rows] = []
        states: list[Tensor] = []
        state = hidden
        for depth, ids in enumerate(drafted):
            state, rows = self._step(F.embedding(ids, table), state, rotary(self.shape, index + depth), base, own)
            own.append(rows)
            states.append(state)
        return states

    def _layer(self) -> DecoderLayer:
        return cast("DecoderLayer", self.layers[0])

    def _exact(self, embedding: Tensor, hidden: Tensor, turn: Rows) -> Rows:
        rows: Rows = self._layer().rows(self.join(embedding.to(hidden.dtype), hidden), turn)
        return rows

    def _step(
        self, embedding: Tensor, hidden: Tensor, turn: Rows, base: Rows, own: Sequence[Rows]
    ) -> tuple[Tensor, Rows]:
        x = self.join(embedding.to(hidden.dtype), hidden)
        x, rows = self._layer().branch(x, turn, base, tuple(own), include_self=False)
        return self.norm(x), rows
