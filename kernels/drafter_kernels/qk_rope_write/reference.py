"""From projections to attention's inputs in plain PyTorch: the specification that the kernel is tested against."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class RopeTable:
    """Rotary positions: element i of the first rotary elements turns with i + rotary / 2.

    `turns` float64 [rotary / 2]: whole turns a position (radians / 2 pi). `amplitude` multiplies cosine and sine.
    `position_offset` is added to keys.
    """

    turns: Tensor
    amplitude: float = 1.0
    position_offset: int = 0

    @staticmethod
    def of(
        frequencies: Sequence[float], device: torch.device, amplitude: float = 1.0, position_offset: int = 0
    ) -> "RopeTable":
        """From radians a position of each pair of elements."""
        turns = torch.tensor([frequency / (2 * math.pi) for frequency in frequencies], dtype=torch.float64)
        return RopeTable(turns.to(device), amplitude, position_offset)


@dataclass(frozen=True)
class HeadNorms:
    """RMSNorm of each head: scales float32 [D] as they multiply, None = no norm; and epsilon."""

    q: Tensor | None
    k: Tensor | None
    epsilon: float


@dataclass(frozen=True)
class HeadShape:
    """Query heads (0 = the projection holds none), KV heads, head width, and whether a gate follows each query head."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    gated: bool = False

    @property
    def query_width(self) -> int:
        """Columns of the projection that belong to queries, gates included."""
        return self.num_heads * self.head_dim * (2 if self.gated else 1)

    @property
    def width(self) -> int:
        """Columns of the projection: queries, keys, values."""
        return self.query_width + 2 * self.num_kv_heads * self.head_dim

    def gate_of(self, projected: Tensor) -> Tensor:
        """The gates [M, num_heads, head_dim] inside a projection: a view."""
        queries = projected[:, : self.query_width].view(len(projected), self.num_heads, 2, self.head_dim)
        return queries[:, :, 1]


def qk_rope_reference(
    projected: Tensor, keys: Tensor, shape: HeadShape, norms: HeadNorms, rope: RopeTable
) -> tuple[Tensor, Tensor, Tensor]:
    """q [M, Hq, D], k and v [M, Hkv, D], float32, as `qk_rope_write` writes them."""
    kv_width = shape.num_kv_heads * shape.head_dim
    queries, k, v = projected.float().split((shape.query_width, kv_width, kv_width), dim=-1)
    step = shape.head_dim * (2 if shape.gated else 1)
    q = queries.unflatten(1, (shape.num_heads, step))[:, :, : shape.head_dim]
    k, v = (part.unflatten(1, (shape.num_kv_heads, shape.head_dim)) for part in (k, v))
    if norms.q is not None:
        q = rms_norm_reference(q, norms.q, norms.epsilon)
    if norms.k is not None:
        k = rms_norm_reference(k, norms.k, norms.epsilon)
    return rotate(q, keys, rope), rotate(k, keys, rope), v


def rotate(x: Tensor, keys: Tensor, rope: RopeTable) -> Tensor:
    """RoPE on x [M, heads, D], float32; angles in float64."""
    angles = (keys + rope.position_offset).double()[:, None] * rope.turns * (2 * math.pi)
    cos, sin = ((part * rope.amplitude).float()[:, None, :] for part in (angles.cos(), angles.sin()))
    rotary = 2 * len(rope.turns)
    first, second = x[..., :rotary].chunk(2, dim=-1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, x[..., rotary:]), dim=-1)
