"""One decoder layer of the Qwen3.5 family in plain PyTorch, shared by the target and its head.

Parameter names are the checkpoint's, so a state dict is the stored layout. Shapes: B windows, S positions, H width,
A heads, C key/value heads, D elements a head.
"""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .shapes import Shape

__all__ = ["Attention", "DecoderLayer", "Norm", "Rows", "rotary"]

Rows = tuple[Tensor, Tensor]  # keys and values [B, C, S, D], keys rotated


class Norm(nn.Module):
    """RMSNorm that stores its scale minus one, computed in float32."""

    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.eps = eps
        self.weight = nn.Parameter(torch.zeros(size))

    def forward(self, x: Tensor) -> Tensor:
        wide = x.float()
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.eps)
        return (wide * (1.0 + self.weight.float())).to(x.dtype)


def rotary(shape: Shape, positions: Tensor) -> Rows:
    """Cosines and sines [S, rotary_dims] in float32 of the positions [S]."""
    exponents = torch.arange(0, shape.rotary_dims, 2, device=positions.device).float() / shape.rotary_dims
    angles = positions.float()[:, None] / shape.rope_theta ** exponents[None, :]
    angles = torch.cat((angles, angles), dim=-1)
    return angles.cos(), angles.sin()


def _rotate(x: Tensor, turn: Rows) -> Tensor:
    cos, sin = (part.to(x.dtype) for part in turn)
    rotated, passed = x[..., : cos.shape[-1]], x[..., cos.shape[-1] :]
    first, second = rotated.chunk(2, dim=-1)
    return torch.cat((rotated * cos + torch.cat((-second, first), dim=-1) * sin, passed), dim=-1)


class Attention(nn.Module):
    """Grouped attention with per-head norms, partial rotary positions and a sigmoid gate beside each query."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.num_heads, self.num_kv_heads, self.head_dim = shape.num_heads, shape.num_kv_heads, shape.head_dim
        width = self.num_heads * self.head_dim
        self.q_proj = nn.Linear(shape.hidden_size, 2 * width, bias=False)
        self.k_proj = nn.Linear(shape.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.v_proj = nn.Linear(shape.hidden_size, self.num_kv_heads * self.head_dim, bias=False)
        self.o_proj = nn.Linear(width, shape.hidden_size, bias=False)
        self.q_norm = Norm(self.head_dim, shape.norm_eps)
        self.k_norm = Norm(self.head_dim, shape.norm_eps)

    def queries(self, x: Tensor, turn: Rows) -> Rows:
        """Rotated queries [B, A, S, D] and gates [B, S, A * D]; each head's query lies beside its gate."""
        query, gate = self.q_proj(x).unflatten(-1, (self.num_heads, 2 * self.head_dim)).chunk(2, dim=-1)
        return _rotate(self.q_norm(query).transpose(1, 2), turn), gate.flatten(-2)

    def rows(self, x: Tensor, turn: Rows) -> Rows:
        """What a cache would keep of x [B, S, H]."""
        key = self.k_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        value = self.v_proj(x).unflatten(-1, (self.num_kv_heads, self.head_dim))
        return _rotate(self.k_norm(key).transpose(1, 2), turn), value.transpose(1, 2)

    def forward(self, x: Tensor, turn: Rows) -> Tensor:
        """Causal self-attention over x [B, S, H]."""
        query, gate = self.queries(x, turn)
        key, value = self.rows(x, turn)
        # Grouped heads are spelt out: compiled for Hopper, `enable_gqa` gave losses that are no numbers.
        groups = self.num_heads // self.num_kv_heads
        key, value = (part.repeat_interleave(groups, dim=1).contiguous() for part in (key, value))
        mixed = F.scaled_dot_product_attention(query.contiguous(), key, value, is_causal=True)
        return self._leave(mixed, gate)

    def branch(self, x: Tensor, turn: Rows, base: Rows, own: Sequence[Rows], *, include_self: bool) -> Tensor:
        """Attention of side branches, one leaving the window at each position.

        x[:, i] sees base rows before i (i too if `include_self`) and row i of each `own`. A branch's window of S keys
        and its few own keys share one softmax.
        """
        query, gate = self.queries(x, turn)
        groups = self.num_heads // self.num_kv_heads
        query = query.unflatten(1, (self.num_kv_heads, groups)) * self.head_dim**-0.5
        scores = query @ base[0][:, :, None].transpose(-1, -2)
        index = torch.arange(x.shape[1], device=x.device)
        seen = index[None, :] <= index[:, None] if include_self else index[None, :] < index[:, None]
        scores = scores.masked_fill(~seen, float("-inf"))
        side = [(query * key[:, :, None]).sum(-1, keepdim=True) for key, _ in own]
        weights = torch.cat((scores, *side), dim=-1).float().softmax(-1).to(query.dtype)
        mixed = weights[..., : x.shape[1]] @ base[1][:, :, None]
        for number, (_, value) in enumerate(own):
            mixed = mixed + weights[..., x.shape[1] + number, None] * value[:, :, None]
        return self._leave(mixed.flatten(1, 2), gate)

    def _leave(self, mixed: Tensor, gate: Tensor) -> Tensor:
        projected: Tensor = self.o_proj(mixed.transpose(1, 2).flatten(-2) * torch.sigmoid(gate))
        return projected


class _Mlp(nn.Module):
    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.up_proj = nn.Linear(shape.hidden_size, shape.intermediate_size, bias=False)
        self.down_proj = nn.Linear(shape.intermediate_size, shape.hidden_size, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        projected: Tensor = self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))
        return projected


class DecoderLayer(nn.Module):
    """Attention and MLP, each normed before and added to the stream."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.input_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.self_attn = Attention(shape)
        self.post_attention_layernorm = Norm(shape.hidden_size, shape.norm_eps)
        self.mlp = _Mlp(shape)
        for linear in (module for module in self.modules() if isinstance(module, nn.Linear)):
            nn.init.normal_(linear.weight, std=0.5 * linear.in_features**-0.5)
        # A new layer adds nothing to the stream, so that depth does not hurt the first steps.
        nn.init.zeros_(self.self_attn.o_proj.weight)
        nn.init.zeros_(self.mlp.down_proj.weight)

    def forward(self, x: Tensor, turn: Rows) -> Tensor:
        """Causal over x [B, S, H]."""
        return self._mlp(x + self.self_attn(self.input_layernorm(x), turn))

    def rows(self, x: Tensor, turn: Rows) -> Rows:
        """This layer's keys and values of its input x."""
        return self.self_attn.rows(self.input_layernorm(x), turn)

    def branch(
        self, x: Tensor, turn: Rows, base: Rows, own: Sequence[Rows], *, include_self: bool
    ) -> tuple[Tensor, Rows]:
        """As `Attention.branch`; x's own rows are added to `own` and returned."""
        normed = self.input_layernorm(x)
        rows = self.self_attn.rows(normed, turn)
        x = x + self.self_attn.branch(normed, turn, base, (*own, rows), include_self=include_self)
        return self._mlp(x), rows

    def _mlp(self, x: Tensor) -> Tensor:
        added: Tensor = x + self.mlp(self.post_attention_layernorm(x))
        return added
