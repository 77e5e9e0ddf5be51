"""One round as a fixed sequence of operations: no host looks at a value, no shape depends on one.

So that the same code runs eagerly on a CPU and, captured once, as one CUDA graph. Everything that varies is in the
buffers of `RoundInputs`; rows that only fill up a batch write nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.draft_chain import (
    ChainPairs,
    ChainState,
    ChainStops,
    ChainWishes,
    begin_chains,
    extend_chains,
)
from drafter_kernels.lm_head import GrammarMasks
from drafter_service.engine.forwards import Forward
from drafter_service.engine.operations import Stop
from drafter_service.heads import MtpHead
from drafter_service.heads.kernel_forward import Place

STOPS: Final = ChainStops(confidence=Stop.CONFIDENCE.value, grammar=Stop.GRAMMAR.value)


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What one captured round is made for.

    Attributes:
        batch: B, entries.
        pairs: R, most pairs of an entry.
        drafts: K, most drafts.
        pages: P, most pages of an entry.
        has_masks: whether entries may have masks.
        keeps_drafts: whether the last draft of an entry may need a row.
    """

    batch: int
    pairs: int
    drafts: int
    pages: int
    has_masks: bool = False
    keeps_drafts: bool = False


@dataclass(frozen=True, slots=True)
class RoundInputs(ChainWishes):
    """The buffers that a round reads. What is beyond an entry's own pairs, pages and drafts is never looked at.

    Attributes:
        tokens: int64 [B, R].
        hiddens: [B, R, W], in the head's type.
        mask_words: int32 [n, ceil(V / 32)], masks of all entries; None where the shape has none.
        mask_rows: int32 [K, B], which of them a draft has to obey, -1 = none.
    """

    tokens: Tensor
    hiddens: Tensor
    mask_words: Tensor | None
    mask_rows: Tensor | None

    def masks(self, step: int) -> GrammarMasks | None:
        """Those of draft number `step`."""
        if self.mask_words is None or self.mask_rows is None:
            return None
        return GrammarMasks(self.mask_words, self.mask_rows[step])


def make_inputs(shape: RoundShape, head: MtpHead) -> RoundInputs:
    """Buffers of a shape on the head's device, as of a batch without entries."""
    device, batch, drafts = head.device, shape.batch, max(shape.drafts, 1)

    def whole(*size: int, fill: int = 0) -> Tensor:
        return torch.full(size, fill, dtype=torch.int64, device=device)

    words = rows = None
    if shape.has_masks:
        words = torch.zeros(batch * drafts, -(-head.config.vocab_size // 32), dtype=torch.int32, device=device)
        rows = torch.full((drafts, batch), -1, dtype=torch.int32, device=device)
    return RoundInputs(
        is_live=torch.zeros(batch, dtype=torch.bool, device=device),
        first_key=whole(batch),
        row_begin=whole(batch),
        pair_count=whole(batch, fill=1),
        page_table=torch.zeros(batch, shape.pages, dtype=torch.int32, device=device),
        num_drafts=whole(batch),
        min_logprob=torch.full((batch,), -torch.inf, device=device),
        keeps_drafts=torch.zeros(batch, dtype=torch.bool, device=device),
        tokens=whole(batch, shape.pairs),
        hiddens=torch.zeros(batch, shape.pairs, head.config.hidden_width, dtype=head.dtype, device=device),
        mask_words=words,
        mask_rows=rows,
    )


class Round:
    """A round of one shape over one forward.

    Args:
        forward: computes.
        shape: what it is made for.
        page_rows: rows in a page.
        state: what it leaves, [B, K]; None = one of its own.
        device: where.

    Attributes:
        state: drafts, their log-probabilities and number, and why a chain ended.
    """

    def __init__(
        self,
        forward: Forward,
        shape: RoundShape,
        page_rows: int,
        device: torch.device,
        state: ChainState | None = None,
    ) -> None:
        self._forward = forward
        self._shape = shape
        self._page_rows = page_rows
        self._pairs = ChainPairs.empty(shape.batch, shape.pairs, device)
        self.state = ChainState.empty(shape.batch, shape.drafts, device) if state is None else state

    def run(self, inputs: RoundInputs) -> ChainState:
        """Absorbs all pairs of all entries, then drafts for all of them."""
        pairs, state, forward = self._pairs, self.state, self._forward
        overlaps = forward.overlaps
        begin_chains(inputs, inputs.tokens, pairs, state, self._page_rows, overlaps=overlaps)
        x = forward.absorb(pairs.tokens, inputs.hiddens.flatten(0, 1), pairs.keys, pairs.slots, pairs.ends)
        place = Place(inputs.page_table, state.row_counts)
        recycle = x
        for step in range(self._shape.drafts):
            masks = inputs.masks(step)
            if step == 0:
                draft = forward.draft(x, state.keys, place, masks)
            else:
                draft = forward.extend(state.tokens, recycle, state.keys, state.slots, place, masks)
            recycle = draft.recycle
            mask_rows = None if masks is None else masks.rows
            given = (draft.ids, draft.logprobs, draft.witness, mask_rows, STOPS, self._page_rows)
            extend_chains(step, inputs, state, *given, overlaps=overlaps)
        if self._shape.keeps_drafts and self._shape.drafts:
            forward.absorb_drafts(state.tokens, recycle, state.keys, state.slots)
        return state
