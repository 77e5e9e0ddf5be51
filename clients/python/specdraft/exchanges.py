"""One request and its answer, as a value. The steps of an operation yield exchanges; threads and asyncio perform them.

Everything that decides (operation numbers, retries, chunks, places) is written once as a generator; `Client` and
`AsyncClient` differ only in how an exchange is performed.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from types import MappingProxyType
from typing import Any, Final, TypeAlias, TypeVar

from specdraft.errors import SpecdraftError
from specdraft.v1 import drafter_pb2, session_pb2
from specdraft.values import value

__all__ = ["DRIVE_FIELDS", "RESPONSES", "Exchange", "Steps", "drive_frame", "perform"]

T = TypeVar("T")
Message: TypeAlias = Any


@value
class Exchange:
    """A request on its way.

    Attributes:
        rpc: name of the RPC, for example "Propose".
        request: its message.
        timeout_s: deadline, in seconds.
    """

    rpc: str
    request: Message
    timeout_s: float


Steps: TypeAlias = Generator[Exchange, Message, T]
"""Steps of an operation: yields exchanges, is sent their answers (or thrown their errors), returns the outcome."""

DRIVE_FIELDS: Final[Mapping[str, str]] = MappingProxyType(
    {
        "Propose": "propose",
        "Catchup": "catchup",
        "Truncate": "truncate",
        "OpenSequence": "open_sequence",
        "CloseSequence": "close_sequence",
        "GetSequence": "get_sequence",
        "TakeKV": "take_kv",
        "InstallKV": "install_kv",
        "FreeKV": "free_kv",
        "ForkSequence": "fork_sequence",
        "ReadDrafts": "read_drafts",
    }
)
"""RPCs that may travel on a `Drive` stream, and their field there. `KeepAlive` stays unary and independent of it."""

RESPONSES: Final[Mapping[str, Any]] = MappingProxyType(
    {
        "GetServerInfo": session_pb2.GetServerInfoResponse,
        "OpenLane": session_pb2.OpenLaneResponse,
        "RegisterRegion": session_pb2.RegisterRegionResponse,
        "UnregisterRegion": session_pb2.UnregisterRegionResponse,
        "OpenSession": session_pb2.OpenSessionResponse,
        "KeepAlive": session_pb2.KeepAliveResponse,
        "CloseSession": session_pb2.CloseSessionResponse,
        **{name: getattr(drafter_pb2, f"{name}Response") for name in DRIVE_FIELDS},
    }
)
"""Answer message of each RPC that this client calls."""

_LENGTH_DELIMITED: Final = 2


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    out.append(value)
    return bytes(out)


_TAGS: Final[Mapping[str, bytes]] = MappingProxyType(
    {
        rpc: _varint(drafter_pb2.DriveRequest.DESCRIPTOR.fields_by_name[field].number << 3 | _LENGTH_DELIMITED)
        for rpc, field in DRIVE_FIELDS.items()
    }
)


def drive_frame(exchange: Exchange, correlation_id: int) -> bytes:
    """The exchange as a serialised `DriveRequest`.

    Setting a submessage copies it (by way of its serialised form). The request is serialised once instead, and its
    bytes are appended as the field that they are.
    """
    timeout_ms = max(1, round(exchange.timeout_s * 1000))
    head = drafter_pb2.DriveRequest(correlation_id=correlation_id, timeout_ms=timeout_ms)
    body = exchange.request.SerializeToString()
    return b"".join((head.SerializeToString(), _TAGS[exchange.rpc], _varint(len(body)), body))


def perform(steps: Steps[T], call: Callable[[Exchange], Message]) -> T:
    """Runs the steps with a blocking `call`. `aio.transport.perform` is its twin."""
    try:
        exchange = next(steps)
        while True:
            try:
                answer = call(exchange)
            except SpecdraftError as error:
                exchange = steps.throw(error)
            else:
                exchange = steps.send(answer)
    except StopIteration as stop:
        outcome: T = stop.value
        return outcome
    finally:
        # An interrupted call (KeyboardInterrupt, cancellation) leaves the steps suspended: closing them lets them note
        # that the outcome is unknown.
        steps.close()
