"""The side socket: hands a session's memfd to whoever shows the one-time token for it."""

from __future__ import annotations

import logging
import os
import secrets
import socket
import socketserver
import struct
import sys
import threading
import time
from pathlib import Path

from specdraft.memory.descriptors import DESCRIPTOR_GRANTED, DESCRIPTOR_TOKEN_SIZE_BYTES

_log = logging.getLogger(__name__)

DESCRIPTOR_REFUSED = b"\x01"
"""Sent instead of a descriptor."""

PEER_TIMEOUT_S = 2.0
"""A peer that has not sent its token by then is let go, and one that waits for its turn is turned away."""

MAX_PEERS = 32
"""Peers served at once; more wait for their turn."""


class DescriptorServer:
    """Passes file descriptors by SCM_RIGHTS on a Unix socket.

    Args:
        path: of the socket; must not exist.
        mode: permissions of the socket.
    """

    def __init__(self, path: Path, mode: int) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._offers: dict[bytes, int] = {}
        self._server = _Server(path, self._redeem)
        path.chmod(mode)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="descriptors", daemon=True)
        self._thread.start()

    def offer(self, descriptor: int) -> bytes:
        """Makes a token, good once, for a duplicate of the descriptor."""
        token = secrets.token_bytes(DESCRIPTOR_TOKEN_SIZE_BYTES)
        with self._lock:
            self._offers[token] = os.dup(descriptor)
        return token

    def withdraw(self, token: bytes) -> None:
        """Ends an offer that nobody took."""
        descriptor = self._redeem(token)
        if descriptor is not None:
            os.close(descriptor)

    def close(self) -> None:
        """Stops serving, removes the socket and drops all offers."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
        self.path.unlink(missing_ok=True)
        with self._lock:
            for descriptor in self._offers.values():
                os.close(descriptor)
            self._offers.clear()

    def _redeem(self, token: bytes) -> int | None:
        with self._lock:
            return self._offers.pop(token, None)


class _Server(socketserver.ThreadingUnixStreamServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 4 * MAX_PEERS

    def __init__(self, path: Path, redeem: object) -> None:
        self.redeem = redeem
        self.peers = threading.BoundedSemaphore(MAX_PEERS)
        super().__init__(str(path), _Peer)

    def process_request(self, request: socket.socket | tuple[bytes, socket.socket], client_address: object) -> None:
        # Longer than this no peer keeps its place.
        if not self.peers.acquire(timeout=2 * PEER_TIMEOUT_S):
            self.shutdown_request(request)
            return
        try:
            super().process_request(request, client_address)
        except BaseException:  # no thread could be started
            self.peers.release()
            raise

    def process_request_thread(self, request: object, client_address: object) -> None:
        try:
            super().process_request_thread(request, client_address)  # type: ignore[arg-type]  # as above
        finally:
            self.peers.release()

    def handle_error(self, request: object, client_address: object) -> None:  # noqa: ARG002  # the base's signature
        _log.info("a peer of the side socket went away: %r", sys.exception())


class _Peer(socketserver.BaseRequestHandler):
    def handle(self) -> None:
        peer: socket.socket = self.request
        pid, uid, _ = struct.unpack("3i", peer.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i")))
        token = _receive(peer, DESCRIPTOR_TOKEN_SIZE_BYTES, time.monotonic() + PEER_TIMEOUT_S)
        descriptor = self.server.redeem(token)  # type: ignore[attr-defined]  # _Server's
        outcome = "handed" if descriptor is not None else "refused (no such token, or it was used)"
        _log.info("descriptor %s to pid %d, uid %d", outcome, pid, uid)
        if descriptor is None:
            peer.sendall(DESCRIPTOR_REFUSED)
            return
        try:
            socket.send_fds(peer, [DESCRIPTOR_GRANTED], [descriptor])
        finally:
            os.close(descriptor)


def _receive(peer: socket.socket, size: int, deadline: float) -> bytes:
    """Up to `size` bytes, in however many pieces; fewer at the end of the stream. Raises TimeoutError."""
    received = b""
    while len(received) < size:
        # At least a moment: 0 would mean not to wait at all.
        peer.settimeout(max(deadline - time.monotonic(), 1e-3))
        piece = peer.recv(size - len(received))
        if not piece:
            break
        received += piece
    return received
