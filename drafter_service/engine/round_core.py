"""One round as a fixed sequence of operations: no host looks at a value, no shape depends on one.

So that the same code runs eagerly on a CPU and, captured once, as one CUDA graph. Everything that varies is in the
buffers of `RoundInputs`; rows that only fill up a batch write to a page of nobody's. The small functions are what
kernels can replace.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.paged_attention import paged_attention
from drafter_service.engine.operations import Stop
from drafter_service.heads import MtpHead
from drafter_service.state.pool import KvPool


@dataclass(frozen=True, slots=True)
class RoundShape:
    """What one captured round is made for.

    Attributes:
        batch: B, entries.
        pairs: R, most pairs of an entry.
        drafts: K, most drafts.
        pages: P, most pages of an entry.
        has_masks: whether entries may have masks.
    """

    batch: int
    pairs: int
    drafts: int
    pages: int
    has_masks: bool = False


@dataclass(frozen=True, slots=True)
class RoundInputs:
    """The buffers that a round reads. What is beyond an entry's own pairs, pages and drafts is never looked at.

    Attributes:
        is_live: bool [B]; the others compute, write to the spare page, and draft nothing.
        first_key: int64 [B].
        row_begin: int64 [B]: row index of the first pair.
        pair_count: int64 [B], 1..R.
        tokens: int64 [B, R].
        hiddens: [B, R, W], in the head's type.
        page_table: int64 [B, P].
        num_drafts: int64 [B], 0..K, already limited to what positions and pages allow.
        min_logprob: float32 [B], -inf = do not stop.
        keeps_drafts: bool [B]: whether the last draft gets a row as well.
        masks: bool [B, K, V]; None where the shape has none.
        spare_page: int64 [1]: a page of nobody's.
    """

    is_live: Tensor
    first_key: Tensor
    row_begin: Tensor
    pair_count: Tensor
    tokens: Tensor
    hiddens: Tensor
    page_table: Tensor
    num_drafts: Tensor
    min_logprob: Tensor
    keeps_drafts: Tensor
    masks: Tensor | None
    spare_page: Tensor


@dataclass(frozen=True, slots=True)
class RoundOutputs:
    """What a round leaves.

    Attributes:
        drafts: int64 [B, K]; entries from draft_count on are undefined.
        logprobs: float32 [B, K].
        draft_count: int64 [B].
        stop: int64 [B]: CONFIDENCE or GRAMMAR where one of them ended the chain, else 0.
        is_broken: bool [B]: the head computed NaN.
    """

    drafts: Tensor
    logprobs: Tensor
    draft_count: Tensor
    stop: Tensor
    is_broken: Tensor


def make_inputs(shape: RoundShape, head: MtpHead, spare_page: int) -> RoundInputs:
    """Buffers of a shape on the head's device, as of a batch without entries."""
    device, batch = head.device, shape.batch

    def whole(*size: int, fill: int = 0) -> Tensor:
        return torch.full(size, fill, dtype=torch.int64, device=device)

    masks = None
    if shape.has_masks:
        masks = torch.ones(batch, max(shape.drafts, 1), head.config.vocab_size, dtype=torch.bool, device=device)
    return RoundInputs(
        is_live=torch.zeros(batch, dtype=torch.bool, device=device),
        first_key=whole(batch),
        row_begin=whole(batch),
        pair_count=whole(batch, fill=1),
        tokens=whole(batch, shape.pairs),
        hiddens=torch.zeros(batch, shape.pairs, head.config.hidden_width, dtype=head.dtype, device=device),
        page_table=whole(batch, shape.pages, fill=spare_page),
        num_drafts=whole(batch),
        min_logprob=torch.full((batch,), -torch.inf, device=device),
        keeps_drafts=torch.zeros(batch, dtype=torch.bool, device=device),
        masks=masks,
        spare_page=whole(1, fill=spare_page),
    )


def run_round(head: MtpHead, pool: KvPool, shape: RoundShape, inputs: RoundInputs) -> RoundOutputs:
    """Absorbs all pairs of all entries, then drafts for all of them."""
    last = _absorb_pairs(head, pool, shape, inputs)
    key = inputs.first_key + inputs.pair_count - 1
    num_rows = inputs.row_begin + inputs.pair_count
    chain = _Chain(inputs, shape)
    for step in range(shape.drafts):
        reader = _TableReader(pool, inputs, num_rows)
        output = head.finish(last, key, reader)
        token = chain.add(step, output.logits)
        key, num_rows = key + 1, num_rows + 1
        if step + 1 < shape.drafts or chain.may_keep:
            writes = chain.is_going(step + 1) | chain.owes_row(step)
            slots = _slots(pool, inputs, (num_rows - 1)[:, None], writes[:, None])
            last = head.absorb(token, output.recycle, key, _FixedWriter(pool, slots))
    return chain.outputs()


def _absorb_pairs(head: MtpHead, pool: KvPool, shape: RoundShape, inputs: RoundInputs) -> Tensor:
    """Writes the rows of all pairs; returns the decoder layer's input of each entry's last pair, [B, H]."""
    steps = torch.arange(shape.pairs, device=head.device)
    is_pair = inputs.is_live[:, None] & (steps < inputs.pair_count[:, None])
    # What lies behind the last pair may be anything: it is replaced before a table or a norm sees it.
    tokens = torch.where(is_pair, inputs.tokens, 0)
    hiddens = torch.where(is_pair[:, :, None], inputs.hiddens, 0)
    keys = torch.where(is_pair, inputs.first_key[:, None] + steps, 0)
    slots = _slots(pool, inputs, inputs.row_begin[:, None] + steps, is_pair)
    writer = _FixedWriter(pool, slots)
    absorbed = head.absorb(tokens.flatten(), hiddens.flatten(0, 1), keys.flatten(), writer)
    ends = (inputs.pair_count - 1).clamp(0, shape.pairs - 1)[:, None, None]
    return absorbed.view(shape.batch, shape.pairs, -1).gather(1, ends.expand(-1, 1, absorbed.shape[-1]))[:, 0]


def _slots(pool: KvPool, inputs: RoundInputs, rows: Tensor, is_written: Tensor) -> Tensor:
    """Pool slots [B * n] of row indices [B, n]; those that are not written lie in the spare page, row by row."""
    page_rows = pool.shape.page_rows
    index = (rows // page_rows).clamp(0, inputs.page_table.shape[1] - 1)
    own = inputs.page_table.gather(1, index) * page_rows + rows % page_rows
    return torch.where(is_written, own, inputs.spare_page * page_rows + rows % page_rows).flatten()


class _FixedWriter:
    """Where `absorb` leaves the rows."""

    def __init__(self, pool: KvPool, slots: Tensor) -> None:
        self._pool = pool
        self._slots = slots

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores one row a pair."""
        self._pool.write(layer, self._slots, k, v)


class _TableReader:
    """Where `finish` finds the rows of a batch."""

    def __init__(self, pool: KvPool, inputs: RoundInputs, num_rows: Tensor) -> None:
        self._pool = pool
        most = inputs.page_table.shape[1] * pool.shape.page_rows
        self._table = torch.where(inputs.is_live[:, None], inputs.page_table, inputs.spare_page)
        self._counts = torch.where(inputs.is_live, num_rows, 1).clamp(1, most)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of one query a sequence over the rows that it holds."""
        k_pages, v_pages = self._pool.pages(layer)
        return paged_attention(q, k_pages, v_pages, self._table, self._counts, scale)


class _Chain:
    """The drafts of all entries as they grow."""

    def __init__(self, inputs: RoundInputs, shape: RoundShape) -> None:
        device, size = inputs.first_key.device, (shape.batch, max(shape.drafts, 1))
        self.may_keep = True
        self._inputs = inputs
        self._drafts = torch.zeros(size, dtype=torch.int64, device=device)
        self._logprobs = torch.zeros(size, device=device)
        self._count = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        self._stop = torch.zeros(shape.batch, dtype=torch.int64, device=device)
        self._is_broken = torch.zeros(shape.batch, dtype=torch.bool, device=device)

    def add(self, step: int, logits: Tensor) -> Tensor:
        """Takes up draft number `step` of every chain that goes on; returns all tokens, [B]."""
        masks = self._inputs.masks
        if masks is not None:
            logits = logits.masked_fill(~masks[:, step], -torch.inf)
        token = logits.max(dim=-1).indices
        logprob = logits.log_softmax(dim=-1).gather(1, token[:, None])[:, 0]
        goes_on = self.is_going(step)
        # Nothing allowed gives NaN, and so does a head that computes NaN: only a mask tells them apart.
        is_nothing = goes_on & logprob.isnan()
        is_masked = torch.isneginf(logits).all(dim=-1)
        is_draft = goes_on & ~is_nothing
        self._drafts[:, step] = torch.where(is_draft, token, 0)
        self._logprobs[:, step] = torch.where(is_draft, logprob, 0)
        self._count = self._count + is_draft
        stops_here = is_draft & (logprob < self._inputs.min_logprob)
        stop = torch.where(stops_here, Stop.CONFIDENCE.value, self._stop)
        self._stop = torch.where(is_nothing & is_masked, Stop.GRAMMAR.value, stop)
        self._is_broken = self._is_broken | (is_nothing & ~is_masked)
        return torch.where(is_draft, token, 0)

    def is_going(self, step: int) -> Tensor:
        """bool [B]: whether draft number `step` is wanted."""
        wanted = self._inputs.is_live & (step < self._inputs.num_drafts)
        return wanted & (self._stop == 0) & ~self._is_broken

    def owes_row(self, step: int) -> Tensor:
        """bool [B]: whether draft number `step` is a chain's last one and needs a row all the same."""
        return self._inputs.is_live & self._inputs.keeps_drafts & (self._count == step + 1)

    def outputs(self) -> RoundOutputs:
        """What came of it."""
        return RoundOutputs(self._drafts, self._logprobs, self._count, self._stop, self._is_broken)
