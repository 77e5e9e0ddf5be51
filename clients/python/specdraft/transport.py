"""How exchanges are performed by threads: over `Drive` where that is possible, else by unary calls."""

from __future__ import annotations

import os
from typing import Any

import grpc

from specdraft.channel import Metadata, method, token_metadata
from specdraft.drive import Drive, DriveUnsupported
from specdraft.errors import NotFoundError, Reason, SpecdraftError
from specdraft.exchanges import DRIVE_FIELDS, RESPONSES, Exchange
from specdraft.statuses import error_of_call
from specdraft.terms import closed_error, inherited_error
from specdraft.v1 import drafter_pb2

__all__ = ["Transport"]


class Transport:
    """The calls of one session (or, without a token, the calls before there is one)."""

    def __init__(self, channel: grpc.Channel, session_token: bytes = b"", target: str = "") -> None:
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
        self._drive: Drive | None = None
        self._closed = False
        self._pid = os.getpid()
        self.lost: SpecdraftError | None = None

    def start_drive(self, grace_s: float) -> None:
        """Attaches the `Drive` stream."""
        opener: Any = self._channel.stream_stream(
            method("Drive"),
            request_serializer=None,  # frames are serialised by the caller's thread
            response_deserializer=self._read_answer,
        )
        self._drive = Drive(lambda frames: opener(frames, metadata=self._metadata), grace_s, self._target)

    def _read_answer(self, data: bytes) -> Any:
        """An answer on the stream, as soon as gRPC has it."""
        answer = drafter_pb2.DriveResponse.FromString(data)
        if self._drive is not None:
            self._drive.arrived(answer)
        return answer

    @property
    def is_inherited(self) -> bool:
        """Whether this is a copy in a forked process: what it would say goes out on its parent's connection."""
        return os.getpid() != self._pid

    @property
    def is_driving(self) -> bool:
        """Whether calls go over the stream."""
        return self._drive is not None

    def call(self, exchange: Exchange) -> Any:
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
                    return self._drive.call(exchange)
                except DriveUnsupported:
                    self._drive = None
            return self._call_unary(exchange)
        except NotFoundError as error:
            if error.reason is Reason.SESSION_UNKNOWN:
                self.lost = error
            raise

    def _call_unary(self, exchange: Exchange) -> Any:
        try:
            return self._unary[exchange.rpc](exchange.request, timeout=exchange.timeout_s, metadata=self._metadata)
        except grpc.RpcError as failure:
            raise error_of_call(failure) from None
        except ValueError as error:  # the channel was closed by another thread
            if self._closed:
                raise closed_error() from error
            raise

    @property
    def drive(self) -> Drive | None:
        """The stream; None where there is none."""
        return self._drive

    def stop_drive(self) -> None:
        """Ends the stream."""
        if self._drive is not None:
            self._drive.close()

    def close(self) -> None:
        """Refuses further calls. The channel belongs to the client."""
        self._closed = True
