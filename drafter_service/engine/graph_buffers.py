"""What a batch of entries is put into for a captured round, and what is read back: one copy each way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields, replace

import torch
from torch import Tensor

from drafter_kernels.draft_chain import ChainState
from drafter_service.engine.batch import RunEntry
from drafter_service.engine.mask_words import pack_masks
from drafter_service.engine.round_core import RoundInputs, RoundShape
from drafter_service.engine.twins import Sizes, Twins
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import tensor_of

WHOLE = torch.int64


class BatchBuffers:
    """For all rounds of B entries, whatever their drafts, pages and masks: of these never two run at once.

    Args:
        head: computes.
        batch: B.
        max_drafts: most drafts; an entry has one pair more at most.
        max_pages: most pages of an entry.

    Attributes:
        state: what every round leaves.
    """

    def __init__(self, head: MtpHead, batch: int, max_drafts: int, max_pages: int) -> None:
        self._head = head
        self._batch = batch
        device, pairs, drafts = head.device, max_drafts + 1, max(max_drafts, 1)
        self._given = Twins(_given(batch, pairs, drafts), device)
        self._left = Twins(_left(batch, drafts), device)
        self.state = ChainState(**self._left.device)
        self._hiddens = torch.zeros(batch, pairs, head.config.hidden_width, dtype=head.dtype, device=device)
        self._tables = {max_pages: torch.zeros(batch, max_pages, dtype=torch.int32, device=device)}
        words = -(-head.config.vocab_size // 32)
        self._mask_words = torch.zeros(batch * drafts, words, dtype=torch.int32, device=device)

    def inputs(self, shape: RoundShape) -> RoundInputs:
        """The buffers as a round of a shape takes them."""
        if shape.pages not in self._tables:
            self._tables[shape.pages] = torch.zeros(
                self._batch, shape.pages, dtype=torch.int32, device=self._head.device
            )
        given = {name: tensor for name, tensor in self._given.device.items() if name != "mask_rows"}
        made = RoundInputs(
            **given,
            page_table=self._tables[shape.pages],
            hiddens=self._hiddens,
            mask_words=self._mask_words,
            mask_rows=self._given.device["mask_rows"],
        )
        return made if shape.has_masks else replace(made, mask_words=None, mask_rows=None)

    def empty(self) -> None:
        """A batch without entries."""
        for tensor in self._given.host.values():
            tensor.zero_()
        self._given.host["pair_count"].fill_(1)
        self._given.host["mask_rows"].fill_(-1)
        self._given.to_device()

    def fill(self, entries: Sequence[RunEntry], shape: RoundShape) -> None:
        """Puts a batch in. What an earlier batch left beyond it is of entries that are not live."""
        host, count = self._given.host, len(entries)
        columns = {
            "first_key": [entry.first_key for entry in entries],
            "row_begin": [entry.row_begin for entry in entries],
            "pair_count": [len(entry.tokens) for entry in entries],
            "num_drafts": [entry.num_drafts for entry in entries],
            "min_logprob": [-torch.inf if entry.min_logprob is None else entry.min_logprob for entry in entries],
            "keeps_drafts": [entry.keeps_drafts for entry in entries],
        }
        for name, values in columns.items():
            host[name][:count] = torch.tensor(values, dtype=host[name].dtype)
        host["is_live"].zero_()
        host["is_live"][:count] = True
        for index, entry in enumerate(entries):
            host["tokens"][index, : len(entry.tokens)] = torch.tensor(entry.tokens)
            self._hiddens[index, : len(entry.tokens)] = tensor_of(entry.hiddens)
        self._fill_pages(entries, self._tables[shape.pages])
        if shape.has_masks:
            self._fill_masks(entries)
        self._given.to_device()

    def _fill_pages(self, entries: Sequence[RunEntry], table: Tensor) -> None:
        """As many columns as the longest entry has pages: what is beyond an entry's rows is never followed."""
        width = min(max(len(entry.pages) for entry in entries), table.shape[1])
        rows = torch.zeros(len(entries), width, dtype=torch.int32)
        for row, entry in zip(rows, entries, strict=True):
            used = min(len(entry.pages), width)
            if used:
                row[:used] = torch.frombuffer(entry.pages, dtype=torch.int32, count=used)
        table[: len(entries), :width] = rows.to(table.device)

    def _fill_masks(self, entries: Sequence[RunEntry]) -> None:
        """Every mask once; a draft beyond an entry's masks has to obey the last one."""
        rows = self._given.host["mask_rows"]
        rows.fill_(-1)
        most = len(rows)
        for index, entry in enumerate(entries):
            if entry.masks is None:
                continue
            used = entry.masks[:most]
            begin = index * most
            self._mask_words[begin : begin + len(used)] = pack_masks(used).to(self._mask_words.device)
            rows[:, index] = begin + torch.arange(most).clamp(max=len(used) - 1)

    def read(self) -> dict[str, Tensor]:
        """What the last round left, on the host."""
        self._left.to_host()
        return self._left.host


def _given(batch: int, pairs: int, drafts: int) -> Sizes:
    whole = dict.fromkeys(("first_key", "row_begin", "pair_count", "num_drafts"), (WHOLE, (batch,)))
    return {
        **whole,
        "is_live": (torch.bool, (batch,)),
        "keeps_drafts": (torch.bool, (batch,)),
        "min_logprob": (torch.float32, (batch,)),
        "tokens": (WHOLE, (batch, pairs)),
        "mask_rows": (torch.int32, (drafts, batch)),
    }


def _left(batch: int, drafts: int) -> Sizes:
    types = {"is_broken": torch.bool, "row_counts": torch.int32, "logprobs": torch.float32}
    wide = {"drafts", "logprobs"}
    return {
        part.name: (types.get(part.name, WHOLE), (batch, drafts) if part.name in wide else (batch,))
        for part in fields(ChainState)
    }
