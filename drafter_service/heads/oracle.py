"""The specification of a draft: the head over the given pairs, from scratch, one step at a time.

Float32, no cache, no pages, no batching, every row recomputed at every step. It shares nothing with the serving
path but the weights, the configuration and the record, so that the two can check each other.
"""

import math
from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.quantize import widen
from drafter_service.heads.mtp import MtpHead
from drafter_service.heads.projections import rows_of
from drafter_service.heads.record import ConcatOrder, NormKind, RecycleSource

# Vocabulary rows widened to float32 at a time: a whole table would be gigabytes.
_VOCAB_CHUNK: Final = 16384


@dataclass(frozen=True)
class OracleDraft:
    """One chain of drafts.

    `logprobs` are natural. `margins` are (best - second best logit) / largest |logit|: below the tolerance of a
    comparison, the draft is a tie that rounding decides. `logits` is float32 [num_drafts, vocab_size], -inf for ids
    outside the draft vocabulary.
    """

    ids: list[int]
    logprobs: list[float]
    margins: list[float]
    logits: Tensor


def oracle_draft(head: MtpHead, tokens: Tensor, hiddens: Tensor, keys: Tensor, num_drafts: int) -> OracleDraft:
    """Drafts from the last of the given pairs, attending to exactly the pairs given.

    tokens int64 [N], hiddens [N, hidden_width], keys int64 [N] strictly increasing, gaps allowed, N >= 1.
    """
    assert len(tokens) == len(hiddens) == len(keys) >= 1
    assert bool((keys[1:] > keys[:-1]).all())
    hiddens = hiddens.float()
    ids: list[int] = []
    steps: list[Tensor] = []
    for _ in range(num_drafts):
        logits, recycled = oracle_forward(head, tokens, hiddens, keys)
        best = int(logits.argmax())
        ids.append(best)
        steps.append(logits)
        tokens = torch.cat((tokens, tokens.new_tensor([best])))
        hiddens = torch.cat((hiddens, recycled[None]))
        keys = torch.cat((keys, keys[-1:] + 1))
    logits = torch.stack(steps) if steps else hiddens.new_zeros(0, head.config.vocab_size)
    chosen = torch.tensor(ids, dtype=torch.int64, device=logits.device)[:, None]
    top2 = logits.topk(2, dim=-1).values
    margins = (top2[:, 0] - top2[:, 1]) / logits.masked_fill(logits.isinf(), 0).abs().amax(-1)
    return OracleDraft(ids, logits.log_softmax(-1).gather(1, chosen)[:, 0].tolist(), margins.tolist(), logits)


def oracle_forward(head: MtpHead, tokens: Tensor, hiddens: Tensor, keys: Tensor) -> tuple[Tensor, Tensor]:
    """(logits [vocab_size], recycled hidden [hidden_size]) of the last pair, both float32.

    The head has one layer, so the pairs before the last matter through their K and V alone.
    """
    weights, layer, config = head.weights, head.weights.layers[0], head.config
    embedded = _rms_norm(head, weights.embedding[tokens].float(), weights.embedding_norm)
    handed = _rms_norm(head, hiddens.float(), weights.hidden_norm)
    order = [embedded, handed] if head.record.concat == ConcatOrder.EMBEDDING_HIDDEN else [handed, embedded]
    joined = torch.cat(order, dim=1) @ widen(weights.join_proj).T
    x = joined[-1] + widen(layer.o_proj) @ _attention_of_last(head, _rms_norm(head, joined, layer.input_norm), keys)
    u = _rms_norm(head, x, layer.ffn_norm)
    gate = widen(layer.gate_proj) @ u
    x = x + widen(layer.down_proj) @ (gate * torch.sigmoid(gate) * (widen(layer.up_proj) @ u))
    y = _rms_norm(head, x, weights.final_norm)
    return _logits(head, y), y if config.recycle == RecycleSource.POST_NORM else x


def _logits(head: MtpHead, y: Tensor) -> Tensor:
    weights, vocab_size = head.weights, head.config.vocab_size
    starts = range(0, head.draft_vocab_size, _VOCAB_CHUNK)
    logits = torch.cat([widen(rows_of(weights.lm_head, start, start + _VOCAB_CHUNK)) @ y for start in starts])
    if weights.draft_ids is None:
        return logits[:vocab_size]
    scattered = torch.full((vocab_size,), -math.inf, device=y.device)
    for row, token in enumerate(weights.draft_ids.tolist()):
        scattered[token] = logits[row]
    return scattered


def _attention_of_last(head: MtpHead, u: Tensor, keys: Tensor) -> Tensor:
    layer, config, rows = head.weights.layers[0], head.config, len(u)
    query_and_gate = (widen(layer.q_proj) @ u[-1]).reshape(config.num_heads, 2, config.head_dim)
    k = (u @ widen(layer.k_proj).T).reshape(rows, config.num_kv_heads, config.head_dim)
    v = (u @ widen(layer.v_proj).T).reshape(rows, config.num_kv_heads, config.head_dim)
    positions = keys + head.record.rope_position_offset
    q = _rope(head, _rms_norm(head, query_and_gate[None, :, 0], layer.q_norm), positions[-1:])[0]
    k = _rope(head, _rms_norm(head, k, layer.k_norm), positions)
    queries_per_kv_head = config.num_heads // config.num_kv_heads
    outputs = []
    for query_head in range(config.num_heads):
        kv_head = query_head // queries_per_kv_head
        attention = (k[:, kv_head] @ q[query_head] / math.sqrt(config.head_dim)).softmax(dim=0)
        outputs.append(attention @ v[:, kv_head] * torch.sigmoid(query_and_gate[query_head, 1]))
    return torch.cat(outputs)


def _rms_norm(head: MtpHead, x: Tensor, weight: Tensor) -> Tensor:
    stored = weight.float()
    factor = stored + 1 if head.record.norm == NormKind.ONE_PLUS_WEIGHT else stored
    return x / torch.sqrt((x * x).mean(dim=-1, keepdim=True) + head.config.rms_norm_eps) * factor


def _rope(head: MtpHead, x: Tensor, positions: Tensor) -> Tensor:
    half = head.config.rope.rotary_dim // 2
    rotated = x.clone()
    for i, frequency in enumerate(head.config.rope.inverse_frequencies()):
        angle = positions.double() * frequency
        cos = (torch.cos(angle) * head.config.rope.amplitude()).float()[:, None]
        sin = (torch.sin(angle) * head.config.rope.amplitude()).float()[:, None]
        rotated[:, :, i] = x[:, :, i] * cos - x[:, :, i + half] * sin
        rotated[:, :, i + half] = x[:, :, i + half] * cos + x[:, :, i] * sin
    return rotated
