"""The forward that a captured round is made of: kernels on a GPU, plain PyTorch elsewhere, behind one face."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor

from drafter_kernels.lm_head import GrammarMasks
from drafter_kernels.paged_attention import paged_attention
from drafter_service.engine.mask_words import unpack_masks
from drafter_service.heads import MtpHead
from drafter_service.heads.kernel_forward import Draft, KernelForward, Place
from drafter_service.heads.kernel_weights import KernelWeights
from drafter_service.state.pool import KvPool


class Forward(Protocol):
    """A head in fixed shapes: no host looks at a value. `KernelForward` says what is what."""

    overlaps: bool

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """Writes the rows of pairs; the layer's input of those at `ends`."""
        ...

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """Writes one row a chain; the layer's inputs."""
        ...

    def draft(self, x: Tensor, keys: Tensor, place: Place, masks: GrammarMasks | None = None) -> Draft:
        """The draft of each chain."""
        ...

    def extend(  # noqa: PLR0917  # a row and a draft
        self,
        tokens: Tensor,
        hiddens: Tensor,
        keys: Tensor,
        slots: Tensor,
        place: Place,
        masks: GrammarMasks | None = None,
    ) -> Draft:
        """Both."""
        ...


def make_forward(head: MtpHead, pool: KvPool, batch: int, absorbed: int) -> Forward:
    """For up to `batch` chains, and `absorbed` pairs at once."""
    if head.runs_kernels:
        return KernelForward(KernelWeights.of(head), pool.pages(0), batch, absorbed)
    return PlainForward(head, pool)


@dataclass(slots=True)
class GraphMemory:
    """What captured rounds share of which never two run at once: intermediate results, and forwards.

    Attributes:
        handle: of PyTorch's pool; None on a CPU.
    """

    handle: Any
    _forwards: dict[tuple[int, int], Forward] = field(default_factory=dict)

    def forward(self, head: MtpHead, pool: KvPool, batch: int, absorbed: int) -> Forward:
        """One of these sizes, made once."""
        if (batch, absorbed) not in self._forwards:
            self._forwards[batch, absorbed] = make_forward(head, pool, batch, absorbed)
        return self._forwards[batch, absorbed]


def new_graph_memory(device: torch.device) -> GraphMemory:
    """For rounds of one stream."""
    return GraphMemory(torch.cuda.graph_pool_handle() if device.type == "cuda" else None)


class PlainForward:
    """The head's plain forward in fixed shapes. Rows that are not written go to a page of nobody's.

    Args:
        head: computes.
        pool: remembers.
    """

    overlaps = False

    def __init__(self, head: MtpHead, pool: KvPool) -> None:
        self._head = head
        self._pool = pool

    def absorb(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor, ends: Tensor) -> Tensor:
        """As the protocol's."""
        return self.absorb_drafts(tokens, hiddens, keys, slots).index_select(0, ends)

    def absorb_drafts(self, tokens: Tensor, hiddens: Tensor, keys: Tensor, slots: Tensor) -> Tensor:
        """As the protocol's."""
        # What stands where there is no pair may be anything: it is replaced before a table or a norm sees it.
        hiddens = torch.where(tokens[:, None] >= 0, hiddens, 0)
        return self._head.absorb(tokens.clamp(min=0), hiddens, keys, _FixedWriter(self._pool, slots))

    def draft(self, x: Tensor, keys: Tensor, place: Place, masks: GrammarMasks | None = None) -> Draft:
        """As the protocol's."""
        output = self._head.finish(x, keys, _TableReader(self._pool, place))
        return choose(output.logits, output.recycle, masks)

    def extend(  # noqa: PLR0917  # a row and a draft
        self,
        tokens: Tensor,
        hiddens: Tensor,
        keys: Tensor,
        slots: Tensor,
        place: Place,
        masks: GrammarMasks | None = None,
    ) -> Draft:
        """As the protocol's."""
        return self.draft(self.absorb_drafts(tokens, hiddens, keys, slots), keys, place, masks)


def choose(logits: Tensor, recycle: Tensor, masks: GrammarMasks | None) -> Draft:
    """The best allowed id of each row of logits float32 [B, V], as `lm_head` would leave it."""
    if masks is not None:
        is_allowed = unpack_masks(masks.words[masks.rows.clamp(min=0).long()], logits.shape[1])
        logits = logits.masked_fill(~(is_allowed | (masks.rows < 0)[:, None]), -torch.inf)
    # The id from the logits themselves: subtracting the normaliser may round two of them into one.
    best, ids = logits.max(dim=-1)
    logprobs = logits.log_softmax(dim=-1).gather(1, ids[:, None])[:, 0]
    # Nothing allowed gives NaN, and so does a head that computes NaN: only the best logit tells them apart.
    is_nothing = logprobs.isnan()
    return Draft(ids.masked_fill(is_nothing, -1), logprobs.masked_fill(is_nothing, -torch.inf), recycle, best[:, None])


class _FixedWriter:
    """Where `absorb` leaves the rows."""

    def __init__(self, pool: KvPool, slots: Tensor) -> None:
        self._pool = pool
        spare = torch.arange(len(slots), device=slots.device) % pool.shape.page_rows
        self._slots = torch.where(slots >= 0, slots, pool.spare_page * pool.shape.page_rows + spare)

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        """Stores one row a pair."""
        self._pool.write(layer, self._slots, k, v)


class _TableReader:
    """Where `finish` finds the rows of a batch."""

    def __init__(self, pool: KvPool, place: Place) -> None:
        self._pool = pool
        most = place.page_table.shape[1] * pool.shape.page_rows
        is_used = place.row_counts > 0
        self._table = torch.where(is_used[:, None], place.page_table, pool.spare_page)
        self._counts = torch.where(is_used, place.row_counts, 1).clamp(1, most)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        """Attention of one query a sequence over the rows that it holds."""
        k_pages, v_pages = self._pool.pages(layer)
        return paged_attention(q, k_pages, v_pages, self._table, self._counts, scale)
