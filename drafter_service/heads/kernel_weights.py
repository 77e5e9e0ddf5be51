"""A head's weights as the kernels take them: projections that one product makes are one weight."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from drafter_kernels.absorb import AbsorbWeights
from drafter_kernels.fuse_pair import PairNorms
from drafter_kernels.linear import InputNorm, LinearWeight
from drafter_kernels.lm_head import LmHeadWeight
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable
from drafter_kernels.quantize import PackedNvfp4
from drafter_service.heads.projections import joined, narrowed, num_rows, rows_of, times
from drafter_service.heads.record import ConcatOrder, RecycleSource
from drafter_service.heads.weights import LayerWeights

if TYPE_CHECKING:
    from drafter_service.heads.mtp import MtpHead


@dataclass(frozen=True)
class JoinedProjections:
    """A layer's projections side by side.

    Attributes:
        qkv: queries with their gates, keys, values; None where queries are of another kind than the rest.
        q: the queries of it, or alone.
        kv: the keys and values of it, or alone.
        gate_up: both halves of the FFN's first product.
        down: the second product, with what makes up for a scale that `gate_up` could not keep.
    """

    qkv: LinearWeight | None
    q: LinearWeight
    kv: LinearWeight
    gate_up: LinearWeight
    down: LinearWeight


def join_layer(layer: LayerWeights, dtype: torch.dtype) -> tuple[LayerWeights, JoinedProjections]:
    """The layer again, its projections now parts of the joined ones: nothing is held twice."""
    num_queries, num_keys = num_rows(layer.q_proj), num_rows(layer.k_proj)
    end = num_queries + 2 * num_keys
    qkv = joined((layer.q_proj, layer.k_proj, layer.v_proj))
    if qkv is None:
        q, kv = layer.q_proj, _joined_or_widened(layer.k_proj, layer.v_proj, dtype)
    else:
        q, kv = rows_of(qkv, 0, num_queries), rows_of(qkv, num_queries, end)
    gate_up, up, down = _join_ffn(layer, dtype)
    parts = replace(
        layer,
        q_proj=q,
        k_proj=rows_of(kv, 0, num_keys),
        v_proj=rows_of(kv, num_keys, 2 * num_keys),
        gate_proj=rows_of(gate_up, 0, num_rows(gate_up) // 2),
        up_proj=up,
    )
    return parts, JoinedProjections(qkv, q, kv, gate_up, down)


def _join_ffn(layer: LayerWeights, dtype: torch.dtype) -> tuple[LinearWeight, LinearWeight, LinearWeight]:
    """Gate and up side by side, up as a part of that, and down.

    Of NVFP4 weights with two tensor scales up gets gate's: what is then wrong with the product of both is a factor,
    which down's scales take up.
    """
    gate, up, down = layer.gate_proj, layer.up_proj, layer.down_proj
    both, end = joined((gate, up)), num_rows(gate) + num_rows(up)
    if both is not None:
        return both, rows_of(both, end // 2, end), down
    if isinstance(gate, PackedNvfp4) and isinstance(up, PackedNvfp4) and not isinstance(down, Tensor):
        both = joined((gate, replace(up, tensor_scale=gate.tensor_scale)))
        assert isinstance(both, PackedNvfp4)
        part = rows_of(both, end // 2, end)
        assert isinstance(part, PackedNvfp4)
        factor = up.tensor_scale / gate.tensor_scale
        return both, replace(part, tensor_scale=up.tensor_scale), times(down, factor)
    both = _joined_or_widened(gate, up, dtype)
    return both, rows_of(both, end // 2, end), down


def _joined_or_widened(first: LinearWeight, second: LinearWeight, dtype: torch.dtype) -> LinearWeight:
    both = joined((first, second))
    return torch.cat((narrowed(first, dtype), narrowed(second, dtype))) if both is None else both


@dataclass(frozen=True)
class KernelWeights:
    """Everything that a forward made of kernels reads.

    Attributes:
        absorb: what a pair passes through before it is a row.
        projections: of the decoder layer.
        o_proj: behind attention.
        shape: of queries, keys and values.
        head_norms: of queries and keys.
        ffn_norm: before the FFN.
        final_norm: before the LM head, float32.
        lm_head: [draft vocabulary, H].
        draft_ids: int32, the ids of its rows; None = row i is id i.
        scale: of attention's scores.
        recycles_normed: whether a chain goes on from what the final norm made, or from what it was given.
    """

    absorb: AbsorbWeights
    projections: JoinedProjections
    o_proj: LinearWeight
    shape: HeadShape
    head_norms: HeadNorms
    ffn_norm: InputNorm
    final_norm: Tensor
    lm_head: LmHeadWeight
    draft_ids: Tensor | None
    scale: float
    recycles_normed: bool

    @staticmethod
    def of(head: MtpHead) -> KernelWeights:
        """Of a head; its joined projections if it has them, else new ones."""
        config, weights, record = head.config, head.folded, head.record
        layer, epsilon = weights.layers[0], config.rms_norm_eps
        projections = head.joined or join_layer(layer, head.dtype)[1]
        rope = RopeTable.of(
            config.rope.inverse_frequencies(), head.device, config.rope.amplitude(), record.rope_position_offset
        )
        norms = HeadNorms(layer.q_norm, layer.k_norm, epsilon)
        return KernelWeights(
            absorb=AbsorbWeights(
                embedding=weights.embedding,
                pair_norms=PairNorms(weights.embedding_norm, weights.hidden_norm, epsilon),
                join_proj=weights.join_proj,
                input_norm=InputNorm(layer.input_norm, epsilon),
                kv_proj=projections.kv,
                shape=HeadShape(0, config.num_kv_heads, config.head_dim),
                head_norms=norms,
                rope=rope,
                hidden_first=record.concat is not ConcatOrder.EMBEDDING_HIDDEN,
            ),
            projections=projections,
            o_proj=layer.o_proj,
            shape=HeadShape(config.num_heads, config.num_kv_heads, config.head_dim, gated=True),
            head_norms=norms,
            ffn_norm=InputNorm(layer.ffn_norm, epsilon),
            final_norm=weights.final_norm,
            lm_head=weights.lm_head,
            draft_ids=None if weights.draft_ids is None else weights.draft_ids.int(),
            scale=config.head_dim**-0.5,
            recycles_normed=config.recycle is RecycleSource.POST_NORM,
        )
