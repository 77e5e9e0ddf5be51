"""A bare gRPC echo: what any Python service over a Unix socket costs, however little it does.

`python -m drafter_service.bench.echo SOCKET` serves; the answer to a request has as many bytes as its first four say.

With the flags of `drafter-service serve` behind it, the drafting service is served too, in the same process, and other
methods run its head's forward before they answer: what any Python service that drafts costs, however little else it
does. In the same process, since the same forward over the same weights differs from one process to the next by more
than a call costs.
"""

from __future__ import annotations

import argparse
import queue
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent import futures
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import grpc

from drafter_service.config import ConfigError, ServiceConfig, add_flags, flags_for, read_config
from drafter_service.server.child import Child, end_with_parent, unwind_at_sigterm

SERVICE = "specdraft.bench.Echo"
NUM_WORKERS = 16
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
        beside: settings of a service to be served in the same process; None = it echoes alone.

    Raises ProcessError if it does not come up; its own lines about why stand on standard error.
    """

    def __init__(self, socket: Path, beside: ServiceConfig | None = None) -> None:
        flags = () if beside is None else tuple(flags_for(beside))
        self._streams: list[queue.SimpleQueue[bytes | None]] = []
        with ExitStack() as stack:
            stack.enter_context(Child("drafter_service.bench.echo", (str(socket), *flags))).first_line("the echo")
            self._channel = grpc.insecure_channel(f"unix://{socket}", [("grpc.use_local_subchannel_pool", 1)])
            stack.callback(self._channel.close)
            grpc.channel_ready_future(self._channel).result(CALL_TIMEOUT_S)
            self._stack = stack.pop_all()

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
        self._stack.close()


def serve(socket: str, flags: Sequence[str] = ()) -> None:
    """Serves until the process is ended.

    Args:
        socket: path of the Unix socket.
        flags: of the service beside it, as `drafter-service serve` takes them, or nothing.
    """
    with ExitStack() as stack:
        handlers = _handlers(answer, "")
        if flags:
            handlers |= _handlers(_drafts_and_answers(flags, stack), "Forward")
        server = grpc.server(futures.ThreadPoolExecutor(NUM_WORKERS), options=[("grpc.so_reuseport", 0)])
        server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(SERVICE, handlers),))
        server.add_insecure_port(f"unix://{socket}")
        server.start()
        print("echoing", flush=True)
        server.wait_for_termination()


def _drafts_and_answers(flags: Sequence[str], stack: ExitStack) -> Callable[[bytes], bytes]:
    """Starts the service; what runs its head's forward, on pages of its own, and then answers as the echo does."""
    # Here, so that an echo alone loads no torch.
    from drafter_service.bench.forward import make_forward
    from drafter_service.server import Service
    from drafter_service.server.process import keep_what_was_loaded

    parser = argparse.ArgumentParser()
    add_flags(parser)
    service = Service(read_config(parser.parse_args(flags), {}))
    stack.callback(service.close)
    service.start()
    assert service.assembly is not None, "it has started"
    forward = make_forward(service.assembly.head)
    keep_what_was_loaded()

    def behave(request: bytes) -> bytes:
        forward()
        return answer(request)

    return behave


def _handlers(behave: Callable[[bytes], bytes], suffix: str) -> dict[str, Any]:
    return {
        f"Unary{suffix}": grpc.unary_unary_rpc_method_handler(lambda request, _context: behave(request)),
        f"Stream{suffix}": grpc.stream_stream_rpc_method_handler(lambda requests, _context: map(behave, requests)),
    }


if __name__ == "__main__":
    unwind_at_sigterm()
    end_with_parent()
    try:
        serve(sys.argv[1], sys.argv[2:])
    except ConfigError as error:
        sys.exit(str(error))
