"""Who does the engine's work: a caller who finds it idle, else its own thread; never two at once."""

import queue
import threading
import time

import pytest
import torch

from books import Books, write
from checkpoints import write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.heads import load_head


class Watched:
    """A runner that notes its threads, and can be held up or made to fail."""

    def __init__(self, runner):
        self.runner = runner
        self.threads: list[str] = []
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()
        self.error: BaseException | None = None

    def run(self, entries):
        self.threads.append(threading.current_thread().name)
        self.entered.set()
        assert self.gate.wait(20)
        if self.error is not None:
            raise self.error
        return self.runner.run(entries)


@pytest.fixture
def books(tmp_path):
    write_tiny_checkpoint(tmp_path)
    books = Books(load_head(tmp_path), num_pages=64, page_rows=4, borrows=True)
    books.engine.runner = Watched(books.runner)
    yield books
    books.close()


def lend(books: Books, sequence_id: bytes, op: int, key: int) -> "queue.SimpleQueue[list[ops.Outcome]]":
    """Asks for a round as a caller does who lends his thread."""
    answers: queue.SimpleQueue[list[ops.Outcome]] = queue.SimpleQueue()
    operation = write(sequence_id, op, key, [1], torch.zeros(1, books.head.config.hidden_size), 2)
    books.engine.accept(ops.Call([operation], time.monotonic(), time.monotonic() + 30, answers.put))
    books.engine.work()
    return answers


def in_thread(name: str, work) -> threading.Thread:
    thread = threading.Thread(target=work, name=name, daemon=True)
    thread.start()
    return thread


def until_idle(books: Books) -> None:
    deadline = time.monotonic() + 20
    while books.engine.is_at_work and time.monotonic() < deadline:
        time.sleep(0.001)


def test_a_caller_who_finds_the_engine_idle_does_his_own_work(books):
    sequence_id = books.open()
    until_idle(books)
    answers = lend(books, sequence_id, 1, 0)
    assert books.engine.runner.threads == [threading.current_thread().name]
    assert not answers.empty()


def test_a_caller_who_finds_somebody_at_work_does_not_wait_for_him(books):
    first, second = books.open(), books.open()
    watched = books.engine.runner
    watched.gate.clear()
    until_idle(books)
    held = in_thread("first", lambda: lend(books, first, 1, 0))
    assert watched.entered.wait(20)
    answers = lend(books, second, 1, 0)
    assert answers.empty()
    watched.gate.set()
    assert isinstance(answers.get(timeout=20)[0], ops.Written)
    held.join(20)
    assert watched.threads == ["first", "engine"]


def test_operations_of_a_sequence_keep_their_order_whoever_works(books):
    sequence_id = books.open()
    watched = books.engine.runner
    watched.gate.clear()
    until_idle(books)
    held = in_thread("first", lambda: lend(books, sequence_id, 1, 0))
    assert watched.entered.wait(20)
    answers = lend(books, sequence_id, 2, 1)
    watched.gate.set()
    (written,) = answers.get(timeout=20)
    assert written.view.last_op == 2
    held.join(20)


def test_an_engine_whose_step_failed_by_a_bug_says_that_it_is_dead(books):
    sequence_id = books.open()
    until_idle(books)
    assert books.engine.is_alive
    books.engine.runner.error = KeyboardInterrupt()  # nothing that a batch may raise
    with pytest.raises(KeyboardInterrupt):
        lend(books, sequence_id, 1, 0)
    assert not books.engine.is_alive


def test_who_must_not_lend_hands_his_work_over(tmp_path):
    write_tiny_checkpoint(tmp_path)
    books = Books(load_head(tmp_path), num_pages=64, page_rows=4)
    books.engine.runner = Watched(books.runner)
    answers = lend(books, books.open(), 1, 0)
    assert isinstance(answers.get(timeout=20)[0], ops.Written)
    assert books.engine.runner.threads == ["engine"]
    books.close()


def test_a_step_says_when_nothing_is_left_to_be_computed_in_it(books):
    sequence_id = books.open()
    until_idle(books)
    rows = torch.zeros(1, books.head.config.hidden_size)
    seen = []
    for op in (5, 1):  # out of order, so refused before the forward; in order
        operation = write(sequence_id, op, 0, [1], rows, 2)
        now = time.monotonic()
        call = ops.Call(
            [operation], now, now + 30, lambda outcomes: seen.append((outcomes[0], books.engine.is_committing))
        )
        books.engine.accept(call)
        books.engine.work()
    assert [(type(outcome), is_committing) for outcome, is_committing in seen] == [
        (ops.Refusal, False),
        (ops.Written, True),
    ]
    assert not books.engine.is_committing
