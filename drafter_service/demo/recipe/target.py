"""The target model in plain PyTorch, with the side branches that tell what it would say greedily at every position."""

from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .layers import DecoderLayer, Norm, Rows, rotary
from .shapes import Shape

__all__ = ["Target"]


class Target(nn.Module):
    """A Qwen3.5 text model of full-attention layers; the embedding table is the LM head as well."""

    def __init__(self, shape: Shape, *, compiled: bool = False) -> None:
        super().__init__()
        self.shape = shape
        # One compilation serves every layer; compiling the whole stack would take minutes.
        self._layer = torch.compile(DecoderLayer.forward, dynamic=False) if compiled else DecoderLayer.forward
        self._branch = torch.compile(DecoderLayer.branch, dynamic=False) if compiled else DecoderLayer.branch
        self.embed_tokens = nn.Embedding(shape.vocab_size, shape.hidden_size)
        self.layers = nn.ModuleList([DecoderLayer(shape) for _ in range(shape.num_layers)])
        self.norm = Norm(shape.hidden_size, shape.norm_eps)
        nn.init.normal_(self.embed_tokens.weight, std=0.02)

    def forward(self, ids: Tensor, *, dtype: torch.dtype) -> Tensor:
        """Final-normed hidden states [B, S, H] of ids [B, S]; `dtype` is the residual stream's."""
        x = self.embed_tokens(ids).to(dtype)
        turn = rotary(self.shape, torch.arange(ids.shape[1], device=ids.device))
        for layer in self._stack():
            x = self._layer(layer, x, turn)
        normed: Tensor = self.norm(x)
        return normed

    @torch.no_grad()
    def greedy_branches(self, ids: Tensor, depth: int, *, dtype: torch.dtype) -> tuple[Tensor, list[Tensor], Tensor]:
        """What the target would say after every position, `depth` tokens far.

        Answers the hidden states h [B, S, H] of ids, the greedy tokens g_1..g_depth [B, S] (g_1 follows t_i), and the
        hidden states [depth, B, S, H] after feeding each of them.
        """
        index = torch.arange(ids.shape[1], device=ids.device)
        turn = rotary(self.shape, index)
        x = self.embed_tokens(ids).to(dtype)
        bases: list[Rows] = []
        for layer in self._stack():
            bases.append(layer.rows(x, turn))
            x = self._layer(layer, x, turn)
        hidden = self.norm(x)
        own: list[list[Rows]] = [[] for _ in self.layers]
        greedy: list[Tensor] = []
        states: list[Tensor] = []
        state = hidden
        for step in range(depth):
            greedy.append(self.most_likely(state))
            x = self.embed_tokens(greedy[-1]).to(dtype)
            turn = rotary(self.shape, index + step + 1)
            for number, layer in enumerate(self._stack()):
                x, rows = self._branch(layer, x, turn, bases[number], tuple(own[number]), include_self=True)
                own[number].append(rows)
            state = self.norm(x)
            states.append(state)
        return hidden, greedy, torch.stack(states)

    def _stack(self) -> list[DecoderLayer]:
        return [cast("DecoderLayer", layer) for layer in self.layers]

    def most_likely(self, hidden: Tensor) -> Tensor:
        """Greedy ids [B, S] of hidden states [B, S, H]."""
        return F.linear(hidden, self.embed_tokens.weight.to(hidden.dtype)).argmax(-1)
