"""Which thread sends an answer over a stream, and when."""

from __future__ import annotations

import queue
import threading
import time
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from drafter_service.server.calls import Answerable
from drafter_service.server.drive import Drive
from drafter_service.server.reading import NUM_ALONE
from drafter_service.telemetry import Metrics
from specdraft.errors import Code, Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb

PATIENCE_S = 5.0


class Scripted:
    """Answers as a request's sequence id says: when a caller works, at the `end` of a step or `early`, or `later`."""

    def __init__(self) -> None:
        self.is_committing = False
        self.due = []
        self.later = None
        self.at_work = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def begin(self, session, request, deadline, on_done, parent=None) -> None:
        how = request.entries[0].sequence_id
        fill = self.fail if how == b"broken" else pb.ProposeResponse.SetInParent
        answer = partial(on_done, Answerable(fill, time.monotonic()))
        if how == b"later":
            self.later = answer
        elif how == b"elsewhere":
            thread = threading.Thread(target=self.committed, args=(answer,), name="elsewhere")
            thread.start()
            thread.join()
        else:
            self.due.append((how, answer))

    def work(self) -> None:
        for how, answer in self.due:
            if how == b"early":
                answer()
        self.at_work.set()
        assert self.may_go_on.wait(PATIENCE_S)
        due, self.due = self.due, []
        for how, answer in due:
            if how != b"early":
                self.committed(answer)

    def committed(self, answer) -> None:
        self.is_committing = True
        answer()
        self.is_committing = False

    @staticmethod
    def fail(_):
        raise RuntimeError("no memory")


class Stream:
    """A stream with its reader and its answering thread; what is sent is told by id and thread."""

    def __init__(self, calls) -> None:
        self.sent = queue.SimpleQueue()
        self.is_sending = threading.Event()
        self.may_send = threading.Event()
        self.may_send.set()
        self.requests = queue.SimpleQueue()
        self.error = None
        self.drive = Drive(calls, lambda: None, Metrics(CollectorRegistry(), 8), time.monotonic, send=self._send)
        self.threads = [
            threading.Thread(target=self.drive.read, args=(iter(self.requests.get, None),), name="reader"),
            threading.Thread(target=self._respond, name="gRPC"),
        ]
        for thread in self.threads:
            thread.start()

    def ask(self, number, how) -> None:
        request = pb.ProposeRequest(entries=[pb.ProposeEntry(sequence_id=how)])
        self.requests.put(pb.DriveRequest(correlation_id=number, timeout_ms=60_000, propose=request))

    def end(self) -> None:
        self.requests.put(None)
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _send(self, response) -> None:
        self.is_sending.set()
        assert self.may_send.wait(PATIENCE_S)
        self.sent.put((response.correlation_id, threading.current_thread().name, response.status.code))

    def _respond(self) -> None:
        try:
            self.drive.respond()
        except SpecdraftError as error:
            self.error = error


@pytest.mark.parametrize(("how", "thread"), [(b"end", "reader"), (b"early", "gRPC"), (b"elsewhere", "gRPC")])
def test_the_reader_sends_what_ends_a_step_of_its_own_and_grpcs_thread_the_rest(how, thread) -> None:
    stream = Stream(Scripted())
    for number in range(1, 4):
        stream.ask(number, how)
        assert stream.sent.get(timeout=PATIENCE_S) == (number, thread, 0)
    stream.end()


def test_an_answer_that_is_ready_does_not_wait_for_the_rest_of_its_step() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"early")
    assert calls.at_work.wait(PATIENCE_S)
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "gRPC", 0)
    calls.may_go_on.set()
    stream.end()


def test_a_stream_ends_with_the_last_answer_also_if_a_reader_sends_it() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"end")
    assert calls.at_work.wait(PATIENCE_S)
    stream.drive.drain()
    calls.may_go_on.set()
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "reader", 0)
    stream.end()
    assert stream.error.reason == Reason.DRAINING


def test_nothing_is_sent_after_a_stream_was_ended_at_once() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"end")
    assert calls.at_work.wait(PATIENCE_S)
    stream.drive.end(make_error(Reason.SESSION_UNKNOWN, "over"))
    stream.threads[1].join(PATIENCE_S)
    calls.may_go_on.set()
    stream.end()
    assert stream.error.reason == Reason.SESSION_UNKNOWN
    assert stream.sent.empty()


def test_an_answer_that_cannot_be_made_is_told_and_the_stream_goes_on() -> None:
    stream = Stream(Scripted())
    stream.ask(1, b"broken")
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "reader", Code.INTERNAL)
    stream.ask(2, b"end")
    assert stream.sent.get(timeout=PATIENCE_S) == (2, "reader", 0)
    stream.end()
    assert stream.error is None


def test_a_reader_does_not_wait_for_a_client_that_does_not_read() -> None:
    stream = Stream(Scripted())
    stream.may_send.clear()
    stream.ask(1, b"early")
    assert stream.is_sending.wait(PATIENCE_S)
    for number in range(2, 6):
        stream.ask(number, b"end")
    stream.requests.put(None)
    stream.threads[0].join(PATIENCE_S)
    assert not stream.threads[0].is_alive()
    stream.may_send.set()
    assert [stream.sent.get(timeout=PATIENCE_S)[:2] for _ in range(5)] == [(n, "gRPC") for n in range(1, 6)]
    stream.threads[1].join(PATIENCE_S)
    assert not stream.threads[1].is_alive()


def test_a_reader_that_has_ended_leaves_its_answers_to_grpcs_thread() -> None:
    calls = Scripted()
    stream = Stream(calls)
    stream.ask(1, b"later")
    assert calls.at_work.wait(PATIENCE_S)
    stream.requests.put(None)
    stream.threads[0].join(PATIENCE_S)
    assert not stream.drive._readers
    calls.committed(calls.later)
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "gRPC", 0)
    stream.threads[1].join(PATIENCE_S)
    assert not stream.threads[1].is_alive()


def test_a_stream_is_read_on_while_a_lone_request_takes_long() -> None:
    calls = Scripted()
    stream = Stream(calls)
    second = threading.Thread(target=stream.drive.read, args=(iter(stream.requests.get, None),), name="second")
    second.start()
    stream.threads.append(second)
    for number in range(1, NUM_ALONE):
        stream.ask(number, b"end")
        assert stream.sent.get(timeout=PATIENCE_S)[0] == number
    calls.may_go_on.clear()
    calls.at_work.clear()
    stream.ask(NUM_ALONE, b"end")
    assert calls.at_work.wait(PATIENCE_S)
    stream.ask(NUM_ALONE + 1, b"elsewhere")
    assert stream.sent.get(timeout=PATIENCE_S) == (NUM_ALONE + 1, "gRPC", 0)
    calls.may_go_on.set()
    assert stream.sent.get(timeout=PATIENCE_S)[0] == NUM_ALONE
    stream.requests.put(None)  # one for each reader
    stream.end()
