"""The hot path: one open stream of a session."""

from __future__ import annotations

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import grpc
from google.protobuf.message import Message

from drafter_service.engine import draining
from drafter_service.server.calls import Answerable, Calls
from drafter_service.server.encoding import entry_status
from drafter_service.server.reading import Reading
from drafter_service.server.refusals import invalid_field
from drafter_service.server.statuses import Ended
from drafter_service.state import Session
from drafter_service.telemetry import Metrics
from specdraft.errors import Code, Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb

_log = logging.getLogger(__name__)

TICK_S = 0.1
"""How often a stream looks for requests that have timed out."""

PAUSE_S = 0.005
"""How often a stream that reads no more looks whether it may again."""

GONE_S = 0.05
"""After the end of the requests it is known by then whether the client is still there."""

MAX_UNANSWERED = 256
"""Requests that may wait for their answers. Then no more are read: who does not read either cannot fill us."""

METHODS: Mapping[str, str] = {
    field.name: field.message_type.name.removesuffix("Request")
    for field in pb.DriveRequest.DESCRIPTOR.oneofs_by_name["request"].fields
    if field.message_type is not None
}
"""The RPC that each member of `DriveRequest.request` stands for."""

_WRITES = frozenset({"propose", "catchup"})


class Lease(Protocol):
    """Renews the session of a stream."""

    def __call__(self) -> Session:
        """The session. Raises SESSION_UNKNOWN once it has ended."""
        ...


@dataclass(slots=True, eq=False)
class _Asked:
    """A request that waits for its answer. Its id may be used again; it is itself."""

    correlation_id: int
    kind: str
    began: float
    deadline: float


_Ready = tuple[_Asked, Answerable | SpecdraftError]
"""An answer on its way out, and the request that it belongs to."""


@dataclass(frozen=True, slots=True)
class _End:
    """No more requests: the client has finished, or the stream is to end with an error, or it broke (None).

    Attributes:
        error: what it ends with.
        is_broken: nobody is there to be answered.
        at_once: what was accepted is not answered any more.
    """

    error: SpecdraftError | None
    is_broken: bool = False
    at_once: bool = False


class Drive:
    """One stream: readers begin, work, and answer what became ready meanwhile; gRPC's thread answers the rest.

    Args:
        calls: begins requests.
        lease: the session, renewed.
        metrics: counts and times, under the names of the unary calls.
        clock: monotonic seconds.
        send: sends an answer and returns once gRPC has taken it; never called by two threads at once.
        parent: the span that the stream was opened in, as `Tracing.parent_in` found it.
    """

    def __init__(
        self,
        calls: Calls,
        lease: Lease,
        metrics: Metrics,
        clock: Callable[[], float],
        *,
        send: Callable[[pb.DriveResponse], None],
        parent: object = None,
    ) -> None:
        self._send = send
        self._parent = parent
        self._calls = calls
        self._lease = lease
        self._metrics = metrics
        self._clock = clock
        self._outbox: queue.SimpleQueue[_Ready | _End | None] = queue.SimpleQueue()
        self._at_hand: deque[_Ready] = deque()  # what readers are about to send themselves
        self._readers: set[int] = set()
        self._sending = threading.Lock()
        self._is_ending = False
        self._is_closed = False
        self._asked: dict[int, _Asked] = {}
        self._reading = Reading(clock)
        self._is_read = False
        self._is_draining = False
        self._is_over = threading.Event()
        self._is_gone = threading.Event()
        self.is_broken = False
        self.ended_at: float | None = None

    def fence(self) -> None:
        """Ends the stream at once: a later one has taken over."""
        self.end(make_error(Reason.SESSION_FENCED, "a later stream of this session has taken over"))

    def end(self, error: SpecdraftError) -> None:
        """Ends the stream at once. What is sent on it from now on is not begun."""
        self._is_over.set()
        self.ended_at = self._clock()
        self._outbox.put(_End(error, at_once=True))

    def drain(self) -> None:
        """Refuses what comes now, answers what was accepted, then ends."""
        self._is_draining = True
        self._outbox.put(_End(draining()))

    def client_gone(self) -> None:
        """The call is over, whoever ended it. Called by gRPC."""
        self._is_gone.set()

    def read(self, requests: Iterator[pb.DriveRequest]) -> None:
        """Begins every request, in order, until they end. For several threads: one reads while others work."""
        self._readers.add(threading.get_ident())
        try:
            while self._read_one(requests):
                self._calls.work()
                self._answer_at_hand()
        except Exception:  # noqa: BLE001  # a reader that died silently would leave its client waiting
            _log.exception("a stream's reader failed")
            self._leave_to_others()
            self._outbox.put(_End(make_error(Reason.INTERNAL, "the stream failed inside the service")))
        finally:
            self._reading.leave()
            self._readers.discard(threading.get_ident())  # a later thread may have the same number

    def _read_one(self, requests: Iterator[pb.DriveRequest]) -> bool:
        """Reads a request and begins it; False after the last one."""
        self._reading.take()
        try:
            request = None if self._is_read else self._next(requests)
            if request is None:
                self._reading.give()
                return False
            if not self._is_over.is_set():
                self._begin(request)
        except BaseException:
            self._reading.give()
            raise
        self._is_read = False
        # A catch-up of a long prompt is no step that a stream can be left alone for.
        self._reading.give_or_keep(len(self._asked), may_keep=request.WhichOneof("request") != "catchup")
        return True

    def _next(self, requests: Iterator[pb.DriveRequest]) -> pb.DriveRequest | None:
        """The next request; None after the last one, whose end has been told then."""
        self._is_read = True  # however the next lines end
        try:
            request = next(requests, None)
            while len(self._asked) >= MAX_UNANSWERED and not self._is_over.wait(PAUSE_S):
                pass
        except grpc.RpcError:
            self._outbox.put(_End(None, is_broken=True))
            return None
        except SpecdraftError as error:
            self._outbox.put(_End(error))
            return None
        if request is None:
            # To gRPC, a client that went away may look like one that has finished, until a moment later.
            self._outbox.put(_End(None, is_broken=self._is_gone.wait(GONE_S)))
        return request

    def respond(self) -> None:
        """Answers what is ready, until the stream ends. Raises what ends it early."""
        try:
            end = self._respond()
        finally:
            self._is_over.set()
            self._reading.free(0)
            with self._sending:
                self._is_closed = True  # readers send no more
        if end.error is not None:
            raise end.error

    def _respond(self) -> _End:
        end: _End | None = None
        look_at = self._clock() + TICK_S
        while end is None or self._asked:
            try:
                item = self._outbox.get(timeout=TICK_S)
            except queue.Empty:
                item = None
            # Also between answers: those of others may never pause.
            if self._clock() >= look_at:
                self._reading.free(TICK_S)
                self._refuse_late()
                look_at = self._clock() + TICK_S
            if isinstance(item, tuple):
                with self._sending:
                    self._answer(*item)
            elif item is None:
                continue
            elif item.is_broken:
                self.is_broken = True
                raise Ended
            elif item.at_once and item.error is not None:
                raise item.error
            else:
                end = end or item
                self._is_ending = True
        return end

    def _answer_at_hand(self) -> None:
        """Sends the answers that became ready in a reader's thread: no other thread has to wake up for them."""
        if not self._at_hand:
            return
        if not self._sending.acquire(blocking=False):
            self._leave_to_others()  # who reads on must not wait for a client that does not read
            return
        try:
            while self._at_hand:
                self._answer(*self._at_hand.popleft())
        finally:
            self._sending.release()
        if self._is_ending:
            self._outbox.put(None)  # this may have been the last one

    def _leave_to_others(self) -> None:
        """Has gRPC's thread send what is at hand."""
        with suppress(IndexError):
            while True:
                self._outbox.put(self._at_hand.popleft())

    def _begin(self, request: pb.DriveRequest) -> None:
        correlation_id = request.correlation_id
        now = self._clock()
        kind = request.WhichOneof("request")
        try:
            if correlation_id in self._asked:
                raise invalid_field("correlation_id", correlation_id, "one that no unanswered request has")
        except SpecdraftError as error:
            # The id belongs to another request, whose answer must not be mistaken for this one's.
            self._is_over.set()
            self._outbox.put(_End(error))
            return
        asked = _Asked(correlation_id, kind or "", now, now + request.timeout_ms / 1000)
        self._asked[correlation_id] = asked
        answer = partial(self._is_ready, asked)
        if kind is None or request.timeout_ms == 0 or self._is_draining:
            answer(self._wrong(kind))
            return
        try:
            inner: Message = getattr(request, kind)
            self._calls.begin(self._lease(), inner, asked.deadline, answer, self._parent)
        except SpecdraftError as error:
            answer(error)
        except Exception:  # noqa: BLE001  # a bug in one request must not end the stream
            _log.exception("%s failed", kind)
            answer(make_error(Reason.INTERNAL, "the call failed inside the service"))

    def _is_ready(self, asked: _Asked, answer: Answerable | SpecdraftError) -> None:
        # What a step answers before its end goes out while the rest of it is computed.
        if self._calls.is_committing and threading.get_ident() in self._readers:
            self._at_hand.append((asked, answer))
        else:
            self._outbox.put((asked, answer))

    def _wrong(self, kind: str | None) -> SpecdraftError:
        """Why a request is not begun that comes while draining, asks for nothing or has no deadline."""
        if self._is_draining:
            return draining()
        if kind is None:
            return invalid_field("request", "not set", "a request")
        return make_error(Reason.DEADLINE_REQUIRED, "timeout_ms is 0")

    def _answer(self, asked: _Asked, answer: Answerable | SpecdraftError) -> None:
        if self._is_closed or self._asked.get(asked.correlation_id) is not asked:
            return  # it was told that its time is over, and its id may have been used again
        del self._asked[asked.correlation_id]
        if self._is_gone.is_set():
            return  # the client may have given the slot for the outputs to another request by now
        if isinstance(answer, SpecdraftError):
            self._send(self._refused(asked, answer))
            return
        try:
            response = pb.DriveResponse(correlation_id=asked.correlation_id)
            inner: Message = getattr(response, asked.kind)
            inner.SetInParent()  # an answer may have nothing to say
            answer.fill(inner)
        except SpecdraftError as error:
            self._send(self._refused(asked, error))
            return
        except Exception:  # noqa: BLE001  # a bug in one answer must neither end the stream nor be silent
            _log.exception("the answer to %s failed", asked.kind)
            refusal = make_error(Reason.INTERNAL, "the answer failed inside the service")
            self._send(self._refused(asked, refusal))
            return
        if asked.kind in _WRITES:
            self._metrics.stage("reply", self._clock() - answer.finished_at)
        self._metrics.rpc_done(METHODS[asked.kind], Code.OK, self._clock() - asked.began)
        self._send(response)

    def _refuse_late(self) -> None:
        now = self._clock()
        with self._sending:
            for correlation_id, asked in list(self._asked.items()):
                if asked.deadline <= now and self._asked.pop(correlation_id, None) is not None:
                    error = make_error(Reason.TIMEOUT, "timeout_ms passed before the answer was ready")
                    self._send(self._refused(asked, error))

    def _refused(self, asked: _Asked, error: SpecdraftError) -> pb.DriveResponse:
        response = pb.DriveResponse(correlation_id=asked.correlation_id, status=entry_status(error))
        if error.reason is not None:
            self._metrics.error(error.reason)
        self._metrics.rpc_done(METHODS.get(asked.kind, "Drive"), error.code, self._clock() - asked.began)
        return response
