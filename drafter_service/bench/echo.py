"""A bare gRPC echo: what any Python service over a Unix socket costs, however little it does.

`python -m drafter_service.bench.echo SOCKET` serves; the answer to a request has as many bytes as its first four say.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
from collections.abc import Callable, Iterator
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

UNARY = "/specdraft.bench.Echo/Unary"
STREAM = "/specdraft.bench.Echo/Stream"
NUM_WORKERS = 16
START_TIMEOUT_S = 30.0
_SIZE_BYTES = 4


def request_of(size: int, answer_size: int) -> bytes:
    """A request of `size` bytes (at least four) that asks for `answer_size` bytes."""
    return answer_size.to_bytes(_SIZE_BYTES, "little").ljust(size, b"\x5a")


def answer(request: bytes) -> bytes:
    """What the echo says."""
    return bytes(int.from_bytes(request[:_SIZE_BYTES], "little"))


class Echo:
    """An echo in a process of its own, and connections to it. Use as a context manager.

    Args:
        socket: path of the Unix socket that it makes.
    """

    def __init__(self, socket: Path) -> None:
        command = [sys.executable, "-m", "drafter_service.bench.echo", str(socket)]
        self._process = subprocess.Popen(
            command, stdout=subprocess.PIPE, env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
        )
        assert self._process.stdout is not None, "it was asked for"
        self._process.stdout.readline()
        self._channel = grpc.insecure_channel(f"unix://{socket}", [("grpc.use_local_subchannel_pool", 1)])
        grpc.channel_ready_future(self._channel).result(START_TIMEOUT_S)
        self._unary: Any = self._channel.unary_unary(UNARY)
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        open_stream: Any = self._channel.stream_stream(STREAM)
        self._incoming: Iterator[bytes] = open_stream(iter(self._outgoing.get, None))

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def unary(self, request: bytes) -> Callable[[], object]:
        """A call that sends the request and waits for its answer."""
        return lambda: self._unary(request, timeout=START_TIMEOUT_S)

    def stream(self, request: bytes) -> Callable[[], object]:
        """The same over the open stream."""

        def call() -> object:
            self._outgoing.put(request)
            return next(self._incoming)

        return call

    def close(self) -> None:
        """Ends the stream, the connection and the process."""
        self._outgoing.put(None)
        self._channel.close()
        self._process.terminate()
        self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()


def serve(socket: str) -> None:
    """Serves until the process is ended."""
    handlers: dict[str, Any] = {
        "Unary": grpc.unary_unary_rpc_method_handler(lambda request, _context: answer(request)),
        "Stream": grpc.stream_stream_rpc_method_handler(lambda requests, _context: map(answer, requests)),
    }
    server = grpc.server(futures.ThreadPoolExecutor(NUM_WORKERS), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler("specdraft.bench.Echo", handlers),))
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    print("echoing", flush=True)
    server.wait_for_termination()


if __name__ == "__main__":
    serve(sys.argv[1])
