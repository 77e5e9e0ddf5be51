"""The first step of a head in plain PyTorch: the specification that the kernel is tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.rms_norm import rms_norm_reference


@dataclass(frozen=True)
class PairNorms:
    """Norms of both halves of a pair: `embedding` float32 [H], `hidden` float32 [W] as they multiply, and epsilon."""

    embedding: Tensor
    hidden: Tensor
    epsilon: float


def fuse_pair_reference(
    tokens: Tensor, embedding: Tensor, hiddens: Tensor, norms: PairNorms, *, hidden_first: bool = False
) -> Tensor:
    """See `fuse_pair`; returns float32 [M, H + W]."""
    is_pair = (tokens >= 0)[:, None]
    first = rms_norm_reference(embedding[tokens.clamp(min=0)], norms.embedding, norms.epsilon)
    second = rms_norm_reference(hiddens, norms.hidden, norms.epsilon)
    joined = torch.cat((second, first) if hidden_first else (first, second), dim=-1)
    return torch.where(is_pair, joined, 0.0)
