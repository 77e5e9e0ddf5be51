"""One session for threads: its lease, its arena, its stream."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import grpc

from specdraft import operations
from specdraft.channel import socket_path
from specdraft.errors import NotFoundError, Reason, SpecdraftError, make_error
from specdraft.exchanges import Exchange, Steps, perform
from specdraft.lanes import LANE_TIMEOUT_FACTOR, Lane, SlotUses, check_connections
from specdraft.lease import Lease, keep_alive
from specdraft.ledger import Ledger
from specdraft.memory import ClientGpu, CudaArena, HostArena, fetch_descriptor, side_socket_path
from specdraft.options import SessionOptions
from specdraft.placement import ClientArena, Placement
from specdraft.regions import Regions
from specdraft.requests import choose_gpu, choose_memory, open_session_request, read_boot_id
from specdraft.server_info import ServerInfo
from specdraft.terms import SessionTerms, closed_error, read_layout, read_terms
from specdraft.transport import Transport
from specdraft.v1 import session_pb2
from specdraft.words import MemoryKind

__all__ = ["Session", "map_arena", "on_live_session", "open_session"]

T = TypeVar("T")


class Session:
    """An open session. Owns its transport, its lease thread and its arena."""

    def __init__(
        self, transport: Transport, terms: SessionTerms, arena: ClientArena | None, *, use_drive: bool
    ) -> None:
        self.terms = terms
        self.regions: Regions | None = None
        if isinstance(arena, CudaArena):
            self.regions = Regions(arena.gpu, transport.call, terms.timeout_s)
        self.placement = Placement(terms, arena, self.regions)
        self._transport = transport
        self._arena = arena
        self._closed = False
        self._left: deque[Ledger] = deque()
        self._lanes: list[Lane] = []
        self._over: list[Lane] = []
        self._slot_uses = SlotUses()
        self._lane_lock = threading.Lock()
        if use_drive:
            transport.start_drive(terms.grace_s)
        self._lease = Lease(transport.call, terms.lease_s, terms.timeout_s)

    @property
    def lost(self) -> bool:
        """Whether the service no longer knows the session (it restarted, or the lease ran out)."""
        return self._transport.lost is not None

    @property
    def is_over(self) -> bool:
        """Whether it is of no use any more: lost, or closed."""
        return self._closed or self.lost

    @property
    def is_inherited(self) -> bool:
        """Whether this is a copy in a forked process, which neither uses nor ends it."""
        return self._transport.is_inherited

    @property
    def is_driving(self) -> bool:
        """Whether calls go over the `Drive` stream."""
        return self._transport.is_driving

    def open_lane(self, stream: int, own_socket: str) -> Lane:
        """Opens a lane beside the target's `stream`. See `Client.open_lane`."""
        arena, drive = self._arena, self._transport.drive
        if not isinstance(arena, CudaArena) or drive is None:
            raise make_error(Reason.TRANSPORT_UNAVAILABLE, "lanes need CUDA memory and the Drive stream", kind="lane")
        with self._lane_lock:  # the proof of a lane has a place in the arena that all lanes share
            over = [lane for lane in self._lanes if lane.is_over]
            for lane in over:
                lane.release()  # its thread ends; its pages go with the session, as that may wait for other lanes
            self._lanes = [lane for lane in self._lanes if lane not in over]
            self._over = [lane for lane in [*self._over, *over] if not lane.is_closed]
            check_connections(len(self._lanes) + 1)
            exchange = Exchange("OpenLane", session_pb2.OpenLaneRequest(), LANE_TIMEOUT_FACTOR * self.terms.timeout_s)
            answer = self._transport.call(exchange)
            lane = Lane(
                answer, arena, drive, stream, own_socket=own_socket, terms=self.terms, slot_uses=self._slot_uses
            )
            try:
                lane.prove()
            except SpecdraftError:
                lane.close()
                raise
            self._lanes.append(lane)
            return lane

    def run(self, steps: Steps[T]) -> T:
        """Performs the steps of an operation.

        Raises:
            SpecdraftError: as the operation says.
        """
        if self._closed:
            raise self._transport.lost or closed_error()
        return perform(steps, self._transport.call)

    def leave(self, ledger: Ledger) -> None:
        """Has a sequence closed when the service is asked for the next one: now it does not answer."""
        self._left.append(ledger)

    def close_left(self) -> None:
        """Closes what was left."""
        if self._left:
            self.run(operations.close_left(self._left, self.terms.timeout_s))

    def close(self) -> None:
        """Ends the session. A service that cannot be reached ends it by itself when the lease runs out."""
        if self._closed:
            return
        self._closed = True
        self._lease.close()
        for lane in [*self._lanes, *self._over]:
            lane.close()
        self._transport.stop_drive()  # first, so that it does not attach again to a session that is ending
        if not self.lost:
            with suppress(SpecdraftError):
                self._transport.call(Exchange("CloseSession", session_pb2.CloseSessionRequest(), self.terms.timeout_s))
        self._transport.close()
        if self.regions is not None:
            self.regions.close()
        if self._arena is not None:
            self._arena.close()


def on_live_session(live_session: Callable[[], Session], work: Callable[[Session], T]) -> T:
    """Does work with a session, and once more with a new one where the service turns out to have lost it.

    A service that has restarted tells so only when it is asked; nothing was done then.
    """
    session = live_session()
    session.close_left()
    try:
        return work(session)
    except NotFoundError:
        if not session.lost:
            raise
    return work(live_session())


def map_arena(
    answer: session_pb2.OpenSessionResponse, terms: SessionTerms, own_socket: str, gpu: ClientGpu | None
) -> ClientArena | None:
    """Maps the session's arena; None where rows travel inline.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE`: the side socket does not give the arena;
            `MEMORY_NOT_SHAREABLE`, `SAME_PID`: the driver does not open it.
    """
    if terms.memory_kind is MemoryKind.CUDA and gpu is not None:
        return CudaArena(gpu, answer.arena.cuda_ipc_handle, read_layout(answer.arena, terms))
    if terms.memory_kind is not MemoryKind.HOST:
        return None
    path = side_socket_path(answer.arena.descriptor_socket, own_socket)
    descriptor = fetch_descriptor(path, answer.arena.descriptor_token, terms.timeout_s)
    return HostArena(descriptor, read_layout(answer.arena, terms))


def open_session(channel: grpc.Channel, target: str, options: SessionOptions, info: ServerInfo) -> Session:
    """Opens a session, maps its arena and proves the mapping."""
    boot_id, own_socket = read_boot_id(), socket_path(target)
    kind = choose_memory(options, info, own_socket, boot_id)
    gpu = choose_gpu(options, kind)
    request = open_session_request(options, info, kind, boot_id, gpu)
    answer = Transport(channel).call(Exchange("OpenSession", request, options.timeout_s))
    terms = read_terms(options, info, answer)
    transport = Transport(channel, answer.session_token, target)
    arena = None
    try:
        arena = map_arena(answer, terms, own_socket, gpu)
        # The first KeepAlive proves the mapping before anything refers to it.
        transport.call(keep_alive(options.timeout_s, arena.nonce() if arena else b""))
        return Session(transport, terms, arena, use_drive=options.use_drive)
    except BaseException:
        if arena is not None:
            arena.close()
        with suppress(SpecdraftError):
            transport.call(Exchange("CloseSession", session_pb2.CloseSessionRequest(), options.timeout_s))
        raise
