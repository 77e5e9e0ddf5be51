"""The graph runner: batches padded to a few shapes, each of them captured once and then launched as one CUDA graph."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch

from drafter_service.engine.batch import RunEntry, Runner, RunResult
from drafter_service.engine.captures import capture_stream, captured
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import RoundInputs, RoundOutputs, RoundShape, make_inputs, run_round
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import tensor_of
from drafter_service.state.pool import KvPool

_log = logging.getLogger(__name__)

WARM_UPS = 2
"""Eager runs before a capture: libraries allocate and choose kernels on their first calls."""


class GraphObserver(Protocol):
    """What a graph runner tells to whoever counts."""

    def graph_captured(self) -> None:
        """A graph was captured."""


@dataclass(slots=True)
class CapturedRound:
    """A round of one shape, ready to be launched.

    Attributes:
        inputs: what to fill before.
        outputs: what to read after.
        launch: runs it, on the current stream.
    """

    inputs: RoundInputs
    outputs: RoundOutputs
    launch: Callable[[], None]


def capture_round(
    head: MtpHead, pool: KvPool, shape: RoundShape, spare_page: int, graph_memory: Any = None
) -> CapturedRound:
    """Makes a round of one shape: a CUDA graph on a GPU, the same operations one by one on a CPU.

    `graph_memory` is shared by rounds of which never two run at once.
    """
    inputs = make_inputs(shape, head, spare_page)
    if head.device.type != "cuda":
        outputs = run_round(head, pool, shape, inputs)

        def launch() -> None:
            for kept, new in zip(_tensors(outputs), _tensors(run_round(head, pool, shape, inputs)), strict=True):
                kept.copy_(new)

        return CapturedRound(inputs, outputs, launch)
    stream = capture_stream(head.device)
    stream.wait_stream(torch.cuda.current_stream(head.device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            run_round(head, pool, shape, inputs)
    stream.synchronize()
    made: list[RoundOutputs] = []
    launch = captured(lambda: made.append(run_round(head, pool, shape, inputs)), head.device, graph_memory)
    return CapturedRound(inputs, made[0], launch)


def _tensors(outputs: RoundOutputs) -> tuple[torch.Tensor, ...]:
    return outputs.drafts, outputs.logprobs, outputs.draft_count, outputs.stop, outputs.is_broken


def new_graph_memory(device: torch.device) -> Any:
    """Memory that graphs share: each would keep its own intermediate results otherwise. None on a CPU."""
    return torch.cuda.graph_pool_handle() if device.type == "cuda" else None


def bucket(count: int, most: int) -> int:
    """The smallest power of two that holds `count`, at most `most`."""
    return min(1 << max(count - 1, 0).bit_length(), most)


@dataclass(frozen=True, slots=True)
class GraphLimits:
    """What graphs are made for.

    Attributes:
        max_batch: most entries.
        max_drafts: K_max; an entry has at most K_max + 1 pairs.
        max_pages: most pages of a sequence.
        warm_pages: page counts up to this are captured before they are needed.
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
        self._spare_page = pool.spare_page
        self._observer = observer
        self._rounds: dict[RoundShape, CapturedRound] = {}
        self._graph_memory = new_graph_memory(head.device)

    @property
    def num_captured(self) -> int:
        """Rounds that are ready."""
        return len(self._rounds)

    @torch.inference_mode()
    def warm_up(self) -> None:
        """Captures every shape of few pages without masks, so that no call waits for it."""
        limits = self._limits
        for batch in _powers(limits.max_batch):
            for drafts in range(limits.max_drafts + 1):
                for pages in _powers(min(limits.warm_pages, limits.max_pages)):
                    self._round(RoundShape(batch, limits.max_drafts + 1, drafts, pages))

    @torch.inference_mode()
    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """One result an entry. If it raises, every row that was stored before is as it was."""
        shape = self._shape(entries)
        if shape is None:
            return self._eager.run(entries)
        captured = self._round(shape)
        self._fill(captured.inputs, entries)
        overwritten = torch.tensor(overwritten_slots(entries, self._pool.shape.page_rows), dtype=torch.int64)
        overwritten = overwritten.to(self._head.device)
        saved = self._pool.read(overwritten)
        try:
            captured.launch()
            return _results(captured.outputs, entries)
        except BaseException:
            self._pool.restore(overwritten, saved)
            raise

    def _shape(self, entries: Sequence[RunEntry]) -> RoundShape | None:
        limits, page_rows = self._limits, self._pool.shape.page_rows
        pairs = max(len(entry.tokens) for entry in entries)
        drafts = max(entry.num_drafts for entry in entries)
        if pairs > limits.max_drafts + 1 or len(entries) > limits.max_batch or drafts > limits.max_drafts:
            return None
        rows = max(entry.num_rows + entry.num_draft_rows for entry in entries)
        has_masks = any(entry.masks is not None for entry in entries)
        pages = bucket(-(-rows // page_rows), limits.max_pages)
        return RoundShape(bucket(len(entries), limits.max_batch), limits.max_drafts + 1, drafts, pages, has_masks)

    def _round(self, shape: RoundShape) -> CapturedRound:
        if shape not in self._rounds:
            began = time.perf_counter()
            self._rounds[shape] = capture_round(self._head, self._pool, shape, self._spare_page, self._graph_memory)
            seconds = time.perf_counter() - began
            if self._observer is not None:
                self._observer.graph_captured()
            _log.debug("captured %s in %.3f s", shape, seconds)
        return self._rounds[shape]

    def _fill(self, inputs: RoundInputs, entries: Sequence[RunEntry]) -> None:
        """Puts a batch into the buffers: one small copy a buffer."""
        batch, pairs = inputs.tokens.shape
        padding = batch - len(entries)

        def put(target: torch.Tensor, values: list[float], fill: float) -> None:
            target.copy_(torch.tensor([*values, *[fill] * padding], dtype=target.dtype), non_blocking=True)

        put(inputs.is_live, [True] * len(entries), fill=False)
        put(inputs.first_key, [entry.first_key for entry in entries], 0)
        put(inputs.row_begin, [entry.row_begin for entry in entries], 0)
        put(inputs.pair_count, [len(entry.tokens) for entry in entries], 1)
        put(inputs.num_drafts, [entry.num_drafts for entry in entries], 0)
        floors = [-torch.inf if entry.min_logprob is None else entry.min_logprob for entry in entries]
        put(inputs.min_logprob, floors, -torch.inf)
        put(inputs.keeps_drafts, [entry.keeps_drafts for entry in entries], fill=False)
        tokens = torch.zeros(batch, pairs, dtype=torch.int64)
        table = torch.full(inputs.page_table.shape, self._spare_page, dtype=torch.int64)
        for index, entry in enumerate(entries):
            tokens[index, : len(entry.tokens)] = torch.tensor(entry.tokens)
            inputs.hiddens[index, : len(entry.tokens)] = tensor_of(entry.hiddens)
            used = min(len(entry.pages), table.shape[1])
            table[index, :used] = torch.frombuffer(entry.pages, dtype=torch.int32, count=used)
            if inputs.masks is not None:
                inputs.masks[index] = True if entry.masks is None else _spread(entry.masks, inputs.masks.shape[1])
        inputs.tokens.copy_(tokens, non_blocking=True)
        inputs.page_table.copy_(table, non_blocking=True)


def overwritten_slots(entries: Sequence[RunEntry], page_rows: int) -> list[int]:
    """Slots that hold live rows now and that the batch will write."""
    return [
        entry.pages[row // page_rows] * page_rows + row % page_rows
        for entry in entries
        for row in range(entry.row_begin, min(entry.num_live_rows, entry.num_rows + entry.num_draft_rows))
    ]


def _powers(most: int) -> list[int]:
    return sorted({bucket(count, most) for count in range(1, most + 1)})


def _spread(masks: torch.Tensor, num_rows: int) -> torch.Tensor:
    """One mask a draft: the last one again where there are fewer."""
    return masks[torch.arange(num_rows).clamp(max=len(masks) - 1)]


def _results(outputs: RoundOutputs, entries: Sequence[RunEntry]) -> list[RunResult]:
    counts, stops, broken = outputs.draft_count.tolist(), outputs.stop.tolist(), outputs.is_broken.tolist()
    drafts, logprobs = outputs.drafts.tolist(), outputs.logprobs.tolist()
    if any(broken[: len(entries)]):
        raise ArithmeticError("the head computed NaN")
    return [
        RunResult(
            tuple(drafts[index][: counts[index]]),
            tuple(logprobs[index][: counts[index]]),
            Stop(stops[index]) if stops[index] else None,
        )
        for index in range(len(entries))
    ]
