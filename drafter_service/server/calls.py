"""What each request of a session means: decode, ask the engine, encode. The same for unary calls and for `Drive`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

from google.protobuf.message import Message

from drafter_service.engine import Engine
from drafter_service.engine import operations as ops
from drafter_service.memory import SharedArena
from drafter_service.server import encoding
from drafter_service.server.decoding import Decoded, Decoder
from drafter_service.server.facts import ServiceFacts
from drafter_service.server.lanes import LaneCalls, no_lanes
from drafter_service.server.outputs import Embed, slot_outputs
from drafter_service.server.refusals import not_implemented
from drafter_service.state import Session
from drafter_service.state.values import value
from drafter_service.telemetry import Metrics, Tracing
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2

Encode = Callable[[Session, Message, Sequence[ops.Outcome], Any], None]
"""Fills the answer (the last argument) to a request, or raises what refuses it."""

Decode = Callable[..., Decoded]


@value
class Answerable:
    """A call whose outcomes are there.

    Attributes:
        fill: fills the answer, an empty message, or raises SpecdraftError. To be called once, outside the engine's
            thread.
        finished_at: monotonic seconds.
    """

    fill: Callable[[Message], None]
    finished_at: float


class Calls:
    """Begins calls of sessions.

    Args:
        engine: does them.
        facts: limits and head.
        metrics: counts refusals and stages.
        embed: embedding of a token, as little-endian elements of a hidden dtype.
        clock: monotonic seconds.
        tracing: makes spans; None = nobody wants them.
    """

    def __init__(
        self,
        engine: Engine,
        facts: ServiceFacts,
        metrics: Metrics,
        embed: Embed,
        clock: Callable[[], float],
        *,
        tracing: Tracing | None = None,
    ) -> None:
        self._tracing = tracing
        self._engine = engine
        self._facts = facts
        self._metrics = metrics
        self._embed = embed
        self._clock = clock
        self._kinds = self._make_kinds(Decoder(facts))
        self.lanes: LaneCalls | None = None

    def _make_kinds(self, decoder: Decoder) -> Mapping[type[Message], tuple[Decode, Encode]]:
        head, page_rows = self._facts.head, self._facts.config.page_rows
        take_kv = partial(encoding.take_kv_response, head=head, page_rows=page_rows)
        return {
            pb.ProposeRequest: (decoder.propose, self._propose_response),
            pb.CatchupRequest: (decoder.catchup, self._catchup_response),
            pb.OpenSequenceRequest: (decoder.open_sequence, _plain(encoding.open_sequence_response)),
            pb.GetSequenceRequest: (decoder.get_sequence, _plain(encoding.get_sequence_response)),
            pb.TruncateRequest: (decoder.truncate, _plain(encoding.truncate_response)),
            pb.CloseSequenceRequest: (decoder.close_sequence, _plain(encoding.close_sequence_response)),
            pb.TakeKVRequest: (decoder.take_kv, _plain(take_kv)),
            pb.InstallKVRequest: (decoder.install_kv, _plain(encoding.install_kv_response)),
            pb.FreeKVRequest: (decoder.free_kv, _plain(encoding.free_kv_response)),
            pb.ForkSequenceRequest: (decoder.fork_sequence, _plain(encoding.fork_sequence_response)),
            pb.ReadDraftsRequest: (decoder.read_drafts, self._read_drafts_response),
        }

    @property
    def is_committing(self) -> bool:
        """Whether a step of the engine is at its end: nothing is left to be computed in it."""
        return self._engine.is_committing

    def begin(
        self,
        session: Session,
        request: Message,
        deadline: float,
        on_done: Callable[[Answerable], None],
        parent: object = None,
    ) -> None:
        """Begins a call; `on_done` is called once, from any thread, and must be quick. `work` has to follow.

        Args:
            session: the caller's.
            request: any request that a `DriveRequest` can hold.
            deadline: monotonic seconds.
            on_done: gets the answer.
            parent: the caller's span, as `Tracing.parent_in` found it.

        Raises:
            SpecdraftError: the request is wrong as a whole; `on_done` is not called then.
        """
        kind = self._kinds.get(type(request))
        if kind is None or (isinstance(request, pb.ProposeRequest) and request.HasField("lane_ticket")):
            self._begin_aside(session, request, on_done)
            return
        decode, encode = kind
        trace = None
        if self._tracing is not None and isinstance(request, pb.ProposeRequest):
            trace = self._tracing.begin(parent, len(request.entries))
        arrivals = self._engine.arrivals
        arrivals.append(None)
        try:
            decoded = decode(session, request)
        finally:
            arrivals.pop()  # before it is submitted: the engine must not wait for its own call

        def finish(outcomes: Sequence[ops.Outcome]) -> None:
            fill = partial(encode, session, request, outcomes)
            on_done(Answerable(trace.around(fill) if trace else fill, self._clock()))

        if trace:
            trace.decoded()
        call = ops.Call(decoded.operations, self._clock(), deadline, finish)
        for index, error in decoded.refused.items():
            call.finish(index, ops.Refusal(error, None))
        if call.num_open:
            if self.lanes is None:
                self._engine.accept(call)
            else:
                self.lanes.desk.accept(call)

    def _begin_aside(self, session: Session, request: Message, on_done: Callable[[Answerable], None]) -> None:
        """Begins what is no operation of the engine's."""
        if isinstance(request, session_pb2.KeepAliveRequest):
            answer = self.keep_alive(session, request)
            on_done(Answerable(lambda response: response.CopyFrom(answer), self._clock()))
        elif not isinstance(request, pb.ProposeRequest):
            raise not_implemented(type(request).__name__.removesuffix("Request"))
        elif self.lanes is None:
            raise no_lanes()
        else:
            self.lanes.begin(session, request, lambda fill: on_done(Answerable(fill, self._clock())))

    def submit(self, call: ops.Call) -> None:
        """Asks for a call that no request stands for, behind the rounds that only the device knows yet."""
        if self.lanes is None:
            self._engine.submit(call)
        else:
            self.lanes.desk.submit(call)

    def work(self) -> None:
        """Does what has been begun, in this thread where that is quickest."""
        self._engine.work()

    def keep_alive(self, session: Session, request: session_pb2.KeepAliveRequest) -> session_pb2.KeepAliveResponse:
        """`KeepAlive`: finding the session has renewed its lease already."""
        if isinstance(session.arena, SharedArena) and request.arena_nonce:
            if request.arena_nonce != session.arena.nonce:
                raise make_error(Reason.MAPPING_NOT_PROVEN, "the nonce is not the one in the arena")
            session.mapping_proven = True
        return session_pb2.KeepAliveResponse(
            lease_ms=int(self._facts.config.lease_s * 1000),
            mapping_proven=session.mapping_proven or session.arena is None,
        )

    def _read_drafts_response(
        self, session: Session, request: Message, outcomes: Sequence[ops.Outcome], response: pb.ReadDraftsResponse
    ) -> None:
        assert isinstance(request, pb.ReadDraftsRequest), "kinds say so"
        drafts = encoding.read_drafts(outcomes).drafts
        wanted = request.with_last_embedding and drafts
        embedding = self._embed(drafts[-1], session.agreement.hidden_dtype) if wanted else b""
        response.CopyFrom(encoding.read_drafts_response(outcomes, embedding))

    def _propose_response(
        self, session: Session, request: Message, outcomes: Sequence[ops.Outcome], response: pb.ProposeResponse
    ) -> None:
        arena = session.arena
        if isinstance(arena, SharedArena):
            assert isinstance(request, pb.ProposeRequest), "kinds say so"
            for entry, outcome in zip(request.entries, outcomes, strict=True):
                if entry.HasField("output_slot"):
                    self._write_outputs(session, arena, entry, outcome)
        for outcome in outcomes:
            if isinstance(outcome, ops.Refusal):
                self._count(outcome)
            encoding.fill_propose_result(response.results.add(), outcome)

    def _catchup_response(
        self, session: Session, request: Message, outcomes: Sequence[ops.Outcome], response: pb.CatchupResponse
    ) -> None:
        del session, request
        for outcome in outcomes:
            if isinstance(outcome, ops.Refusal):
                self._count(outcome)
        response.CopyFrom(encoding.catchup_response(outcomes))

    def _count(self, refusal: ops.Refusal) -> None:
        """Entries are refused one by one, in an answer that is no refusal."""
        if refusal.error.reason:
            self._metrics.error(refusal.error.reason)

    def _write_outputs(
        self, session: Session, arena: SharedArena, entry: pb.ProposeEntry, outcome: ops.Outcome
    ) -> None:
        if entry.output_slot >= arena.layout.wish.num_slots:
            return  # refused for it
        outputs = slot_outputs(entry.op, outcome, self._embed, session.agreement.hidden_dtype)
        # Where the session has ended meanwhile nobody looks any more.
        with suppress(SpecdraftError):
            arena.write_outputs(entry.output_slot, outputs)


def _plain(encode: Callable[[Sequence[ops.Outcome]], Message]) -> Encode:
    return lambda _session, _request, outcomes, response: response.CopyFrom(encode(outcomes))
