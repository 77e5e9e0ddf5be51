"""A sequence that reserved its pages keeps them, whatever its rows do."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from books import SESSION, Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.heads import load_head


@pytest.fixture
def books(tmp_path: Path):
    write_tiny_checkpoint(tmp_path)
    books = Books(load_head(tmp_path), num_pages=12, page_rows=4)
    yield books
    books.close()


def reserve(books: Books, max_keys: int) -> tuple[bytes, ops.Outcome]:
    sequence_id = bytes([max_keys]) * 16
    (opened,) = books.ask(ops.Open(SESSION, sequence_id, sequence_id, max_keys, reserve=True, max_sequences=9))
    return sequence_id, opened


def rows(books: Books, count: int) -> torch.Tensor:
    return torch.zeros(count, books.head.config.hidden_size)


def test_a_reservation_takes_all_pages_at_once_or_none(books: Books) -> None:
    _, opened = reserve(books, 40)
    assert isinstance(opened, ops.Opened)
    assert books.allocator.num_free == 2
    _, refused = reserve(books, 12)
    assert refused.error.reason == "PAGES_EXHAUSTED"
    assert books.allocator.num_free == 2
    _, fits = reserve(books, 8)
    assert isinstance(fits, ops.Opened)


def test_rewinding_and_growing_within_a_reservation_moves_no_page(books: Books) -> None:
    sequence_id, _ = reserve(books, 40)
    books.ask(write(sequence_id, 1, 0, [1] * 30, rows(books, 30), 5))
    books.ask(ops.Truncate(SESSION, sequence_id, 2, b"", 3, None))
    assert books.allocator.num_free == 2


def test_turn_after_turn_leaves_a_reservation_whole(books: Books) -> None:
    sequence_id, _ = reserve(books, 40)
    for turn in range(4):
        op = 4 * turn
        books.ask(write(sequence_id, op + 1, 0, [1] * 8, rows(books, 8)))
        (taken,) = books.ask(ops.Take(SESSION, sequence_id, op + 2, b"", SESSION, ""))
        books.ask(ops.Install(SESSION, sequence_id, op + 3, b"", SESSION, taken.carry.kv_id, None, ""))
        books.ask(ops.Truncate(SESSION, sequence_id, op + 4, b"", 0, None))
        assert len(books.ledger.sequences.find(SESSION, sequence_id).pages) == 10


def test_a_carry_takes_the_pages_of_its_rows_and_leaves_the_rest_reserved(books: Books) -> None:
    sequence_id, _ = reserve(books, 40)
    books.ask(write(sequence_id, 1, 0, [1] * 9, rows(books, 9)))
    (taken,) = books.ask(ops.Take(SESSION, sequence_id, 2, b"", SESSION, ""))
    assert books.ledger.vault.carries.num_pages == 3
    assert len(books.ledger.sequences.find(SESSION, sequence_id).pages) == 9  # all that were left
    (installed,) = books.ask(ops.Install(SESSION, sequence_id, 3, b"", SESSION, taken.carry.kv_id, None, ""))
    assert installed.view.row_count == 9
    assert len(books.ledger.sequences.find(SESSION, sequence_id).pages) == 10
    books.ask(ops.CloseSession(SESSION, b""))
    assert books.allocator.num_free == 12
