"""Carries: kept for a while, given up oldest first, and always before a live sequence is refused."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from books import SESSION, Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.engine.vault import CarryLimits
from drafter_service.heads import load_head

KEY = b"hash of a carry key"


@pytest.fixture
def books(tmp_path: Path):
    write_tiny_checkpoint(tmp_path)
    books = Books(load_head(tmp_path), num_pages=12, page_rows=4, limits=CarryLimits(ttl_s=300.0, max_pages=6))
    yield books
    books.close()


def take(books: Books, num_rows: int, owner: bytes = SESSION, session: bytes = SESSION, label: str = "") -> bytes:
    sequence = books.open(session=session)
    rows = torch.zeros(num_rows, books.head.config.hidden_size)
    books.ask(write(sequence, 1, 0, [1] * num_rows, rows, session=session))
    (taken,) = books.ask(ops.Take(session, sequence, 2, b"", owner, label))
    books.ask(ops.Close(session, sequence, 3, b"", None))
    return taken.carry.kv_id


def listed(books: Books, owner: bytes) -> list[bytes]:
    (answer,) = books.ask(ops.ListCarries(b"any", b"", owner))
    return [carry.kv_id for carry in answer.carries]


def test_a_carry_is_given_up_when_its_time_is_over(books: Books) -> None:
    first = take(books, 4)
    books.now = 200.0
    second = take(books, 4)
    books.now = 299.0
    assert listed(books, SESSION) == [first, second]
    books.now = 300.0
    books.ask(ops.Expire(b"", b""))
    assert listed(books, SESSION) == [second]
    assert books.allocator.num_free == 11
    books.now = 501.0
    (gone,) = books.ask(ops.Free(SESSION, b"", SESSION, second))
    assert gone.error.reason == "CARRY_UNKNOWN"


def test_the_oldest_carries_go_when_all_together_hold_too_much(books: Books) -> None:
    kv_ids = [take(books, 8) for _ in range(4)]
    assert listed(books, SESSION) == kv_ids[1:]
    assert books.ledger.vault.carries.num_pages == 6


def test_a_single_carry_may_be_larger_than_the_bound(books: Books) -> None:
    take(books, 8)
    large = take(books, 40)
    assert listed(books, SESSION) == [large]


def test_carries_are_given_up_oldest_first_before_a_live_sequence_is_refused(books: Books) -> None:
    kv_ids = [take(books, 8) for _ in range(3)]
    sequence = books.open()
    rows = torch.zeros(28, books.head.config.hidden_size)
    (written,) = books.ask(write(sequence, 1, 0, [1] * 28, rows))
    assert isinstance(written, ops.Written)
    assert listed(books, SESSION) == kv_ids[1:]


def test_no_carry_is_given_up_for_a_request_that_is_refused_all_the_same(books: Books) -> None:
    kv_ids = [take(books, 8) for _ in range(3)]
    sequence = books.open()
    rows = torch.zeros(52, books.head.config.hidden_size)
    (refused,) = books.ask(write(sequence, 1, 0, [1] * 52, rows))
    assert refused.error.reason == "PAGES_EXHAUSTED"
    assert listed(books, SESSION) == kv_ids


def test_a_carry_under_a_key_outlives_its_session_and_one_without_does_not(books: Books) -> None:
    keyed = take(books, 4, owner=KEY, session=b"first session", label="turn 1")
    own = take(books, 4, owner=b"first session", session=b"first session")
    books.ask(ops.CloseSession(b"first session", b""))
    assert listed(books, KEY) == [keyed]
    assert listed(books, b"first session") == []
    sequence = books.open(session=b"second session")
    (foreign,) = books.ask(ops.Install(b"second session", sequence, 1, b"", KEY, own, None, ""))
    assert foreign.error.reason == "CARRY_UNKNOWN"
    (installed,) = books.ask(ops.Install(b"second session", sequence, 1, b"", KEY, keyed, None, ""))
    assert installed.view.row_count == 4
    assert listed(books, KEY) == []


def test_a_failed_install_leaves_the_carry_where_it_was(books: Books) -> None:
    kv_id = take(books, 8)
    small = books.open(max_keys=5)
    (refused,) = books.ask(ops.Install(SESSION, small, 1, b"", SESSION, kv_id, None, ""))
    assert refused.error.reason == "POSITION_LIMIT"
    (other_head,) = books.ask(ops.Install(SESSION, small, 1, b"", SESSION, kv_id, 4, "another head"))
    assert other_head.error.reason == "KV_MISMATCH"
    (fits,) = books.ask(ops.Install(SESSION, small, 1, b"", SESSION, kv_id, 4, ""))
    assert fits.view.row_count == 4
