"""The RPCs. Thin: who calls, what is begun, how long it is waited for."""

from __future__ import annotations

import logging
import math
import queue
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import grpc
from google.protobuf.message import Message

from drafter_service.engine import Engine, draining
from drafter_service.engine import operations as ops
from drafter_service.memory import CudaArena, SharedArena
from drafter_service.memory.device_loss import device_lost
from drafter_service.server import regions
from drafter_service.server.calls import Answerable, Calls
from drafter_service.server.drive import Drive
from drafter_service.server.encoding import carry_infos
from drafter_service.server.handshake import Handshake, kind_name, open_session_response
from drafter_service.server.hiddens import regions_of
from drafter_service.server.lanes import SessionLanes, no_lanes
from drafter_service.server.refusals import invalid_field
from drafter_service.server.statuses import Ended
from drafter_service.state import Session, SessionTable
from drafter_service.telemetry import Metrics, Tracing
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import drafter_pb2_grpc, session_pb2, tensor_pb2

_log = logging.getLogger(__name__)

TOKEN_METADATA = "specdraft-token-bin"

_WRITES = (pb.ProposeRequest, pb.CatchupRequest)

RESPONSES: Mapping[type[Message], type[Message]] = {
    pb.ProposeRequest: pb.ProposeResponse,
    pb.CatchupRequest: pb.CatchupResponse,
    pb.OpenSequenceRequest: pb.OpenSequenceResponse,
    pb.GetSequenceRequest: pb.GetSequenceResponse,
    pb.TruncateRequest: pb.TruncateResponse,
    pb.CloseSequenceRequest: pb.CloseSequenceResponse,
    pb.TakeKVRequest: pb.TakeKVResponse,
    pb.InstallKVRequest: pb.InstallKVResponse,
    pb.FreeKVRequest: pb.FreeKVResponse,
    pb.ForkSequenceRequest: pb.ForkSequenceResponse,
    pb.ReadDraftsRequest: pb.ReadDraftsResponse,
}
"""What the unary calls of a session answer."""

FENCED_S = 5.0
"""A stream that was ended and whose client does not take the news is cut after this."""


@dataclass(frozen=True, slots=True)
class Parts:
    """What the RPCs need; there once the head is loaded and the self-test has passed."""

    engine: Engine
    calls: Calls
    sessions: SessionTable
    handshake: Handshake
    metrics: Metrics
    tracing: Tracing | None = None

    def parent_in(self, context: grpc.ServicerContext) -> object:
        """The caller's span, where spans are wanted."""
        return self.tracing.parent_in(context.invocation_metadata()) if self.tracing else None


class DrafterServicer(drafter_pb2_grpc.DrafterServicer):
    """Implements `specdraft.v1.Drafter`.

    Args:
        num_places: unary calls of sessions that may wait for the engine at once.
        clock: monotonic seconds.
    """

    def __init__(self, num_places: int, clock: Callable[[], float]) -> None:
        self._num_places = num_places
        # A semaphore, as what costs least: Python's own are made of a lock, a list and a dozen calls.
        self._places: queue.SimpleQueue[None] = queue.SimpleQueue()
        for _ in range(num_places):
            self._places.put(None)
        self._clock = clock
        self._parts: Parts | None = None
        self._is_draining = False
        self._is_ending = False
        self._is_lost = False
        self._drives: dict[Drive, grpc.ServicerContext] = {}
        self._lock = threading.Lock()

    def serve(self, parts: Parts) -> None:
        """From now on calls are answered; before, they are UNAVAILABLE."""
        self._parts = parts

    def refuse_sessions(self) -> None:
        """Refuses new sessions from now on; open ones go on."""
        with self._lock:
            self._is_draining = True

    def drain(self) -> None:
        """Refuses new sessions and streams; open streams end once they have answered what was accepted."""
        self.refuse_sessions()
        with self._lock:
            self._is_ending = True
            drives = list(self._drives)
        for drive in drives:
            drive.drain()

    def lose_device(self) -> None:
        """From now on calls are UNAVAILABLE, and open streams end so."""
        self._is_lost = True
        with self._lock:
            self._is_draining = self._is_ending = True
            drives = list(self._drives)
        for drive in drives:
            drive.end(device_lost())

    def end_session(self, session: Session, reason: str) -> threading.Event:
        """Gives up what a session owns; the session has been forgotten already.

        Returns:
            Set once its pages are free.
        """
        parts = self._parts
        assert parts is not None, "there are sessions"
        drive = session.drive
        if drive is not None:
            drive.end(
                draining() if reason == "shutdown" else make_error(Reason.SESSION_UNKNOWN, "the session has ended")
            )
        done = threading.Event()
        call = ops.Call([ops.CloseSession(session.session_id, b"")], self._clock(), math.inf, lambda _: done.set())
        if session.lanes is not None:
            session.lanes.close()  # first: pages and arena wait for what the device still does
        parts.calls.submit(call)
        if session.regions is not None:
            session.regions.close()
        if session.arena is not None and session.lanes is None:
            session.arena.close()
        parts.metrics.session_ended(reason)
        _log.info("session %s ended: %s; %d are open", _named(session), reason, len(parts.sessions))
        return done

    def cut_streams(self) -> None:
        """Frees the threads of streams that were ended and whose clients read nothing."""
        now = self._clock()
        with self._lock:
            drives = list(self._drives.items())
        for drive, context in drives:
            if drive.ended_at is not None and now - drive.ended_at > FENCED_S:
                context.cancel()

    def expire_carries(self) -> None:
        """Has the engine give up the carries whose time is over."""
        call = ops.Call([ops.Expire(b"", b"")], self._clock(), math.inf, lambda _: None)
        if self._parts is not None:
            self._parts.engine.submit(call)

    def GetServerInfo(self, request: session_pb2.GetServerInfoRequest, context: grpc.ServicerContext) -> Any:
        """`GetServerInfo`."""
        del request, context
        return self._ready().handshake.server_info()

    def OpenSession(self, request: session_pb2.OpenSessionRequest, context: grpc.ServicerContext) -> Any:
        """`OpenSession`."""
        parts = self._ready()
        if self._is_draining:
            raise draining()
        agreement = parts.handshake.agree(request)
        kind = parts.handshake.memory_kind(request, is_local=context.peer().startswith("unix:"))
        is_shared = kind != tensor_pb2.MEMORY_KIND_INLINE
        carried: Sequence[session_pb2.CarryInfo] = ()
        if agreement.carry_owner:  # before there is a session: a call that is refused leaves none behind
            carries = ops.ListCarries(b"", b"", agreement.carry_owner)
            carried = carry_infos([parts.engine.ask(carries, context.time_remaining())])
        arena = parts.handshake.make_arena(request, agreement, kind) if is_shared else None
        try:
            session, token = parts.sessions.open(agreement, arena)
        except BaseException:
            if arena is not None:
                arena.close()
            raise
        parts.metrics.session_opened(kind_name(kind))
        _log.info("session %s opened; %d are open", _named(session), len(parts.sessions))
        try:
            return self._opened(parts, session, token, carried, context)
        except BaseException:
            # Nobody has its token: it would keep a place and its arena until the lease is over.
            if parts.sessions.close(token) is not None:
                self.end_session(session, "closed")
            raise

    @staticmethod
    def _opened(
        parts: Parts,
        session: Session,
        token: bytes,
        carried: Sequence[session_pb2.CarryInfo],
        context: grpc.ServicerContext,
    ) -> Any:
        """The answer to an `OpenSession`. Raises Ended if nobody waits for it any more."""
        arena = session.arena
        assert arena is None or isinstance(arena, SharedArena), "the handshake has made it"
        if isinstance(arena, CudaArena) and parts.handshake.gpu is not None:
            session.regions = parts.handshake.gpu.make_regions()
        response = open_session_response(session, token, parts.handshake, arena, carried)
        if not context.is_active():
            raise Ended
        return response

    def KeepAlive(self, request: session_pb2.KeepAliveRequest, context: grpc.ServicerContext) -> Any:
        """`KeepAlive`."""
        parts = self._ready()
        return parts.calls.keep_alive(self._session(parts, context), request)

    def CloseSession(self, request: session_pb2.CloseSessionRequest, context: grpc.ServicerContext) -> Any:
        """`CloseSession`."""
        del request
        session = self._ready().sessions.close(_token(context))
        if session is None:
            raise make_error(Reason.SESSION_UNKNOWN, "no session belongs to this token")
        self.end_session(session, "closed").wait(context.time_remaining() / 2)
        return session_pb2.CloseSessionResponse()

    def Drive(  # type: ignore[override]  # as `Handlers` calls those of streams
        self,
        request_iterator: Iterator[pb.DriveRequest],
        context: grpc.ServicerContext,
        send: Callable[[pb.DriveResponse], None],
    ) -> None:
        """`Drive`."""
        parts = self._ready()
        session = self._session(parts, context)
        parent = parts.parent_in(context)
        lease = partial(self._renewed, parts.sessions, session)
        drive = Drive(parts.calls, lease, parts.metrics, self._clock, send=send, parent=parent)
        with self._lock:
            if self._is_ending:
                raise draining()
            self._drives[drive] = context
        # One reads on while the other works.
        readers = [
            threading.Thread(target=drive.read, args=(request_iterator,), name="drive-reader", daemon=True)
            for _ in range(2)
        ]
        try:
            parts.sessions.attach(session, drive)
            _follow(session)
            # An open stream alone tells the client that it is attached.
            context.send_initial_metadata(())
            if not context.add_callback(drive.client_gone):
                raise Ended
            for reader in readers:
                reader.start()
            drive.respond()
        finally:
            with self._lock:
                del self._drives[drive]
            parts.sessions.detach(session, drive, broken=drive.is_broken or not context.is_active())
            _follow(session)

    def OpenSequence(self, request: pb.OpenSequenceRequest, context: grpc.ServicerContext) -> Any:
        """`OpenSequence`."""
        return self._call(request, context)

    def GetSequence(self, request: pb.GetSequenceRequest, context: grpc.ServicerContext) -> Any:
        """`GetSequence`."""
        return self._call(request, context)

    def Truncate(self, request: pb.TruncateRequest, context: grpc.ServicerContext) -> Any:
        """`Truncate`."""
        return self._call(request, context)

    def CloseSequence(self, request: pb.CloseSequenceRequest, context: grpc.ServicerContext) -> Any:
        """`CloseSequence`."""
        return self._call(request, context)

    def Catchup(self, request: pb.CatchupRequest, context: grpc.ServicerContext) -> Any:
        """`Catchup`."""
        return self._call(request, context)

    def Propose(self, request: pb.ProposeRequest, context: grpc.ServicerContext) -> Any:
        """`Propose`."""
        return self._call(request, context)

    def TakeKV(self, request: pb.TakeKVRequest, context: grpc.ServicerContext) -> Any:
        """`TakeKV`."""
        return self._call(request, context)

    def InstallKV(self, request: pb.InstallKVRequest, context: grpc.ServicerContext) -> Any:
        """`InstallKV`."""
        return self._call(request, context)

    def FreeKV(self, request: pb.FreeKVRequest, context: grpc.ServicerContext) -> Any:
        """`FreeKV`."""
        return self._call(request, context)

    def ForkSequence(self, request: pb.ForkSequenceRequest, context: grpc.ServicerContext) -> Any:
        """`ForkSequence`."""
        return self._call(request, context)

    def ReadDrafts(self, request: pb.ReadDraftsRequest, context: grpc.ServicerContext) -> Any:
        """`ReadDrafts`."""
        return self._call(request, context)

    def OpenLane(self, request: session_pb2.OpenLaneRequest, context: grpc.ServicerContext) -> Any:
        """`OpenLane`."""
        del request
        parts = self._ready()
        if parts.calls.lanes is None:
            raise no_lanes()
        return parts.calls.lanes.open(self._session(parts, context), context.time_remaining() / 2)

    def RegisterRegion(self, request: session_pb2.RegisterRegionRequest, context: grpc.ServicerContext) -> Any:
        """`RegisterRegion`."""
        parts = self._ready()
        return regions.register(self._session(parts, context), parts.handshake.gpu, request)

    def UnregisterRegion(self, request: session_pb2.UnregisterRegionRequest, context: grpc.ServicerContext) -> Any:
        """`UnregisterRegion`."""
        table = regions_of(self._session(self._ready(), context))
        table.unregister(request.region_id, context.time_remaining() / 2)
        return session_pb2.UnregisterRegionResponse()

    def _ready(self) -> Parts:
        if self._is_lost:
            raise device_lost()
        if self._parts is None:
            raise make_error(Reason.STARTING, "the head is still being loaded", retry_delay_ms=1000)
        return self._parts

    def _session(self, parts: Parts, context: grpc.ServicerContext) -> Session:
        try:
            return parts.sessions.find(_token(context))
        except SpecdraftError:
            if self._is_ending:  # the end of the service has ended the session
                raise draining() from None
            raise

    def _renewed(self, sessions: SessionTable, session: Session) -> Session:
        if self._is_lost:
            raise device_lost()
        try:
            sessions.renew(session)
        except SpecdraftError:
            if self._is_ending:  # as above
                raise draining() from None
            raise
        return session

    def _call(self, request: Message, context: grpc.ServicerContext) -> Message:
        parts = self._ready()
        session = self._session(parts, context)
        remaining = context.time_remaining()
        if isinstance(request, pb.ProposeRequest) and request.HasField("lane_ticket"):
            raise invalid_field("lane_ticket", "in a unary call", "a ticket over Drive, where the order is sure")
        # Where the engine does not get on, callers are told while they can still do something else.
        deadline = self._clock() + remaining
        try:
            self._places.get_nowait()
        except queue.Empty:
            self._wait_for_place(context, remaining / 2)
        try:
            answers: queue.SimpleQueue[Answerable | None] = queue.SimpleQueue()
            parent = parts.parent_in(context) if parts.tracing else None
            parts.calls.begin(session, request, deadline, answers.put, parent)
            parts.calls.work()
            answer = self._waited_for(answers, context, deadline)
        finally:
            self._places.put(None)
        response: Message = RESPONSES[type(request)]()
        answer.fill(response)
        if isinstance(request, _WRITES):
            parts.metrics.stage("reply", self._clock() - answer.finished_at)
        return response

    def _wait_for_place(self, context: grpc.ServicerContext, timeout_s: float) -> None:
        try:
            self._places.get(timeout=timeout_s)
        except queue.Empty:
            limit = self._num_places
            text = f"{limit} calls wait for the engine, which is the limit"
            raise make_error(Reason.IN_FLIGHT_EXHAUSTED, text, retry_delay_ms=100, limit=limit) from None
        if not context.is_active():  # nobody waits for it any more
            self._places.put(None)
            raise Ended

    def _waited_for(
        self, answers: queue.SimpleQueue[Answerable | None], context: grpc.ServicerContext, deadline: float
    ) -> Answerable:
        # Whoever does not wait any more, or is made not to by the end of the service, frees this thread.
        if answers.empty() and not context.add_callback(lambda: answers.put(None)):
            raise Ended
        try:
            answer = answers.get(timeout=max(deadline - self._clock(), 0))
        except queue.Empty:
            raise _late() from None
        # Also what was ready after its caller had gone, or after his deadline, has been told to nobody.
        if answer is None or not context.is_active():
            raise _late() if self._clock() >= deadline else Ended
        return answer


def _late() -> SpecdraftError:
    return make_error(Reason.TIMEOUT, "the deadline passed before the answer was ready")


def _follow(session: Session) -> None:
    """The session has another stream, or none any more: its lanes are told."""
    if isinstance(session.lanes, SessionLanes):
        session.lanes.follow()


def _named(session: Session) -> str:
    """As `specdraftctl sessions` shows it. The name is a caller's: quoted, so that it stays in its line."""
    client_name = session.agreement.client_name
    return session.session_id.hex()[:12] + (f" {client_name!r}" if client_name else "")


def _token(context: grpc.ServicerContext) -> bytes:
    for key, value in context.invocation_metadata():
        if key == TOKEN_METADATA and isinstance(value, bytes):
            return value
    return b""
