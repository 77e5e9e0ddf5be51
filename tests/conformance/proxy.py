"""A proxy between two Unix sockets that can cut its connections at a chosen byte, and remembers what it has seen."""

import contextlib
import socket
import threading

CHUNK_BYTES = 65536
GOAWAY = 7
FRAME_HEADER_BYTES = 9


class CutProxy:
    """Listens at `path`, forwards to `backend`.

    Attributes:
        num_connections: connections that were taken.
        num_cuts: connections that were cut because a byte was reached.
    """

    def __init__(self, path, backend):
        self.path, self.backend = str(path), str(backend)
        self.num_connections = self.num_cuts = 0
        self.frames = Frames()
        self._lock = threading.Lock()
        self._left = {}  # direction -> bytes until the cut
        self._open = set()
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self.path)
        self._listener.listen()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut_after(self, direction, num_bytes):
        """Cuts every connection once so many more bytes have gone "up" (to the service) or "down"."""
        with self._lock:
            self._left = {direction: num_bytes}

    def cut_now(self):
        with self._lock:
            self._cut()

    def close(self):
        self._listener.close()
        with self._lock:
            self._cut()

    def _accept(self):
        while True:
            try:
                near, _ = self._listener.accept()
            except OSError:
                return
            far = socket.socket(socket.AF_UNIX)
            try:
                far.connect(self.backend)
            except OSError:
                near.close()
                far.close()
                continue
            with self._lock:
                self.num_connections += 1
                self._open.add((near, far))
            for one, other, direction in ((near, far, "up"), (far, near, "down")):
                threading.Thread(target=self._pump, args=(one, other, direction), daemon=True).start()

    def _pump(self, one, other, direction):
        with contextlib.suppress(OSError):
            while data := one.recv(CHUNK_BYTES):
                data, is_cut = self._allowed(direction, data)
                if direction == "down":
                    self.frames.feed(one, data)
                other.sendall(data)
                if is_cut:
                    with self._lock:
                        self.num_cuts += 1
                        self._cut()
                    return
        end(one, other)

    def _allowed(self, direction, data):
        with self._lock:
            left = self._left.get(direction)
            if left is None:
                return data, False
            if len(data) <= left:
                self._left[direction] = left - len(data)
                return data, False
            self._left = {}
            return data[:left], True

    def _cut(self):
        for pair in self._open:
            end(*pair)
        self._open.clear()


def end(*sockets):
    for one in sockets:
        with contextlib.suppress(OSError):
            one.shutdown(socket.SHUT_RDWR)
        one.close()


class Frames:
    """Counts the HTTP/2 frames that a service sends, by type."""

    def __init__(self):
        self.counts = {}
        self._pending = {}

    def feed(self, connection, data):
        pending = self._pending.get(connection, b"") + data
        while len(pending) >= FRAME_HEADER_BYTES:
            size = FRAME_HEADER_BYTES + int.from_bytes(pending[:3], "big")
            if len(pending) < size:
                break
            self.counts[pending[3]] = self.counts.get(pending[3], 0) + 1
            pending = pending[size:]
        self._pending[connection] = pending
