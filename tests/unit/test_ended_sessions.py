"""What is still on its way when a session ends changes nothing any more."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from books import SESSION, Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import eager_steps as runners
from drafter_service.engine import operations as ops
from drafter_service.heads import load_head


@pytest.fixture
def books(tmp_path: Path):
    write_tiny_checkpoint(tmp_path, max_position=5000)
    books = Books(load_head(tmp_path), num_pages=400, page_rows=16)
    yield books
    books.close()


def opened(name: bytes) -> ops.Open:
    return ops.Open(SESSION, name, name, 100, reserve=True, max_sequences=9)


def test_a_sequence_cannot_be_opened_in_a_session_that_has_ended(books: Books) -> None:
    books.ask(opened(b"first"))
    books.ask(ops.CloseSession(SESSION, b""))
    (late,) = books.ask(opened(b"late"))
    assert late.error.reason == "SESSION_UNKNOWN"
    assert books.allocator.num_free == books.allocator.num_pages
    (foreign,) = books.ask(ops.Open(b"another session", b"x", b"x", 100, reserve=False, max_sequences=9))
    assert isinstance(foreign, ops.Opened)


def test_truncating_at_the_first_draft_leaves_the_round_to_be_judged(books: Books) -> None:
    rows = torch.randn(8, books.head.config.hidden_size, generator=torch.Generator().manual_seed(1))
    sequence = books.open()
    (first,) = books.ask(write(sequence, 1, 0, [1, 2, 3, 4], rows[:4], 3))
    books.ask(ops.Truncate(SESSION, sequence, 2, b"", 4, None))  # P itself: nothing verified is dropped
    assert books.registry.get_sample_value("specdraft_unjudged_proposals_total") == 0
    books.ask(write(sequence, 3, 4, [*first.drafts[:2], 99], rows[4:7], 0))
    assert books.registry.get_sample_value("specdraft_accepted_tokens_total") == 2
    (again,) = books.ask(write(sequence, 4, 7, [5], rows[7:8], 3))
    assert again.drafts
    books.ask(ops.Truncate(SESSION, sequence, 5, b"", 7, None))  # below P
    assert books.registry.get_sample_value("specdraft_unjudged_proposals_total") == 1


def test_a_long_sequence_does_not_make_its_neighbours_as_dear(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """What attention gathers grows with the rows that there are, not with sequences times the longest."""
    gathered = []
    attend = runners.paged_attention

    def counted(q, k_pages, v_pages, page_table, *rest):
        gathered.append(page_table.numel() * k_pages.shape[1])
        return attend(q, k_pages, v_pages, page_table, *rest)

    monkeypatch.setattr(runners, "paged_attention", counted)
    width = books.head.config.hidden_size
    sequences = [books.open(5000) for _ in range(7)]
    for turn in range(4):
        count = 1000
        books.ask(write(sequences[0], turn + 1, turn * count, [1] * count, torch.zeros(count, width)))
    entries = [write(sequences[0], 5, 4000, [1], torch.zeros(1, width), 1)]
    entries += [write(sequence, 1, 0, [1] * 5, torch.zeros(5, width), 1) for sequence in sequences[1:]]
    outcomes = books.ask(*entries)
    assert all(isinstance(outcome, ops.Written) for outcome in outcomes)
    num_rows = 4001 + 6 * 5
    assert sum(gathered) < 1.2 * num_rows
