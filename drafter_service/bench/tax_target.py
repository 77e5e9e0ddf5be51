"""What plays the target when the tax is measured: a verify of a known length, and the same round in its own process."""

from __future__ import annotations

import math
import statistics
import struct
import time
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.engine.batch import RunEntry
from drafter_service.engine.lane_plan import read_mirror
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import RoundShape
from drafter_service.engine.runner import EagerRunner
from drafter_service.engine.slot_round import (
    NUM_MIRROR_WORDS,
    NUM_STATE_WORDS,
    LaunchedRound,
    SlotInputs,
    SlotPlace,
    capture_slot_round,
)
from drafter_service.heads import MtpHead, load_head
from drafter_service.memory.layout import ArenaLayout, ArenaWish, lay_out
from drafter_service.server.lanes import NUMBERS, REASONS
from drafter_service.state.pool import KvPool, PoolShape
from specdraft.memory import ClientGpu, DeviceRange
from specdraft.memory.simulated import SimulatedDriver

PAGE_ROWS = 16
NUM_CONTEXT_ROWS = 64
"""Rows of the sequence; every round writes its pairs behind them again, so that all rounds cost the same."""

MAX_POSITION = 512
NUM_PAGES = MAX_POSITION // PAGE_ROWS + 1
"""Of the longest sequence, here as in the service: into how many parts attention is cut hangs on it."""

NUM_PAIRS = 2


class Device:
    """A stream of the target's, on a GPU or on a simulated one."""

    def __init__(self, gpu: ClientGpu) -> None:
        self.gpu = gpu
        driver = gpu.driver
        driver.make_current(gpu.device)
        self._simulated = driver if isinstance(driver, SimulatedDriver) else None
        if self._simulated is None:
            self.torch_device = torch.device("cuda", gpu.device)
            self._stream = torch.cuda.Stream(self.torch_device)
            self.stream = int(self._stream.cuda_stream)
        else:
            self.torch_device = torch.device("cpu")
            self.stream = driver.create_stream()

    def enqueue(self, work: Callable[[], object]) -> None:
        """Puts work onto the stream."""
        if self._simulated is not None:
            self._simulated.launch(self.stream, torch.inference_mode()(work))
            return
        with torch.cuda.stream(self._stream), torch.inference_mode():
            work()

    def copy(self, target: DeviceRange, source: Tensor) -> None:
        """Puts a copy onto the stream, as a kernel of the target's would write; on whichever GPU the memory lies.

        `source` is on this device, dense, and kept until the stream is past it.
        """
        self.gpu.driver.make_current(self.gpu.device)
        self.gpu.driver.copy(self.stream, target.pointer, source.data_ptr(), target.nbytes)

    def synchronize(self) -> None:
        """Waits for the stream."""
        self.gpu.driver.synchronize(self.stream)

    def captured(self, work: Callable[[], object]) -> Callable[[], object]:
        """The work as a CUDA graph; on a simulated GPU the work itself."""
        if self._simulated is not None:
            return work
        self.enqueue(work)
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=self._stream, capture_error_mode="thread_local"):
            work()
        return graph.replay


class Verify:
    """A verify of about `verify_ms`, made of matrix products, that leaves the pairs in a slot behind them.

    Args:
        device: where it runs.
        verify_ms: how long.
    """

    def __init__(self, device: Device, verify_ms: float) -> None:
        size = 4096 if device.torch_device.type == "cuda" else 64
        dtype = torch.bfloat16 if device.torch_device.type == "cuda" else torch.float32
        self._device = device
        self._matrix = torch.randn(size, size, device=device.torch_device).to(dtype)
        self._product = torch.empty_like(self._matrix)
        self._after = torch.zeros(1, device=device.torch_device)
        count = max(1, round(verify_ms * 1e3 / self._microseconds_of_one()))
        self.launch = device.captured(lambda: self._products(count))
        times = []
        for _ in range(9):
            began = time.perf_counter()
            device.enqueue(self.launch)
            device.synchronize()
            times.append((time.perf_counter() - began) * 1e3)
        self.milliseconds = statistics.median(times)

    def next_work(self) -> None:
        """What the target enqueues behind the drafts."""
        self._after.add_(1)

    def _products(self, count: int) -> None:
        for _ in range(count):
            torch.mm(self._matrix, self._matrix, out=self._product)

    def _microseconds_of_one(self) -> float:
        self._device.enqueue(lambda: self._products(3))
        self._device.synchronize()
        began = time.perf_counter()
        self._device.enqueue(lambda: self._products(20))
        self._device.synchronize()
        return max((time.perf_counter() - began) * 1e6 / 20, 1e-3)


def context_tokens() -> list[int]:
    """The tokens of the pairs before the rounds."""
    return [1 + key % 60 for key in range(NUM_CONTEXT_ROWS)]


def context_rows(width: int, dtype: torch.dtype) -> Tensor:
    """Their hidden rows."""
    return torch.randn(NUM_CONTEXT_ROWS, width, generator=torch.Generator().manual_seed(0)).to(dtype)


def pair_tokens(variant: int) -> list[int]:
    """The tokens of a variant's pairs."""
    return [1 + (variant * NUM_PAIRS + index) % 60 for index in range(NUM_PAIRS)]


def pair_rows(width: int, dtype: torch.dtype, variant: int) -> Tensor:
    """The hidden rows of a variant's pairs."""
    return torch.randn(NUM_PAIRS, width, generator=torch.Generator().manual_seed(variant)).to(dtype)


def pairs_bytes(layout: ArenaLayout, first_key: int, width: int, dtype: torch.dtype, variant: int = 0) -> Tensor:
    """The input part of a slot, from `first_key` to the last hidden row, as the target's kernels would leave it."""
    fields = layout.fields
    data = bytearray(fields.hidden - fields.first_key)
    struct.pack_into("<q", data, 0, first_key)
    struct.pack_into("<i", data, fields.pair_count - fields.first_key, NUM_PAIRS)
    struct.pack_into(f"<{NUM_PAIRS}i", data, fields.tokens - fields.first_key, *pair_tokens(variant))
    rows = pair_rows(width, dtype, variant)
    packed = torch.zeros(NUM_PAIRS, layout.row_stride, dtype=torch.uint8)
    packed[:, : rows.shape[1] * rows.element_size()] = rows.contiguous().view(torch.uint8)
    return torch.cat((torch.tensor(list(data), dtype=torch.uint8), packed.flatten()))


@dataclass(slots=True)
class OwnRound:
    """The same round in the target's own process: what an engine with a built-in head would launch.

    Attributes:
        launched: of the same code as the service's.
        inputs: the slot's input part.
    """

    launched: LaunchedRound
    inputs: Tensor

    def outputs(self) -> tuple[tuple[int, ...], tuple[float, ...]]:
        """Ids and log-probabilities that the last run drafted; the device is done with it."""
        made = self.launched.round
        words, logprobs = made.mirror[0].tolist(), made.logprobs[0].tolist()
        found = read_mirror(words, logprobs, made.shape.pairs, NUM_MIRROR_WORDS, dict(REASONS))
        return found.drafts, found.logprobs


@torch.inference_mode()
def make_own_round(checkpoint: Path, device: Device, num_drafts: int, dtype: str) -> OwnRound:
    """Loads the head into this process and captures its round."""
    torch_device = device.torch_device
    head = load_head(checkpoint, device=torch_device)
    pool, shape = _pool(head), RoundShape(1, num_drafts + 1, num_drafts, NUM_PAGES)
    width = head.config.hidden_width
    item = getattr(torch, dtype)
    wish = ArenaWish(1, num_drafts, width * item.itemsize, width * item.itemsize, head.config.vocab_size, 0, False)
    layout = lay_out(wish)

    def whole(*values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=torch_device)

    arena = torch.zeros(layout.size, dtype=torch.uint8, device=torch_device)
    place = SlotPlace(
        arena=arena,
        layout=layout,
        dtype=dtype,
        width=width,
        fence=whole(0),
        ready=whole(1),
        states=whole(*[0, 0, NUM_CONTEXT_ROWS - 1] * 2).view(2, NUM_STATE_WORDS),
        numbers=NUMBERS,
    )
    launched = capture_slot_round(head, pool, shape, place)
    _absorb_context(head, pool, item)
    _fill(launched.round.inputs, num_drafts)
    begin = layout.slots + layout.fields.first_key
    prepared = pairs_bytes(layout, NUM_CONTEXT_ROWS, width, item)
    if torch_device.type == "cuda":
        torch.cuda.synchronize(torch_device)  # the device's own stream waits for no other
    return OwnRound(launched, arena[begin : begin + len(prepared)])


def _absorb_context(head: MtpHead, pool: KvPool, dtype: torch.dtype) -> None:
    """Stores the rows before the rounds, as the service's sequences hold them."""
    context = RunEntry(
        pages=array("i", range(NUM_PAGES)),
        first_key=0,
        row_begin=0,
        num_live_rows=0,
        tokens=tuple(context_tokens()),
        hiddens=context_rows(head.config.hidden_width, dtype),
        num_drafts=0,
        min_logprob=None,
        masks=None,
    )
    EagerRunner(head, pool, max_batch=1).run([context])


def _fill(inputs: SlotInputs, num_drafts: int) -> None:
    """What the service's planner would say about the round."""
    for name, value in (
        ("ticket", 1),
        ("op", 1),
        ("planned", num_drafts),
        ("planned_stop", Stop.COMPLETE.value),
        ("max_keys", MAX_POSITION),
        ("num_rows_max", MAX_POSITION),
    ):
        getattr(inputs, name).fill_(value)
    inputs.min_logprob.fill_(-math.inf)
    inputs.is_real.fill_(value=True)
    inputs.page_table.copy_(torch.arange(NUM_PAGES)[None])


def _pool(head: MtpHead) -> KvPool:
    layout = head.kv_layout()
    shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
    return KvPool(shape, NUM_PAGES, head.device)
