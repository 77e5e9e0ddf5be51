"""Whether anybody listens at a target, asked of the kernel: gRPC itself answers from its back-off for a while."""

from __future__ import annotations

import socket
from typing import Final

from specdraft.channel import socket_path

__all__ = ["is_refused"]

_TIMEOUT_S: Final = 0.25


def is_refused(target: str) -> bool:
    """Whether a connection to "unix:///path" or "host:port" is refused for certain. Everything else may come right."""
    path = socket_path(target)
    host, _, port = target.rpartition(":")
    try:
        if path:
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
                probe.settimeout(_TIMEOUT_S)
                probe.connect(path)
        elif port.isdigit():
            socket.create_connection((host.strip("[]"), int(port)), _TIMEOUT_S).close()
    except (ConnectionRefusedError, FileNotFoundError):
        return True
    except OSError:
        return False
    return False
