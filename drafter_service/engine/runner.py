"""The eager runner: joins the head with the KV pool and runs a batch operation by operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from drafter_kernels.lm_head import GrammarMasks
from drafter_service.engine.batch import RunEntry, RunResult
from drafter_service.engine.eager_steps import FEW_ROWS, EagerSteps, make_steps
from drafter_service.engine.mask_words import pack_masks
from drafter_service.engine.operations import Stop
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import tensor_of
from drafter_service.state.pool import KvPool


class EagerRunner:
    """Runs batches: absorb all pairs of all entries at once, then draft for all entries at once, step by step.

    Args:
        head: computes.
        pool: remembers.
        max_batch: most entries that are expected.
        steps: computes in the head's place; None = as the head does.
    """

    def __init__(self, head: MtpHead, pool: KvPool, max_batch: int = 64, steps: EagerSteps | None = None) -> None:
        self._head = head
        self._pool = pool
        self._steps = steps or make_steps(head, pool, max_batch)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Has every kernel compiled that a batch may need."""
        self._steps.warm_up()

    @torch.inference_mode()
    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """One result an entry. If it raises, every row that was stored before is as it was."""
        overwritten = self._overwritten(entries)
        saved = None if overwritten is None else self._pool.read(overwritten)
        try:
            return self._run(entries)
        except BaseException:
            if overwritten is not None and saved is not None:
                self._pool.restore(overwritten, saved)
            raise

    def _run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        last_inputs = self._absorb(entries)
        words, bases = self._masks(entries)
        chains = [
            _Chain(entry, index, entry.first_key + len(entry.tokens) - 1, entry.num_rows, bases[index])
            for index, entry in enumerate(entries)
        ]
        active = [chain for chain in chains if chain.entry.num_drafts > 0]
        inputs = last_inputs if len(active) == len(chains) else last_inputs[[chain.index for chain in active]]
        page_table = self._page_table(active) if active else torch.empty(0)
        while active:
            recycled = self._draft(active, inputs, page_table, words)
            if not all(chain.goes_on for chain in active):
                self._keep_last_drafts(active, recycled)
                going = [position for position, chain in enumerate(active) if chain.goes_on]
                active = [active[position] for position in going]
                recycled, page_table = recycled[going], page_table[going]
            if active:
                inputs = self._absorb_drafts(active, recycled)
        return [RunResult(tuple(chain.drafts), tuple(chain.logprobs), chain.stop) for chain in chains]

    def _absorb(self, entries: Sequence[RunEntry]) -> Tensor:
        """Writes the rows of all pairs; returns the decoder layer's input of each entry's last pair, [B, H]."""
        tokens = torch.tensor([token for entry in entries for token in entry.tokens], dtype=torch.int64)
        keys = _joined([torch.arange(e.first_key, e.first_key + len(e.tokens)) for e in entries])
        slots = _joined([self._slots(e, e.row_begin, e.num_rows) for e in entries])
        hiddens = _joined([tensor_of(entry.hiddens) for entry in entries])
        device = self._head.device
        ends = torch.tensor([len(entry.tokens) for entry in entries]).cumsum(0) - 1
        hiddens = hiddens.to(device=device, dtype=self._head.dtype)
        return self._steps.absorb(tokens.to(device), hiddens, keys.to(device), slots.to(device), ends.to(device))

    def _keep_last_drafts(self, chains: Sequence[_Chain], recycled: Tensor) -> None:
        """Writes the row of the last draft of each chain that has ended and whose drafts are kept."""
        ended = [position for position, chain in enumerate(chains) if chain.owes_row]
        if ended:
            self._absorb_drafts([chains[position] for position in ended], recycled[ended])

    def _absorb_drafts(self, chains: Sequence[_Chain], recycled: Tensor) -> Tensor:
        """Writes the row of each chain's last draft; returns the layer's inputs, [B, H]."""
        slots = [self._slots(chain.entry, chain.num_rows, chain.num_rows + 1) for chain in chains]
        for chain in chains:
            chain.key += 1
            chain.num_rows += 1
        device = self._head.device
        tokens = torch.tensor([chain.drafts[-1] for chain in chains], device=device)
        keys = torch.tensor([chain.key for chain in chains], device=device)
        return self._steps.absorb_drafts(tokens, recycled, keys, _joined(slots).to(device))

    def _draft(self, chains: Sequence[_Chain], inputs: Tensor, page_table: Tensor, words: Tensor | None) -> Tensor:
        """Makes the next draft of each chain; returns the hidden that each would go on with, [B, W]."""
        device = self._head.device
        keys = torch.tensor([chain.key for chain in chains], device=device)
        masks = None
        if words is not None:
            rows = torch.tensor([chain.mask_row for chain in chains], dtype=torch.int32, device=device)
            masks = GrammarMasks(words, rows)
        draft = self._steps.draft(inputs, keys, page_table, [chain.num_rows for chain in chains], masks)
        ids = draft.ids.tolist()
        is_nan = draft.witness.isnan().any(-1).tolist() if min(ids) < 0 else [False] * len(ids)
        for chain, *found in zip(chains, ids, draft.logprobs.tolist(), is_nan, strict=True):
            chain.add(*found)
        return draft.recycle

    def _masks(self, entries: Sequence[RunEntry]) -> tuple[Tensor | None, list[int]]:
        """The masks of all entries, packed, and where each entry's begin; None where no entry has one."""
        bases, given, count = [], [], 0
        for entry in entries:
            bases.append(count)
            if entry.masks is not None:
                given.append(pack_masks(entry.masks))
                count += len(entry.masks)
        return (torch.cat(given).to(self._head.device) if given else None), bases

    def _page_table(self, chains: Sequence[_Chain]) -> Tensor:
        """Pages of each chain, those of its drafts' rows included: the same for all steps of a batch. int32 [B, P]."""
        page_rows = self._pool.shape.page_rows
        widths = [-(-(chain.num_rows + chain.entry.num_drafts - 1) // page_rows) for chain in chains]
        if len(chains) == 1:
            return torch.frombuffer(chains[0].entry.pages, dtype=torch.int32, count=widths[0])[None].to(
                self._head.device, copy=True
            )
        table = torch.full((len(chains), max(widths)), -1, dtype=torch.int32)
        for row, chain, width in zip(table, chains, widths, strict=True):
            row[:width] = torch.frombuffer(chain.entry.pages, dtype=torch.int32, count=width)
        return table.to(self._head.device)

    def _slots(self, entry: RunEntry, begin: int, end: int) -> Tensor:
        """Pool slots of rows begin <= row < end of the entry's sequence."""
        page_rows, pages = self._pool.shape.page_rows, entry.pages
        if end - begin <= FEW_ROWS:
            # A handful of integers: Python is faster than the eight tensor operations below.
            return torch.tensor([pages[row // page_rows] * page_rows + row % page_rows for row in range(begin, end)])
        rows = torch.arange(begin, end)
        first_page = begin // page_rows
        num_pages = -(-end // page_rows) - first_page
        table = torch.frombuffer(pages, dtype=torch.int32, count=num_pages, offset=first_page * 4).long()
        return table[rows // page_rows - first_page] * page_rows + rows % page_rows

    def _overwritten(self, entries: Sequence[RunEntry]) -> Tensor | None:
        """Slots that hold live rows now and that the batch will write; None = no slot does."""
        slots = []
        for entry in entries:
            end = min(entry.num_live_rows, entry.num_rows + entry.num_draft_rows)
            if end > entry.row_begin:
                slots.append(self._slots(entry, entry.row_begin, end))
        return _joined(slots).to(self._head.device) if slots else None


@dataclass(slots=True)
class _Chain:
    """One entry's drafts as they grow."""

    entry: RunEntry
    index: int
    key: int
    num_rows: int
    mask_base: int
    drafts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def mask_row(self) -> int:
        """Which of the batch's masks the next draft has to obey; -1 = none."""
        masks = self.entry.masks
        return -1 if masks is None else self.mask_base + min(len(self.drafts), len(masks) - 1)

    @property
    def goes_on(self) -> bool:
        """Whether another draft is wanted."""
        return self.stop is None and len(self.drafts) < self.entry.num_drafts

    @property
    def owes_row(self) -> bool:
        """Whether the chain has ended and its last draft needs a row all the same."""
        rows_written = self.num_rows - self.entry.num_rows
        return not self.goes_on and self.entry.keeps_drafts and rows_written < len(self.drafts)

    def add(self, draft: int, logprob: float, is_nan: bool) -> None:
        """Takes up the next draft; -1 is none: everything is masked, or the head is broken."""
        if draft < 0:
            if is_nan or self.entry.masks is None:
                raise ArithmeticError("the head computed NaN")
            self.stop = Stop.GRAMMAR
            return
        self.drafts.append(draft)
        self.logprobs.append(logprob)
        floor = self.entry.min_logprob
        if floor is not None and logprob < floor:
            self.stop = Stop.CONFIDENCE


def _joined(parts: Sequence[Tensor]) -> Tensor:
    return parts[0] if len(parts) == 1 else torch.cat(list(parts))
