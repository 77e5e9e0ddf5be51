"""A session made of bare messages: what the service costs without the client library, as the echo is measured."""

from __future__ import annotations

import itertools
import os
import queue
from collections.abc import Callable, Iterator
from types import TracebackType
from typing import Any, Self

import grpc
from torch import Tensor

from drafter_service.bench.samples import Case
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import drafter_pb2_grpc, session_pb2, tensor_pb2

TOKEN_METADATA = "specdraft-token-bin"
TIMEOUT_S = 30.0
SERVICE = "/specdraft.v1.Drafter"


class WireSession:
    """One session with one sequence of n pairs, hidden rows inline. Use as a context manager.

    What is timed sends bytes and gets bytes; they are made before and read after.

    Args:
        target: gRPC address.
        tokens: t_1 .. t_n.
        hiddens: h_0 .. h_{n-1}, float32 [n, H].
        num_drafts: K.
    """

    def __init__(self, target: str, tokens: list[int], hiddens: Tensor, num_drafts: int) -> None:
        self._channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = drafter_pb2_grpc.DrafterStub(self._channel)
        self._tokens, self._num_drafts = tokens, num_drafts
        self._rows = [row.numpy().tobytes() for row in hiddens]
        opened = self._stub.OpenSession(open_request(hiddens.shape[1], num_drafts), timeout=TIMEOUT_S)
        self._metadata = ((TOKEN_METADATA, opened.session_token),)
        request = pb.OpenSequenceRequest(open_id=bytes(16))
        self._sequence_id: bytes = self._ask(self._stub.OpenSequence, request).sequence_id
        self._op = 0
        self._outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._incoming: Iterator[bytes] | None = None
        self._fill(hiddens)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._outgoing.put(None)
        self._ask(self._stub.CloseSession, session_pb2.CloseSessionRequest())
        self._channel.close()

    def sample(self) -> tuple[bytes, bytes]:
        """A Propose request and its answer."""
        request = self._propose(len(self._tokens))
        answer: pb.ProposeResponse = self._ask(self._stub.Propose, request)
        return request.SerializeToString(), answer.SerializeToString()

    def rehearsal(self, answer: bytes) -> Callable[[], object]:
        """What is done between two Proposes, given an answer: whoever is compared with them has to rest as long."""
        requests = (self._request(key, 1) for key in itertools.cycle(self._keys()))

        def prepare() -> None:
            _check_propose(answer)
            next(requests).SerializeToString()

        return prepare

    def propose_unary(self) -> Case:
        """Proposes by unary calls, at one key after the other, as a target does whose drafts are never accepted."""
        return self._case(self._unary("Propose"), self._propose_in_turn(), _check_propose)

    def propose_drive(self) -> Case:
        """The same over the stream."""
        frames = (pb.DriveRequest(correlation_id=1, timeout_ms=1000, propose=one) for one in self._propose_in_turn())
        return self._case(self._stream, frames, lambda data: _check_propose(_of_drive(data, "propose")))

    def look_unary(self) -> Case:
        """Asks where the sequence stands: through the engine and back, with nothing to compute."""
        requests = itertools.repeat(pb.GetSequenceRequest(sequence_id=self._sequence_id))
        return self._case(self._unary("GetSequence"), requests, pb.GetSequenceResponse.FromString)

    def look_drive(self) -> Case:
        """The same over the stream."""
        inner = pb.GetSequenceRequest(sequence_id=self._sequence_id)
        frames = itertools.repeat(pb.DriveRequest(correlation_id=1, timeout_ms=1000, get_sequence=inner))
        return self._case(self._stream, frames, lambda data: _of_drive(data, "get_sequence"))

    def _case(self, send: Callable[[bytes], bytes], requests: Iterator[Any], check: Callable[[bytes], object]) -> Case:
        frame, answer = b"", b""

        def prepare() -> None:
            nonlocal frame
            if answer:
                check(answer)
            frame = next(requests).SerializeToString()

        def call() -> None:
            nonlocal answer
            answer = send(frame)

        return Case(call, prepare)

    def _unary(self, rpc: str) -> Callable[[bytes], bytes]:
        method: Any = self._channel.unary_unary(f"{SERVICE}/{rpc}")
        return lambda frame: method(frame, timeout=TIMEOUT_S, metadata=self._metadata)

    def _stream(self, frame: bytes) -> bytes:
        if self._incoming is None:
            open_stream: Any = self._channel.stream_stream(f"{SERVICE}/Drive")
            self._incoming = open_stream(iter(self._outgoing.get, None), metadata=self._metadata)
        self._outgoing.put(frame)
        return next(self._incoming)

    def _propose_in_turn(self) -> Iterator[pb.ProposeRequest]:
        return (self._propose(key) for key in itertools.cycle(self._keys()))

    def _keys(self) -> range:
        return range(len(self._tokens), 2 * len(self._tokens))

    def _propose(self, key: int) -> pb.ProposeRequest:
        self._op += 1
        return self._request(key, self._op)

    def _request(self, key: int, op: int) -> pb.ProposeRequest:
        row = key % len(self._tokens)
        ref = tensor_pb2.TensorRef(inline=self._rows[row], dtype=tensor_pb2.D_TYPE_FLOAT32, row_count=1)
        pairs = pb.Pairs(first_key=key, tokens=[self._tokens[row]], hiddens=ref)
        entry = pb.ProposeEntry(sequence_id=self._sequence_id, op=op, pairs=pairs, draft_count=self._num_drafts)
        return pb.ProposeRequest(entries=[entry])

    def _fill(self, hiddens: Tensor) -> None:
        self._op += 1
        ref = tensor_pb2.TensorRef(
            inline=hiddens.numpy().tobytes(), dtype=tensor_pb2.D_TYPE_FLOAT32, row_count=len(self._tokens)
        )
        pairs = pb.Pairs(first_key=0, tokens=self._tokens, hiddens=ref)
        entry = pb.CatchupEntry(sequence_id=self._sequence_id, op=self._op, pairs=pairs)
        answer = self._ask(self._stub.Catchup, pb.CatchupRequest(entries=[entry]))
        assert answer.results[0].status.code == 0, answer

    def _ask(self, method: Callable[..., Any], request: Any) -> Any:
        return method(request, timeout=TIMEOUT_S, metadata=self._metadata)


def _of_drive(data: bytes, field: str) -> bytes:
    answer = pb.DriveResponse.FromString(data)
    assert answer.HasField("status") is False or answer.status.code == 0, answer
    inner: bytes = getattr(answer, field).SerializeToString()
    return inner


def _check_propose(data: bytes) -> None:
    (result,) = pb.ProposeResponse.FromString(data).results
    assert result.status.code == 0, result


def open_request(width: int, num_drafts: int) -> session_pb2.OpenSessionRequest:
    """Opens a session that sends float32 rows of `width` elements inline and asks for up to `num_drafts` drafts."""
    return session_pb2.OpenSessionRequest(
        protocol_version=1,
        hidden_source=session_pb2.HIDDEN_SOURCE_POST_NORM,
        hidden_dtype=tensor_pb2.D_TYPE_FLOAT32,
        hidden_width=width,
        memory_kind=tensor_pb2.MEMORY_KIND_INLINE,
        max_drafts=num_drafts,
        pid=os.getpid(),
    )
