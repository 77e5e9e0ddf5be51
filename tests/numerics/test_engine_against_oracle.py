"""Whatever is asked in whatever order, the drafts are those of a recomputation from scratch over the true pairs."""

from __future__ import annotations

import secrets
from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from books import SESSION, Books, Comparison, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.heads import MtpHead, load_head

MAX_KEYS = 60


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> MtpHead:
    directory = tmp_path_factory.mktemp("head")
    write_tiny_checkpoint(directory, seed=5)
    return load_head(directory)


@pytest.fixture
def books(head: MtpHead):
    books = Books(head)
    yield books
    books.close()


class Model:
    """What a sequence should hold: the true pairs, and what is needed for the next round."""

    def __init__(self, sequence_id: bytes) -> None:
        self.sequence_id = sequence_id
        self.op = 0
        self.pairs: dict[int, tuple[int, torch.Tensor]] = {}
        self.drafts: tuple[int, ...] = ()

    @property
    def next_key(self) -> int:
        return max(self.pairs, default=-1) + 1

    def next_op(self) -> int:
        self.op += 1
        return self.op

    def record(self, first_key: int, tokens: list[int], hiddens: torch.Tensor) -> None:
        self.pairs = {key: pair for key, pair in self.pairs.items() if key < first_key}
        self.pairs |= {first_key + i: (token, hiddens[i]) for i, token in enumerate(tokens)}


class Orders(RuleBasedStateMachine):
    """Random orders of catch-ups, proposals, partial accepts, rewinds, takes, installs and closes."""

    head: MtpHead
    comparison: Comparison

    def __init__(self) -> None:
        super().__init__()
        self.books = Books(self.head)
        self.models: list[Model] = []
        self.carries: list[tuple[bytes, dict[int, tuple[int, torch.Tensor]]]] = []
        self.random = torch.Generator().manual_seed(7)

    def teardown(self) -> None:
        self.books.ask(ops.CloseSession(SESSION, b""))
        assert self.books.allocator.num_free == self.books.allocator.num_pages
        self.books.close()

    def hiddens(self, count: int) -> torch.Tensor:
        return torch.randn(count, self.head.config.hidden_size, generator=self.random)

    def pick(self, index: int) -> Model:
        return self.models[index % len(self.models)]

    @precondition(lambda self: len(self.models) < 4)
    @rule()
    def open(self) -> None:
        self.models.append(Model(self.books.open(MAX_KEYS)))

    @precondition(lambda self: self.models)
    @rule(which=st.integers(0, 9), back=st.integers(0, 9), tokens=st.lists(st.integers(0, 127), min_size=1, max_size=9))
    def catch_up(self, which: int, back: int, tokens: list[int]) -> None:
        model = self.pick(which)
        first_key = max(model.next_key - back, 0)
        if first_key + len(tokens) > MAX_KEYS:
            return
        hiddens = self.hiddens(len(tokens))
        (outcome,) = self.books.ask(write(model.sequence_id, model.next_op(), first_key, tokens, hiddens))
        assert isinstance(outcome, ops.Written)
        model.record(first_key, tokens, hiddens)
        model.drafts = ()

    @precondition(lambda self: self.models)
    @rule(
        mask=st.integers(1, 15),
        accepts=st.lists(st.integers(0, 8), min_size=4, max_size=4),
        counts=st.lists(st.integers(0, 5), min_size=4, max_size=4),
        bonus=st.integers(0, 127),
    )
    def propose_together(self, mask: int, accepts: list[int], counts: list[int], bonus: int) -> None:
        """One call for several sequences: each absorbs its accepted drafts and a bonus token, then drafts."""
        entries, chosen = [], []
        for place, model in enumerate(self.models):
            accepted = min(accepts[place], len(model.drafts))
            tokens = [*model.drafts[:accepted], bonus]
            if not mask >> place & 1 or model.next_key + len(tokens) + counts[place] > MAX_KEYS:
                continue
            hiddens = self.hiddens(len(tokens))
            first_key = model.next_key
            entries.append(write(model.sequence_id, model.next_op(), first_key, tokens, hiddens, counts[place]))
            model.record(first_key, tokens, hiddens)
            chosen.append((model, counts[place]))
        outcomes = self.books.ask(*entries) if entries else []
        for (model, count), outcome in zip(chosen, outcomes, strict=True):
            if count:
                self.books.expect_oracle(outcome, model.pairs, count, self.comparison)
            model.drafts = outcome.drafts

    @precondition(lambda self: self.models)
    @rule(which=st.integers(0, 9), first_key=st.integers(0, 30))
    def truncate(self, which: int, first_key: int) -> None:
        model = self.pick(which)
        self.books.ask(ops.Truncate(SESSION, model.sequence_id, model.next_op(), b"", first_key, None))
        model.record(first_key, [], self.hiddens(0))
        model.drafts = ()

    @precondition(lambda self: self.models)
    @rule(which=st.integers(0, 9))
    def take(self, which: int) -> None:
        model = self.pick(which)
        (taken,) = self.books.ask(ops.Take(SESSION, model.sequence_id, model.next_op(), b"", SESSION, "turn"))
        assert isinstance(taken, ops.Taken)
        self.carries.append((taken.carry.kv_id, model.pairs))
        model.pairs, model.drafts = {}, ()

    @precondition(lambda self: self.models and self.carries)
    @rule(which=st.integers(0, 9), carry=st.integers(0, 9), keep=st.none() | st.integers(0, 30))
    def install(self, which: int, carry: int, keep: int | None) -> None:
        model = self.pick(which)
        kv_id, pairs = self.carries[carry % len(self.carries)]
        install = ops.Install(SESSION, model.sequence_id, model.op + 1, b"", SESSION, kv_id, keep, "")
        (outcome,) = self.books.ask(install)
        if model.pairs:
            assert isinstance(outcome, ops.Refusal)
            return
        model.next_op()
        self.carries.remove((kv_id, pairs))
        model.pairs = {key: pair for key, pair in pairs.items() if keep is None or key < keep}
        model.drafts = ()

    @precondition(lambda self: self.models and len(self.models) < 4)
    @rule(which=st.integers(0, 9), keep=st.integers(0, 40))
    def fork(self, which: int, keep: int) -> None:
        source = self.pick(which)
        fork_id = secrets.token_bytes(16)
        fork = ops.Fork(SESSION, source.sequence_id, fork_id, fork_id, keep, max_keys=MAX_KEYS, max_sequences=9)
        (opened,) = self.books.ask(fork)
        assert opened.sequence_id == fork_id
        model = Model(fork_id)
        model.pairs = {key: pair for key, pair in source.pairs.items() if key < keep}
        self.models.append(model)

    @precondition(lambda self: self.models)
    @rule(which=st.integers(0, 9))
    def close(self, which: int) -> None:
        model = self.pick(which)
        self.books.ask(ops.Close(SESSION, model.sequence_id, model.next_op(), b"", None))
        self.models.remove(model)

    @invariant()
    def the_books_agree(self) -> None:
        for model in self.models:
            (viewed,) = self.books.ask(ops.Get(SESSION, model.sequence_id))
            assert viewed.view.row_count == len(model.pairs)
            assert viewed.view.last_pair_key == model.next_key - 1
            assert viewed.view.last_op == model.op


def test_any_order_of_operations_equals_the_oracle(head: MtpHead) -> None:
    comparison = Comparison()
    machine = type("Machine", (Orders,), {"head": head, "comparison": comparison})
    checks = settings(max_examples=60, stateful_step_count=25, suppress_health_check=list(HealthCheck), deadline=None)
    test_case = machine.TestCase
    test_case.settings = checks
    test_case().runTest()
    comparison.check()


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_every_accept_count_keeps_every_row_exact(books: Books, accepted: int) -> None:
    """Contract 2.1: after accepting a of K drafts, P' = P + a + 1 and all rows come from target hiddens."""
    comparison = Comparison()
    generator = torch.Generator().manual_seed(accepted)
    hiddens = torch.randn(40, books.head.config.hidden_size, generator=generator)
    sequence_id = books.open()
    pairs = {key: (key + 1, hiddens[key]) for key in range(8)}
    tokens = [pairs[key][0] for key in range(8)]
    books.ask(write(sequence_id, 1, 0, tokens[:7], hiddens[:7]))
    (first,) = books.ask(write(sequence_id, 2, 7, tokens[7:], hiddens[7:8], 3))
    books.expect_oracle(first, pairs, 3, comparison)
    verified = [*first.drafts[:accepted], 99]
    (second,) = books.ask(write(sequence_id, 3, 8, verified, hiddens[8 : 9 + accepted], 3))
    pairs |= {8 + i: (token, hiddens[8 + i]) for i, token in enumerate(verified)}
    books.expect_oracle(second, pairs, 3, comparison)
    assert second.view.last_pair_key == 8 + accepted
    assert second.view.row_count == 8 + accepted + 1
    comparison.check()


def test_a_declared_gap_drafts_like_an_oracle_over_the_rows_present(books: Books) -> None:
    comparison = Comparison()
    hiddens = torch.randn(12, books.head.config.hidden_size, generator=torch.Generator().manual_seed(3))
    sequence_id = books.open()
    (refused,) = books.ask(write(sequence_id, 1, 8, [1, 2, 3, 4], hiddens[8:12], 3))
    assert refused.error.details == {"gap_begin": "0", "gap_end": "8", "last_pair_key": "-1"}
    (written,) = books.ask(write(sequence_id, 1, 8, [1, 2, 3, 4], hiddens[8:12], 3, allow_gap=True))
    books.expect_oracle(written, {8 + i: (i + 1, hiddens[8 + i]) for i in range(4)}, 3, comparison)
    (filled,) = books.ask(write(sequence_id, 2, 0, list(range(12)), hiddens, 3))
    books.expect_oracle(filled, {i: (i, hiddens[i]) for i in range(12)}, 3, comparison)
    comparison.check()


def test_a_batch_does_not_change_what_its_entries_get(books: Books) -> None:
    """Alone, and beside neighbours of other lengths and draft counts: the same drafts."""
    generator = torch.Generator().manual_seed(11)
    lengths = [1, 3, 4, 5, 17, 2, 9]
    hiddens = [torch.randn(length, books.head.config.hidden_size, generator=generator) for length in lengths]
    tokens = [torch.randint(128, (length,), generator=generator).tolist() for length in lengths]

    def entries() -> list[ops.Write]:
        return [write(books.open(), 1, 0, tokens[i], hiddens[i], 1 + i % 4) for i in range(len(lengths))]

    alone = [books.ask(entry)[0] for entry in entries()]
    together = books.ask(*entries())
    reversed_order = list(reversed(books.ask(*reversed(entries()))))
    assert [outcome.drafts for outcome in alone] == [outcome.drafts for outcome in together]
    assert [outcome.drafts for outcome in alone] == [outcome.drafts for outcome in reversed_order]


def test_one_call_is_one_forward(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batched proposal of B entries and K drafts runs K times, not B x K times."""
    sizes: list[int] = []
    finish = MtpHead.finish

    def counted(self: MtpHead, x: torch.Tensor, *rest: object) -> object:
        sizes.append(len(x))
        return finish(self, x, *rest)

    monkeypatch.setattr(MtpHead, "finish", counted)
    hiddens = torch.zeros(2, books.head.config.hidden_size)
    books.ask(*[write(books.open(), 1, 0, [1, 2], hiddens, 3) for _ in range(5)])
    assert sizes == [5, 5, 5]


def test_a_catch_up_runs_no_attention(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows need no query, no feed-forward and no LM head."""
    monkeypatch.setattr(MtpHead, "finish", lambda *_: pytest.fail("a catch-up must not draft"))
    hiddens = torch.zeros(9, books.head.config.hidden_size)
    (outcome,) = books.ask(write(books.open(), 1, 0, [1] * 9, hiddens))
    assert outcome.view.row_count == 9


def test_a_neighbours_full_last_page_is_never_touched(books: Books) -> None:
    """Whoever owns the last page of the pool keeps it bit for bit, whatever the others draft."""
    width = books.head.config.hidden_size
    owners = [books.open(64) for _ in range(4)]
    hiddens = torch.randn(61, width, generator=torch.Generator().manual_seed(1))
    for owner in owners:
        books.ask(write(owner, 1, 0, [3] * 61, hiddens))
    assert not books.allocator.free_pages()
    before = books.rows_of(owners[3])
    for turn in range(20):
        outcomes = books.ask(*[write(owner, 2 + turn, 60, [3], hiddens[60:], 3) for owner in owners[:3]])
        assert all(isinstance(outcome, ops.Written) for outcome in outcomes)
    assert books.rows_of(owners[3]) == before


def test_a_head_that_fails_midway_leaves_every_row_as_it_was(books: Books, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when the failed write had begun to overwrite live rows, and also for its neighbour in the batch."""
    width = books.head.config.hidden_size
    hiddens = torch.randn(12, width, generator=torch.Generator().manual_seed(2))
    victim, neighbour = books.open(), books.open()
    books.ask(write(victim, 1, 0, list(range(10)), hiddens[:10]), write(neighbour, 1, 0, [5, 6], hiddens[:2]))
    before = books.rows_of(victim)
    finish = MtpHead.finish

    def failing(self: MtpHead, x: torch.Tensor, keys: torch.Tensor, *rest: object) -> object:
        if 7 in keys.tolist():
            raise RuntimeError("the device failed")
        return finish(self, x, keys, *rest)

    monkeypatch.setattr(MtpHead, "finish", failing)
    rewind = write(victim, 2, 4, [9, 9, 9, 9], hiddens[4:8], 3, digest=b"x")
    failed, fine = books.ask(rewind, write(neighbour, 2, 2, [7], hiddens[2:3], 3))
    assert isinstance(failed, ops.Refusal)
    assert failed.error.reason == "INTERNAL"
    assert isinstance(fine, ops.Written)
    assert books.rows_of(victim) == before
    assert failed.view.row_count == 10
    monkeypatch.undo()
    (again,) = books.ask(rewind)
    assert again.error is failed.error  # the number is used up: a retry gets the same failure
    (next_one,) = books.ask(write(victim, 3, 10, [9], hiddens[10:11], 3))
    pairs = {key: (key, hiddens[key]) for key in range(10)} | {10: (9, hiddens[10])}
    books.expect_oracle(next_one, pairs, 3, Comparison())


def test_two_layouts_of_one_head_draft_alike(tmp_path: Path) -> None:
    """The size of a page is nobody's business but the pool's."""
    write_tiny_checkpoint(tmp_path, seed=8)
    head = load_head(tmp_path)
    hiddens = torch.randn(23, head.config.hidden_size, generator=torch.Generator().manual_seed(4))
    drafts = []
    for page_rows in (1, 4, 16, 64):
        books = Books(head, num_pages=40, page_rows=page_rows)
        (written,) = books.ask(write(books.open(30), 1, 0, list(range(23)), hiddens, 4))
        drafts.append(written.drafts)
        books.close()
    assert len(set(drafts)) == 1
