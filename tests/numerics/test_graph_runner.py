"""Batches in fixed shapes draft like the eager runner and like the oracle, and padding touches nobody's rows.

On a CPU the operations of a captured round run one by one; on a GPU the same tests run it as a CUDA graph.
"""

from __future__ import annotations

import pytest
import torch
from prometheus_client import CollectorRegistry

from books import Books, Comparison, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import graph_buffers
from drafter_service.engine import operations as ops
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner, bucket
from drafter_service.heads import load_head
from drafter_service.memory.hiddens import RowsToCome, hidden_rows
from drafter_service.telemetry import Metrics
from round_story import Story

LIMITS = GraphLimits(max_batch=8, max_drafts=4, max_pages=32)


def as_graphs(runner, head, pool):
    return GraphRunner(runner, head, pool, LIMITS)


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture
def head(tmp_path, device):
    write_tiny_checkpoint(tmp_path, seed=5)
    return load_head(tmp_path, device=device)


def test_random_batches_draft_like_the_oracle(head):
    books = Books(head, wrap_runner=as_graphs)
    story, comparison = Story(books, 3), Comparison()
    for _ in range(25):
        chosen, entries, outcomes = story.round()
        for sequence, entry, outcome in zip(chosen, entries, outcomes, strict=True):
            assert isinstance(outcome, ops.Written), outcome
            books.expect_oracle(outcome, story.pairs[sequence], entry.drafts.num_drafts, comparison)
    comparison.check()
    assert 3 < books.runner.num_captured < 40
    books.close()


def test_eager_and_graph_agree_and_leave_the_same_rows(head):
    made = [Books(head), Books(head, wrap_runner=as_graphs)]
    stories = [Story(books, 4) for books in made]
    for _ in range(12):
        (_, _, eager), (_, _, graph) = [story.round() for story in stories]
        assert [one.drafts for one in eager] == [one.drafts for one in graph]
        for first, second in zip(eager, graph, strict=True):
            assert first.logprobs == pytest.approx(second.logprobs, abs=1e-4)
            assert (first.stop, first.view.row_count) == (second.stop, second.view.row_count)
    for first, second in zip(stories[0].ids, stories[1].ids, strict=True):
        rows = [
            torch.frombuffer(bytearray(books.rows_of(one)), dtype=torch.float32)
            for books, one in zip(made, (first, second), strict=True)
        ]
        assert torch.allclose(*rows, atol=1e-4)
    for books in made:
        books.close()


def test_padding_writes_into_no_live_row(head):
    books = Books(head, num_pages=24, wrap_runner=as_graphs)
    story = Story(books, 5, num_sequences=4)
    for sequence in story.ids:
        books.ask(story.entry(sequence))
    watched = story.ids.pop()
    before = books.rows_of(watched)
    for _ in range(40):
        chosen = story.ids[:3]
        books.ask(*[story.entry(sequence, most_pairs=2) for sequence in chosen])
        assert books.rows_of(watched) == before
    books.close()


def test_confidence_masks_and_kept_drafts_go_as_in_the_eager_runner(head):
    made = [Books(head), Books(head, wrap_runner=as_graphs)]
    found = []
    for books in made:
        ids = [books.open() for _ in range(3)]
        kept = ops.Open(
            b"a session", b"kept".ljust(16), b"k" * 16, 200, reserve=False, max_sequences=9, keeps_drafts=True
        )
        books.ask(kept)
        ids.append(kept.sequence_id)
        hiddens = torch.randn(3, head.config.hidden_size, generator=torch.Generator().manual_seed(1))
        nothing = torch.zeros(4, 128, dtype=torch.bool)
        nothing[:2, 5:9] = True
        wishes = [
            ops.DraftWish(4, min_logprob=-0.01),
            ops.DraftWish(4, masks=nothing),
            ops.DraftWish(3, masks=nothing[:1]),
            ops.DraftWish(2),
        ]
        pairs = ops.WriteWish(0, (1, 2, 3), hiddens, allow_gap=False, accepted_drafts=None)
        entries = [
            ops.Write(b"a session", sequence, 1, b"", pairs, wish) for sequence, wish in zip(ids, wishes, strict=True)
        ]
        found.append([(one.drafts, one.stop) for one in books.ask(*entries)])
        more = ops.WriteWish(3 + 1, (9,), hiddens[:1], False, None, verified_tokens=found[-1][3][0][:1])
        again = books.ask(ops.Write(b"a session", ids[3], 2, b"", more, ops.DraftWish(2)))
        found[-1].append((again[0].drafts, again[0].stop))
        books.close()
    assert found[0] == found[1]
    stops = [stop for _, stop in found[1]]
    assert stops == [ops.Stop.CONFIDENCE, ops.Stop.GRAMMAR, ops.Stop.COMPLETE, ops.Stop.COMPLETE, ops.Stop.COMPLETE]
    assert all(5 <= draft < 9 for draft in found[1][1][0])


def test_a_head_that_computes_nan_fails_the_entry_and_puts_live_rows_back(head, monkeypatch):
    books = Books(head, wrap_runner=as_graphs)
    story = Story(books, 6, num_sequences=1)
    (sequence,) = story.ids
    books.ask(story.entry(sequence))
    before = books.rows_of(sequence)
    if head.device.type == "cpu":
        with monkeypatch.context() as patch:
            patch.setattr(type(head), "_logits", lambda self, y: torch.full((len(y), 128), float("nan")))
            (failed,) = books.ask(write(sequence, 2, 0, [1, 2], torch.randn(2, head.config.hidden_size), 2))
        assert isinstance(failed, ops.Refusal)
    assert books.rows_of(sequence) == before
    books.close()


def on_their_way(rows):
    """Rows whose copy is waited for; how often is counted."""
    width, waits = rows.shape[1], []
    coming = RowsToCome(lambda: waits.append(1) or bytearray(rows.numpy().tobytes()), "float32", width, "float32")
    return coming, waits


HANDED_OVER = {
    "on their way": lambda rows, device: on_their_way(rows)[0],
    "packed": lambda rows, device: hidden_rows(rows.numpy().tobytes(), "float32", rows.shape[1], "float32"),
    "on the host": lambda rows, device: rows,
    "on the device": lambda rows, device: rows.to(device),
}


@pytest.mark.parametrize("most_bytes", [graph_buffers.ROWS_BYTES_MAX, 0])
def test_rows_draft_alike_however_they_are_handed_over(head, monkeypatch, most_bytes):
    monkeypatch.setattr(graph_buffers, "ROWS_BYTES_MAX", most_bytes)
    books = Books(head, wrap_runner=as_graphs)
    generator = torch.Generator().manual_seed(2)
    ids = [books.open() for _ in range(6)]
    ways = list(HANDED_OVER.values())
    for turn in range(4):
        rows = [torch.randn(1 + index, head.config.hidden_size, generator=generator) for index in range(3)]
        # Each way in each place of a batch, and behind each other way in the same place; and each alone.
        entries = []
        for index, part in enumerate(rows):
            way = ways[(index + turn) % 4]
            for sequence, given in ((ids[index], way(part, head.device)), (ids[index + 3], part)):
                entries.append(write(sequence, turn + 1, 0, [5, 6, 7][: len(part)], given, 3))
        found = [books.ask(entry)[0] for entry in entries[:2]] if turn == 3 else books.ask(*entries)
        for ours, theirs in zip(found[::2], found[1::2], strict=True):
            assert isinstance(ours, ops.Written), ours
            assert ours.drafts == theirs.drafts
            assert ours.logprobs == pytest.approx(theirs.logprobs, abs=1e-4)
    for ours, theirs in zip(ids[:3], ids[3:], strict=True):
        assert all(len(books.rows_of(one)) for one in (ours, theirs))
        left, right = (torch.frombuffer(bytearray(books.rows_of(one)), dtype=torch.float32) for one in (ours, theirs))
        assert torch.allclose(left, right, atol=1e-4)
    books.close()


def test_rows_on_their_way_are_waited_for_once_and_refused_before_anything_has_changed(head):
    books = Books(head, wrap_runner=as_graphs)
    sequence, rows = books.open(), torch.randn(2, head.config.hidden_size)
    coming, waits = on_their_way(rows)
    (first,) = books.ask(write(sequence, 1, 0, [1, 2], coming, 2))
    assert isinstance(first, ops.Written), first
    again, waits_again = on_their_way(rows)
    assert books.ask(write(sequence, 1, 0, [1, 2], again, 2)) == [first]
    assert (len(waits), len(waits_again)) == (1, 0), "a retry is answered from memory"
    before = books.rows_of(sequence)
    rows[1, 3] = torch.inf
    (refused,) = books.ask(write(sequence, 2, 1, [3, 4], on_their_way(rows)[0], 2))
    assert isinstance(refused, ops.Refusal)
    assert (refused.error.reason, refused.error.details["row"]) == ("HIDDEN_NOT_FINITE", "1")
    assert (refused.view.last_op, books.rows_of(sequence)) == (1, before)
    books.close()


def test_batches_and_page_counts_go_into_powers_of_two():
    assert [bucket(count, 6) for count in (1, 2, 3, 4, 5, 6)] == [1, 2, 4, 4, 6, 6]


def test_captures_are_counted(head):
    metrics = Metrics(CollectorRegistry(), 4)
    runners = []

    def wrap(runner, *parts):
        runners.append(GraphRunner(runner, *parts, GraphLimits(4, 2, 4), observer=metrics))
        return runners[0]

    books = Books(head, wrap_runner=wrap)
    runners[0].warm_up()
    books.close()
    assert runners[0].num_captured > 0
    assert metrics.registry.get_sample_value("specdraft_graph_captures_total") == runners[0].num_captured


def test_after_warming_up_nothing_is_captured_any_more(head):
    books = Books(head, wrap_runner=lambda runner, *parts: GraphRunner(runner, *parts, GraphLimits(4, 2, 4)))
    books.runner.warm_up()
    num_captured = books.runner.num_captured
    story = Story(books, 7, num_sequences=3)
    for _ in range(6):
        chosen = story.random.sample(story.ids, story.random.randint(1, 3))
        entries = [story.entry(sequence, most_pairs=1) for sequence in chosen]
        entries = [ops.Write(e.session_id, e.sequence_id, e.op, e.digest, e.pairs, ops.DraftWish(2)) for e in entries]
        books.ask(*entries)
    assert books.runner.num_captured == num_captured
    books.close()
