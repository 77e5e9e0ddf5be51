"""What a batch of entries is put into for a captured round, and what is read back: one copy each way."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.draft_chain import ChainState
from drafter_service.engine.batch import RunEntry, RunResult
from drafter_service.engine.mask_words import pack_masks
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import RoundInputs, RoundShape
from drafter_service.engine.twins import Sizes, Twins
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import PackedRows, tensor_of

WHOLE = torch.int64

ROWS_BYTES_MAX: Final = 256 << 10
"""Hidden rows of so many bytes travel with everything else that is said about a round; more of them by themselves."""

_STOPS: Final = {stop.value: stop for stop in Stop} | {0: None}


class BatchBuffers:
    """For all rounds of B entries, whatever their drafts, pages and masks: of these never two run at once.

    Args:
        head: computes.
        batch: B.
        max_drafts: most drafts; an entry has one pair more at most.
        short_pages: pages up to which a table travels with everything else.

    Attributes:
        state: what every round leaves.
    """

    def __init__(self, head: MtpHead, batch: int, max_drafts: int, short_pages: int) -> None:
        device, pairs, drafts = head.device, max_drafts + 1, max(max_drafts, 1)
        width = head.config.hidden_width
        self._device, self._batch, self._pairs, self._drafts = device, batch, pairs, drafts
        self._dtype, self._row_bytes = str(head.dtype).removeprefix("torch."), width * head.dtype.itemsize
        num_words, rest = divmod(self._row_bytes, 4)
        self._holds_rows = not rest and batch * pairs * self._row_bytes <= ROWS_BYTES_MAX
        self._given = Twins(_given(batch, pairs, drafts, short_pages, num_words if self._holds_rows else 0), device)
        self._left = Twins(_left(batch, drafts), device)
        self._from_host, self._to_host = self._given.new_host(), self._left.new_host(for_reading=True)
        self.state = ChainState(**self._left.device)
        if self._holds_rows:
            self._hiddens = self._given.device["rows"].view(head.dtype)
            self._staged = self._from_host.tensors["rows"].view(head.dtype)
            self._row_memory = self._from_host.views["rows"].cast("B")
        else:
            self._hiddens = torch.zeros(batch, pairs, width, dtype=head.dtype, device=device)
            self._staged = torch.zeros(batch * pairs, width, dtype=head.dtype, pin_memory=device.type == "cuda")
        self._tables = {short_pages: self._given.device["page_table"]}
        words = -(-head.config.vocab_size // 32)
        self._mask_words = torch.zeros(batch * drafts, words, dtype=torch.int32, device=device)

    def inputs(self, shape: RoundShape) -> RoundInputs:
        """The buffers as a round of a shape takes them."""
        if shape.pages not in self._tables:
            self._tables[shape.pages] = torch.zeros(self._batch, shape.pages, dtype=torch.int32, device=self._device)
        without = {"mask_rows", "page_table", "places", "kept", "rows"}
        given = {name: tensor for name, tensor in self._given.device.items() if name not in without}
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
        for tensor in self._from_host.tensors.values():
            tensor.zero_()
        self._from_host.tensors["pair_count"].fill_(1)
        self._from_host.tensors["mask_rows"].fill_(-1)
        self._given.to_device(self._from_host)

    def fill(self, entries: Sequence[RunEntry], shape: RoundShape, kept: Sequence[int]) -> Tensor | None:
        """Puts a batch in. What an earlier batch left beyond it is of entries that are not live.

        Returns:
            The pool's slots `kept`, which somebody wants to read before the round, on the device; None without any.
        """
        views, pairs = self._from_host.views, self._pairs
        views["is_live"][:] = bytes([1] * len(entries) + [0] * (self._batch - len(entries)))
        tokens, places, count = views["tokens"], views["places"], 0
        for index, entry in enumerate(entries):
            views["first_key"][index] = entry.first_key
            views["row_begin"][index] = entry.row_begin
            views["pair_count"][index] = len(entry.tokens)
            views["num_drafts"][index] = entry.num_drafts
            views["min_logprob"][index] = -math.inf if entry.min_logprob is None else entry.min_logprob
            views["keeps_drafts"][index] = entry.keeps_drafts
            for place, token in enumerate(entry.tokens, start=index * pairs):
                tokens[place] = token
                places[count] = place
                count += 1
        for place, slot in enumerate(kept):
            views["kept"][place] = slot
        self._fill_pages(entries, shape.pages)
        if shape.has_masks:
            self._fill_masks(entries)
        if self._holds_rows:
            self._send_with_rows(entries)
        else:
            self._given.to_device(self._from_host)
            self._send_rows(entries, count)
        return self._given.device["kept"][: len(kept)] if kept else None

    def _send_with_rows(self, entries: Sequence[RunEntry]) -> None:
        """Everything in one copy; rows that are on the device already go to their places there, behind it."""
        on_device = []
        for index, entry in enumerate(entries):
            rows = entry.hiddens
            if isinstance(rows, PackedRows) and rows.dtype == self._dtype:
                begin = index * self._pairs * self._row_bytes
                self._row_memory[begin : begin + len(rows.buffer)] = rows.buffer
                continue
            tensor = tensor_of(rows)
            if tensor.device.type == "cpu":
                self._staged[index, : len(tensor)].copy_(tensor)
            else:
                on_device.append((index, tensor))
        self._given.to_device(self._from_host)
        for index, tensor in on_device:
            self._hiddens[index, : len(tensor)].copy_(tensor)

    def _send_rows(self, entries: Sequence[RunEntry], count: int) -> None:
        """All rows side by side in one copy, and from there to their places."""
        rows = [tensor_of(entry.hiddens) for entry in entries]
        if len(rows) == 1 and rows[0].device == self._device:
            self._hiddens[0, :count].copy_(rows[0])
            return
        if any(part.device.type != "cpu" for part in rows):
            packed = torch.cat([part.to(self._device) for part in rows])
        else:
            packed = torch.cat(rows, out=self._staged[:count]).to(self._device, non_blocking=True)
        self._hiddens.flatten(0, 1).index_copy_(0, self._given.device["places"][:count], packed)

    def _fill_pages(self, entries: Sequence[RunEntry], num_pages: int) -> None:
        """Of a long table the columns that the longest entry has: what is beyond an entry's rows is never followed."""
        table = self._tables[num_pages]
        if table is self._given.device["page_table"]:
            view = self._from_host.views["page_table"]
            for index, entry in enumerate(entries):
                pages = memoryview(entry.pages)[:num_pages]
                view[index * num_pages : index * num_pages + len(pages)] = pages
            return
        width = min(max(len(entry.pages) for entry in entries), num_pages)
        rows = bytearray().join(entry.pages[:width].tobytes().ljust(4 * width, b"\0") for entry in entries)
        if rows:
            packed = torch.frombuffer(rows, dtype=torch.int32).view(len(entries), width)
            table[: len(entries), :width] = packed.to(self._device)

    def _fill_masks(self, entries: Sequence[RunEntry]) -> None:
        """Every mask once; a draft beyond an entry's masks has to obey the last one."""
        rows = self._from_host.tensors["mask_rows"]
        rows.fill_(-1)
        most = len(rows)
        for index, entry in enumerate(entries):
            if entry.masks is None:
                continue
            used = entry.masks[:most]
            begin = index * most
            self._mask_words[begin : begin + len(used)] = pack_masks(used).to(self._device)
            rows[:, index] = begin + torch.arange(most).clamp(max=len(used) - 1)

    def read(self, count: int) -> list[RunResult]:
        """What the last round left for the first `count` entries, once it is there. Raises ArithmeticError for NaN."""
        self._left.to_host(self._to_host)
        views = self._to_host.views
        if 1 in views["is_broken"][:count]:
            raise ArithmeticError("the head computed NaN")
        results = []
        for index in range(count):
            begin = index * self._drafts
            end = begin + views["draft_count"][index]
            drafts, logprobs = views["drafts"][begin:end], views["logprobs"][begin:end]
            results.append(RunResult(tuple(drafts), tuple(logprobs), _STOPS[views["stop"][index]]))
        return results


def _given(batch: int, pairs: int, drafts: int, short_pages: int, row_words: int) -> Sizes:
    """What the host says; `row_words`: 32-bit words of a hidden row, 0 = rows travel by themselves."""
    whole = dict.fromkeys(("first_key", "row_begin", "pair_count", "num_drafts"), (WHOLE, (batch,)))
    rows: Sizes = {"rows": (torch.int32, (batch, pairs, row_words))} if row_words else {}
    return {
        **whole,
        "is_live": (torch.bool, (batch,)),
        "keeps_drafts": (torch.bool, (batch,)),
        "min_logprob": (torch.float32, (batch,)),
        "tokens": (WHOLE, (batch, pairs)),
        "places": (WHOLE, (batch * pairs,)),
        "kept": (WHOLE, (batch * (pairs + drafts),)),
        "page_table": (torch.int32, (batch, short_pages)),
        "mask_rows": (torch.int32, (drafts, batch)),
        **rows,
    }


def _left(batch: int, drafts: int) -> Sizes:
    types = {"is_broken": torch.bool, "row_counts": torch.int32, "logprobs": torch.float32}
    wide = {"drafts", "logprobs"}
    return {
        part.name: (types.get(part.name, WHOLE), (batch, drafts) if part.name in wide else (batch,))
        for part in fields(ChainState)
    }
