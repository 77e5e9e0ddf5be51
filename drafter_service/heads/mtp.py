"""An MTP head in plain PyTorch: absorbing pairs, and finishing a draft forward.

K and V of a one-layer head depend on the pair alone, so absorbing runs neither attention nor LM head; only the
rows that draft go on to `finish`. The caller owns the K/V and the inference mode.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import silu

from drafter_service.heads.config import HeadConfig
from drafter_service.heads.kernel_weights import JoinedProjections
from drafter_service.heads.projections import num_rows, product, runs_kernels
from drafter_service.heads.record import (
    ArchitectureRecord,
    AttentionKind,
    ConcatOrder,
    FfnKind,
    NormKind,
    RecycleSource,
)
from drafter_service.heads.weights import HeadWeights, LayerWeights


class KvWriter(Protocol):
    """Where absorbed rows go."""

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Takes k and v [N, num_kv_heads, head_dim]: one row per absorbed pair, in order."""


class KvReader(Protocol):
    """Attention over the rows of the sequences being drafted."""

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Maps q [B, num_heads, head_dim] to the attention's output, of the same shape, in q's dtype."""


@dataclass(frozen=True)
class KvLayout:
    """What one row of K/V consists of."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of K and V of one pair, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class HeadOutput:
    """`logits` float32 [B, vocab_size], -inf for ids that cannot be drafted; `recycle` [B, hidden_size].

    `recycle` is the hidden of the next pair in a chain.
    """

    logits: Tensor
    recycle: Tensor


class MtpHead:
    """Frozen weights and the two halves of the forward. Safe to share between threads: nothing changes.

    `levers` are the settings that changed what it drafts, by name, as text. `joined` are the layer's projections side
    by side, if it was loaded for kernels. `folded` are the weights with each norm's as it multiplies.
    """

    def __init__(
        self,
        config: HeadConfig,
        record: ArchitectureRecord,
        weights: HeadWeights,
        fingerprint: str,
        *,
        levers: Mapping[str, str] = MappingProxyType({}),
        joined: JoinedProjections | None = None,
    ) -> None:
        assert record.attention is AttentionKind.GATED_GQA
        assert record.ffn is FfnKind.DENSE_SWIGLU
        assert config.num_layers == 1
        self.config = config
        self.record = record
        self.weights = weights
        self.fingerprint = fingerprint
        self.levers = levers
        self.joined = joined
        self.device = weights.embedding.device
        self.dtype = weights.embedding.dtype
        self.folded = _fold_norms(weights, record.norm)
        self._scale = config.head_dim**-0.5
        # Angles are formed in float64: in float32 a position of 100,000 is off by thousandths of a radian.
        self._frequencies = torch.tensor(config.rope.inverse_frequencies(), dtype=torch.float64, device=self.device)

    def kv_layout(self) -> KvLayout:
        """The layout of the rows that `absorb` writes."""
        return KvLayout(self.config.num_layers, self.config.num_kv_heads, self.config.head_dim, self.dtype)

    def weight_bytes(self) -> int:
        """Bytes of weights on the device."""
        return self.weights.num_bytes()

    @property
    def draft_vocab_size(self) -> int:
        """How many ids can be drafted."""
        return num_rows(self.weights.lm_head)

    @property
    def runs_kernels(self) -> bool:
        """Whether kernels compute it, and not the plain forward below."""
        return runs_kernels(self.device, self.dtype)

    def embed(self, tokens: Tensor) -> Tensor:
        """The embeddings [B, hidden_size] of token ids [B]; ids must lie in [0, vocab_size)."""
        return self.weights.embedding[tokens]

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, writer: KvWriter) -> Tensor:
        """Writes the K/V rows of N pairs and returns x [N, hidden_size], what `finish` goes on from.

        tokens int64 [N]: pair k holds t_{k+1}. hiddens [N, hidden_width], any float dtype. keys int64 [N].
        """
        weights, layer = self.folded, self.folded.layers[0]
        embedding = self._norm(self.embed(tokens), weights.embedding_norm)
        hidden = self._norm(hiddens.to(self.dtype), weights.hidden_norm)
        parts = (embedding, hidden) if self.record.concat is ConcatOrder.EMBEDDING_HIDDEN else (hidden, embedding)
        x = product(torch.cat(parts, dim=-1), weights.join_proj)
        normed = self._norm(x, layer.input_norm)
        k = self._heads(product(normed, layer.k_proj))
        v = self._heads(product(normed, layer.v_proj))
        writer.write(0, self._rotate(self._norm(k, layer.k_norm), keys), v)
        return x

    def finish(self, x: Tensor, keys: Tensor, reader: KvReader) -> HeadOutput:
        """The rest of the forward for rows x [B, hidden_size] of `absorb`, whose keys are int64 [B]."""
        weights, layer = self.folded, self.folded.layers[0]
        x = x + self._attention(self._norm(x, layer.input_norm), keys, layer, reader)
        x = x + self._feed_forward(self._norm(x, layer.ffn_norm), layer)
        y = self._norm(x, weights.final_norm)
        return HeadOutput(self._logits(y), y if self.config.recycle is RecycleSource.POST_NORM else x)

    def _attention(self, normed: Tensor, keys: Tensor, layer: LayerWeights, reader: KvReader) -> Tensor:
        # Head by head: the query's head_dim elements, then the gate's.
        joined = product(normed, layer.q_proj).view(-1, self.config.num_heads, 2 * self.config.head_dim)
        q, gate = joined.chunk(2, dim=-1)
        attended = reader.attend(0, self._rotate(self._norm(q, layer.q_norm), keys), self._scale)
        return product((attended * torch.sigmoid(gate)).flatten(1), layer.o_proj)

    def _feed_forward(self, normed: Tensor, layer: LayerWeights) -> Tensor:
        return product(silu(product(normed, layer.gate_proj)) * product(normed, layer.up_proj), layer.down_proj)

    def _logits(self, y: Tensor) -> Tensor:
        """float32 [B, vocab_size]. Masks, argmax and normaliser need not know that the LM head was cut."""
        table, ids = self.folded.lm_head, self.folded.draft_ids
        logits = product(y.to(table.dtype) if isinstance(table, Tensor) else y.float(), table).float()
        if ids is None:
            return logits
        return logits.new_full((len(y), self.config.vocab_size), float("-inf")).index_copy_(1, ids, logits)

    def _heads(self, projected: Tensor) -> Tensor:
        return projected.view(-1, self.config.num_kv_heads, self.config.head_dim)

    def _norm(self, x: Tensor, scale: Tensor) -> Tensor:
        """RMSNorm over the last dimension, in float32, back in x's dtype."""
        if x.dtype is torch.float32:
            return torch.rms_norm(x, scale.shape, scale, self.config.rms_norm_eps)
        wide = x.float()
        rms = torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.config.rms_norm_eps)
        return (wide * rms * scale).to(x.dtype)

    def _rotate(self, x: Tensor, keys: Tensor) -> Tensor:
        """RoPE on the first rotary_dim elements of x [N, heads, head_dim]: element i turns with i + rotary_dim / 2."""
        positions = (keys + self.record.rope_position_offset).double()
        angles = positions[:, None] * self._frequencies
        cos = (angles.cos() * self.config.rope.amplitude()).float()[:, None, :]
        sin = (angles.sin() * self.config.rope.amplitude()).float()[:, None, :]
        rotary_dim = self.config.rope.rotary_dim
        first, second = x[..., :rotary_dim].float().chunk(2, dim=-1)
        rotated = torch.cat((first * cos - second * sin, second * cos + first * sin), dim=-1)
        return torch.cat((rotated.to(x.dtype), x[..., rotary_dim:]), dim=-1)


def _fold_norms(weights: HeadWeights, kind: NormKind) -> HeadWeights:
    """The weights with each norm's stored weight replaced by what it scales by, so that no step adds the 1 again."""
    added = 1.0 if kind is NormKind.ONE_PLUS_WEIGHT else 0.0
    layers = tuple(
        replace(
            layer,
            input_norm=layer.input_norm + added,
            ffn_norm=layer.ffn_norm + added,
            q_norm=layer.q_norm + added,
            k_norm=layer.k_norm + added,
        )
        for layer in weights.layers
    )
    return replace(
        weights,
        embedding_norm=weights.embedding_norm + added,
        hidden_norm=weights.hidden_norm + added,
        final_norm=weights.final_norm + added,
        layers=layers,
    )
