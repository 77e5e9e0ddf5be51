"""Lanes at the border: `OpenLane`, and `Propose` with a ticket."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from types import MappingProxyType

import torch
from google.protobuf.message import Message

from drafter_service.engine.captures import capture_stream
from drafter_service.engine.lane_context import LaneContext
from drafter_service.engine.lane_rounds import LaneDesk, Results
from drafter_service.engine.operations import LaneWrite
from drafter_service.engine.slot_round import NUM_STATE_WORDS, SlotPlace, StatusNumbers
from drafter_service.memory import CudaArena, DescriptorServer
from drafter_service.memory.device_view import bytes_at
from drafter_service.memory.gpu import GpuMemory
from drafter_service.memory.hiddens import DTYPES
from drafter_service.memory.lanes import DONE_OFFSET, READY_OFFSET, Lane, LaneTools, StreamPool, released
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.memory.streams import stream_work
from drafter_service.server.decoding import digest_of
from drafter_service.server.encoding import entry_status, reason_number
from drafter_service.server.facts import ServiceFacts
from drafter_service.server.hiddens import arena_of, check_slot
from drafter_service.server.refusals import invalid_field, not_implemented
from drafter_service.state import Session
from drafter_service.state.sessions import DriveStream
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.counters import COUNTER_PAGE_SIZE_BYTES
from specdraft.memory.cuda import DEFAULT_STREAM
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2

REASONS: Mapping[int, Reason] = MappingProxyType({int(reason_number(reason)): reason for reason in Reason})

STATES_MAX = 256
"""Sequences that may have rounds under way in one lane."""

NUMBERS = StatusNumbers(
    fenced=int(reason_number(Reason.LANE_RELEASED)),
    pair_count=int(reason_number(Reason.PAIR_COUNT_MISMATCH)),
    token=int(reason_number(Reason.TOKEN_OUT_OF_RANGE)),
    not_finite=int(reason_number(Reason.HIDDEN_NOT_FINITE)),
    missing_rows=int(reason_number(Reason.MISSING_ROWS)),
    position=int(reason_number(Reason.POSITION_LIMIT)),
    pages=int(reason_number(Reason.PAGES_EXHAUSTED)),
    internal=int(reason_number(Reason.INTERNAL)),
)


class SessionLanes:
    """The lanes of one session. Each belongs to a stream, on which its tickets come, and is over with it.

    Args:
        desk: runs their rounds.
        gpu: takes them down.
        arena: the session's; closed once no lane can touch it any more.
        attached: the session's stream at this moment; None = none is attached.
    """

    def __init__(
        self, desk: LaneDesk, gpu: GpuMemory, arena: CudaArena, attached: Callable[[], DriveStream | None]
    ) -> None:
        self._desk = desk
        self._gpu = gpu
        self._arena = arena
        self._attached = attached
        self.lock = threading.Lock()
        self._contexts: dict[int, LaneContext] = {}
        self._streams: dict[int, DriveStream | None] = {}  # None: the next one's
        self._ending: set[Lane] = set()
        self._next_number = 1
        self._is_closed = False

    def add(self, make: Callable[[int], LaneContext], limit: int) -> LaneContext:
        """Makes one more lane. Raises IN_FLIGHT_EXHAUSTED."""
        with self.lock:
            if self._is_closed:
                raise make_error(Reason.SESSION_UNKNOWN, "the session has ended")
            for number, context in list(self._contexts.items()):
                if context.lane.is_given_up or context.lane.state.is_released:
                    self._end(self._taken_out(number))
            if sum(not context.lane.state.is_released for context in self._contexts.values()) >= limit:
                raise make_error(
                    Reason.IN_FLIGHT_EXHAUSTED,
                    f"the session has {limit} lanes, which is the limit",
                    retry_delay_ms=100,
                    limit=limit,
                )
            context = self._contexts[self._next_number] = make(self._next_number)
            self._streams[self._next_number] = self._attached()
            self._next_number += 1
            return context

    def find(self, number: int) -> LaneContext:
        """A lane. Raises LANE_RELEASED, INVALID_FIELD."""
        context = self._contexts.get(number)
        if context is not None:
            return context
        if 0 < number < self._next_number:
            raise released()
        raise invalid_field("lane_ticket.lane", number, "a lane of this session")

    def follow(self) -> None:
        """Gives up the lanes of streams that the session has no more. To be called when its stream is another, or none.

        What was sent on such a stream and not answered is nobody's. Lanes that were opened while there was no stream
        are those of the next one.
        """
        with self.lock:
            attached, lanes = self._attached(), []
            for number, stream in list(self._streams.items()):
                if stream is None:
                    self._streams[number] = attached
                elif stream is not attached:
                    lanes.append(self._taken_out(number))
        for lane in lanes:
            self._end(lane)

    def release(self) -> None:
        """Gives all lanes up; the session may open others."""
        with self.lock:
            lanes = [self._taken_out(number) for number in list(self._contexts)]
        for lane in lanes:
            self._end(lane)

    def _taken_out(self, number: int) -> Lane:
        """Has a lane found no more, and among `_ending` before anybody can see that it is gone. Under the lock."""
        lane = self._contexts.pop(number).lane
        del self._streams[number]
        self._ending.add(lane)
        return lane

    def close(self) -> None:
        """Gives all lanes up, and the arena once the device is done with them. Safe to call twice."""
        with self.lock:
            was_closed, self._is_closed = self._is_closed, True
        self.release()
        if not was_closed:
            self._gpu.reaper.once(self._closed)

    def _end(self, lane: Lane) -> None:
        """Gives a lane up that is among `_ending` already: the arena waits for it."""
        self._desk.watchdog.release(lane)

        def take_down() -> bool:
            if not lane.is_over:
                return False
            with self.lock:
                self._ending.discard(lane)
            lane.take_down()
            return True

        self._gpu.reaper.once(take_down)

    def _closed(self) -> bool:
        with self.lock:
            if not all(lane.is_over for lane in self._ending):
                return False
        self._arena.close()
        return True


class LaneCalls:
    """Opens lanes and begins their rounds.

    Args:
        desk: runs them.
        facts: limits and head.
        gpu: where they run.
        descriptors: hands the counters' pages over.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        desk: LaneDesk,
        facts: ServiceFacts,
        gpu: GpuMemory,
        descriptors: DescriptorServer,
        clock: Callable[[], float],
    ) -> None:
        self.desk = desk
        self._facts = facts
        self._gpu = gpu
        self._descriptors = descriptors
        work = stream_work(gpu.driver, gpu.torch_device)
        self._streams = StreamPool.made(gpu.driver, gpu.device, _must_go(gpu.torch_device))
        self._tools = LaneTools(gpu.driver, gpu.device, self._streams, work, clock)
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """Makes rounds of nobody's: while a lane waits, loading a kernel that was never used before would block."""
        facts, device = self._facts, self._gpu.torch_device
        head, num_drafts = facts.head, facts.config.max_drafts
        for dtype in sorted({"float32", head.dtype}):
            item_bytes = DTYPES[dtype].itemsize
            wish = ArenaWish(
                num_slots=facts.config.max_batch,
                max_drafts=num_drafts,
                hidden_row_bytes=head.hidden_width * item_bytes,
                embedding_bytes=head.head_width * item_bytes,
                vocab_size=head.vocab_size,
                num_prefill_rows=1,
                with_masks=False,
            )
            layout = lay_out(wish)
            counter = torch.zeros(1, dtype=torch.int64, device=device)
            place = SlotPlace(
                arena=torch.zeros(layout.size, dtype=torch.uint8, device=device),
                layout=layout,
                dtype=dtype,
                width=head.hidden_width,
                fence=counter,
                ready=counter,
                states=torch.zeros(2, NUM_STATE_WORDS, dtype=torch.int64, device=device),
                numbers=NUMBERS,
            )
            self.desk.warm_up(place, wish.num_slots, num_drafts + 1)

    def close(self) -> None:
        """Releases what is left, and gives the streams back."""
        self.desk.close()
        self._gpu.reaper.later(self._streams.close)

    def open(self, session: Session, timeout_s: float) -> session_pb2.OpenLaneResponse:
        """`OpenLane`. Raises SpecdraftError."""
        arena = arena_of(session)
        if not isinstance(arena, CudaArena):
            raise no_lanes()
        lanes = self._lanes_of(session, arena)
        context = lanes.add(lambda number: self._context(session, arena, number), self._facts.config.max_lanes)
        try:
            self.desk.prepare(context, arena.layout.wish.num_slots).result(timeout_s)
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told
            self.desk.watchdog.release(context.lane)  # nobody will hear of it
            if isinstance(error, TimeoutError):
                raise make_error(Reason.TIMEOUT, "the lane's rounds were not ready in time") from None
            raise make_error(Reason.INTERNAL, "the lane's rounds could not be made inside the service") from None
        if context.lane.state.is_released:
            raise released()
        return session_pb2.OpenLaneResponse(
            lane=context.lane.number,
            descriptor_token=context.lane.token,
            descriptor_socket=str(self._facts.descriptor_socket),
            size_bytes=COUNTER_PAGE_SIZE_BYTES,
            ready_offset_bytes=READY_OFFSET,
            done_offset_bytes=DONE_OFFSET,
            ready_timeout_ms=int(self._facts.config.ready_timeout_s * 1000),
        )

    def _lanes_of(self, session: Session, arena: CudaArena) -> SessionLanes:
        with self._lock:
            if not isinstance(session.lanes, SessionLanes):
                session.lanes = SessionLanes(self.desk, self._gpu, arena, lambda: session.drive)
            lanes = session.lanes
        if session.has_ended:
            lanes.close()  # whoever ended the session may not have seen them
        return lanes

    def begin(
        self, session: Session, request: pb.ProposeRequest, on_done: Callable[[Callable[[Message], None]], None]
    ) -> None:
        """`Propose` with a ticket. Raises what is wrong with it as a whole; the lane is over then."""
        if not isinstance(session.lanes, SessionLanes):
            raise invalid_field("lane_ticket.lane", request.lane_ticket.lane, "a lane of this session")
        ticket = request.lane_ticket
        context = session.lanes.find(ticket.lane)
        limit_s = self._facts.config.ready_timeout_s
        timeout_s = min(ticket.ready_timeout_ms / 1000 or limit_s, limit_s)
        if not request.entries:
            self.desk.begin_proof(context, ticket.ticket, timeout_s)
            on_done(lambda _: None)
            return
        try:
            writes = self._decoded(session, request)
        except SpecdraftError as error:
            # The ticket is used all the same, and gets its `done`.
            self.desk.begin(context, ticket.ticket, limit_s, [], lambda _: None)
            raise error from None

        def finish(results: Results) -> None:
            on_done(lambda response: response.CopyFrom(_response(results)))

        self.desk.begin(context, ticket.ticket, timeout_s, writes, finish)

    def _context(self, session: Session, arena: CudaArena, number: int) -> LaneContext:
        memory = arena.memory  # where the session has ended, before there is a lane
        lane = Lane(number, self._tools, self._descriptors)
        device, agreement = self._gpu.torch_device, session.agreement
        states = torch.zeros(STATES_MAX + 1, NUM_STATE_WORDS, dtype=torch.int64, device=device)
        place = SlotPlace(
            arena=memory,
            layout=arena.layout,
            dtype=agreement.hidden_dtype,
            width=agreement.hidden_width,
            fence=bytes_at(lane.fence_pointer, 8, device).view(torch.int64),
            ready=bytes_at(lane.ready_pointer, 8, device).view(torch.int64),
            states=states,
            numbers=NUMBERS,
        )
        return LaneContext(session.session_id, lane, place, agreement.max_drafts + 1)

    def _decoded(self, session: Session, request: pb.ProposeRequest) -> list[LaneWrite]:
        arena, limit = arena_of(session), self._facts.config.max_batch
        if len(request.entries) > limit:
            raise invalid_field("entries", len(request.entries), f"at most {limit} entries")
        for name in ("sequence_id", "slot"):
            values = [e.pairs.hiddens.arena_slot.slot if name == "slot" else e.sequence_id for e in request.entries]
            if len(set(values)) < len(values):
                raise make_error(Reason.DUPLICATE_SEQUENCE, f"a {name} stands more than once in this call")
        return [_lane_write(session, arena, entry) for entry in request.entries]


def _response(results: Results) -> pb.ProposeResponse:
    return pb.ProposeResponse(results=[pb.ProposeResult(status=entry_status(one)) for one in results])


def _must_go(device: torch.device) -> list[int]:
    """The streams that carry calls without tickets, and what is captured."""
    return [DEFAULT_STREAM, *([int(capture_stream(device).cuda_stream)] if device.type == "cuda" else [])]


def _lane_write(session: Session, arena: CudaArena | object, entry: pb.ProposeEntry) -> LaneWrite:
    assert isinstance(arena, CudaArena), "sessions with lanes have one"
    pairs, limit = entry.pairs, session.agreement.max_drafts
    if not pairs.hiddens.HasField("arena_slot") or pairs.tokens or pairs.hiddens.row_count:
        raise invalid_field("pairs", "given", "an arena slot, no tokens and row_count 0: the device reads the slot")
    slot = pairs.hiddens.arena_slot.slot
    check_slot(arena, slot)
    if entry.HasField("output_slot") and entry.output_slot != slot:
        raise invalid_field("output_slot", entry.output_slot, "the slot of the pairs, or not set")
    if entry.HasField("mask"):
        raise not_implemented("LaneTicket with ProposeEntry.mask")
    if entry.draft_count > limit:
        text = f"{entry.draft_count} drafts; at most {limit}"
        raise make_error(Reason.TOO_MANY_DRAFTS, text, drafts=entry.draft_count, limit=limit)
    if entry.op == 0:
        raise invalid_field("op", 0, "1 or more")
    return LaneWrite(
        session.session_id,
        entry.sequence_id,
        entry.op,
        digest_of(entry),
        slot,
        entry.draft_count,
        entry.min_logprob if entry.HasField("min_logprob") else None,
        entry.accepted_drafts if entry.HasField("accepted_drafts") else None,
    )


def no_lanes() -> SpecdraftError:
    """What is said where there are no lanes."""
    return make_error(Reason.TRANSPORT_UNAVAILABLE, "lanes need a session with a CUDA arena", kind="lane")
