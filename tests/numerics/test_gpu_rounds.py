"""What only a GPU shows of rounds made of kernels: every bucket of a batch, nothing compiled or allocated once warm."""

from __future__ import annotations

from array import array

import pytest
import torch

from checkpoints import write_tiny_checkpoint
from drafter_kernels import CompileWatch
from drafter_service.engine.batch import RunEntry
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.engine.operations import Stop
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import BodyPrecision, LmHeadPrecision, load_head, oracle_draft, plan_head
from drafter_service.state.pool import KvPool, PoolShape

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
PAGE_ROWS, VOCAB, WIDTH, MAX_DRAFTS = 16, 128, 64, 4
# As in `test_gpu_runner`: how far below the best logit a draft may lie, as a part of the largest |logit|.
TIE = 4e-2
LEVERS = {
    "as-stored": {},
    "nvfp4-cut": {"quantization": BodyPrecision.NVFP4, "lm_head": LmHeadPrecision.NVFP4, "draft_vocab": "first:100"},
}


class World:
    """Both runners over one pool, and sequences of random pairs that follow each other in it."""

    def __init__(self, head, num_pages, max_batch, max_pages=64):
        layout = head.kv_layout()
        shape = PoolShape(1, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
        self.head = head
        self.pool = KvPool(shape, num_pages, head.device)
        self.pool.poison(range(num_pages + 1))
        self.eager = EagerRunner(head, self.pool, max_batch)
        self.graphs = GraphRunner(self.eager, head, self.pool, GraphLimits(max_batch, MAX_DRAFTS, max_pages))
        self.random = torch.Generator().manual_seed(4)
        self.num_used = 0

    def pages(self, num_rows):
        first, self.num_used = self.num_used, self.num_used - (-num_rows // PAGE_ROWS)
        assert self.num_used <= self.pool.num_pages
        return array("i", range(first, self.num_used))

    def entry(self, pages, begin, pairs, drafts, **more):
        tokens = torch.randint(VOCAB, (pairs,), generator=self.random).tolist()
        hiddens = torch.randn(pairs, WIDTH, generator=self.random).bfloat16()
        given = {"min_logprob": None, "masks": None} | more
        return RunEntry(pages, begin, begin, begin, tuple(tokens), hiddens, drafts, **given)


@pytest.fixture(params=list(LEVERS))
def head(request, tmp_path):
    write_tiny_checkpoint(tmp_path, seed=5, dtype="bfloat16")
    return load_head(tmp_path, device=DEVICE, **LEVERS[request.param])


def distance(head, entry, result):
    """By how much the worst draft lies below the best logit, up to the first tie; and how many were compared."""
    tokens, keys = torch.tensor(entry.tokens, device=DEVICE), torch.arange(len(entry.tokens), device=DEVICE)
    expected = oracle_draft(head, tokens, entry.hiddens.to(DEVICE), keys, entry.num_drafts)
    worst = 0.0
    for index, (logits, draft, best) in enumerate(zip(expected.logits, result.drafts, expected.ids, strict=True)):
        worst = max(worst, float((logits[best] - logits[draft]) / logits[~logits.isinf()].abs().max()))
        if draft != best:
            return worst, index
    return worst, len(expected.ids)


def test_every_bucket_of_a_batch_drafts_like_the_oracle_eagerly_and_as_graphs(head):
    world = World(head, 700, max_batch=100)
    for batch in (1, 2, 7, 16, 17, 33, 64, 65, 100):
        world.num_used = 0
        entries = [world.entry(world.pages(16), 0, 1 + index % 5, MAX_DRAFTS) for index in range(batch)]
        eager, graph = world.eager.run(entries), world.graphs.run(entries)
        compared = 0
        for index in sorted({0, 1 % batch, batch // 2, batch - 1}):
            worst, same = distance(head, entries[index], graph[index])
            assert worst <= TIE
            compared += same
        assert compared >= 3
        same = sum(ours.drafts == theirs.drafts for ours, theirs in zip(eager, graph, strict=True))
        assert same >= 0.8 * batch  # the rest are ties, which attention in other parts decides otherwise
        for ours, theirs in zip(eager, graph, strict=True):
            if ours.drafts == theirs.drafts:
                assert ours.logprobs == pytest.approx(theirs.logprobs, abs=0.1)
    assert world.pool.pages(0)[0][world.num_used :].isnan().all(), "pages of nobody's hold what they held"


def test_masks_floors_and_nan_end_chains_as_they_should(head):
    world = World(head, 64, max_batch=4)
    none, some = torch.zeros(1, VOCAB, dtype=torch.bool), torch.zeros(3, VOCAB, dtype=torch.bool)
    some[:2, 40:45] = True
    for runner in (world.eager, world.graphs):
        world.num_used = 0
        wishes = [{"masks": none}, {"masks": some}, {"min_logprob": -1e-6}]
        entries = [world.entry(world.pages(16), 0, 2, MAX_DRAFTS, **more) for more in wishes]
        nothing, masked, unsure = runner.run(entries)
        assert (nothing.drafts, nothing.stop) == ((), Stop.GRAMMAR)
        assert (len(masked.drafts), masked.stop) == (2, Stop.GRAMMAR)
        assert all(40 <= draft < 45 for draft in masked.drafts)
        assert (len(unsure.drafts), unsure.stop) == (1, Stop.CONFIDENCE)
    down = world.head.joined.down
    (down if torch.is_tensor(down) else down.tensor_scale).fill_(torch.nan)
    for runner in (world.eager, world.graphs):
        for more in ({}, {"masks": ~none}):
            world.num_used = 0
            with pytest.raises(ArithmeticError, match="NaN"):
                runner.run([world.entry(world.pages(16), 0, 2, 1, **more)])


def test_once_warm_nothing_is_compiled_captured_or_taken_from_the_driver(head):
    world = World(head, 30_000, max_batch=17, max_pages=1200)
    world.eager.warm_up()
    world.graphs.warm_up()
    captured = world.graphs.num_captured
    compiled, mask = [], torch.ones(1, VOCAB, dtype=torch.bool)
    # What PyTorch itself prepares on a first call of each kind: its caches, not ours.
    world.eager.run([world.entry(world.pages(2100), 0, 2000, 1, masks=mask)])
    torch.cuda.synchronize()
    before = torch.cuda.memory_stats()["num_device_alloc"]
    with CompileWatch(compiled.append):
        for batch in (1, 2, 3, 4, 16, 17):
            for length in (1, 15, 16, 64, 2500):
                world.num_used = 0
                tables = [world.pages(length + 16) for _ in range(batch)]
                world.eager.run([world.entry(pages, 0, length, 0) for pages in tables])
                for drafts in (1, 2, 3, 4):
                    for accepted in range(drafts + 1):
                        for more in ({}, {"masks": mask}, {"keeps_drafts": True}):
                            world.graphs.run(
                                [world.entry(pages, length, accepted + 1, drafts, **more) for pages in tables]
                            )
                world.eager.run([world.entry(pages, length, 3, 3) for pages in tables])
    assert compiled == []
    assert world.graphs.num_captured == captured
    assert torch.cuda.memory_stats()["num_device_alloc"] - before <= 2


def test_rounds_write_into_no_memory_that_is_handed_out_later(head):
    world = World(head, 200, max_batch=4)
    world.graphs.warm_up()
    torch.cuda.synchronize()
    # Whatever small pieces are free, a round's own tensors among them if it has let go of them.
    others = [torch.full((size // 8,), -77, device=DEVICE) for size in (512, 1024, 2048) for _ in range(6000)]
    for batch in (1, 2, 4):
        for drafts in (1, 2, 3, MAX_DRAFTS):
            world.num_used = 0
            entries = [world.entry(world.pages(16), 0, 3, drafts) for _ in range(batch)]
            results = world.graphs.run(entries)
            worst, _ = distance(head, entries[-1], results[-1])
            assert worst <= TIE
    assert sum(int((one != -77).sum()) for one in others) == 0


def test_a_long_prompt_is_absorbed_as_it_would_be_pair_by_pair(head):
    world = World(head, 600, max_batch=2, max_pages=300)
    pages = world.pages(3000)
    prompt = world.entry(pages, 0, 2600, 0)
    world.eager.run([prompt])
    last = world.entry(pages, 2600, 3, MAX_DRAFTS)
    tokens = torch.tensor([*prompt.tokens, *last.tokens], device=DEVICE)
    hiddens = torch.cat((prompt.hiddens, last.hiddens)).to(DEVICE)
    expected = oracle_draft(head, tokens, hiddens, torch.arange(2603, device=DEVICE), 1)
    logits = expected.logits[0]
    for runner in (world.eager, world.graphs):
        (draft, *_) = runner.run([last])[0].drafts
        assert float((logits.max() - logits[draft]) / logits[~logits.isinf()].abs().max()) <= TIE


@pytest.mark.parametrize("levers", list(LEVERS))
def test_narrow_weights_stay_narrow_on_the_device(tmp_path, levers):
    write_tiny_checkpoint(tmp_path, dtype="bfloat16", hidden_size=1024, intermediate_size=2048, vocab_size=8192)
    plan = plan_head(tmp_path, **LEVERS[levers])
    before = torch.cuda.memory_allocated()
    head = load_head(tmp_path, device=DEVICE, **LEVERS[levers])
    held = torch.cuda.memory_allocated() - before
    assert head.weight_bytes() == plan.gpu_weight_bytes
    assert abs(held - head.weight_bytes()) < 0.02 * head.weight_bytes() + 2**18
