"""The graph runner: batches padded to a few shapes, each of them captured once and then launched as one CUDA graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

import torch

from drafter_service.engine.batch import RunEntry, Runner, RunResult
from drafter_service.engine.captures import capture
from drafter_service.engine.forwards import new_graph_memory
from drafter_service.engine.graph_buffers import BatchBuffers
from drafter_service.engine.round_core import Round, RoundShape
from drafter_service.heads import MtpHead
from drafter_service.state.pool import KvPool

_log = logging.getLogger(__name__)

SHORT_ROWS: Final = 2048
"""Rows up to which kernels have shapes of their own; beyond, one shape is for all lengths."""


class GraphObserver(Protocol):
    """What a graph runner tells to whoever counts."""

    def graph_captured(self) -> None:
        """A graph was captured."""


def bucket(count: int, most: int) -> int:
    """The smallest power of two that holds `count`, at most `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


def table_pages(head: MtpHead, pool: KvPool, num_pages: int, most: int) -> int:
    """Pages of the table that a batch gets whose longest sequence has so many, at most `most`.

    Kernels follow a sequence's rows alone, so two widths serve all; plain attention takes the time of the whole table.
    """
    if not head.runs_kernels:
        return bucket(num_pages, most)
    short = min(-(-SHORT_ROWS // pool.shape.page_rows), most)
    return short if num_pages <= short else most


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What graphs are made for.

    Attributes:
        max_batch: most entries.
        max_drafts: K_max; an entry has at most K_max + 1 pairs.
        max_pages: most pages of a sequence.
        warm_pages: of a head without kernels, page counts up to this are captured before they are needed.
    """

    max_batch: int
    max_drafts: int
    max_pages: int
    warm_pages: int = 16


class GraphRunner:
    """Runs host-synchronised batches through captured rounds; what fits none of them goes to the eager runner.

    Args:
        eager: runs the rest.
        head: computes.
        pool: remembers.
        limits: the shapes.
        observer: told of captures; None = nobody is.
    """

    def __init__(
        self,
        eager: Runner,
        head: MtpHead,
        pool: KvPool,
        limits: GraphLimits,
        *,
        observer: GraphObserver | None = None,
    ) -> None:
        self._eager = eager
        self._head = head
        self._pool = pool
        self._limits = limits
        self._observer = observer
        self._runs_kernels = head.runs_kernels
        self._rounds: dict[RoundShape, Callable[[], Any]] = {}
        self._fitting: dict[tuple[int, int, int, bool, bool], RoundShape] = {}
        self._buffers: dict[int, BatchBuffers] = {}
        self._graph_memory = new_graph_memory(head.device)
        self._short_pages = table_pages(head, pool, 1, limits.max_pages)

    @property
    def num_captured(self) -> int:
        """Rounds that are ready."""
        return len(self._rounds)

    def warm_up(self) -> None:
        """Captures what no call shall wait for: with kernels every shape, else those of few pages without masks."""
        limits = self._limits
        for batch in _powers(limits.max_batch):
            for drafts in range(limits.max_drafts + 1):
                for pages, is_general in self._warm_pages():
                    self._round(RoundShape(batch, limits.max_drafts + 1, drafts, pages, is_general, is_general))

    def _warm_pages(self) -> Iterator[tuple[int, bool]]:
        """Pages, and whether masks and kept drafts are possible too."""
        limits = self._limits
        if not self._head.runs_kernels:
            yield from ((pages, False) for pages in _powers(min(limits.warm_pages, limits.max_pages)))
            return
        for pages in {self._short_pages, limits.max_pages}:
            yield pages, False
        yield limits.max_pages, True

    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """One result an entry. If it raises, every row that was stored before is as it was."""
        shape, has_live_rows = self._shape(entries)
        if shape is None:
            return self._eager.run(entries)
        launch, buffers = self._round(shape), self._buffers[shape.batch]
        overwritten = overwritten_slots(entries, self._pool.shape.page_rows) if has_live_rows else ()
        slots = buffers.fill(entries, shape, overwritten)
        saved = None if slots is None else self._pool.read(slots)
        try:
            launch()
            return buffers.read(len(entries))
        except BaseException:
            if slots is not None and saved is not None:
                self._pool.restore(slots, saved)
            raise

    def _shape(self, entries: Sequence[RunEntry]) -> tuple[RoundShape | None, bool]:
        """What the batch fits into, None = nothing; and whether it may overwrite live rows."""
        limits = self._limits
        pairs = drafts = rows = 0
        has_masks = keeps_drafts = has_live_rows = False
        for entry in entries:  # once for everything: this is in the way of every call
            pairs = max(pairs, len(entry.tokens))
            drafts = max(drafts, entry.num_drafts)
            rows = max(rows, entry.num_rows + entry.num_draft_rows)
            has_masks = has_masks or entry.masks is not None
            keeps_drafts = keeps_drafts or entry.keeps_drafts
            has_live_rows = has_live_rows or entry.row_begin < entry.num_live_rows
        if pairs > limits.max_drafts + 1 or len(entries) > limits.max_batch or drafts > limits.max_drafts:
            return None, has_live_rows
        pages = -(-rows // self._pool.shape.page_rows)
        if pages > self._short_pages:
            pages = table_pages(self._head, self._pool, pages, limits.max_pages)
        else:
            pages = self._short_pages
        key = len(entries), drafts, pages, has_masks, keeps_drafts
        shape = self._fitting.get(key)
        if shape is None:
            shape = self._fitting[key] = self._fit(*key)
        return shape, has_live_rows

    def _fit(self, num_entries: int, drafts: int, pages: int, has_masks: bool, keeps_drafts: bool) -> RoundShape:
        limits = self._limits
        batch = bucket(num_entries, limits.max_batch)
        if self._runs_kernels and (has_masks or keeps_drafts):
            pages, has_masks, keeps_drafts = limits.max_pages, True, True
        return RoundShape(batch, limits.max_drafts + 1, drafts, pages, has_masks, keeps_drafts)

    def _round(self, shape: RoundShape) -> Callable[[], Any]:
        launch = self._rounds.get(shape)
        if launch is None:
            began = time.perf_counter()
            launch = self._rounds[shape] = self._captured(shape)
            if self._observer is not None:
                self._observer.graph_captured()
            _log.debug("captured %s in %.3f s", shape, time.perf_counter() - began)
        return launch

    @torch.inference_mode()
    def _captured(self, shape: RoundShape) -> Callable[[], Any]:
        head, limits = self._head, self._limits
        if shape.batch not in self._buffers:
            with torch.inference_mode(mode=False):  # they are filled and read outside of it
                self._buffers[shape.batch] = BatchBuffers(head, shape.batch, limits.max_drafts, self._short_pages)
        buffers = self._buffers[shape.batch]
        # One for all batches: the largest has room for any.
        forward = self._graph_memory.forward(
            head, self._pool, limits.max_batch, limits.max_batch * (limits.max_drafts + 1)
        )
        with torch.inference_mode(mode=False):
            inputs = buffers.inputs(shape)
        made = Round(forward, shape, self._pool.shape.page_rows, head.device, buffers.state)
        buffers.empty()
        run = torch.inference_mode()(made.run)
        return capture(lambda: run(inputs), head.device, self._graph_memory.handle)


def overwritten_slots(entries: Sequence[RunEntry], page_rows: int) -> list[int]:
    """Slots that hold live rows now and that the batch will write."""
    return [
        entry.pages[row // page_rows] * page_rows + row % page_rows
        for entry in entries
        for row in range(entry.row_begin, min(entry.num_live_rows, entry.num_rows + entry.num_draft_rows))
    ]


def _powers(most: int) -> list[int]:
    return sorted({bucket(count, most) for count in range(1, most + 1)})
