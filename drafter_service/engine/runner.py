"""The eager runner: joins the head with the KV pool and runs a batch operation by operation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafter_kernels.paged_attention import paged_attention
from drafter_service.engine.batch import RunEntry, RunResult
from drafter_service.engine.operations import Stop
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import tensor_of
from drafter_service.state.pool import KvPool

FEW_ROWS = 32


class EagerRunner:
    """Runs batches: absorb all pairs of all entries at once, then draft for all entries at once, step by step.

    Args:
        head: computes.
        pool: remembers.
    """

    def __init__(self, head: MtpHead, pool: KvPool) -> None:
        self._head = head
        self._pool = pool

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
        chains = [
            _Chain(entry, index, entry.first_key + len(entry.tokens) - 1, entry.num_rows)
            for index, entry in enumerate(entries)
        ]
        active = [chain for chain in chains if chain.entry.num_drafts > 0]
        inputs = last_inputs if len(active) == len(chains) else last_inputs[[chain.index for chain in active]]
        page_table = self._page_table(active) if active else torch.empty(0)
        while active:
            recycled = self._draft(active, inputs, page_table)
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
        writer = _SlotWriter(self._pool, slots.to(device))
        inputs = self._head.absorb(tokens.to(device), hiddens.to(device), keys.to(device), writer)
        if len(entries) == 1:
            return inputs[-1:]
        ends = torch.tensor([len(entry.tokens) for entry in entries]).cumsum(0) - 1
        return inputs[ends.to(device)]

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
        return self._head.absorb(tokens, recycled, keys, _SlotWriter(self._pool, _joined(slots).to(device)))

    def _draft(self, chains: Sequence[_Chain], inputs: Tensor, page_table: Tensor) -> Tensor:
        """Makes the next draft of each chain; returns the hidden that each would go on with, [B, W]."""
        device = self._head.device
        reader = _PageReader(self._pool, page_table, [chain.num_rows for chain in chains])
        keys = torch.tensor([chain.key for chain in chains], device=device)
        output = self._head.finish(inputs, keys, reader)
        logits = self._masked(chains, output.logits)
        # The id from the logits themselves: subtracting the normaliser may round two of them into one.
        ids = logits.max(dim=-1).indices
        logprobs = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
        for chain, draft, logprob in zip(chains, ids.tolist(), logprobs.tolist(), strict=True):
            chain.add(draft, logprob)
        return output.recycle

    def _masked(self, chains: Sequence[_Chain], logits: Tensor) -> Tensor:
        if all(chain.entry.masks is None for chain in chains):
            return logits
        logits = logits.clone()
        for row, chain in zip(logits, chains, strict=True):
            mask = chain.mask
            if mask is not None:
                row.masked_fill_(~mask.to(row.device), float("-inf"))
        return logits

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
    drafts: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stop: Stop | None = None

    @property
    def mask(self) -> Tensor | None:
        """What the next draft may be, bool [vocab]."""
        masks = self.entry.masks
        return None if masks is None else masks[min(len(self.drafts), len(masks) - 1)]

    @property
    def goes_on(self) -> bool:
        """Whether another draft is wanted."""
        return self.stop is None and len(self.drafts) < self.entry.num_drafts

    @property
    def owes_row(self) -> bool:
        """Whether the chain has ended and its last draft needs a row all the same."""
        rows_written = self.num_rows - self.entry.num_rows
        return not self.goes_on and self.entry.keeps_drafts and rows_written < len(self.drafts)

    def add(self, draft: int, logprob: float) -> None:
        """Takes up the next draft; one without a probability is none, since everything is masked."""
        if math.isnan(logprob):
            if self.mask is None:
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


class _SlotWriter:
    """Where `absorb` leaves the rows."""

    def __init__(self, pool: KvPool, slots: Tensor) -> None:
        self._pool = pool
        self._slots = slots

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores one row a pair."""
        self._pool.write(layer, self._slots, k, v)


class _PageReader:
    """Where `finish` finds the rows of a batch.

    The reference attention gathers as many rows for every sequence as the longest has. So sequences of like lengths
    (within a factor of two) go together: one long sequence must not make its neighbours as dear as itself.
    """

    def __init__(self, pool: KvPool, page_table: Tensor, row_counts: Sequence[int]) -> None:
        self._pool = pool
        self._page_table = page_table
        self._row_count = max(row_counts)
        self._is_small = len(row_counts) == 1 and page_table.device.type == "cpu" and pool.shape.dtype == torch.float32
        self._row_counts = torch.tensor(row_counts, dtype=torch.int32, device=page_table.device)
        groups: dict[int, list[int]] = {}
        for index, count in enumerate(row_counts):
            groups.setdefault(max(count, FEW_ROWS).bit_length(), []).append(index)
        page_rows = pool.shape.page_rows
        self._groups = [
            (indices, -(-max(row_counts[index] for index in indices) // page_rows)) for indices in groups.values()
        ]

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of one query a sequence over the rows that it holds."""
        k_pages, v_pages = self._pool.pages(layer)
        if self._is_small:
            return self._attend_alone(q, k_pages, v_pages, scale)
        if len(self._groups) == 1:
            return paged_attention(q, k_pages, v_pages, self._page_table, self._row_counts, scale)
        attended = torch.empty_like(q)
        for indices, num_pages in self._groups:
            table, counts = self._page_table[indices, :num_pages], self._row_counts[indices]
            attended[indices] = paged_attention(q[indices], k_pages, v_pages, table, counts, scale)
        return attended

    def _attend_alone(self, q: Tensor, k_pages: Tensor, v_pages: Tensor, scale: float) -> Tensor:
        """The same for one sequence on a CPU: no row is there that does not count, so that fewer operations do."""
        num_pages = -(-self._row_count // k_pages.shape[1])
        pages = self._page_table[0, :num_pages]
        k, v = (
            stored.index_select(0, pages).flatten(0, 1)[: self._row_count].transpose(0, 1)
            for stored in (k_pages, v_pages)
        )
        grouped = q.view(1, len(k), -1, q.shape[-1])  # a KV head's queries, side by side
        return scaled_dot_product_attention(grouped, k[None], v[None], scale=scale).reshape(q.shape)
