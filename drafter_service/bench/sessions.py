"""Many clients at once: proposals of several sessions that arrive together, beside one call for all of them."""

from __future__ import annotations

import secrets
import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import grpc

from drafter_service.bench.rpc import MODELS
from drafter_service.bench.wire import SERVICE, TOKEN_METADATA, open_request
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import drafter_pb2_grpc, session_pb2, tensor_pb2

TOGETHER_GOAL = 1.25
TIMEOUT_S = 60.0
NUM_DRAFTS = 3
CONTEXT_ROWS = 64


@dataclass(frozen=True, slots=True)
class SessionsPlan:
    """How much is measured.

    Attributes:
        num_sessions: sessions that call together.
        num_entries: sequences that each of them proposes for.
        num_sequences: open sequences in all.
        num_rounds: rounds; the two ways of asking take turns.
    """

    num_sessions: int = 8
    num_entries: int = 8
    num_sequences: int = 1000
    num_rounds: int = 15


class _Caller:
    """One session with open sequences, each holding some rows."""

    def __init__(self, target: str, num_sequences: int, width: int) -> None:
        self.channel = grpc.insecure_channel(target, [("grpc.use_local_subchannel_pool", 1)])
        self._stub = drafter_pb2_grpc.DrafterStub(self.channel)
        self._send: Any = self.channel.unary_unary(f"{SERVICE}/Propose")
        request = open_request(width, NUM_DRAFTS)
        token = self._stub.OpenSession(request, timeout=TIMEOUT_S).session_token
        self._metadata = ((TOKEN_METADATA, token),)
        self._width = width
        self._ops: dict[bytes, int] = {}
        self.fill(self.open(num_sequences), CONTEXT_ROWS)

    def open(self, count: int) -> list[bytes]:
        """Opens sequences."""
        opened = []
        for _ in range(count):
            request = pb.OpenSequenceRequest(open_id=secrets.token_bytes(16))
            answer = self._stub.OpenSequence(request, timeout=TIMEOUT_S, metadata=self._metadata)
            self._ops[answer.sequence_id] = 0
            opened.append(answer.sequence_id)
        return opened

    def fill(self, sequence_ids: Sequence[bytes], num_rows: int) -> None:
        """Gives sequences their rows."""
        for sequence_id in sequence_ids:
            entry = pb.CatchupEntry(sequence_id=sequence_id, op=self._next_op(sequence_id), pairs=self._pairs(num_rows))
            answer = self._stub.Catchup(pb.CatchupRequest(entries=[entry]), timeout=TIMEOUT_S, metadata=self._metadata)
            assert answer.results[0].status.code == 0, answer

    def proposal(self, count: int) -> pb.ProposeRequest:
        """A Propose for the first `count` sequences, from the pair behind their rows."""
        request = pb.ProposeRequest()
        for sequence_id in list(self._ops)[:count]:
            pairs = self._pairs(1, CONTEXT_ROWS)
            entry = pb.ProposeEntry(
                sequence_id=sequence_id, op=self._next_op(sequence_id), pairs=pairs, draft_count=NUM_DRAFTS
            )
            request.entries.append(entry)
        return request

    def begin(self, frame: bytes) -> Any:
        """Sends a serialised Propose; its `result()` is the serialised answer."""
        return self._send.future(frame, timeout=TIMEOUT_S, metadata=self._metadata)

    def _next_op(self, sequence_id: bytes) -> int:
        self._ops[sequence_id] += 1
        return self._ops[sequence_id]

    def _pairs(self, count: int, first_key: int = 0) -> pb.Pairs:
        rows = bytes(count * self._width * 4)
        ref = tensor_pb2.TensorRef(inline=rows, dtype=tensor_pb2.D_TYPE_FLOAT32, row_count=count)
        return pb.Pairs(first_key=first_key, tokens=range(1, count + 1), hiddens=ref)


def measure_sessions(
    plan: SessionsPlan, models: Path = MODELS, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, Any]:
    """Figures: both ways' medians, their ratio round by round, and whether the goal is met."""
    config = ServiceConfig(
        checkpoint=models / "head",
        target_checkpoint=models / "target",
        kv_bytes=64 * MIB,
        torch_threads=1,
        log_level="warning",
    )
    with ExitStack() as stack:
        reached = stack.enter_context(ServiceProcess(config))
        width = _width(reached.target)
        callers = [_Caller(reached.target, plan.num_entries, width) for _ in range(plan.num_sessions)]
        callers.append(_Caller(reached.target, plan.num_sessions * plan.num_entries, width))
        for caller in callers:
            stack.callback(caller.channel.close)
        callers[-1].open(plan.num_sequences)
        tell(f"{plan.num_rounds} rounds")
        rounds = [_round(callers, plan) for _ in range(plan.num_rounds + 2)][2:]
    ratio = statistics.median(apart / whole for apart, whole in rounds)
    return {
        "plan": asdict(plan),
        "together_us_p50": round(statistics.median(apart for apart, _ in rounds), 1),
        "one_call_us_p50": round(statistics.median(whole for _, whole in rounds), 1),
        "together_over_one_call": round(ratio, 3),
        "goals": {
            f"{plan.num_sessions} sessions together <= {TOGETHER_GOAL} x one call": ratio <= TOGETHER_GOAL,
        },
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    plan = figures["plan"]
    together = (
        f"{plan['num_sessions']} sessions x {plan['num_entries']} sequences at once: "
        f"{figures['together_over_one_call']:.2f} x one call for all of them"
    )
    lines = [together]
    lines += [f"goal {'met   ' if met else 'missed'} {goal}" for goal, met in figures["goals"].items()]
    return "\n".join(lines)


def _width(target: str) -> int:
    with grpc.insecure_channel(target) as channel:
        stub = drafter_pb2_grpc.DrafterStub(channel)
        return int(stub.GetServerInfo(session_pb2.GetServerInfoRequest(), timeout=TIMEOUT_S).head.hidden_width)


def _round(callers: Sequence[_Caller], plan: SessionsPlan) -> tuple[float, float]:
    """Microseconds until the last of all sessions has its drafts, and until one call for as many sequences has."""
    *apart, whole = callers
    whole_us = _time([whole], [whole.proposal(plan.num_sessions * plan.num_entries)])
    return _time(apart, [caller.proposal(plan.num_entries) for caller in apart]), whole_us


def _time(callers: Sequence[_Caller], requests: Sequence[pb.ProposeRequest]) -> float:
    """Microseconds from the first request sent to the last answer received. Messages are made and read outside."""
    frames = [request.SerializeToString() for request in requests]
    began = time.perf_counter_ns()
    calls = [caller.begin(frame) for caller, frame in zip(callers, frames, strict=True)]
    answers = [call.result() for call in calls]
    taken_us = (time.perf_counter_ns() - began) / 1000
    for answer in answers:
        assert all(result.status.code == 0 for result in pb.ProposeResponse.FromString(answer).results), answer
    return taken_us
