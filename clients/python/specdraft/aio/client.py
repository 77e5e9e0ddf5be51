"""The client for asyncio."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Sequence as Items
from contextlib import AsyncExitStack
from types import TracebackType
from typing import Self, TypeAlias, Unpack

import grpc.aio

from specdraft import operations
from specdraft.aio.conversations import AsyncConversations
from specdraft.aio.sequence import AsyncSequence
from specdraft.aio.session import AsyncSession, on_live_session, open_session
from specdraft.aio.transport import AsyncTransport
from specdraft.answers import Carry, Proposal, SequenceState
from specdraft.channel import open_aio_channel
from specdraft.errors import SpecdraftError
from specdraft.exchanges import Exchange
from specdraft.items import (
    CatchupItem,
    ProposeItem,
    catchup_job,
    proposal_or_error,
    propose_job,
    state_or_error,
)
from specdraft.options import SessionKeywords, SessionOptions
from specdraft.server_info import ServerInfo
from specdraft.terms import closed_error, inherited_error
from specdraft.v1 import session_pb2
from specdraft.words import MemoryKind, RowsPolicy
from specdraft.writes import catchup_jobs, propose_jobs

__all__ = ["AsyncClient"]

_Items: TypeAlias = Items[ProposeItem[AsyncSequence]] | Items[CatchupItem[AsyncSequence]]


class AsyncClient:
    """A connection to the service with one session, for asyncio: `Client` with the same words, to be awaited.

    ```python
    async with AsyncClient("unix:///run/specdraft/specdraft.sock", hidden_width=4096) as client:
        sequence = await client.open_sequence()
    ```
    """

    def __init__(self, target: str, **options: Unpack[SessionKeywords]) -> None:
        """Notes the target; `open` (or `async with`) connects.

        Args:
            target: "unix:///path/to/socket" or "host:port".
            **options: fields of `SessionOptions`.

        Raises:
            ValueError: an option is wrong by itself.
        """
        self._target = target
        self._options = SessionOptions(**options)
        self._channel: grpc.aio.Channel | None = None
        self._opened: AsyncSession | None = None
        self._lock = asyncio.Lock()
        self._pid = os.getpid()
        self._failure: SpecdraftError | None = None  # as in `Client`
        self._num_failures = 0
        self._conversations = AsyncConversations(self._live_session, self._options)

    async def __aenter__(self) -> Self:
        await self.open()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def open(self) -> None:
        """Connects and opens the session.

        Raises:
            SpecdraftError: no service there, or it refuses the handshake (`HANDSHAKE_MISMATCH`).
        """
        async with self._lock:
            if self._channel is not None:
                return
            self._pid = os.getpid()
            self._channel = open_aio_channel(self._target, self._options.credentials)
            try:
                self._opened = await self._open_session()
            except BaseException:
                await self._channel.close()
                self._channel = None
                raise

    async def close(self) -> None:
        """Ends the session and the connection. May be called twice. In a forked process it does nothing."""
        if os.getpid() != self._pid:  # as in `Client`
            return
        async with self._lock:
            if self._opened is not None:
                await self._opened.close()
                self._opened = None
            if self._channel is not None:
                await self._channel.close()
                self._channel = None

    @property
    def session(self) -> AsyncSession:
        """The session in use.

        Raises:
            UnavailableError: the client is not open.
        """
        if self._opened is None:
            raise closed_error()
        return self._opened

    @property
    def memory_kind(self) -> MemoryKind:
        """How hidden rows travel."""
        return self.session.terms.memory_kind

    @property
    def is_driving(self) -> bool:
        """Whether calls go over the `Drive` stream (False: unary calls)."""
        return self.session.is_driving

    @property
    def hidden_width(self) -> int:
        """Elements of one hidden row."""
        return self.session.terms.width

    @property
    def max_drafts(self) -> int:
        """Most drafts of one propose."""
        return self.session.terms.max_drafts

    @property
    def options(self) -> SessionOptions:
        """What was asked for."""
        return self._options

    @property
    def carries(self) -> tuple[Carry, ...]:
        """Carries that were found under the carry key when the session opened."""
        return self.session.terms.carries

    @property
    def conversations(self) -> AsyncConversations:
        """Sequences that were parked between two turns, to be resumed."""
        return self._conversations

    async def server_info(self) -> ServerInfo:
        """Asks what this service is."""
        if self._channel is None:
            raise closed_error()
        if os.getpid() != self._pid:
            raise inherited_error()
        request = session_pb2.GetServerInfoRequest()
        transport = AsyncTransport(self._channel)
        return ServerInfo.read(await transport.call(Exchange("GetServerInfo", request, self._options.timeout_s)))

    async def reopen(self) -> None:
        """Opens a new session in the place of the present one, whose sequences are lost."""
        async with self._lock:
            await self._replace_session()

    async def open_sequence(
        self, budget_tokens: int = 0, *, reserve: bool = False, rows_policy: RowsPolicy = RowsPolicy.EXACT
    ) -> AsyncSequence:
        """As `Client.open_sequence`."""

        async def open_in(session: AsyncSession) -> AsyncSequence:
            timeout_s = session.terms.timeout_s
            steps = operations.open_sequence(budget_tokens, rows_policy, reserve=reserve, timeout_s=timeout_s)
            return AsyncSequence(session, await session.run(steps))

        return await on_live_session(self._live_session, open_in)

    async def propose_batch(self, items: Items[ProposeItem[AsyncSequence]]) -> list[Proposal | SpecdraftError]:
        """As `Client.propose_batch`."""
        session = self.session
        jobs = [propose_job(item.sequence.ledger, item, session.terms) for item in items]
        async with AsyncExitStack() as locks:
            await self._enter_locks(locks, items)
            await session.run(propose_jobs(jobs, session.terms, session.placement))
        return [proposal_or_error(job) for job in jobs]

    async def catchup_batch(self, items: Items[CatchupItem[AsyncSequence]]) -> list[SequenceState | SpecdraftError]:
        """As `Client.catchup_batch`."""
        session = self.session
        jobs = [catchup_job(item.sequence.ledger, item, session.terms) for item in items]
        async with AsyncExitStack() as locks:
            await self._enter_locks(locks, items)
            await session.run(catchup_jobs(jobs, session.terms, session.placement))
        return [state_or_error(job) for job in jobs]

    async def free_kv(self, carry: Carry) -> None:
        """Gives a carry up."""
        await self.session.run(operations.free_kv(carry, self.session.terms.timeout_s))

    async def _open_session(self) -> AsyncSession:
        if self._channel is None:
            raise closed_error()
        return await open_session(self._channel, self._target, self._options, await self.server_info())

    async def _live_session(self) -> AsyncSession:
        if self.session.is_over:
            num_failures = self._num_failures
            async with self._lock:
                if self.session.is_over:
                    if self._failure is not None and self._num_failures != num_failures:  # as in `Client`
                        raise self._failure
                    await self._replace_session()
        return self.session

    async def _replace_session(self) -> None:
        before = self.session
        await before.close()
        try:
            self._opened = await self._open_session()
        except SpecdraftError as error:
            self._failure, self._num_failures = error, self._num_failures + 1
            raise
        self._conversations.follow(before.terms, self._opened.terms)

    @staticmethod
    async def _enter_locks(locks: AsyncExitStack, items: _Items) -> None:
        # In the order of their ids, each once: two batches that share sequences cannot wait for each other.
        chosen = {item.sequence.sequence_id: item.sequence for item in items}
        for sequence_id in sorted(chosen):
            await locks.enter_async_context(chosen[sequence_id].lock)
