"""A stream whose client does not wait for answers is read no further than so many requests."""

from __future__ import annotations

import threading
import time

from prometheus_client import CollectorRegistry

from drafter_service.server.drive import MAX_UNANSWERED, Drive
from drafter_service.telemetry import Metrics
from specdraft.errors import Reason, make_error
from specdraft.v1 import drafter_pb2 as pb


class Silent:
    """Takes every request and answers none."""

    is_committing = False

    def __init__(self) -> None:
        self.num_begun = 0

    def begin(self, session, request, deadline, on_done, parent=None) -> None:
        self.num_begun += 1

    def work(self) -> None:
        pass


def requests(taken: list[int]):
    for number in range(1, MAX_UNANSWERED + 50):
        taken.append(number)
        yield pb.DriveRequest(correlation_id=number, timeout_ms=60_000, get_sequence=pb.GetSequenceRequest())


def test_no_more_is_read_than_may_wait_for_an_answer() -> None:
    calls, taken = Silent(), []
    drive = Drive(calls, lambda: None, Metrics(CollectorRegistry(), 8), time.monotonic, send=lambda _: None)
    reader = threading.Thread(target=drive.read, args=(requests(taken),))
    reader.start()
    until = time.monotonic() + 5
    while calls.num_begun < MAX_UNANSWERED and time.monotonic() < until:
        time.sleep(0.001)
    time.sleep(0.05)
    assert calls.num_begun == MAX_UNANSWERED
    assert len(taken) <= MAX_UNANSWERED + 1
    drive.end(make_error(Reason.SESSION_UNKNOWN, "over"))
    reader.join(5)
    assert not reader.is_alive()
    assert calls.num_begun == MAX_UNANSWERED
