"""What the eager runner computes with: the plain forward, whose shapes follow the batch, or kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, Protocol

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from drafter_kernels.lm_head import GrammarMasks
from drafter_kernels.paged_attention import paged_attention
from drafter_service.engine.forwards import choose
from drafter_service.heads import MtpHead
from drafter_service.heads.kernel_forward import ABSORB_ROWS, Draft, KernelForward, Place
from drafter_service.heads.kernel_weights import KernelWeights
from drafter_service.state.pool import KvPool

FEW_ROWS: Final = 32

ANY_ROWS: Final = 1 << 30


class EagerSteps(Protocol):
    """The steps of a batch; what the host knows is given as numbers."""

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """Writes the rows of N pairs; returns the decoder layer's inputs of those at `ends` int64 [B], [B, H]."""
        ...

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Writes one row a chain; returns the layer's inputs [B, H]."""
        ...

    def draft(
        self, x: Tensor, keys: Tensor, page_table: Tensor, row_counts: Sequence[int], masks: GrammarMasks | None
    ) -> Draft:
        """The next draft of each chain; page_table int32 [B, P]."""
        ...

    def warm_up(self) -> None:
        """Has everything compiled that a batch may need."""
        ...


def make_steps(head: MtpHead, pool: KvPool, max_batch: int) -> EagerSteps:
    """As the head computes."""
    return KernelSteps(head, pool, max_batch) if head.runs_kernels else PlainSteps(head, pool)


class KernelSteps:
    """Kernels, launched one by one; what they compile for is the same as in captured rounds.

    Args:
        head: its weights.
        pool: remembers.
        max_batch: most chains that are expected.
    """

    def __init__(self, head: MtpHead, pool: KvPool, max_batch: int) -> None:
        self._device, self._dtype = head.device, head.dtype
        self._width, self._hidden_width = head.config.hidden_size, head.config.hidden_width
        self._words = -(-head.config.vocab_size // 32)
        self._weights, self._pages = KernelWeights.of(head), pool.pages(0)
        self._max_batch = max_batch
        self._forward = self._make(max_batch)

    def _make(self, batch: int) -> KernelForward:
        return KernelForward(self._weights, self._pages, batch, ABSORB_ROWS)

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """As the protocol's."""
        if len(ends) > self._max_batch:  # of whoever did not say how many there would be
            self._max_batch = len(ends)
            self._forward = self._make(len(ends))
        return self._forward.absorb(tokens, hiddens, keys, slots, ends)

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """As the protocol's. A copy: kernels load what begins anywhere more slowly, and compile for it."""
        return self._forward.absorb_drafts(tokens, hiddens.contiguous(), keys, slots)

    def draft(
        self, x: Tensor, keys: Tensor, page_table: Tensor, row_counts: Sequence[int], masks: GrammarMasks | None
    ) -> Draft:
        """As the protocol's. Attention is planned for any length: there is one kernel to be compiled for a batch."""
        counts = torch.tensor(row_counts, dtype=torch.int32, device=self._device)
        return self._forward.draft(x, keys, Place(page_table, counts, ANY_ROWS), masks)

    def warm_up(self) -> None:
        """Runs every size on nobody's rows."""
        for count in (1, 16, 17, 33, 65, 1025):
            self._absorb_nothing(count)
        powers = [1 << bits for bits in range(self._max_batch.bit_length() + 1)]
        for batch in sorted({min(power, self._max_batch) for power in powers}):
            for has_masks in (False, True):
                self._draft_nothing(batch, has_masks=has_masks)

    def _absorb_nothing(self, count: int) -> None:
        nowhere = torch.full((count,), -1, dtype=torch.int64, device=self._device)
        hiddens = torch.zeros(count, self._hidden_width, dtype=self._dtype, device=self._device)
        ends = torch.zeros(1, dtype=torch.int64, device=self._device)
        self._forward.absorb(nowhere, hiddens, nowhere, nowhere, ends)

    def _draft_nothing(self, batch: int, *, has_masks: bool) -> None:
        nowhere = torch.full((batch,), -1, dtype=torch.int64, device=self._device)
        x = torch.zeros(batch, self._width, dtype=self._dtype, device=self._device)
        table = torch.zeros(batch, 1, dtype=torch.int32, device=self._device)
        words = torch.zeros(1, self._words, dtype=torch.int32, device=self._device)
        masks = GrammarMasks(words, nowhere.int()) if has_masks else None
        self._forward.absorb_drafts(nowhere, x, nowhere, nowhere)
        self.draft(x, nowhere, table, [0] * batch, masks)


class PlainSteps:
    """The plain forward.

    Args:
        head: computes.
        pool: remembers.
    """

    def __init__(self, head: MtpHead, pool: KvPool) -> None:
        self._head = head
        self._pool = pool

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """As the protocol's."""
        inputs = self._head.absorb(tokens, hiddens, keys, _SlotWriter(self._pool, slots))
        return inputs[-1:] if len(ends) == 1 else inputs[ends]

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """As the protocol's."""
        return self._head.absorb(tokens, hiddens, keys, _SlotWriter(self._pool, slots))

    def draft(
        self, x: Tensor, keys: Tensor, page_table: Tensor, row_counts: Sequence[int], masks: GrammarMasks | None
    ) -> Draft:
        """As the protocol's."""
        output = self._head.finish(x, keys, _PageReader(self._pool, page_table, row_counts))
        return choose(output.logits, output.recycle, masks)

    def warm_up(self) -> None:
        """Nothing is compiled."""


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
