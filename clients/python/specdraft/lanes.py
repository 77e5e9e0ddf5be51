"""Lanes: rounds ordered by counters on the device, sent while the target still verifies. No host waits for drafts."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Sequence as Items
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.exchanges import Exchange
from specdraft.memory import CudaArena, fetch_descriptor, side_socket_path
from specdraft.memory.counters import COUNTER_PAGE_SIZE_BYTES, CounterPage
from specdraft.memory.cuda import CONNECTIONS_VARIABLE, connections_problem
from specdraft.memory.descriptors import NONCE_SIZE_BYTES
from specdraft.memory.lane_protocol import RELEASED, ClientLane
from specdraft.statuses import check_entry
from specdraft.v1 import drafter_pb2, session_pb2, tensor_pb2
from specdraft.words import wire

if TYPE_CHECKING:
    from specdraft.drive import Drive
    from specdraft.memory import SlotOutputs
    from specdraft.sequence import Sequence
    from specdraft.terms import SessionTerms

__all__ = ["LANE_TIMEOUT_FACTOR", "EarlyItem", "EarlyRound", "Lane", "SlotUses", "check_connections"]

LANE_TIMEOUT_FACTOR: Final = 12
"""Opening a lane makes its graphs first: it may take so many times as long as other calls."""

_PASSED_OFFSET: Final = 0
_STORE_PAUSE_S: Final = 100e-6
_MPS_VARIABLE: Final = "CUDA_MPS_PIPE_DIRECTORY"


def check_connections(num_lanes: int) -> None:
    """Refuses lanes that would hold every hardware queue of this process.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE`.
    """
    problem = connections_problem(os.environ.get(CONNECTIONS_VARIABLE), num_lanes, is_mps=_MPS_VARIABLE in os.environ)
    if problem:
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, problem, kind="lane")


@dataclass(frozen=True, slots=True)
class EarlyItem:
    """One sequence of an early round.

    Attributes:
        sequence: whose drafts are wanted.
        slot: the arena slot in which the target's kernels leave `first_key`, `pair_count`, `tokens` and `hidden`, and
            find the outputs.
        num_drafts: drafts wanted.
        min_logprob: stop after the first draft below it.
    """

    sequence: Sequence
    slot: int
    num_drafts: int
    min_logprob: float | None = None


class SlotUse:
    """One round's use of one slot.

    Attributes:
        was_refused: whether the round was not done; None = nobody knows yet.
    """

    __slots__ = ("was_refused",)

    def __init__(self) -> None:
        self.was_refused: bool | None = None


class SlotUses:
    """Which rounds the slots of a session were given to, over all of its lanes.

    The number of an operation is its sequence's: found in a slot, it does not tell rounds of several sequences apart.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._uses: dict[int, list[SlotUse]] = {}

    def give(self, slot: int) -> SlotUse:
        """Gives a slot to a round that is about to be sent."""
        use = SlotUse()
        with self._lock:
            uses = [one for one in self._uses.get(slot, ()) if not one.was_refused]
            done = [index for index, one in enumerate(uses) if one.was_refused is False]
            self._uses[slot] = [*uses[done[-1] if done else 0 :], use]
        return use

    def is_last(self, slot: int, use: SlotUse) -> bool:
        """Whether no later round was sent into the slot, but for those that were refused."""
        with self._lock:
            return next((one is use for one in reversed(self._uses.get(slot, ())) if not one.was_refused), False)


class EarlyRound:
    """A round under way. The target's stream is behind the wait for it; the host need not look at all."""

    def __init__(self, lane: Lane, ticket: int, items: Items[EarlyItem], ops: Items[int], uses: Items[SlotUse]) -> None:
        self.ticket = ticket
        self._lane = lane
        self._items = items
        self._ops = ops
        self._uses = uses
        self._answered = threading.Event()
        self._is_accepted = False
        self._errors: list[SpecdraftError | None] = [None] * len(items)
        self.refusal: SpecdraftError | None = None
        """Why nothing of it was done."""

    def is_passed(self) -> bool:
        """Whether the target's stream has gone past the wait."""
        return self._lane.passed >= self.ticket

    def outputs(self, timeout_s: float) -> list[SlotOutputs | SpecdraftError]:
        """Waits for the round and reads the slots, for a host that wants to look.

        Returns:
            What each slot holds, or why there is nothing: refused; `LANE_RELEASED` when the lane was given up;
            `OP_OUT_OF_ORDER` when the slot was given to a later round before this was called: `Sequence.read_drafts`
            has the drafts if that round was another sequence's.
        """
        deadline_s = time.monotonic() + timeout_s
        while not (self._answered.is_set() and self.is_passed()):
            if time.monotonic() > deadline_s:
                self._lane.release()
                break
            time.sleep(_STORE_PAUSE_S)
        return [self._output(index) for index in range(len(self._items))]

    def _output(self, index: int) -> SlotOutputs | SpecdraftError:
        error = self._errors[index]
        if error is not None:
            return error
        item, op = self._items[index], self._ops[index]
        outputs = self._lane.arena.slot_outputs(item.slot)
        is_last = self._lane.slot_uses.is_last(item.slot, self._uses[index])  # seen after what was read
        if self._is_accepted and is_last and self._lane.trusts(outputs, op):
            return outputs
        if self._is_accepted and not self._lane.is_released and not is_last:
            return _overwritten(item.slot, op)  # the operation has its number, however it ended
        item.sequence.ledger.unsure = True
        if self._lane.is_released:
            return make_error(Reason.LANE_RELEASED, "the lane was released: its outputs are nobody's")
        is_refused = outputs.op == op and outputs.status
        return _device_refusal(outputs.status) if is_refused else _overwritten(item.slot, op)

    def answered(self, answer: Any, error: Exception | None) -> None:
        """The call has ended; called by the stream's thread."""
        if error is None:
            self._errors = [_error_of(result.status) for result in answer.results]
        else:
            known = error if isinstance(error, SpecdraftError) else None
            self.refusal = known or make_error(Reason.LANE_RELEASED, str(error))
            self._errors = [self.refusal] * len(self._items)
        for item, refused in zip(self._items, self._errors, strict=True):
            if refused is not None:
                item.sequence.ledger.unsure = True  # the next use asks where the sequence stands
        is_in_band = error is None or (isinstance(error, SpecdraftError) and error.reason is not None)
        for use, refused in zip(self._uses, self._errors, strict=True):
            use.was_refused = is_in_band and refused is not None
        is_ok = not all(self._errors or [error])
        self._is_accepted = self._lane.answered(self.ticket, is_ok=is_ok, is_in_band=is_in_band)
        self._answered.set()


class Lane:
    """One lane of a session, beside one stream of the target. Made by `Client.open_lane`.

    ```python
    slot = client.claim_slot()
    # enqueue on the stream: the verify, and what leaves first_key, pair_count, tokens and hidden in the slot
    early = lane.propose_early([EarlyItem(sequence, slot, num_drafts=4)])
    # enqueue on the stream: the next verify, which reads draft_count and drafts from the slot
    ```

    A lane that was released (a timeout, a broken stream, a service that died) gives no tickets any more: draft nothing
    for a round and open another.
    """

    def __init__(
        self,
        answer: session_pb2.OpenLaneResponse,
        arena: CudaArena,
        drive: Drive,
        stream: int,
        *,
        own_socket: str,
        terms: SessionTerms,
        slot_uses: SlotUses,
    ) -> None:
        path = side_socket_path(answer.descriptor_socket, own_socket)
        self._page = CounterPage(fetch_descriptor(path, answer.descriptor_token, terms.timeout_s))
        self._own = CounterPage()
        self.arena = arena
        self.slot_uses = slot_uses
        self._gpu = arena.gpu
        self._drive = drive
        self._stream = stream
        self._terms = terms
        self._number = answer.lane
        self._done_offset = answer.done_offset_bytes
        self._ready_offset = answer.ready_offset_bytes
        self._lock = threading.Lock()
        self._book = ClientLane()
        self._is_closed = False
        self._wake = threading.Event()
        self._gpu.driver.make_current(self._gpu.device)
        shared = self._gpu.driver.register_host(self._page.address, COUNTER_PAGE_SIZE_BYTES)
        self._ready_pointer = shared + answer.ready_offset_bytes
        self._done_pointer = shared + answer.done_offset_bytes
        self._own_pointer = self._gpu.driver.register_host(self._own.address, COUNTER_PAGE_SIZE_BYTES)
        self._watchdog = threading.Thread(target=self._watch, name="specdraft-lane", daemon=True)
        self._watchdog.start()
        drive.when_broken(self.release)

    @property
    def is_released(self) -> bool:
        """Whether the lane was given up, by whichever side."""
        return self._book.is_released or (not self._is_closed and self._page.load(self._done_offset) == RELEASED)

    @property
    def is_over(self) -> bool:
        """Whether it was given up and the stream waits for nothing of it."""
        return self._is_closed or (self.is_released and self.passed >= self._book.last)

    @property
    def is_closed(self) -> bool:
        """Whether it was taken down: nothing of it is left."""
        return self._is_closed

    @property
    def passed(self) -> int:
        """The newest ticket that the stream has gone past."""
        return self._own.load(_PASSED_OFFSET) if not self._is_closed else self._book.last

    def propose_early(self, items: Items[EarlyItem]) -> EarlyRound:
        """Sends a round whose inputs are still being computed, and has the stream wait for its outputs.

        What is enqueued on the lane's stream before this call is what the round waits for; what is enqueued after it
        waits for the drafts. It also says that the slots' earlier outputs have been read, on every stream.

        Calls of other threads about these sequences are waited for: each use of a sequence has its number.

        Raises:
            AbortedError: `LANE_RELEASED`: open another lane.
            SpecdraftError: nothing was sent; the lane is released.
        """
        for item in items:
            if item.sequence.ledger.unsure:
                item.sequence.state()
        with ExitStack() as stack:
            # In the order of their ids, each once, as batches without tickets take them.
            for _, sequence in sorted({item.sequence.sequence_id: item.sequence for item in items}.items()):
                stack.enter_context(sequence.lock)
            stack.enter_context(self._lock)
            return self._issue(items)

    def prove(self) -> None:
        """Tries, once, that both sides see in order what the other one writes on the device.

        The stream leaves bytes in the arena, and a round without entries has the service invert them there.

        Raises:
            FailedPreconditionError: `TRANSPORT_UNAVAILABLE`: they do not. Calls without tickets work all the same.
        """
        challenge = ctypes.create_string_buffer(os.urandom(NONCE_SIZE_BYTES), NONCE_SIZE_BYTES)
        with self._lock:
            self._gpu.driver.make_current(self._gpu.device)
            place = self.arena.nonce_pointer
            self._gpu.driver.copy(self._stream, place, ctypes.addressof(challenge), NONCE_SIZE_BYTES)
            early = self._issue([])
        early.outputs(self._terms.timeout_s)
        found = None if early.refusal or self.is_released else self.arena.nonce()
        if found == bytes(255 - one for one in challenge.raw):
            return
        self.release()
        why = early.refusal or "what one side writes on the device does not reach the other in order"
        text = f"no lane between these two processes: {why}; calls without tickets work"
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, text, kind="lane")

    def _issue(self, items: Items[EarlyItem]) -> EarlyRound:
        """Sends a round with the next ticket, and has the stream wait for it. Under the lane's lock."""
        if self.is_released:
            self._book = self._book.released()
            self._wake.set()
            raise make_error(Reason.LANE_RELEASED, "the lane was released; open a new one")
        self._book = self._book.issued()
        ticket = self._book.last
        ops, uses = [item.sequence.ledger.next_op for item in items], [self.slot_uses.give(item.slot) for item in items]
        early = EarlyRound(self, ticket, items, ops, uses)
        driver = self._gpu.driver
        driver.make_current(self._gpu.device)
        driver.write_value(self._stream, self._ready_pointer, ticket)
        try:
            self._drive.post(self._exchange(ticket, items), early.answered)
        except SpecdraftError:
            self._book = self._book.released()
            for use in uses:
                use.was_refused = True
            driver.write_value(self._stream, self._own_pointer + _PASSED_OFFSET, ticket)  # nothing is waited for
            self._wake.set()
            raise
        for item in items:
            item.sequence.ledger.last_op += 1
        driver.wait_value(self._stream, self._done_pointer, ticket)
        driver.write_value(self._stream, self._own_pointer + _PASSED_OFFSET, ticket)
        return early

    def trusts(self, outputs: SlotOutputs, op: int) -> bool:
        """Whether what a slot holds is what an accepted round left there."""
        with self._lock:
            book = self._book
        return book.trusts(op=outputs.op, expected_op=op, status=outputs.status)

    def answered(self, ticket: int, *, is_ok: bool, is_in_band: bool) -> bool:
        """A call of the lane has ended. Returns whether its outputs may be believed; the lane does not remember it."""
        with self._lock:
            book = self._book.answered(ticket, is_ok=is_ok) if is_in_band else self._book.ended(ticket)
            self._book = book.settled(ticket)
        if book.is_released:
            self._wake.set()
        return ticket in book.accepted

    def release(self) -> None:
        """Gives the lane up: whatever the stream waits for is over, and nothing of it is believed."""
        with self._lock:
            self._book = self._book.released()
        self._wake.set()
        self._drive.forget(self.release)

    def close(self) -> None:
        """Gives the lane up and takes it down, once the stream is past it. May be called twice."""
        if self._is_closed:
            return
        self.release()
        self._watchdog.join()
        self._is_closed = True
        for page in (self._page, self._own):
            self._gpu.driver.make_current(self._gpu.device)
            self._gpu.driver.unregister_host(page.address)
            page.close()

    def _watch(self) -> None:
        """Ends the stream's waits by stores, again and again until it is past them. Makes no CUDA call."""
        self._wake.wait()
        while True:
            # Seen first, stored then: a `done` of the service's that comes later is overwritten again.
            is_past = self._own.load(_PASSED_OFFSET) >= self._book.last
            self._page.store(self._done_offset, RELEASED)
            if is_past:
                # The stream writes to `ready` no more: now the service can be told.
                self._page.store(self._ready_offset, RELEASED)
                return
            time.sleep(_STORE_PAUSE_S)

    def _exchange(self, ticket: int, items: Items[EarlyItem]) -> Exchange:
        request = drafter_pb2.ProposeRequest(
            entries=[self._entry(item) for item in items],
            lane_ticket=drafter_pb2.LaneTicket(lane=self._number, ticket=ticket),
        )
        return Exchange("Propose", request, self._terms.timeout_s)

    def _entry(self, item: EarlyItem) -> drafter_pb2.ProposeEntry:
        rows = tensor_pb2.TensorRef(arena_slot=tensor_pb2.ArenaSlot(slot=item.slot), dtype=wire(self._terms.dtype))
        return drafter_pb2.ProposeEntry(
            sequence_id=item.sequence.sequence_id,
            op=item.sequence.ledger.next_op,
            pairs=drafter_pb2.Pairs(hiddens=rows),
            draft_count=item.num_drafts,
            min_logprob=item.min_logprob,
        )


def _error_of(status: drafter_pb2.EntryStatus) -> SpecdraftError | None:
    try:
        check_entry(status)
    except SpecdraftError as error:
        return error
    return None


def _overwritten(slot: int, op: int) -> SpecdraftError:
    text = f"slot {slot} was given to a later round: the outputs in it are not of this one; read_drafts may have them"
    return make_error(Reason.OP_OUT_OF_ORDER, text, op=op)


def _device_refusal(status: int) -> SpecdraftError:
    from specdraft.v1 import error_reason_pb2

    name = error_reason_pb2.ErrorReason.Name(status).removeprefix("ERROR_REASON_")
    return make_error(Reason[name], "the device refused what the slot held", retry_delay_ms=0)
