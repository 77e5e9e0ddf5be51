"""The `Drive` stream for asyncio: many tasks, one stream, one task that reads it."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Final

import grpc
import grpc.aio

from specdraft.channel import RECONNECTED_WITHIN_S
from specdraft.drive import DriveUnsupported
from specdraft.errors import DeadlineError, SpecdraftError, UnavailableError
from specdraft.exchanges import DRIVE_FIELDS, Exchange, drive_frame
from specdraft.listening import is_refused
from specdraft.statuses import check_entry, error_of_call
from specdraft.terms import closed_error
from specdraft.unanswered import After, Reattachment, Unanswered

__all__ = ["AsyncDrive", "Attach"]

_STATUS_DELAY_S: Final = 0.05

Attach = Callable[[], Any]
"""Opens a stream to write frames to and read `DriveResponse`s from."""


def _connected() -> bool:
    return True


class AsyncDrive:
    """One session's stream; behaves as `specdraft.drive.Drive`.

    Args:
        attach: opens the stream.
        grace_s: how long the session waits for the next stream.
        target: where the service listens.
        is_connected: whether the channel has a connection right now.
    """

    def __init__(
        self, attach: Attach, grace_s: float, target: str, is_connected: Callable[[], bool] = _connected
    ) -> None:
        self._attach = attach
        self._is_connected = is_connected
        self._target = target
        self._unanswered: Unanswered[asyncio.Future[Any]] = Unanswered()
        self._reattachment = Reattachment(max(grace_s, RECONNECTED_WITHIN_S))
        self._stream: Any = None
        self._writing = asyncio.Lock()  # gRPC takes one write at a time
        self._writes: set[asyncio.Task[None]] = set()
        self._wanted = asyncio.Event()  # cuts the pause between two attempts short
        self._final: Exception | None = None
        self._reader: asyncio.Task[None] | None = None
        self._start_reader()

    async def call(self, exchange: Exchange) -> Any:
        """Sends the request and waits for its answer.

        Raises:
            SpecdraftError: what the service answered, or `DeadlineError` after `timeout_s`.
            DriveUnsupported: the service does not serve the stream.
        """
        if self._final is not None:
            raise self._final
        correlation_id = self._unanswered.next_id()
        frame = drive_frame(exchange, correlation_id)
        waiter: asyncio.Future[Any] = asyncio.get_running_loop().create_future()
        self._unanswered.add(correlation_id, frame, waiter)
        self._reattachment.wanted(len(self._unanswered))
        try:
            async with asyncio.timeout(exchange.timeout_s):
                if self._reader is None:
                    self._start_reader()
                elif self._stream is not None:
                    self._start_write(self._stream, frame)
                else:
                    self._wanted.set()
                answer = await waiter
        except TimeoutError:
            raise DeadlineError(None, f"no answer to {exchange.rpc} within {exchange.timeout_s:g} s") from None
        finally:
            self._unanswered.take(correlation_id)
        check_entry(answer.status)
        return getattr(answer, DRIVE_FIELDS[exchange.rpc])

    async def close(self) -> None:
        """Ends the stream and its task; tasks that still wait get `UnavailableError`."""
        self._final = self._final or closed_error()
        reader = self._reader
        if reader is not None:
            reader.cancel()
            with suppress(asyncio.CancelledError):
                await reader
        if self._stream is not None:
            self._stream.cancel()
        for write in self._writes:
            write.cancel()
        await asyncio.gather(*self._writes, return_exceptions=True)
        self._finish(After.GIVE_UP, closed_error())

    def _start_reader(self) -> None:
        self._reader = asyncio.create_task(self._read(), name="specdraft-drive")

    def _start_write(self, stream: Any, frame: bytes) -> None:
        # A task of its own: a caller that is cancelled in the middle of a write would make gRPC cancel the stream, and
        # with it everybody's requests.
        write = asyncio.create_task(self._write(stream, frame), name="specdraft-write")
        self._writes.add(write)
        write.add_done_callback(self._writes.discard)

    async def _write(self, stream: Any, frame: bytes) -> None:
        # A stream that has just ended refuses the write; its reader sends the frame again on the next one.
        with suppress(grpc.RpcError, asyncio.InvalidStateError):
            async with self._writing:
                await stream.write(frame)

    async def _read(self) -> None:
        """Body of the reader task: one stream after another, until one ends for good."""
        while True:
            error = await self._read_stream()
            after = self._reattachment.ended(error, asyncio.get_running_loop().time())
            if after is not After.ATTACH_AGAIN:
                self._finish(after, error)
                return
            if self._reattachment.is_of_the_connection(error):
                await self._tell_if_nobody_listens()
            if error is not None and self._reattachment.is_of_the_size(error):
                self._tell(self._unanswered.take_largest(), error)
            with suppress(TimeoutError):
                async with asyncio.timeout(self._reattachment.next_delay_s()):
                    await self._wanted.wait()
            self._wanted.clear()

    async def _tell_if_nobody_listens(self) -> None:
        if len(self._unanswered) and await asyncio.to_thread(is_refused, self._target):
            self._tell_all(UnavailableError(None, f"nobody listens at {self._target}"))

    def _tell_all(self, outcome: Exception) -> None:
        for waiter in self._unanswered.take_all():
            self._tell(waiter, outcome)

    @staticmethod
    def _tell(waiter: asyncio.Future[Any] | None, outcome: Exception) -> None:
        if waiter is not None and not waiter.done():
            waiter.set_exception(outcome)

    async def _read_stream(self) -> SpecdraftError | None:
        stream = self._attach()
        self._reattachment.attached(asyncio.get_running_loop().time())
        try:
            # Frames of calls that begin meanwhile come after these: the stream is not public yet, and they are noted.
            last_id = 0
            while pending := self._unanswered.frames(last_id):
                for last_id, frame in pending:  # noqa: B007 - the last one counts
                    await stream.write(frame)
            self._stream = stream
            async for answer in stream:
                self._reattachment.answered()
                waiter = self._unanswered.take(answer.correlation_id)
                if waiter is not None and not waiter.done():
                    waiter.set_result(answer)
        except asyncio.CancelledError:
            stream.cancel()
            raise
        except (grpc.RpcError, asyncio.InvalidStateError):
            pass  # the stream says below how it ended
        finally:
            self._stream = None
        return await self._ending(stream)

    def _finish(self, after: After, error: SpecdraftError | None) -> None:
        outcome: Exception = error or UnavailableError(None, "the stream to the service has ended")
        self._reader = self._stream = None
        if after is After.USE_UNARY:
            outcome = self._final = DriveUnsupported()
        elif after is After.STOP:
            self._final = outcome
        self._tell_all(outcome)

    async def _ending(self, stream: Any) -> SpecdraftError | None:
        """How a stream ended; None = in peace."""
        code = await stream.code()
        if code is grpc.StatusCode.INTERNAL:
            # A write that meets the end of the stream puts this in the place of a status that has not arrived yet.
            # Whether the service ended the stream, and why, shows a moment later. If it does not, and there is no
            # connection any more, that was the reason: a service that fences a stream keeps the connection.
            await asyncio.sleep(_STATUS_DELAY_S)
            code = await stream.code()
            if code is grpc.StatusCode.INTERNAL and not self._is_connected():
                return UnavailableError(None, "the connection to the service broke")
        if code is grpc.StatusCode.OK:
            return None
        return error_of_call(_Ended(code, await stream.details(), await stream.trailing_metadata()))


@dataclass(frozen=True, slots=True)
class _Ended:
    """The status of an asyncio call, with the methods of one that was raised."""

    status: grpc.StatusCode
    text: str
    trailers: Any

    def code(self) -> grpc.StatusCode:
        return self.status

    def details(self) -> str:
        return self.text

    def trailing_metadata(self) -> Any:
        return self.trailers
