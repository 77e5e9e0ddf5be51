"""The LM head in plain PyTorch: the specification that kernels are tested against."""

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.quantize import Fp8Weight, PackedNvfp4, widen
from drafter_kernels.rms_norm import RowNorm, rms_norm_reference

LmHeadWeight = Tensor | Fp8Weight | PackedNvfp4
"""[N, K]: of a float type as it is, E4M3 with a scale a row, or NVFP4 packed for kernels."""


@dataclass(frozen=True)
class GrammarMasks:
    """`words` int32 [R, ceil(vocabulary / 32)]: bit id % 32 of word id / 32 is set where an id is allowed.

    `rows` int32 [M]: which of the R masks holds for a row of x; a negative number = none.
    """

    words: Tensor
    rows: Tensor


def lm_head_reference(
    x: Tensor,
    weight: LmHeadWeight,
    *,
    num_rows: int | None = None,
    norm: RowNorm | None = None,
    draft_ids: Tensor | None = None,
    masks: GrammarMasks | None = None,
) -> tuple[Tensor, Tensor]:
    """See `lm_head`; returns ids int64 [M] and logprobs float32 [M]. Whole logits, in float32."""
    if norm is not None:
        x = norm.out.copy_(rms_norm_reference(x, norm.scale, norm.epsilon))
    logits = (x.float() @ widen(weight)[:num_rows].T).clamp(max=torch.finfo(torch.float32).max)
    logits = torch.where(logits.isnan(), -torch.inf, logits)
    count = logits.shape[1]
    ids = torch.arange(count, device=x.device) if draft_ids is None else draft_ids[:count].long()
    if masks is not None:
        words = masks.words[masks.rows.clamp(min=0).long()][:, ids // 32].long()
        is_allowed = ((words >> ids % 32) & 1).bool() | (masks.rows < 0)[:, None]
        logits = logits.masked_fill(~is_allowed, -torch.inf)
    best, rows = first_maximum(logits)
    nothing = best == -torch.inf
    logprobs = best - logits.logsumexp(-1)
    return ids[rows].masked_fill(nothing, -1), logprobs.masked_fill(nothing, -torch.inf)


def first_maximum(logits: Tensor) -> tuple[Tensor, Tensor]:
    """The largest of each row and the lowest index that it stands at; no NaN."""
    best = logits.amax(-1)
    return best, (logits == best[:, None]).byte().argmax(-1)
