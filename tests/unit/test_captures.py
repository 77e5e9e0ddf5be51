"""A graph knows addresses: whatever was there before a capture lives as long as what launches the graph."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from checkpoints import write_tiny_checkpoint
from drafter_kernels import Backend
from drafter_service.engine import captures, forwards, graph_runner, slot_round
from drafter_service.engine.forwards import new_graph_memory
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.engine.round_core import RoundShape
from drafter_service.engine.slot_round import SlotPlace, SlotRound, StatusNumbers
from drafter_service.heads import MtpHead, load_head
from drafter_service.heads.kernel_forward import KernelForward
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.state.pool import KvPool, PoolShape

TENSORS = ("arena", "fence", "ready", "states")
NUMBERS = StatusNumbers(44, 4, 3, 11, 20, 60, 70, 110)


class Addresses(TorchDispatchMode):
    """Whose memory operations are given that they have not made themselves.

    Attributes:
        given: weak references to it.
        num_launches: of the newest graph, since its capture.
    """

    def __init__(self):
        super().__init__()
        self.given = {}
        self.num_launches = 0
        self._made = {}

    def __torch_dispatch__(self, operation, _types, args=(), kwargs=None):
        kwargs = kwargs or {}
        for storage in storages((args, kwargs)):
            if storage._cdata not in self._made:
                self.given.setdefault(storage._cdata, StorageWeakRef(storage))
        found = operation(*args, **kwargs)
        for storage in storages(found):
            if storage._cdata not in self.given:
                self._made[storage._cdata] = storage
        return found

    def end(self):
        """What was made on the way is the graph's."""
        self._made.clear()

    @property
    def num_lost(self):
        """How much of it has been freed."""
        return sum(storage.expired() for storage in self.given.values())


def storages(values):
    return [value.untyped_storage() for value in tree_leaves(values) if isinstance(value, torch.Tensor)]


@pytest.fixture
def graphs(monkeypatch):
    """Captures on a CPU; for each graph, what it knows addresses of."""
    known = []

    class Graph:
        def capture_begin(self, **_):
            known.append(Addresses())
            known[-1].__enter__()

        def capture_end(self):
            known[-1].__exit__(None, None, None)
            known[-1].end()

        def replay(self):
            known[-1].num_launches += 1

    def capture(run, device, graph_memory, warm=None):
        (warm or run)()
        return captures.captured(run, device, graph_memory)

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(captures, "capture_stream", lambda _: None)
    monkeypatch.setattr(graph_runner, "capture", capture)
    return known


@pytest.fixture(params=["plain", "kernels"])
def head(request, tmp_path, monkeypatch):
    write_tiny_checkpoint(tmp_path, seed=5)
    if request.param == "plain":
        return load_head(tmp_path)
    monkeypatch.setattr(MtpHead, "runs_kernels", True)
    monkeypatch.setattr(forwards, "KernelForward", partial(KernelForward, backend=Backend.REFERENCE))
    return load_head(tmp_path, packed=True)


@pytest.fixture
def pool(head):
    layout = head.kv_layout()
    shape = PoolShape(layout.num_layers, 16, layout.num_kv_heads, layout.head_dim, layout.dtype)
    return KvPool(shape, 8, head.device)


def test_what_was_captured_is_launched_and_not_run(graphs):
    ran = []
    launch = captures.captured(lambda: ran.append(1), torch.device("cpu"))
    launch()
    launch()
    assert (len(ran), graphs[0].num_launches) == (1, 2)


def test_no_graph_that_has_become_garbage_is_destroyed_within_a_capture(graphs):
    """CUDA gives up the capture of a thread that destroys a graph meanwhile."""
    destroyed = []

    class Old:
        def __init__(self):
            self.itself = self
            weakref.finalize(self, destroyed.append, 1)

    def work():
        for _ in range(3):
            _ = [[n] for n in range(3000)]  # as many objects as have garbage collected
        seen.append(len(destroyed))

    seen, threshold = [], gc.get_threshold()
    gc.collect()
    gc.set_threshold(100, 1, 1)
    try:
        Old()
        captures.captured(work, torch.device("cpu"))
        assert seen == [0]
        work()
        assert seen == [0, 1], "and is afterwards"
    finally:
        gc.set_threshold(*threshold)


def test_all_that_rounds_of_calls_use_lives_as_long_as_they_do(graphs, head, pool):
    runner = GraphRunner(None, head, pool, GraphLimits(max_batch=2, max_drafts=3, max_pages=4))
    runner.warm_up()
    gc.collect()
    assert len(graphs) == runner.num_captured > 8
    assert all(len(one.given) > 10 for one in graphs)
    assert [one.num_lost for one in graphs] == [0] * len(graphs)
    del runner
    gc.collect()
    assert all(one.num_lost > 0 for one in graphs), "and no longer"


def test_all_that_a_lanes_rounds_use_lives_as_long_as_they_do(graphs, head, pool):
    width, memory, launches = head.config.hidden_width, new_graph_memory(head.device), []
    layout = lay_out(ArenaWish(1, 3, 4 * width, 4 * width, head.config.vocab_size, 0, with_masks=False))
    for drafts in (1, 2, 3):
        whole = torch.zeros(4, dtype=torch.int64).split(1)
        arena, states = torch.zeros(layout.size, dtype=torch.uint8), torch.zeros(2, 3, dtype=torch.int64)
        place = SlotPlace(arena, layout, "float32", width, whole[0], whole[1], states, NUMBERS)
        forward = memory.forward(head, pool, 1, 4)
        made = SlotRound(head, pool, RoundShape(1, 4, drafts, 2), place, forward)
        with torch.inference_mode():
            launches.append(graph_runner.capture(made.run, head.device, memory.handle))
    del memory, whole, arena, states, place, forward, made
    gc.collect()
    assert all(len(one.given) > 20 for one in graphs)
    assert [one.num_lost for one in graphs] == [0] * 3
    del launches
    gc.collect()
    assert all(one.num_lost > 10 for one in graphs), "and no longer"


def test_what_runs_before_a_capture_reads_nothing_that_the_lane_or_its_session_may_give_back_meanwhile(monkeypatch):
    places = []

    class Made:
        new_host = run = staticmethod(lambda: None)

        def __init__(self, _head, _pool, _shape, place, _forward=None):
            places.append(place)

    monkeypatch.setattr(slot_round, "SlotRound", Made)
    monkeypatch.setattr(slot_round, "capture", lambda *_, **__: None)
    memory = SimpleNamespace(forward=lambda *_: None, handle=None)
    lane = SlotPlace(*(torch.zeros(8) if name in TENSORS else None for name in SlotPlace.__slots__))
    head = SimpleNamespace(device=torch.device("cuda"))
    slot_round.capture_slot_round(head, None, RoundShape(1, 2, 1, 1), lane, memory)
    captured, warm = places
    assert captured is lane
    for name in TENSORS:
        assert getattr(warm, name).data_ptr() != getattr(lane, name).data_ptr(), name
