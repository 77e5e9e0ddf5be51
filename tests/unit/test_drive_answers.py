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
from drafter_service.telemetry import Metrics
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb

PATIENCE_S = 5.0


class Scripted:
    """Answers a request as its sequence id says: `now`, when a caller `works`, or from `elsewhere`."""

    def __init__(self) -> None:
        self.due = []
        self.later = None
        self.at_work = threading.Event()
        self.may_go_on = threading.Event()
        self.may_go_on.set()

    def begin(self, session, request, deadline, on_done, parent=None) -> None:
        is_propose = isinstance(request, pb.ProposeRequest)
        response = pb.ProposeResponse if is_propose else pb.GetSequenceResponse
        answer = partial(on_done, Answerable(response, time.monotonic()))
        match request.entries[0].sequence_id if is_propose else request.sequence_id:
            case b"now":
                answer()
            case b"works":
                self.due.append(answer)
            case b"later":
                self.later = answer
            case b"elsewhere":
                thread = threading.Thread(target=answer, name="elsewhere")
                thread.start()
                thread.join()

    def work(self) -> None:
        self.at_work.set()
        assert self.may_go_on.wait(PATIENCE_S)
        while self.due:
            self.due.pop()()


class Stream:
    """A stream with its reader and its answering thread; what is sent is told by id and thread."""

    def __init__(self, calls) -> None:
        self.sent = queue.SimpleQueue()
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

    def look(self, number, how) -> None:
        request = pb.GetSequenceRequest(sequence_id=how)
        self.requests.put(pb.DriveRequest(correlation_id=number, timeout_ms=60_000, get_sequence=request))

    def end(self) -> None:
        self.requests.put(None)
        for thread in self.threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive()

    def _send(self, response) -> None:
        self.sent.put((response.correlation_id, threading.current_thread().name))

    def _respond(self) -> None:
        try:
            self.drive.respond()
        except SpecdraftError as error:
            self.error = error


@pytest.mark.parametrize(("how", "thread"), [(b"now", "reader"), (b"works", "reader"), (b"elsewhere", "gRPC")])
def test_an_answer_is_sent_by_the_reader_under_whose_hands_it_became_ready_or_by_grpcs_thread(how, thread) -> None:
    stream = Stream(Scripted())
    for number in range(1, 4):
        stream.ask(number, how)
        assert stream.sent.get(timeout=PATIENCE_S) == (number, thread)
    stream.end()


def test_an_answer_that_is_ready_does_not_wait_for_the_work_that_its_reader_goes_on_to() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"now")
    assert calls.at_work.wait(PATIENCE_S)
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "reader")
    calls.may_go_on.set()
    stream.end()


def test_a_stream_ends_with_the_last_answer_also_if_a_reader_sends_it() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"works")
    assert calls.at_work.wait(PATIENCE_S)
    stream.drive.drain()
    calls.may_go_on.set()
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "reader")
    stream.end()
    assert stream.error.reason == Reason.DRAINING


def test_nothing_is_sent_after_a_stream_was_ended_at_once() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"works")
    assert calls.at_work.wait(PATIENCE_S)
    stream.drive.end(make_error(Reason.SESSION_UNKNOWN, "over"))
    stream.threads[1].join(PATIENCE_S)
    calls.may_go_on.set()
    stream.end()
    assert stream.error.reason == Reason.SESSION_UNKNOWN
    assert stream.sent.empty()


def test_what_a_step_answers_before_its_end_does_not_wait_for_the_rest_of_it() -> None:
    stream = Stream(Scripted())
    stream.look(1, b"works")
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "gRPC")
    stream.end()


def test_a_reader_that_has_ended_leaves_its_answers_to_grpcs_thread() -> None:
    calls = Scripted()
    calls.may_go_on.clear()
    stream = Stream(calls)
    stream.ask(1, b"later")
    assert calls.at_work.wait(PATIENCE_S)
    calls.may_go_on.set()
    stream.requests.put(None)
    stream.threads[0].join(PATIENCE_S)
    assert not stream.drive._readers
    calls.later()
    assert stream.sent.get(timeout=PATIENCE_S) == (1, "gRPC")
    stream.threads[1].join(PATIENCE_S)
    assert not stream.threads[1].is_alive()
