"""gRPC channels: every option and constant of the connection, once."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, TypeAlias

import grpc
import grpc.aio

from specdraft.words import TOKEN_METADATA_KEY

__all__ = [
    "MESSAGE_SIZE_MAX_BYTES",
    "RECONNECTED_WITHIN_S",
    "SERVICE",
    "Metadata",
    "method",
    "open_aio_channel",
    "open_channel",
    "socket_path",
    "token_metadata",
]

SERVICE: Final = "specdraft.v1.Drafter"
MESSAGE_SIZE_MAX_BYTES: Final = 4 * 1024 * 1024
"""Message limit of both sides unless `GetServerInfo` says otherwise."""

_RECEIVE_SIZE_MAX_BYTES: Final = -1  # answers are small; a limit here could only lose one
# Pings only while a call is open, and rarer than any server's minimum (gRPC's default is one in 5 minutes without data,
# the service allows one in 10 s): a ping too many makes a server end the connection.
_KEEPALIVE_TIME_MS: Final = 60_000
_KEEPALIVE_TIMEOUT_MS: Final = 10_000
# A service that restarts on the same host is back within moments: gRPC's own first back-off is one second.
_RECONNECT_FIRST_MS: Final = 100
_RECONNECT_MOST_MS: Final = 2_000

RECONNECTED_WITHIN_S: Final = 1.2 * _RECONNECT_MOST_MS / 1000
"""gRPC looks again after so long at the latest (its pauses vary by a fifth), and tells the last failure until then."""

Metadata: TypeAlias = tuple[tuple[str, bytes], ...]


def _options() -> Sequence[tuple[str, int]]:
    return (
        # Sending is not limited here: the service refuses what is too large, and requests are cut to its limit.
        ("grpc.max_send_message_length", -1),
        ("grpc.max_receive_message_length", _RECEIVE_SIZE_MAX_BYTES),
        ("grpc.keepalive_time_ms", _KEEPALIVE_TIME_MS),
        ("grpc.keepalive_timeout_ms", _KEEPALIVE_TIMEOUT_MS),
        ("grpc.keepalive_permit_without_calls", 0),
        ("grpc.initial_reconnect_backoff_ms", _RECONNECT_FIRST_MS),
        ("grpc.max_reconnect_backoff_ms", _RECONNECT_MOST_MS),
        # Each client owns its connection, so that closing one ends only its own calls.
        ("grpc.use_local_subchannel_pool", 1),
        # Proxies of the environment are not meant for a socket on the same host.
        ("grpc.enable_http_proxy", 0),
    )


def open_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.Channel:
    """Opens a channel for threads to "unix:///path" or "host:port"."""
    _check_target(target)
    if credentials is None:
        return grpc.insecure_channel(target, _options())
    return grpc.secure_channel(target, credentials, _options())


def open_aio_channel(target: str, credentials: grpc.ChannelCredentials | None) -> grpc.aio.Channel:
    """Opens a channel for asyncio to "unix:///path" or "host:port"."""
    _check_target(target)
    if credentials is None:
        return grpc.aio.insecure_channel(target, _options())
    return grpc.aio.secure_channel(target, credentials, _options())


def _check_target(target: str) -> None:
    if target.startswith("/"):  # gRPC would look for a host of this name
        raise ValueError(f"target {target!r} is a path: write unix://{target}")


def socket_path(target: str) -> str:
    """Path of a Unix socket target; empty for any other."""
    scheme, found, rest = target.partition(":")
    if not found or scheme != "unix":
        return ""
    return rest.removeprefix("//") if rest.startswith("///") else rest


def method(rpc: str) -> str:
    """Full name of an RPC of the service."""
    return f"/{SERVICE}/{rpc}"


def token_metadata(session_token: bytes) -> Metadata:
    """Metadata that every call of a session carries; empty before there is one."""
    return ((TOKEN_METADATA_KEY, session_token),) if session_token else ()
