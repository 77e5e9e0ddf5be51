"""One session for asyncio: its lease, its arena, its stream."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable
from contextlib import suppress
from typing import TypeVar

import grpc.aio

from specdraft import operations
from specdraft.aio.transport import AsyncTransport, perform
from specdraft.channel import socket_path
from specdraft.errors import NotFoundError, SpecdraftError
from specdraft.exchanges import Exchange, Steps
from specdraft.lease import LEASE_SHARE, RETRY_SHARE, keep_alive
from specdraft.ledger import Ledger
from specdraft.options import SessionOptions
from specdraft.placement import ClientArena, Placement
from specdraft.requests import choose_gpu, choose_memory, open_session_request, read_boot_id
from specdraft.server_info import ServerInfo
from specdraft.session import map_arena
from specdraft.terms import SessionTerms, closed_error, read_terms
from specdraft.v1 import session_pb2

__all__ = ["AsyncSession", "on_live_session", "open_session"]

T = TypeVar("T")


class AsyncSession:
    """An open session. Owns its transport, its lease task and its arena."""

    def __init__(
        self, transport: AsyncTransport, terms: SessionTerms, arena: ClientArena | None, *, use_drive: bool
    ) -> None:
        self.terms = terms
        self.placement = Placement(terms, arena)
        self._transport = transport
        self._arena = arena
        self._closed = False
        self._left: deque[Ledger] = deque()
        if use_drive:
            transport.start_drive(terms.grace_s)
        self._lease = asyncio.create_task(self._renew(), name="specdraft-lease")

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

    async def run(self, steps: Steps[T]) -> T:
        """Performs the steps of an operation.

        Raises:
            SpecdraftError: as the operation says.
        """
        if self._closed:
            raise self._transport.lost or closed_error()
        return await perform(steps, self._transport.call)

    def leave(self, ledger: Ledger) -> None:
        """Has a sequence closed when the service is asked for the next one: now it does not answer."""
        self._left.append(ledger)

    async def close_left(self) -> None:
        """Closes what was left."""
        if self._left:
            await self.run(operations.close_left(self._left, self.terms.timeout_s))

    async def close(self) -> None:
        """Ends the session. A service that cannot be reached ends it by itself when the lease runs out."""
        if self._closed:
            return
        self._closed = True
        try:
            self._lease.cancel()
            with suppress(asyncio.CancelledError):
                await self._lease
            await self._transport.stop_drive()  # first, so that it does not attach again to a session that is ending
            if not self.lost:
                with suppress(SpecdraftError):
                    await self._transport.call(
                        Exchange("CloseSession", session_pb2.CloseSessionRequest(), self.terms.timeout_s)
                    )
        finally:  # who is cancelled here does not come again
            self._transport.close()
            if self._arena is not None:
                self._arena.close()

    async def _renew(self) -> None:
        pause_s = self.terms.lease_s / LEASE_SHARE
        while True:
            await asyncio.sleep(pause_s)
            try:
                await self._transport.call(keep_alive(min(self.terms.timeout_s, self.terms.lease_s / LEASE_SHARE)))
            except NotFoundError:
                return  # the session is gone; the next use of a sequence says so
            except SpecdraftError:
                pause_s = self.terms.lease_s / RETRY_SHARE
            else:
                pause_s = self.terms.lease_s / LEASE_SHARE


async def on_live_session(
    live_session: Callable[[], Awaitable[AsyncSession]], work: Callable[[AsyncSession], Awaitable[T]]
) -> T:
    """As `specdraft.session.on_live_session`."""
    session = await live_session()
    await session.close_left()
    try:
        return await work(session)
    except NotFoundError:
        if not session.lost:
            raise
    return await work(await live_session())


async def open_session(
    channel: grpc.aio.Channel, target: str, options: SessionOptions, info: ServerInfo
) -> AsyncSession:
    """Opens a session, maps its arena and proves the mapping."""
    boot_id, own_socket = read_boot_id(), socket_path(target)
    kind = choose_memory(options, info, own_socket, boot_id)
    gpu = await asyncio.to_thread(choose_gpu, options, kind)
    request = open_session_request(options, info, kind, boot_id, gpu)
    answer = await AsyncTransport(channel).call(Exchange("OpenSession", request, options.timeout_s))
    terms = read_terms(options, info, answer)
    transport = AsyncTransport(channel, answer.session_token, target)
    arena = None
    try:
        # A blocking socket, but one on this host that answers at once.
        arena = await asyncio.to_thread(map_arena, answer, terms, own_socket, gpu)
        await transport.call(keep_alive(options.timeout_s, arena.nonce() if arena else b""))
        return AsyncSession(transport, terms, arena, use_drive=options.use_drive)
    except BaseException:
        if arena is not None:
            arena.close()
        with suppress(SpecdraftError):
            await transport.call(Exchange("CloseSession", session_pb2.CloseSessionRequest(), options.timeout_s))
        raise
