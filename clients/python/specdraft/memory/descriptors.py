"""The side socket that hands over the file descriptor of a host arena.

Connect to the side socket (AF_UNIX, SOCK_STREAM), send the 16-byte token from `OpenSession`, receive one byte. It is
0x00 and brings exactly one descriptor (SCM_RIGHTS) when the token was good; any other byte, or the end of the stream,
means refused.
"""

from __future__ import annotations

import array
import fcntl
import os
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Final

from specdraft.errors import Reason, SpecdraftError, make_error

__all__ = [
    "DESCRIPTOR_GRANTED",
    "DESCRIPTOR_SEALS",
    "DESCRIPTOR_TOKEN_SIZE_BYTES",
    "NONCE_SIZE_BYTES",
    "SIDE_SOCKET_SUFFIX",
    "check_descriptor",
    "fetch_descriptor",
    "side_socket_path",
]

DESCRIPTOR_TOKEN_SIZE_BYTES: Final = 16
"""Length of the token that buys the descriptor once."""

DESCRIPTOR_GRANTED: Final = b"\x00"
"""The byte that comes with the descriptor."""

DESCRIPTOR_SEALS: Final = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW
"""Seals that every arena carries: without them the other side could truncate the file and kill us with SIGBUS."""

NONCE_SIZE_BYTES: Final = 16
"""Length of the nonce that the service writes into the arena."""

SIDE_SOCKET_SUFFIX: Final = ".fd"
"""The side socket's path is the socket's own path and this."""

_RETRY_DELAY_S: Final = 0.01


def side_socket_path(advertised: str, socket_path: str) -> str:
    """Chooses the side socket's path.

    Args:
        advertised: the path as the service sees it (`Arena.descriptor_socket`).
        socket_path: the path of the gRPC socket as this process sees it; empty when it is not a Unix socket.

    Returns:
        `advertised` if it exists here; otherwise the neighbour of `socket_path` (another mount point of the same
        directory is normal between containers).
    """
    if not socket_path or Path(advertised).exists():
        return advertised
    return socket_path + SIDE_SOCKET_SUFFIX


def fetch_descriptor(path: str, token: bytes, timeout_s: float) -> int:
    """Trades the token for the arena's file descriptor.

    Returns:
        A descriptor that the caller owns and closes.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE` if the socket cannot be reached or refuses.
    """
    try:
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as side:
            _connect(side, path, timeout_s)
            side.sendall(token)
            answer, descriptors = _receive(side)
    except OSError as error:
        raise _refusal(f"the side socket {path} cannot be used: {error.strerror or error}") from error
    if answer != DESCRIPTOR_GRANTED or len(descriptors) != 1:
        for descriptor in descriptors:
            with suppress(OSError):
                os.close(descriptor)
        raise _refusal(f"the side socket {path} refused the token")
    return descriptors[0]


def _connect(side: socket.socket, path: str, timeout_s: float) -> None:
    # A Unix socket whose queue of connections is full says so at once instead of waiting: many sessions that open
    # together are no reason to do without the arena.
    deadline_s = time.monotonic() + timeout_s
    while True:
        side.settimeout(max(_RETRY_DELAY_S, deadline_s - time.monotonic()))
        try:
            side.connect(path)
        except BlockingIOError:
            if time.monotonic() + _RETRY_DELAY_S > deadline_s:
                raise
            time.sleep(_RETRY_DELAY_S)
        else:
            return


def _receive(side: socket.socket) -> tuple[bytes, list[int]]:
    # Room for two: a peer that sends more than one is refused, and nothing it sent stays open. Close-on-exec from the
    # start, so that a fork in another thread does not inherit the arena.
    room = socket.CMSG_SPACE(2 * array.array("i").itemsize)
    data, ancillary, _flags, _address = side.recvmsg(1, room, socket.MSG_CMSG_CLOEXEC)
    descriptors = array.array("i")
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            descriptors.frombytes(payload[: len(payload) - len(payload) % descriptors.itemsize])
    return data, list(descriptors)


def check_descriptor(descriptor: int, size_bytes: int) -> None:
    """Checks that a file is sealed against resizing and holds at least `size_bytes`.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE`.
    """
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as error:
        raise _refusal("the arena's file is not a memfd that can be sealed") from error
    if seals & DESCRIPTOR_SEALS != DESCRIPTOR_SEALS:
        raise _refusal("the arena's file is not sealed against shrinking and growing")
    held = os.fstat(descriptor).st_size
    if held < size_bytes:
        raise _refusal(f"the arena's file holds {held} bytes and should hold {size_bytes}")


def _refusal(message: str) -> SpecdraftError:
    return make_error(Reason.TRANSPORT_UNAVAILABLE, message, kind="HOST")
