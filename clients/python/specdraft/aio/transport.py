"""How exchanges are performed by asyncio: over `Drive` where that is possible, else by unary calls."""

from __future__ import annotations

import os
from collections.abc import Awaitable, Callable
from typing import Any, TypeVar

import grpc
import grpc.aio

from specdraft.aio.drive import AsyncDrive
from specdraft.channel import Metadata, method, token_metadata
from specdraft.drive import DriveUnsupported
from specdraft.errors import NotFoundError, Reason, SpecdraftError
from specdraft.exchanges import DRIVE_FIELDS, RESPONSES, Exchange, Steps
from specdraft.statuses import error_of_call
from specdraft.terms import closed_error, inherited_error
from specdraft.v1 import drafter_pb2

__all__ = ["AsyncTransport", "perform"]

T = TypeVar("T")


async def perform(steps: Steps[T], call: Callable[[Exchange], Awaitable[Any]]) -> T:
    """Runs the steps with an awaitable `call`: the twin of `specdraft.exchanges.perform`."""
    try:
        exchange = next(steps)
        while True:
            try:
                answer = await call(exchange)
            except SpecdraftError as error:
                exchange = steps.throw(error)
            else:
                exchange = steps.send(answer)
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome
    finally:
        steps.close()


class AsyncTransport:
    """The calls of one session (or, without a token, the calls before there is one)."""

    def __init__(self, channel: grpc.aio.Channel, session_token: bytes = b"", target: str = "") -> None:
        self._channel = channel
        self._metadata: Metadata = token_metadata(session_token)
        self._unary: dict[str, Any] = {
            rpc: channel.unary_unary(
                method(rpc),
                request_serializer=lambda request: request.SerializeToString(),
                response_deserializer=response.FromString,
            )
            for rpc, response in RESPONSES.items()
        }
        self._target = target
        self._drive: AsyncDrive | None = None
        self._closed = False
        self._pid = os.getpid()
        self.lost: SpecdraftError | None = None

    def start_drive(self, grace_s: float) -> None:
        """Attaches the `Drive` stream."""
        opener: Any = self._channel.stream_stream(
            method("Drive"),
            request_serializer=None,  # frames are serialised already
            response_deserializer=drafter_pb2.DriveResponse.FromString,
        )
        self._drive = AsyncDrive(
            lambda: opener(metadata=self._metadata),
            grace_s,
            self._target,
            lambda: self._channel.get_state() is grpc.ChannelConnectivity.READY,
        )

    @property
    def is_inherited(self) -> bool:
        """Whether this is a copy in a forked process: what it would say goes out on its parent's connection."""
        return os.getpid() != self._pid

    @property
    def is_driving(self) -> bool:
        """Whether calls go over the stream."""
        return self._drive is not None

    async def call(self, exchange: Exchange) -> Any:
        """Performs one exchange.

        Raises:
            SpecdraftError: what the service answered, or what became of the connection.
        """
        if self._closed:
            raise closed_error()
        if self.is_inherited:
            raise inherited_error()
        try:
            if self._drive is not None and exchange.rpc in DRIVE_FIELDS:
                try:
                    return await self._drive.call(exchange)
                except DriveUnsupported:
                    self._drive = None
            return await self._call_unary(exchange)
        except NotFoundError as error:
            if error.reason is Reason.SESSION_UNKNOWN:
                self.lost = error
            raise

    async def _call_unary(self, exchange: Exchange) -> Any:
        try:
            return await self._unary[exchange.rpc](
                exchange.request, timeout=exchange.timeout_s, metadata=self._metadata
            )
        except grpc.RpcError as failure:
            raise error_of_call(failure) from None
        except grpc.aio.UsageError as error:  # the channel was closed by another task
            raise closed_error() from error

    async def stop_drive(self) -> None:
        """Ends the stream."""
        if self._drive is not None:
            await self._drive.close()

    def close(self) -> None:
        """Refuses further calls. The channel belongs to the client."""
        self._closed = True
