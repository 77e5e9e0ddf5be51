"""Rounds made of the kernels' operations draft like the plain forward and like the oracle, on a CPU.

Here the operations run their references, or their Triton kernels in Triton's interpreter; on a GPU `test_gpu_runner`
has the same rounds compiled.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch

from books import Books, write
from checkpoints import write_tiny_checkpoint
from drafter_kernels import Backend
from drafter_service.engine import eager_steps, forwards
from drafter_service.engine import operations as ops
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import BodyPrecision, LmHeadPrecision, MtpHead, load_head, oracle_draft, plan_head
from drafter_service.heads.kernel_forward import KernelForward
from round_story import Story

LIMITS = GraphLimits(max_batch=8, max_drafts=4, max_pages=64)
VARIANTS = [
    {},
    {"lm_head": LmHeadPrecision.NVFP4},
    {"lm_head": LmHeadPrecision.FP8, "draft_vocab": "first:100"},
    {"lm_head": LmHeadPrecision.FLOAT32},
    {"lm_head": LmHeadPrecision.NVFP4, "quantization": BodyPrecision.NVFP4, "draft_vocab": "first:77"},
    {"quantization": BodyPrecision.FP8},
]
# Of the largest |logit|: how far below the best one a draft may lie. As in `test_gpu_runner`.
TIE = {"float32": 1e-4, "bfloat16": 4e-2}


def as_graphs(runner, head, pool):
    return GraphRunner(runner, head, pool, LIMITS)


def name(variant):
    return "-".join(variant.values()) or "as-stored"


@pytest.fixture
def kernels(monkeypatch):
    """Heads on a CPU compute with the kernels' operations, by the references or in the interpreter."""

    def use(backend):
        monkeypatch.setattr(MtpHead, "runs_kernels", True)
        for module in (forwards, eager_steps):
            monkeypatch.setattr(module, "KernelForward", partial(KernelForward, backend=backend))

    return use


def expect_oracle(head, pairs, drafts, count):
    """The drafts lie close to the oracle's, up to the first one that rounding decides; how many were compared."""
    keys = sorted(pairs)
    tokens, hiddens = torch.tensor([pairs[key][0] for key in keys]), torch.stack([pairs[key][1] for key in keys])
    expected = oracle_draft(head, tokens, hiddens, torch.tensor(keys), count)
    assert len(drafts) == count
    tie = TIE[head.config.dtype]
    for index, (logits, draft, best) in enumerate(zip(expected.logits, drafts, expected.ids, strict=True)):
        finite = logits[~logits.isinf()]
        assert float((logits[best] - logits[draft]) / finite.abs().max()) <= tie
        if draft != best:
            return index
    return count


@pytest.mark.parametrize("wrap", [{}, {"wrap_runner": as_graphs}], ids=["eager", "graph"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_packed_heads_draft_like_the_oracle_of_the_same_numbers(tmp_path, kernels, variant, dtype, wrap):
    write_tiny_checkpoint(tmp_path, seed=5, dtype=dtype)
    kernels(Backend.REFERENCE)
    head = load_head(tmp_path, packed=True, **variant)
    books = Books(head, **wrap)
    story, compared, drafted = Story(books, 3), 0, 0
    for _ in range(8):
        chosen, entries, outcomes = story.round()
        for sequence, entry, outcome in zip(chosen, entries, outcomes, strict=True):
            assert isinstance(outcome, ops.Written), outcome
            count = entry.drafts.num_drafts
            compared += expect_oracle(head, story.pairs[sequence], outcome.drafts, count)
            drafted += count
    assert compared > 0.8 * drafted > 10
    books.close()


@pytest.mark.parametrize("variant", VARIANTS, ids=name)
def test_packed_and_widened_heads_are_one_head(tmp_path, variant):
    write_tiny_checkpoint(tmp_path, seed=5, dtype="bfloat16")
    packed, wide = load_head(tmp_path, packed=True, **variant), load_head(tmp_path, **variant)
    plan = plan_head(tmp_path, **variant)
    assert packed.fingerprint == wide.fingerprint
    assert packed.levers == wide.levers
    assert packed.weight_bytes() == plan.gpu_weight_bytes
    assert wide.weight_bytes() == plan.weight_bytes
    narrow = variant.get("quantization") or variant.get("lm_head") in {LmHeadPrecision.NVFP4, LmHeadPrecision.FP8}
    assert (packed.weight_bytes() < wide.weight_bytes()) == bool(narrow)


@pytest.mark.parametrize("backend", list(Backend))
@pytest.mark.parametrize("wrap", [{}, {"wrap_runner": as_graphs}], ids=["eager", "graph"])
def test_stops_masks_and_kept_drafts_go_as_in_the_plain_runner(tmp_path, kernels, backend, wrap):
    write_tiny_checkpoint(tmp_path, seed=5)
    expected = told(Books(load_head(tmp_path)))
    kernels(backend)
    found = told(Books(load_head(tmp_path, packed=True), **wrap))
    assert [one[:2] for one in found] == [one[:2] for one in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert ours[2] == pytest.approx(theirs[2], abs=1e-3)
    stops = [stop for _, stop, _ in found]
    assert stops == [ops.Stop.CONFIDENCE, ops.Stop.GRAMMAR, ops.Stop.COMPLETE, ops.Stop.COMPLETE, ops.Stop.COMPLETE]


def told(books):
    """Drafts, stops and log-probabilities of entries with a floor, masks, one mask, kept drafts, and what follows."""
    head = books.head
    ids = [books.open() for _ in range(3)]
    kept = ops.Open(b"a session", b"kept".ljust(16), b"k" * 16, 200, reserve=False, max_sequences=9, keeps_drafts=True)
    books.ask(kept)
    ids.append(kept.sequence_id)
    hiddens = torch.randn(3, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
    allowed = torch.zeros(4, 128, dtype=torch.bool)
    allowed[:2, 5:9] = True
    wishes = [
        ops.DraftWish(4, min_logprob=-0.01),
        ops.DraftWish(4, masks=allowed),
        ops.DraftWish(3, masks=allowed[:1]),
        ops.DraftWish(2),
    ]
    pairs = ops.WriteWish(0, (1, 2, 3), hiddens, allow_gap=False, accepted_drafts=None)
    entries = [ops.Write(b"a session", one, 1, b"", pairs, wish) for one, wish in zip(ids, wishes, strict=True)]
    found = books.ask(*entries)
    more = ops.WriteWish(4, (9,), hiddens[:1], False, None, verified_tokens=found[3].drafts[:1])
    found += books.ask(ops.Write(b"a session", ids[3], 2, b"", more, ops.DraftWish(2)))
    books.close()
    return [(one.drafts, one.stop, one.logprobs) for one in found]


@pytest.mark.parametrize("variant", VARIANTS[3:], ids=name)
def test_interpreted_kernels_make_whole_rounds(tmp_path, kernels, variant):
    write_tiny_checkpoint(tmp_path, seed=5, dtype="bfloat16")
    kernels(Backend.TRITON)
    head = load_head(tmp_path, packed=True, **variant)
    books = Books(head, wrap_runner=as_graphs)
    story, compared = Story(books, 9, num_sequences=2), 0
    for _ in range(2):
        chosen, entries, outcomes = story.round()
        for sequence, entry, outcome in zip(chosen, entries, outcomes, strict=True):
            compared += expect_oracle(head, story.pairs[sequence], outcome.drafts, entry.drafts.num_drafts)
    assert compared > 0
    books.close()


@pytest.mark.parametrize("wrap", [{}, {"wrap_runner": as_graphs}], ids=["eager", "graph"])
@pytest.mark.parametrize("has_mask", [False, True])
def test_nan_is_told_from_a_mask_that_allows_nothing(tmp_path, kernels, has_mask, wrap):
    write_tiny_checkpoint(tmp_path, seed=5, dtype="bfloat16")
    kernels(Backend.REFERENCE)
    head = load_head(tmp_path, packed=True)
    head.joined.down.fill_(torch.nan)
    books = Books(head, **wrap)
    masks = torch.ones(1, 128, dtype=torch.bool) if has_mask else None
    pairs = ops.WriteWish(0, (1, 2), torch.randn(2, 64), allow_gap=False, accepted_drafts=None)
    (failed,) = books.ask(ops.Write(b"a session", books.open(), 1, b"", pairs, ops.DraftWish(2, masks=masks)))
    assert isinstance(failed, ops.Refusal)
    books.close()


@pytest.mark.parametrize("wrap", [{}, {"wrap_runner": as_graphs}], ids=["eager", "graph"])
def test_long_prompts_are_absorbed_part_by_part(tmp_path, kernels, monkeypatch, wrap):
    write_tiny_checkpoint(tmp_path, seed=5)
    kernels(Backend.REFERENCE)
    monkeypatch.setattr("drafter_service.heads.kernel_forward.ABSORB_ROWS", 8)
    monkeypatch.setattr(eager_steps, "ABSORB_ROWS", 8)
    head = load_head(tmp_path, packed=True)
    books, count = Books(head, **wrap), 61
    sequence = books.open()
    tokens = [(7 * i + 3) % 128 for i in range(count)]
    hiddens = torch.randn(count, 64, generator=torch.Generator().manual_seed(2))
    books.ask(write(sequence, 1, 0, tokens[:60], hiddens[:60]))
    (written,) = books.ask(write(sequence, 2, 60, tokens[60:], hiddens[60:], 3))
    pairs = {key: (token, hiddens[key]) for key, token in enumerate(tokens)}
    assert expect_oracle(head, pairs, written.drafts, 3) == 3
    books.close()


def test_a_batch_larger_than_expected_drafts_like_the_plain_runner(tmp_path, kernels):
    write_tiny_checkpoint(tmp_path, seed=5)
    kernels(Backend.REFERENCE)
    head = load_head(tmp_path, packed=True)
    books = Books(head, max_batch=8, wrap_runner=lambda _, *parts: EagerRunner(*parts, max_batch=2))
    story = Story(books, 4, num_sequences=7)
    entries = [story.entry(sequence) for sequence in story.ids]
    outcomes = books.ask(*entries)
    for sequence, entry, outcome in zip(story.ids, entries, outcomes, strict=True):
        count = entry.drafts.num_drafts
        assert expect_oracle(head, story.pairs[sequence], outcome.drafts, count) == count
    books.close()
