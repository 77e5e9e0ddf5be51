"""The eager runner on a GPU drafts like the oracle, through the same books as on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from books import SESSION, Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.heads import BodyPrecision, LmHeadPrecision, load_head, oracle_draft
from drafter_service.heads.kernel_forward import KernelForward

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
NUM_DRAFTS = 4

# How far below the best logit a draft may lie, as a part of the largest |logit|. float32: the contract's tie. bf16:
# twice the contract's, since about one draft in a thousand is rounded further, and which one differs by device.
TIE = {"float32": 1e-4, "bfloat16": 4e-2}

Pairs = dict[int, tuple[int, torch.Tensor]]


def as_graphs(runner, head, pool):
    return GraphRunner(runner, head, pool, GraphLimits(max_batch=8, max_drafts=NUM_DRAFTS, max_pages=64))


# What bf16 heads are rounded to: the kernels are others for each, and the oracle computes with the rounded numbers.
LEVERS = {
    "as-stored": {},
    "float32-head": {"lm_head": LmHeadPrecision.FLOAT32},
    "fp8": {"lm_head": LmHeadPrecision.FP8, "quantization": BodyPrecision.FP8},
    "nvfp4-head": {"lm_head": LmHeadPrecision.NVFP4},
    "nvfp4-cut": {
        "lm_head": LmHeadPrecision.NVFP4,
        "quantization": BodyPrecision.NVFP4,
        "draft_vocab": "first:100",
    },
}
HEADS = [("float32", "as-stored"), *(("bfloat16", levers) for levers in LEVERS)]


@pytest.fixture(params=[(*head, runner) for head in HEADS for runner in ("eager", "graph")], ids="-".join)
def books(request: pytest.FixtureRequest, tmp_path: Path):
    matmul = torch.backends.cuda.matmul
    allowed, matmul.allow_tf32 = matmul.allow_tf32, False  # float32 is compared with float32
    dtype, levers, runner = request.param
    write_tiny_checkpoint(tmp_path, seed=5, dtype=dtype)
    wrap = {"wrap_runner": as_graphs} if runner == "graph" else {}
    head = load_head(tmp_path, dtype=getattr(torch, dtype), device=DEVICE, **LEVERS[levers])
    assert head.runs_kernels == (dtype == "bfloat16")
    books = Books(head, page_rows=4, **wrap)
    assert books.head.device == books.pool.pages(0)[0].device == torch.device(DEVICE)
    yield books
    books.close()
    matmul.allow_tf32 = allowed


class Target:
    """What one sequence should hold, and hiddens to feed it: in host memory, as they come out of a request."""

    def __init__(self, books: Books, sequence_id: bytes, pairs: Pairs | None = None, seed: int = 1) -> None:
        self.books = books
        self.sequence_id = sequence_id
        self.pairs = dict(pairs or {})
        self.op = 0
        self.random = torch.Generator().manual_seed(seed)

    def entry(self, first_key: int, tokens: list[int], num_drafts: int | None = None) -> ops.Write:
        """The next write, and takes note of its pairs."""
        hiddens = torch.randn(len(tokens), self.books.head.config.hidden_size, generator=self.random)
        self.pairs = {key: pair for key, pair in self.pairs.items() if key < first_key}
        self.pairs |= {first_key + i: (token, hiddens[i]) for i, token in enumerate(tokens)}
        self.op += 1
        return write(self.sequence_id, self.op, first_key, tokens, hiddens, num_drafts)

    def write(self, first_key: int, tokens: list[int], num_drafts: int | None = None) -> ops.Written:
        """Does it alone, and checks what comes back."""
        (written,) = self.books.ask(self.entry(first_key, tokens, num_drafts))
        assert isinstance(written, ops.Written), written
        if num_drafts:
            self.expect_oracle(written, num_drafts)
        return written

    def expect_oracle(self, written: ops.Outcome, num_drafts: int) -> None:
        """The drafts are the oracle's over exactly these pairs, up to the first one that rounding decides."""
        assert isinstance(written, ops.Written), written
        assert len(written.drafts) == num_drafts
        head, tie = self.books.head, TIE[str(self.books.head.dtype).removeprefix("torch.")]
        keys = sorted(self.pairs)
        tokens = torch.tensor([self.pairs[key][0] for key in keys], device=head.device)
        hiddens = torch.stack([self.pairs[key][1] for key in keys]).to(head.device)
        expected = oracle_draft(head, tokens, hiddens, torch.tensor(keys, device=head.device), num_drafts)
        for logits, draft, best in zip(expected.logits, written.drafts, expected.ids, strict=True):
            largest = logits[~logits.isinf()].abs().max()
            assert float((logits[best] - logits[draft]) / largest) <= tie
            if draft != best:
                return  # a tie: from here on the two chains follow different tokens


def chunked_prompt(books: Books, num_pairs: int = 53) -> Target:
    """A sequence whose prompt was caught up with in chunks that end neither together with pages nor alike."""
    target = Target(books, books.open())
    tokens = [(7 * i + 3) % 128 for i in range(num_pairs)]
    for begin, end in ((0, 40), (40, 41), (41, num_pairs)):
        target.write(begin, tokens[begin:end])
    return target


def test_rounds_with_every_accept_count_follow_a_prompt_in_chunks(books: Books) -> None:
    target = chunked_prompt(books)
    drafts = target.write(53, [9], NUM_DRAFTS).drafts
    first_key = 54
    for accepted in range(NUM_DRAFTS + 1):
        drafts = target.write(first_key, [*drafts[:accepted], 100 + accepted], NUM_DRAFTS).drafts
        first_key += accepted + 1


def test_a_rewind_drops_the_tail(books: Books) -> None:
    target = chunked_prompt(books)
    target.write(53, [9], NUM_DRAFTS)
    target.write(30, [77, 78], NUM_DRAFTS)
    target.write(32, [79], NUM_DRAFTS)


def test_a_fork_and_its_source_go_separate_ways(books: Books) -> None:
    source = chunked_prompt(books)
    forked_id = b"forked sequence."
    (opened,) = books.ask(ops.Fork(SESSION, source.sequence_id, forked_id, forked_id, 50, 200, 99))
    assert isinstance(opened, ops.Opened), opened
    forked = Target(books, forked_id, {key: pair for key, pair in source.pairs.items() if key < 50}, seed=2)
    before = books.rows_of(source.sequence_id)
    forked.write(47, [20, 21], NUM_DRAFTS)  # into a page that both hold
    assert books.rows_of(source.sequence_id) == before
    both = [source.entry(53, [9], NUM_DRAFTS), forked.entry(49, [22, 23, 24], NUM_DRAFTS - 1)]
    first, second = books.ask(*both)
    source.expect_oracle(first, NUM_DRAFTS)
    forked.expect_oracle(second, NUM_DRAFTS - 1)


def test_every_batch_bucket_drafts_like_the_oracle(books: Books) -> None:
    targets = [Target(books, books.open(), seed=seed) for seed in range(8)]
    for target in targets:
        target.write(0, [5, 6, 7])
    for batch in (1, 2, 3, 4, 5, 8):
        entries = [target.entry(max(target.pairs) + 1, [batch, 9], NUM_DRAFTS) for target in targets[:batch]]
        for target, written in zip(targets, books.ask(*entries), strict=False):
            target.expect_oracle(written, NUM_DRAFTS)


def test_a_failed_write_puts_live_rows_back(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    target = chunked_prompt(books)
    before = books.rows_of(target.sequence_id)
    # Behind absorbing, so that rows have been overwritten.
    place = (KernelForward, "_attend") if books.head.runs_kernels else (type(books.head), "finish")
    with monkeypatch.context() as patch:
        patch.setattr(*place, lambda *_: (_ for _ in ()).throw(RuntimeError("the device failed")))
        pairs = dict(target.pairs)
        (failed,) = books.ask(target.entry(20, [1, 2, 3], NUM_DRAFTS))
    assert isinstance(failed, ops.Refusal)
    assert books.rows_of(target.sequence_id) == before
    target.pairs = pairs
    target.write(53, [9], NUM_DRAFTS)
