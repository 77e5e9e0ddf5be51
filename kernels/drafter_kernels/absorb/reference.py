"""Pairs become K/V rows in plain PyTorch: the specification that the composition of kernels is tested against."""

from dataclasses import dataclass

from torch import Tensor

from drafter_kernels.fuse_pair import PairNorms, fuse_pair_reference
from drafter_kernels.linear import InputNorm, LinearWeight, linear_reference
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable, qk_rope_reference


@dataclass(frozen=True)
class AbsorbWeights:
    """What a pair passes through before it is a row.

    `embedding` [V, H]; `join_proj` [H, H + W]; `kv_proj` [2 Hkv D, H], the rows of k and then those of v;
    `hidden_first`: the order of the halves. `shape` has no query heads.
    """

    embedding: Tensor
    pair_norms: PairNorms
    join_proj: LinearWeight
    input_norm: InputNorm
    kv_proj: LinearWeight
    shape: HeadShape
    head_norms: HeadNorms
    rope: RopeTable
    hidden_first: bool = False


def absorb_reference(
    tokens: Tensor, hiddens: Tensor, keys: Tensor, weights: AbsorbWeights
) -> tuple[Tensor, Tensor, Tensor]:
    """x [M, H], k and v [M, Hkv, D], all float32."""
    joined = fuse_pair_reference(
        tokens, weights.embedding, hiddens, weights.pair_norms, hidden_first=weights.hidden_first
    )
    x = linear_reference(joined, weights.join_proj)
    projected = linear_reference(x, weights.kv_proj, norm=weights.input_norm)
    assert weights.shape.num_heads == 0
    _, k, v = qk_rope_reference(projected, keys, weights.shape, weights.head_norms, weights.rope)
    return x, k, v
