"""A device-resident round: inputs copied out of arena slots, checked, used, and outputs left in the slots.

Nothing is read from a slot twice and nothing of ours is read back from it: whoever rewrites its slot meanwhile changes
its own drafts and no more. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.draft_chain import ChainState
from drafter_service.engine.forwards import Forward, GraphMemory, make_forward, new_graph_memory
from drafter_service.engine.graph_runner import capture
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import Round, RoundInputs, RoundShape, make_inputs
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import DTYPES
from drafter_service.memory.layout import ArenaLayout
from drafter_service.state.pool import KvPool
from specdraft.memory.lane_protocol import RELEASED

NUM_STATE_WORDS: Final = 3
"""Per sequence: key and row index at which its last unbroken run of keys begins, and its last key."""

NUM_MIRROR_WORDS: Final = 5
"""Per entry, before its tokens and drafts: status, first key, pairs, drafts, stop reason."""


@dataclass(frozen=True, slots=True)
class StatusNumbers:
    """Numbers of the reasons that a round can give, as they stand on the wire."""

    fenced: int
    pair_count: int
    token: int
    not_finite: int
    missing_rows: int
    position: int
    pages: int
    internal: int


@dataclass(frozen=True, slots=True)
class SlotInputs:
    """What the host says about a round's entries; int64 [B] each unless it says otherwise.

    Attributes:
        ticket: [1].
        slot: of the arena. Entries that only pad the batch repeat the first one's.
        state_index: in the table of sequence states; padding has the last index, of nobody's.
        is_real: bool.
        op: the operation's number.
        planned: drafts that the pages allow.
        planned_stop: why no more are planned: COMPLETE, NOT_ASKED or PAGES.
        max_keys: keys are below.
        num_rows_max: rows that the pages hold.
        page_table: int32 [B, P].
        min_logprob: float32.
    """

    ticket: Tensor
    slot: Tensor
    state_index: Tensor
    is_real: Tensor
    op: Tensor
    planned: Tensor
    planned_stop: Tensor
    max_keys: Tensor
    num_rows_max: Tensor
    page_table: Tensor
    min_logprob: Tensor


@dataclass(frozen=True, slots=True)
class SlotPlace:
    """Where a lane's rounds read and write.

    Attributes:
        arena: the session's arena, uint8.
        layout: of the arena.
        dtype: name of the hidden rows' element type.
        width: their elements.
        fence: int64 [1], not 0 = the lane was given up; the service's own.
        ready: int64 [1], the client's counter.
        states: int64 [N + 1, 3], the sequences' states; the last one is nobody's.
        numbers: of the statuses.
    """

    arena: Tensor
    layout: ArenaLayout
    dtype: str
    width: int
    fence: Tensor
    ready: Tensor
    states: Tensor
    numbers: StatusNumbers


def make_slot_inputs(shape: RoundShape, device: torch.device) -> SlotInputs:
    """Buffers of a shape."""

    def whole(*size: int) -> Tensor:
        return torch.zeros(*size, dtype=torch.int64, device=device)

    batch = shape.batch
    return SlotInputs(
        ticket=whole(1),
        slot=whole(batch),
        state_index=whole(batch),
        is_real=torch.zeros(batch, dtype=torch.bool, device=device),
        op=whole(batch),
        planned=whole(batch),
        planned_stop=whole(batch),
        max_keys=whole(batch),
        num_rows_max=whole(batch),
        page_table=torch.zeros(batch, shape.pages, dtype=torch.int32, device=device),
        min_logprob=torch.full((batch,), -torch.inf, device=device),
    )


class SlotRound:
    """A round of one shape in one lane.

    Args:
        head: computes.
        pool: remembers.
        shape: what it is made for; pairs and drafts are the session's most.
        place: where it reads and writes.
        forward: computes in the head's place; None = as the head does.

    Attributes:
        inputs: to be filled before each run, in the lane's stream.
        mirror: int64 [B, 5 + R + K]: status, first key, pair count, draft count, stop, tokens, drafts.
        logprobs: float32 [B, K].
    """

    def __init__(
        self, head: MtpHead, pool: KvPool, shape: RoundShape, place: SlotPlace, forward: Forward | None = None
    ) -> None:
        self._head = head
        self.shape = shape
        self._place = place
        forward = forward or make_forward(head, pool, shape.batch, shape.batch * shape.pairs)
        self._round = Round(forward, shape, pool.shape.page_rows, head.device)
        self._core = make_inputs(shape, head)
        self.inputs = make_slot_inputs(shape, head.device)
        words = NUM_MIRROR_WORDS + shape.pairs + shape.drafts
        self.mirror = torch.zeros(shape.batch, words, dtype=torch.int64, device=head.device)
        self.logprobs = torch.zeros(shape.batch, max(shape.drafts, 1), device=head.device)
        layout = place.layout
        slots = (layout.wish.num_slots, layout.fields.stride)
        self._slots = torch.as_strided(
            place.arena, slots, (layout.fields.stride, 1), place.arena.storage_offset() + layout.slots
        )

    @torch.inference_mode()
    def run(self) -> None:
        """The whole round."""
        copied = self._copy()
        status, core, position_limited = self._check(copied)
        outputs = self._round.run(core)
        status = torch.where(outputs.is_broken & (status == 0), self._place.numbers.internal, status)
        count = torch.where(status == 0, outputs.draft_count, 0)
        stop = self._stop(outputs, position_limited, status)
        self._advance(status, core)
        self._write_out(status, outputs, count, stop)
        fields = torch.stack((status, core.first_key, core.pair_count, count, stop), dim=1)
        self.mirror.copy_(torch.cat((fields, core.tokens, outputs.drafts[:, : self.shape.drafts]), dim=1))
        self.logprobs.copy_(outputs.logprobs)

    def _copy(self) -> RoundInputs:
        """A private copy of what the slots hold, as the core takes it, unchecked."""
        fields, shape, place = self._place.layout.fields, self.shape, self._place
        row_stride = place.layout.row_stride
        end = fields.hidden + shape.pairs * row_stride
        begin = fields.first_key
        copied = self._slots[:, begin:end].index_select(0, self.inputs.slot)

        def field(offset: int, dtype: torch.dtype, count: int) -> Tensor:
            columns = copied[:, offset - begin : offset - begin + count * dtype.itemsize]
            return columns.contiguous().view(dtype)

        rows = copied[:, fields.hidden - begin :].reshape(shape.batch, shape.pairs, row_stride)
        item = DTYPES[place.dtype]
        hiddens = rows[:, :, : place.width * item.itemsize].contiguous().view(item)
        return replace(
            self._core,
            is_live=self.inputs.is_real,
            first_key=field(fields.first_key, torch.int64, 1)[:, 0],
            pair_count=field(fields.pair_count, torch.int32, 1)[:, 0].long(),
            tokens=field(fields.tokens, torch.int32, shape.pairs).long(),
            hiddens=hiddens,
            page_table=self.inputs.page_table,
            min_logprob=self.inputs.min_logprob,
        )

    def _check(self, copied: RoundInputs) -> tuple[Tensor, RoundInputs, Tensor]:
        """Status of every entry (0 = fine), the core's inputs, harmless where not, and whether positions limit."""
        inputs, numbers = self.inputs, self._place.numbers
        begin, begin_row, last_key = self._place.states.index_select(0, inputs.state_index).unbind(1)
        count = copied.pair_count
        is_count = (count >= 1) & (count <= self.shape.pairs)
        steps = torch.arange(self.shape.pairs, device=count.device)
        is_pair = steps < count.clamp(0, self.shape.pairs)[:, None]
        is_token = (copied.tokens >= 0) & (copied.tokens < self._head.config.vocab_size)
        wide = copied.hiddens.to(self._head.dtype)
        is_finite = torch.isfinite(wide).all(dim=-1)
        follows = (copied.first_key >= begin) & (copied.first_key <= last_key + 1)
        # Clamped, so that no sum can wrap around whatever the slot says.
        first_key = torch.where(follows, copied.first_key, begin)
        count = torch.where(is_count, count, 1)
        row_begin = begin_row + first_key - begin
        end_key = first_key + count
        positions = (inputs.max_keys - end_key + 1).clamp(min=0)
        num_drafts = torch.minimum(inputs.planned, positions)
        fits = row_begin + count + (num_drafts - 1).clamp(min=0) <= inputs.num_rows_max
        status = torch.zeros_like(count)
        # The first of these that fails is told: the last one written wins.
        for is_fine, number in (
            (fits, numbers.pages),
            (end_key <= inputs.max_keys, numbers.position),
            (follows, numbers.missing_rows),
            ((is_finite | ~is_pair).all(dim=1), numbers.not_finite),
            ((is_token | ~is_pair).all(dim=1), numbers.token),
            (is_count, numbers.pair_count),
            (self._may_run(), numbers.fenced),
        ):
            status = torch.where(is_fine, status, number)
        is_live = copied.is_live & (status == 0)
        tokens = torch.where(is_token, copied.tokens, 0)
        core = replace(copied, is_live=is_live, first_key=first_key, pair_count=count, tokens=tokens, hiddens=wide)
        row_begin, num_drafts = torch.where(is_live, row_begin, 0), torch.where(is_live, num_drafts, 0)
        return status, replace(core, row_begin=row_begin, num_drafts=num_drafts), positions < inputs.planned

    def _may_run(self) -> Tensor:
        """bool [1]; `lane_protocol.may_run` on the device."""
        ready, ticket = self._place.ready.clone(), self.inputs.ticket
        return (self._place.fence.clone() == 0) & (ticket <= ready) & (ready < RELEASED)

    def _stop(self, outputs: ChainState, position_limited: Tensor, status: Tensor) -> Tensor:
        planned = torch.where(position_limited, Stop.POSITION_LIMIT.value, self.inputs.planned_stop)
        return torch.where(status == 0, torch.where(outputs.stop > 0, outputs.stop, planned), 0)

    def _advance(self, status: Tensor, core: RoundInputs) -> None:
        """The sequences' states after the round. What failed while computing has lost the rows that it overwrote."""
        before = self._place.states.index_select(0, self.inputs.state_index)
        end = torch.where(status == 0, core.first_key + core.pair_count - 1, before[:, 2])
        end = torch.where(status == self._place.numbers.internal, torch.minimum(before[:, 2], core.first_key - 1), end)
        after = torch.cat((before[:, :2], end[:, None]), dim=1)
        self._place.states.index_copy_(0, self.inputs.state_index, after)

    def _write_out(self, status: Tensor, outputs: ChainState, count: Tensor, stop: Tensor) -> None:
        """Leaves the outputs in the slots, `op` behind the rest."""
        fields, batch = self._place.layout.fields, self.shape.batch
        out = torch.zeros(batch, fields.first_key, dtype=torch.uint8, device=status.device)
        state = self._place.states.index_select(0, self.inputs.state_index)
        row_count = state[:, 1] + state[:, 2] + 1 - state[:, 0]
        last = outputs.drafts.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
        embedding = self._head.embed(last).to(DTYPES[self._place.dtype])
        embedding = torch.where((count > 0)[:, None], embedding, 0)
        drafts = self.shape.drafts
        for offset, values in (
            (fields.status, status.int()),
            (fields.draft_count, count.int()),
            (fields.stop_reason, stop.int()),
            (fields.drafts, outputs.drafts[:, :drafts].int()),
            (fields.logprobs, outputs.logprobs[:, :drafts]),
            (fields.last_embedding, embedding),
            (fields.row_count, row_count.int()),
            (fields.last_pair_key, state[:, 2]),
        ):
            packed = _bytes_of(values.reshape(batch, -1))
            out[:, offset : offset + packed.shape[1]] = packed
        # Entries that pad the batch write the first one's bytes into the first one's slot once more.
        is_real = self.inputs.is_real[:, None]
        self._slots[:, : fields.first_key].index_copy_(0, self.inputs.slot, torch.where(is_real, out, out[:1]))
        op = torch.where(self.inputs.is_real, self.inputs.op, self.inputs.op[:1])
        packed = _bytes_of(op[:, None])
        self._slots[:, fields.op : fields.op + 8].index_copy_(0, self.inputs.slot, packed)


def _bytes_of(values: Tensor) -> Tensor:
    """Rows of numbers as rows of bytes. A copy: a single number counts as contiguous whatever its stride."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)


@dataclass(slots=True)
class LaunchedRound:
    """What is launched for one shape of one lane.

    Attributes:
        round: its buffers.
        launch: runs it on the current stream.
    """

    round: SlotRound
    launch: Callable[[], None]


@torch.inference_mode()
def capture_slot_round(
    head: MtpHead, pool: KvPool, shape: RoundShape, place: SlotPlace, graph_memory: GraphMemory | None = None
) -> LaunchedRound:
    """A lane's own instance of a round: launches of one instance are ordered by CUDA, so lanes share none.

    What runs while it is made runs on copies, so that nothing of a session is touched. `graph_memory` is shared by the
    rounds of one lane, which run one after the other.
    """
    memory = graph_memory or new_graph_memory(head.device)
    forward = memory.forward(head, pool, shape.batch, shape.batch * shape.pairs)
    made = SlotRound(head, pool, shape, place, forward)
    if head.device.type != "cuda":
        return LaunchedRound(made, made.run)
    copies = replace(place, arena=torch.zeros_like(place.arena), states=place.states.clone())
    warm = SlotRound(head, pool, shape, copies, forward)
    return LaunchedRound(made, capture(made.run, head.device, memory.handle, warm=warm.run))
