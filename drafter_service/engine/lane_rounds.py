"""Device-resident rounds between the lanes and the books: planned and launched, later read back and entered."""

from __future__ import annotations

import logging
import math
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from functools import partial

import torch
from torch import Tensor

from drafter_service.engine.engine import Engine
from drafter_service.engine.forwards import new_graph_memory
from drafter_service.engine.graph_runner import bucket, table_pages
from drafter_service.engine.in_flight import Key
from drafter_service.engine.lane_context import LaneContext, LaneRecord
from drafter_service.engine.lane_order import LaneOrder
from drafter_service.engine.lane_plan import PlannedSlot, enter_slot, plan_slot, read_mirror
from drafter_service.engine.operations import Call, LaneWrite, Outcome, Task
from drafter_service.engine.round_core import RoundShape
from drafter_service.engine.slot_round import (
    NUM_MIRROR_WORDS,
    NUM_STATE_WORDS,
    LaunchedRound,
    SlotHost,
    SlotPlace,
    capture_slot_round,
)
from drafter_service.heads import MtpHead
from drafter_service.memory.device_loss import DeviceLoss
from drafter_service.memory.device_view import on_device
from drafter_service.memory.lanes import Lane, LaneObserver, LaneWork, Watchdog, released
from drafter_service.memory.layout import NONCE_BYTES
from drafter_service.state.pool import KvPool
from specdraft.errors import Reason, SpecdraftError, make_error

_log = logging.getLogger(__name__)

Results = list[SpecdraftError | None]

ENDING_S = 2.0
"""How long the engine's last step may take before it is left alone."""

FOLLOWERS_MAX = 4096
"""Sequences of a lane of which is remembered what round comes next."""


@torch.inference_mode()
def _invert(values: Tensor) -> None:
    values.bitwise_not_()


def _nothing() -> None:
    pass


class LaneDesk:
    """Takes rounds with tickets, and keeps other calls about their sequences waiting until they are entered.

    Args:
        engine: with whose turn rounds are planned, launched and entered.
        head: computes.
        pool: remembers.
        reasons: error reasons by their numbers.
        loss: told of what the driver and torch say.
        max_batch: most entries of a round.
        max_pages: most pages of a sequence.
    """

    def __init__(
        self,
        engine: Engine,
        head: MtpHead,
        pool: KvPool,
        *,
        reasons: Mapping[int, Reason],
        loss: DeviceLoss,
        max_batch: int,
        max_pages: int,
        observer: LaneObserver | None = None,
    ) -> None:
        self._engine = engine
        self._head = head
        self._pool = pool
        self._reasons = dict(reasons)
        self._loss = loss
        loss.when_lost(self._release_all)
        self._max_batch = max_batch
        self._max_pages = max_pages
        self._order = LaneOrder(engine.submit)
        self._planned: Counter[Key] = Counter()
        self._contexts: dict[Lane, LaneContext] = {}
        self.watchdog = Watchdog(self._on_news, observer)

    def prepare(self, context: LaneContext, num_slots: int) -> Future[None]:
        """Takes a lane up. Done once its rounds have been made, one a turn: others get theirs in between.

        Where one cannot be made, for want of memory say, the error is the future's.
        """
        ready: Future[None] = Future()
        shapes = iter(self._first_shapes(context.num_pairs, num_slots))

        def make() -> None:
            shape = next(shapes, None)
            if shape is None or context.lane.state.is_released:
                ready.set_result(None)
                return
            try:
                self._round(context, shape)
            except Exception as error:
                ready.set_exception(error)
                raise
            self._later(make)

        def add() -> None:
            self._add(context)
            self._later(make)

        self._later(add)
        return ready

    @torch.inference_mode()
    def _add(self, context: LaneContext) -> None:
        context.graph_memory = new_graph_memory(self._head.device)
        context.free_indices = list(range(context.place.states.shape[0] - 1))
        self._contexts[context.lane] = context
        self.watchdog.watch(context.lane)

    @torch.inference_mode()
    def warm_up(self, place: SlotPlace, num_slots: int, num_pairs: int) -> None:
        """Makes rounds of every batch in a place that is nobody's, before there are calls."""
        with on_device(self._head.device):
            _invert(torch.zeros(NONCE_BYTES, dtype=torch.uint8, device=self._head.device))
            for shape in self._first_shapes(num_pairs, num_slots):
                if shape.drafts == num_pairs - 1:
                    capture_slot_round(self._head, self._pool, shape, place).launch()

    def _first_shapes(self, num_pairs: int, num_slots: int) -> Iterator[RoundShape]:
        """Every batch and number of drafts for sequences that are not long, and for the others what is likeliest."""
        most = bucket(num_slots, self._max_batch)
        batches = sorted({bucket(count, most) for count in range(1, most + 1)})
        short, most_drafts = self._table_pages(1), max(num_pairs - 1, 1)
        for batch in batches:
            for drafts in range(1, most_drafts + 1):
                yield RoundShape(batch, num_pairs, drafts, short)
        if self._head.runs_kernels and short < self._max_pages:
            yield from (RoundShape(batch, num_pairs, most_drafts, self._max_pages) for batch in {1, most})

    def _table_pages(self, num_pages: int) -> int:
        return table_pages(self._head, self._pool, num_pages, self._max_pages)

    def begin(
        self,
        context: LaneContext,
        ticket: int,
        ready_timeout_s: float,
        writes: Sequence[LaneWrite],
        on_done: Callable[[Results], None],
    ) -> None:
        """Takes a round; `on_done` gets an error or None an entry once planned. Raises if the ticket is refused."""
        try:
            context.lane.take(ticket, ready_timeout_s)
        except SpecdraftError:
            self._later(partial(self._pump, context))  # a ticket that skipped one gets its `done` all the same
            raise
        plan = partial(self._guarded, partial(self._plan, context, ticket, writes, on_done))
        self._order.plan(writes, plan)

    def begin_proof(self, context: LaneContext, ticket: int, ready_timeout_s: float) -> None:
        """Takes a round that inverts the arena's nonce on the device and does no more. Raises if it is refused."""
        try:
            context.lane.take(ticket, ready_timeout_s, is_counted=False)
        except SpecdraftError:
            self._later(partial(self._pump, context))
            raise

        def plan() -> None:
            context.works[ticket] = LaneWork(_nothing, partial(_invert, context.nonce), _nothing)
            self._pump(context)

        self._later(plan)

    def accept(self, call: Call) -> None:
        """`Engine.accept`, as soon as no round of the call's sequences is under way."""
        self._order.hand_over(call, self._engine.accept)

    def submit(self, call: Call) -> None:
        """`Engine.submit`, as soon as no round of the call's sequences is under way."""
        self._order.hand_over(call, self._engine.submit)

    def close(self) -> None:
        """Releases what is left; the engine has ended."""
        self._release_all()
        self.watchdog.close()
        self._engine.stop(ENDING_S)  # its last step may be about a lane
        if not self._engine.is_at_work:
            for context in list(self._contexts.values()):
                context.forget()

    def _release_all(self) -> None:
        for lane in list(self._contexts):
            self.watchdog.release(lane)

    def _on_news(self, lane: Lane, dropped: tuple[int, ...]) -> None:
        context = self._contexts.get(lane)
        if context is not None:
            self._later(partial(self._news, context, dropped))

    def _guarded(self, action: Callable[[], None]) -> None:
        try:
            with on_device(self._head.device):
                action()
        except Exception as error:
            self._loss.seen(error)
            raise

    def _later(self, action: Callable[[], None]) -> None:
        self._engine.submit(Call([Task(b"", b"", partial(self._guarded, action))], 0.0, math.inf, lambda _: None))

    # From here on everything runs with the engine's turn.

    @torch.inference_mode()
    def _plan(
        self, context: LaneContext, ticket: int, writes: Sequence[LaneWrite], on_done: Callable[[Results], None]
    ) -> None:
        self._catch_up(context)
        if self._is_released(context):  # while it waited for others; nothing of the lane may be used any more
            on_done([released()] * len(writes))
            self._order.rounds_over(writes)
            return
        results: Results = [None] * len(writes)
        planned: dict[int, PlannedSlot] = {}
        for index, write in enumerate(writes):
            try:
                outcome = self._plan_entry(context, write)
            except SpecdraftError as error:
                results[index] = error
                continue
            if isinstance(outcome, PlannedSlot):  # else a retry: outputs are not written again, `ReadDrafts` has them
                planned[index] = outcome
        if planned and (failure := self._prepared(context, ticket, list(planned.values()))):
            results = [failure if index in planned else result for index, result in enumerate(results)]
            planned = {}
        over = [write for index, write in enumerate(writes) if index not in planned]
        if not planned:
            context.lane.refuse(ticket)
        on_done(results)
        self._order.rounds_over(over)
        self._pump(context)
        if self._is_released(context):
            self._news(context, (ticket,))

    @staticmethod
    def _is_released(context: LaneContext) -> bool:
        return context.lane.state.is_released  # anew each time: other threads release lanes

    def _plan_entry(self, context: LaneContext, write: LaneWrite) -> PlannedSlot | Outcome:
        key, is_here = (write.session_id, write.sequence_id), write.sequence_id in context.indices
        if self._planned[key] and not is_here:
            for other in [one for one in self._contexts.values() if one.session_id == write.session_id]:
                self._catch_up(other)
        if self._planned[key] and not is_here:
            raise make_error(
                Reason.IN_FLIGHT_EXHAUSTED,
                "rounds of the sequence are under way in another lane",
                retry_delay_ms=10,
                limit=1,
            )
        if not context.free_indices and not is_here:
            limit = context.place.states.shape[0] - 1
            text = f"{limit} sequences have rounds under way in this lane, which is the limit"
            raise make_error(Reason.IN_FLIGHT_EXHAUSTED, text, retry_delay_ms=10, limit=limit)
        outcome = plan_slot(self._engine.ledger, write, self._planned[key], context.num_pairs)
        if isinstance(outcome, PlannedSlot):
            context.index_of(write.sequence_id)
            self._planned[key] += 1
            outcome.sequence.num_rounds += 1
        return outcome

    def _prepared(self, context: LaneContext, ticket: int, planned: list[PlannedSlot]) -> SpecdraftError | None:
        """Why a round cannot be made, and then nothing of it is left: it must not hold up its lane, or its session."""
        try:
            self._prepare(context, ticket, planned)
        except Exception as error:  # noqa: BLE001  # whatever the device raises
            _log.exception("a round could not be made")
            self._loss.seen(error)
            self._end_rounds(context, planned)
            return make_error(Reason.INTERNAL, "the round could not be made")
        return None

    def _prepare(self, context: LaneContext, ticket: int, planned: list[PlannedSlot]) -> None:
        """Makes the round's work: everything that it will need is there before it goes onto the stream."""
        indices = [context.index_of(one.operation.sequence_id) for one in planned]
        pages = self._table_pages(max(len(one.pages) for one in planned))
        drafts = max(1, *(one.operation.num_drafts for one in planned))
        shape = RoundShape(bucket(len(planned), self._max_batch), context.num_pairs, drafts, pages)
        launched = self._round(context, shape)
        host = launched.take_host()
        self._fill(host, shape, ticket, planned, indices, context)
        written = self._rows_written(context, planned)

        def run() -> None:
            launched.round.send(host)
            launched.launch()

        collect = partial(launched.round.collect, host)
        context.works[ticket] = LaneWork(written.wait if written else _nothing, run, collect)
        context.records.append(LaneRecord(ticket, planned, indices, launched, host))

    def _rows_written(self, context: LaneContext, planned: list[PlannedSlot]) -> torch.cuda.Event | None:
        """What the lane's stream has to wait for: rows that calls without tickets are still writing on theirs, or copy.

        Such a call may have been about a sequence of the round, or about one that had its pages before: None where the
        sequences' rounds just follow each other in the lane, on pages that they have held all the time.
        """
        if len(context.followers) > FOLLOWERS_MAX:
            context.followers.clear()
        follows = True
        for one in planned:
            sequence_id, op, num_forks = one.operation.sequence_id, one.operation.op, one.sequence.num_forks
            follows &= context.followers.get(sequence_id) == (op, num_forks) and not one.has_new_pages
            context.followers[sequence_id] = (op + 1, num_forks)
        if follows or self._head.device.type != "cuda":
            return None
        event: torch.cuda.Event = torch.cuda.current_stream(self._head.device).record_event()
        return event

    def _fill(  # noqa: PLR0917  # what a round is about
        self,
        host: SlotHost,
        shape: RoundShape,
        ticket: int,
        planned: list[PlannedSlot],
        indices: list[int],
        context: LaneContext,
    ) -> None:
        """The round's inputs, padded with the first entry's slot and nobody's state."""
        views, spare, nobody = host.given.views, self._pool.spare_page, context.place.states.shape[0] - 1
        views["ticket"][0] = ticket
        for index, one in enumerate(planned):
            asked = one.operation
            views["slot"][index], views["state_index"][index] = asked.slot, indices[index]
            views["is_real"][index], views["is_told"][index] = True, one.state is not None
            if one.state is not None:
                told = (one.state.begin_key, one.state.begin_row, one.state.last_key)
                views["told"][NUM_STATE_WORDS * index : NUM_STATE_WORDS * (index + 1)] = memoryview(array("q", told))
            views["op"][index], views["planned"][index] = asked.op, one.num_drafts
            views["planned_stop"][index], views["max_keys"][index] = one.stop.value, one.sequence.max_keys
            views["num_rows_max"][index] = one.num_rows_max
            views["min_logprob"][index] = -math.inf if asked.min_logprob is None else asked.min_logprob
        for index in range(len(planned), shape.batch):
            views["slot"][index], views["state_index"][index] = planned[0].operation.slot, nobody
            views["is_real"][index] = False
        # Of a long table the columns that are used: what is beyond a sequence's rows is never followed.
        width = min(bucket(max(len(one.pages) for one in planned), shape.pages), shape.pages)
        table = [array("i", [*one.pages, *[spare] * (width - len(one.pages))][:width]) for one in planned]
        table += [array("i", [spare] * width)] * (shape.batch - len(planned))
        if "page_table" not in views:
            packed = torch.frombuffer(bytearray().join(table), dtype=torch.int32).view(shape.batch, width)
            host.table = packed.pin_memory() if self._head.device.type == "cuda" else packed
            return
        for index, pages in enumerate(table):
            views["page_table"][index * shape.pages : index * shape.pages + width] = memoryview(pages)

    def _round(self, context: LaneContext, shape: RoundShape) -> LaunchedRound:
        if shape not in context.rounds:
            context.rounds[shape] = capture_slot_round(
                self._head, self._pool, shape, context.place, context.graph_memory
            )
        return context.rounds[shape]

    def _pump(self, context: LaneContext) -> None:
        """Puts onto the stream what may go there."""
        has_launched = False
        while context.lane.launch_next(context.works):
            has_launched = True
        if has_launched:
            self.watchdog.wake()

    def _catch_up(self, context: LaneContext) -> None:
        """Enters what the device is done with, whoever saw it first."""
        if context.lane.see() or context.is_passed:
            self._news(context, ())

    def _news(self, context: LaneContext, dropped: tuple[int, ...]) -> None:
        """Enters what has come back, forgets what never will run, and lets others have the room."""
        while context.is_passed:
            self._enter(context, context.records.popleft())
        lost = [record for record in context.records if record.ticket in dropped and record.ticket in context.works]
        for record in lost:
            del context.works[record.ticket]
            context.records.remove(record)
            self._let_go(context, record)
        if context.lane.is_over and not context.records:
            self._contexts.pop(context.lane, None)
            context.forget()
        for other in list(self._contexts.values()):
            self._pump(other)

    def _enter(self, context: LaneContext, record: LaneRecord) -> None:
        left = record.host.left.tensors
        words, logprobs = left["mirror"].tolist(), left["logprobs"].tolist()
        for index, planned in enumerate(record.planned):
            try:
                result = read_mirror(words[index], logprobs[index], context.num_pairs, NUM_MIRROR_WORDS, self._reasons)
                enter_slot(self._engine.ledger, planned, result)
            except Exception:  # noqa: BLE001  # one entry's books must not stop the lane
                _log.exception("a round could not be entered")
        self._let_go(context, record)

    def _let_go(self, context: LaneContext, record: LaneRecord) -> None:
        record.launched.give_host(record.host)
        self._end_rounds(context, record.planned)
        self._order.rounds_over([planned.operation for planned in record.planned])

    def _end_rounds(self, context: LaneContext, planned: Sequence[PlannedSlot]) -> None:
        for one in planned:
            key = one.operation.session_id, one.operation.sequence_id
            one.sequence.num_rounds -= 1
            self._planned[key] -= 1
            if not self._planned[key]:
                del self._planned[key]
                self._engine.ledger.settle(one.sequence)
                context.free_indices.append(context.indices.pop(one.operation.sequence_id))
