"""Forks share the pages of their prefix, and nobody's rows are anybody else's."""

from __future__ import annotations

import pytest
import torch

from books import SESSION, Books, Comparison, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.engine.vault import CarryLimits
from drafter_service.heads import MtpHead, load_head


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    directory = tmp_path_factory.mktemp("head")
    write_tiny_checkpoint(directory, seed=5)
    return load_head(directory)


@pytest.fixture
def books(head: MtpHead):
    books = Books(head, num_pages=64, page_rows=4)
    yield books
    books.close()


def rows(head: MtpHead, count: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(count, head.config.hidden_size, generator=torch.Generator().manual_seed(seed))


def fork(books: Books, source: bytes, name: bytes, keep: int) -> ops.Outcome:
    return books.ask(ops.Fork(SESSION, source, name, name, keep, max_keys=200, max_sequences=99))[0]


def test_fifty_forks_of_a_long_prompt_use_one_copy_of_its_full_pages(head: MtpHead) -> None:
    books = Books(head, num_pages=600, page_rows=4)
    hiddens = rows(head, 2001)
    source = books.open(2100)
    books.ask(write(source, 1, 0, [3] * 2001, hiddens))
    used = books.allocator.num_pages - books.allocator.num_free
    for number in range(50):
        opened = books.ask(ops.Fork(SESSION, source, bytes([number]) * 16, bytes([number]) * 16, 2001, 2100, 99))[0]
        assert opened.view.row_count == 2001
    assert books.allocator.num_pages - books.allocator.num_free == used + 50  # one boundary page each
    books.close()


@pytest.mark.parametrize("keep", [8, 7, 5])
def test_drafting_never_writes_a_shared_page(books: Books, keep: int) -> None:
    hiddens = rows(books.head, 40)
    first = books.open()
    books.ask(write(first, 1, 0, [3] * 8, hiddens[:8]))
    second = b"second sequence."
    fork(books, first, second, keep)
    before = books.rows_of(first)
    for turn in range(50):
        books.ask(write(second, 1 + turn, keep, [11], hiddens[8:9], 7))
        assert books.rows_of(first) == before
        books.ask(write(first, 2 + turn, 7, [3], hiddens[7:8], 7))
        before = books.rows_of(first)


def test_each_of_two_that_share_a_prefix_drafts_like_its_own_oracle(books: Books) -> None:
    comparison = Comparison()
    hiddens = rows(books.head, 40)
    first, second = books.open(), b"second sequence."
    books.ask(write(first, 1, 0, list(range(9)), hiddens[:9]))
    fork(books, first, second, 8)
    shared = {key: (key, hiddens[key]) for key in range(8)}
    outcomes = books.ask(write(first, 2, 8, [11, 12], hiddens[20:22], 3), write(second, 1, 8, [22], hiddens[22:23], 3))
    books.expect_oracle(outcomes[0], shared | {8: (11, hiddens[20]), 9: (12, hiddens[21])}, 3, comparison)
    books.expect_oracle(outcomes[1], shared | {8: (22, hiddens[22])}, 3, comparison)
    comparison.check()


@pytest.mark.parametrize("who", ["source", "fork"])
def test_a_rewind_into_the_shared_prefix_copies_instead_of_overwriting(books: Books, who: str) -> None:
    comparison = Comparison()
    hiddens = rows(books.head, 40)
    source, forked = books.open(), b"forked sequence."
    books.ask(write(source, 1, 0, list(range(16)), hiddens[:16]))
    fork(books, source, forked, 16)
    rewound, other = (source, forked) if who == "source" else (forked, source)
    before = books.rows_of(other)
    op = books.ledger.sequences.find(SESSION, rewound).last_op + 1
    (written,) = books.ask(write(rewound, op, 6, [90, 91], hiddens[30:32], 3))
    assert books.rows_of(other) == before
    pairs = {key: (key, hiddens[key]) for key in range(6)} | {6: (90, hiddens[30]), 7: (91, hiddens[31])}
    books.expect_oracle(written, pairs, 3, comparison)
    comparison.check()


def test_a_failed_write_into_a_shared_page_leaves_both_as_they_were(
    books: Books, monkeypatch: pytest.MonkeyPatch
) -> None:
    hiddens = rows(books.head, 40)
    source, forked = books.open(), b"forked sequence."
    books.ask(write(source, 1, 0, list(range(16)), hiddens[:16]))
    fork(books, source, forked, 16)
    before, free = books.rows_of(source), books.allocator.num_free
    monkeypatch.setattr(MtpHead, "finish", lambda *_: (_ for _ in ()).throw(RuntimeError("the device failed")))
    (failed,) = books.ask(write(forked, 1, 3, [90] * 9, hiddens[30:39], 3))
    assert failed.error.reason == "INTERNAL"
    assert books.rows_of(forked) == books.rows_of(source) == before
    assert books.allocator.num_free == free


def test_closing_the_source_gives_back_its_private_pages_only(books: Books) -> None:
    comparison = Comparison()
    hiddens = rows(books.head, 40)
    source, forked = books.open(), b"forked sequence."
    books.ask(write(source, 1, 0, list(range(10)), hiddens[:10]))
    fork(books, source, forked, 8)
    free = books.allocator.num_free
    books.ask(ops.Close(SESSION, source, 2, b"", None))
    assert books.allocator.num_free == free + 1
    (written,) = books.ask(write(forked, 1, 8, [22], hiddens[22:23], 3))
    pairs = {key: (key, hiddens[key]) for key in range(8)} | {8: (22, hiddens[22])}
    books.expect_oracle(written, pairs, 3, comparison)
    comparison.check()


def test_a_retried_fork_is_the_same_sequence(books: Books) -> None:
    source = books.open()
    books.ask(write(source, 1, 0, [1] * 6, rows(books.head, 6)))
    first, second = fork(books, source, b"a" * 16, 6), fork(books, source, b"a" * 16, 6)
    assert (first.sequence_id, first.is_new) == (second.sequence_id, True)
    assert not second.is_new


def test_a_fork_with_no_page_for_its_boundary_changes_nothing(head: MtpHead) -> None:
    books = Books(head, num_pages=2, page_rows=4)
    source = books.open()
    books.ask(write(source, 1, 0, [1] * 6, rows(head, 6)))
    refused = fork(books, source, b"a" * 16, 6)
    assert refused.error.reason == "PAGES_EXHAUSTED"
    assert len(books.ledger.sequences) == 1
    whole = fork(books, source, b"a" * 16, 4)  # ends with a page: needs none
    assert whole.view.row_count == 4
    books.close()


def test_carries_of_forks_are_given_up_together_when_only_that_frees_pages(head: MtpHead) -> None:
    books = Books(head, num_pages=5, page_rows=4, limits=CarryLimits(300.0, 5))
    source = books.open()
    books.ask(write(source, 1, 0, [1] * 16, rows(head, 16)))
    fork(books, source, b"a" * 16, 16)
    for sequence, op in ((source, 2), (b"a" * 16, 1)):
        books.ask(ops.Take(SESSION, sequence, op, b"", SESSION, ""))
    assert books.allocator.num_free == 1
    (written,) = books.ask(write(source, 3, 0, [1] * 16, rows(head, 16)))
    assert written.view.row_count == 16
    assert len(books.ledger.vault.carries) == 0
    books.close()
