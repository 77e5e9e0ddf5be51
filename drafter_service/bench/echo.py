"""A bare gRPC echo: what any Python service over a Unix socket costs, however little it does.

`python -m drafter_service.bench.echo SOCKET` serves; the answer to a request has as many bytes as its first four say.
With a head and its target's checkpoint behind it, other methods run the head's forward before they answer: what any
Python service that drafts costs, however little else it does.
"""

from __future__ import annotations

import os
import queue
import select
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from drafter_service.bench.child import Child, end_with_parent
from drafter_service.server.process import ProcessError

SERVICE = "specdraft.bench.Echo"
NUM_WORKERS = 16
START_TIMEOUT_S = 120.0
CALL_TIMEOUT_S = 30.0
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
        models: a head's checkpoint and its target's, to run its forward too; None = it echoes alone.

    Raises ProcessError if it does not come up; its own lines about why stand on standard error.
    """

    def __init__(self, socket: Path, models: tuple[Path, Path] | None = None) -> None:
        # It imports what we import, wherever that was found.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._child = Child("drafter_service.bench.echo", (str(socket), *map(str, models or ())), environment)
        self._channel = grpc.insecure_channel(f"unix://{socket}", [("grpc.use_local_subchannel_pool", 1)])
        self._streams: list[queue.SimpleQueue[bytes | None]] = []
        try:
            self._wait_until_ready()
        except BaseException:
            self.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def unary(self, request: bytes, *, with_forward: bool = False) -> Callable[[], object]:
        """A call that sends the request and waits for its answer."""
        call: Any = self._channel.unary_unary(f"/{SERVICE}/{'UnaryForward' if with_forward else 'Unary'}")
        return lambda: call(request, timeout=CALL_TIMEOUT_S)

    def stream(self, request: bytes, *, with_forward: bool = False) -> Callable[[], object]:
        """The same over a stream that stays open."""
        outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._streams.append(outgoing)
        open_stream: Any = self._channel.stream_stream(f"/{SERVICE}/{'StreamForward' if with_forward else 'Stream'}")
        incoming: Iterator[bytes] = open_stream(iter(outgoing.get, None))

        def call() -> object:
            outgoing.put(request)
            return next(incoming)

        return call

    def close(self) -> None:
        """Ends the streams, the connection and the process."""
        for outgoing in self._streams:
            outgoing.put(None)
        self._channel.close()
        self._child.close()

    def _wait_until_ready(self) -> None:
        stdout = self._child.process.stdout
        assert stdout is not None, "it was asked for"
        readable, _, _ = select.select([stdout], [], [], START_TIMEOUT_S)
        if not readable:
            raise ProcessError(f"the echo did not come up within {START_TIMEOUT_S:.0f} s")
        if not stdout.readline():
            raise ProcessError("the echo did not come up")
        grpc.channel_ready_future(self._channel).result(CALL_TIMEOUT_S)


def serve(socket: str, models: Sequence[str] = ()) -> None:
    """Serves until the process is ended.

    Args:
        socket: path of the Unix socket.
        models: a head's checkpoint and its target's, or nothing.
    """
    handlers = _handlers(answer, "")
    if models:
        from drafter_service.bench.forward import make_forward

        forward = make_forward(*map(Path, models))

        def draft_and_answer(request: bytes) -> bytes:
            forward()
            return answer(request)

        handlers |= _handlers(draft_and_answer, "Forward")
    server = grpc.server(futures.ThreadPoolExecutor(NUM_WORKERS), options=[("grpc.so_reuseport", 0)])
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
    server.add_insecure_port(f"unix://{socket}")
    server.start()
    print("echoing", flush=True)
    server.wait_for_termination()


def _handlers(behave: Callable[[bytes], bytes], suffix: str) -> dict[str, Any]:
    return {
        f"Unary{suffix}": grpc.unary_unary_rpc_method_handler(lambda request, _context: behave(request)),
        f"Stream{suffix}": grpc.stream_stream_rpc_method_handler(lambda requests, _context: map(behave, requests)),
    }


if __name__ == "__main__":
    end_with_parent()
    serve(sys.argv[1], sys.argv[2:])
