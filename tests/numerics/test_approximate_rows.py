"""The approximate rows policy: accepted drafts keep the rows that drafting made, checked against what was verified."""

from __future__ import annotations

import pytest
import torch

from books import SESSION, Books, Comparison, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.heads import MtpHead, load_head
from drafter_service.heads.oracle import oracle_forward


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


def open_approximate(books: Books, max_keys: int = 100) -> bytes:
    name = b"an approximate 1"
    books.ask(ops.Open(SESSION, name, name, max_keys, reserve=False, max_sequences=9, keeps_drafts=True))
    return name


def rows(head: MtpHead, count: int) -> torch.Tensor:
    return torch.randn(count, head.config.hidden_size, generator=torch.Generator().manual_seed(1))


def recycled(head: MtpHead, pairs: dict[int, tuple[int, torch.Tensor]], drafts: tuple[int, ...]) -> dict:
    """The pairs of the draft rows: each draft with the head's own hidden before it, as the oracle computes it."""
    known = dict(pairs)
    for draft in drafts:
        keys = sorted(known)
        tokens = torch.tensor([known[key][0] for key in keys])
        hiddens = torch.stack([known[key][1] for key in keys])
        _, hidden = oracle_forward(head, tokens, hiddens, torch.tensor(keys))
        known[keys[-1] + 1] = (draft, hidden)
    return known


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_the_next_round_attends_to_the_rows_of_the_accepted_drafts(books: Books, accepted: int) -> None:
    comparison = Comparison()
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    pairs = {key: (key + 1, hiddens[key]) for key in range(6)}
    (first,) = books.ask(write(sequence, 1, 0, [1, 2, 3, 4, 5, 6], hiddens[:6], 3))
    books.expect_oracle(first, pairs, 3, comparison)
    assert (first.view.last_pair_key, first.view.row_count) == (5, 6)
    verified = first.drafts[:accepted]
    key = 6 + accepted
    (second,) = books.ask(write(sequence, 2, key, [99], hiddens[10:11], 3, verified=verified))
    after = recycled(books.head, pairs, verified) | {key: (99, hiddens[10])}
    books.expect_oracle(second, after, 3, comparison)
    assert second.view.last_pair_key == key
    assert second.view.first_approximate_key == (6 if accepted else -1)
    comparison.check()


def test_verified_tokens_that_differ_from_the_drafts_are_refused_with_the_key(books: Books) -> None:
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    (first,) = books.ask(write(sequence, 1, 0, [1] * 6, hiddens[:6], 3))
    wrong = (first.drafts[0], (first.drafts[1] + 1) % 128)
    before = books.rows_of(sequence)
    (refused,) = books.ask(write(sequence, 2, 8, [99], hiddens[10:11], 3, verified=wrong))
    assert refused.error.reason == "DRAFT_MISMATCH"
    assert refused.error.details == {"key": "7", "stored": str(first.drafts[1]), "given": str(wrong[1])}
    assert books.rows_of(sequence) == before
    (fine,) = books.ask(write(sequence, 2, 8, [99], hiddens[10:11], 3, verified=first.drafts[:2]))
    assert isinstance(fine, ops.Written)


@pytest.mark.parametrize(("first_key", "count"), [(8, 1), (8, 3), (7, 2), (10, 4)])
def test_verified_tokens_must_lead_exactly_to_the_first_key(books: Books, first_key: int, count: int) -> None:
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    (first,) = books.ask(write(sequence, 1, 0, [1] * 6, hiddens[:6], 3))
    tokens = (first.drafts * 2)[:count]
    (refused,) = books.ask(write(sequence, 2, first_key, [99], hiddens[10:11], 3, verified=tokens))
    assert refused.error.reason == "INVALID_FIELD"


def test_skipping_draft_rows_without_saying_what_was_verified_is_a_gap(books: Books) -> None:
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    books.ask(write(sequence, 1, 0, [1] * 6, hiddens[:6], 3))
    (refused,) = books.ask(write(sequence, 2, 7, [99], hiddens[10:11], 3))
    assert refused.error.reason == "MISSING_ROWS"
    assert refused.error.details["gap_begin"] == "6"


def test_repairing_from_the_first_approximate_key_makes_every_row_exact(books: Books) -> None:
    comparison = Comparison()
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    (first,) = books.ask(write(sequence, 1, 0, [1, 2, 3, 4, 5, 6], hiddens[:6], 3))
    (second,) = books.ask(write(sequence, 2, 8, [99], hiddens[8:9], 2, verified=first.drafts[:2]))
    assert second.view.first_approximate_key == 6
    tokens = [*first.drafts[:2], 99]
    (repaired,) = books.ask(write(sequence, 3, 6, tokens, hiddens[6:9], 3))
    pairs = {key: (key + 1, hiddens[key]) for key in range(6)}
    pairs |= {6 + i: (token, hiddens[6 + i]) for i, token in enumerate(tokens)}
    books.expect_oracle(repaired, pairs, 3, comparison)
    assert repaired.view.first_approximate_key == -1
    comparison.check()


def test_a_carry_keeps_approximate_rows_and_drops_draft_rows(books: Books) -> None:
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books)
    (first,) = books.ask(write(sequence, 1, 0, [1] * 6, hiddens[:6], 3))
    books.ask(write(sequence, 2, 8, [99], hiddens[8:9], 3, verified=first.drafts[:2]))
    (taken,) = books.ask(ops.Take(SESSION, sequence, 3, b"", SESSION, ""))
    assert [(span.begin, span.end) for span in taken.carry.ranges] == [(0, 9)]
    (installed,) = books.ask(ops.Install(SESSION, sequence, 4, b"", SESSION, taken.carry.kv_id, None, ""))
    assert (installed.view.last_pair_key, installed.view.first_approximate_key) == (8, 6)
    (cut,) = books.ask(ops.Truncate(SESSION, sequence, 5, b"", 6, None))
    assert cut.view.first_approximate_key == -1


def test_draft_rows_are_kept_whatever_ended_the_chain(books: Books) -> None:
    """Confidence, pages, positions: the last draft's row is there, so that a full accept leaves no gap."""
    hiddens = rows(books.head, 20)
    sequence = open_approximate(books, max_keys=9)
    (first,) = books.ask(write(sequence, 1, 0, [1] * 6, hiddens[:6], 8))
    assert first.stop is ops.Stop.POSITION_LIMIT
    assert len(first.drafts) == 3  # keys 6, 7, 8
    (refused,) = books.ask(write(sequence, 2, 9, [99], hiddens[9:10], 0, verified=first.drafts))
    assert refused.error.reason == "POSITION_LIMIT"
    pairs = ops.WriteWish(5, (1,), hiddens[5:6], allow_gap=False, accepted_drafts=None)
    wish = ops.DraftWish(3, min_logprob=0.0)
    (confident,) = books.ask(ops.Write(SESSION, sequence, 2, b"", pairs, wish))
    assert (confident.stop, len(confident.drafts)) == (ops.Stop.CONFIDENCE, 1)
    (accepted,) = books.ask(write(sequence, 3, 7, [99], hiddens[9:10], 1, verified=confident.drafts))
    assert accepted.view.last_pair_key == 7
