"""A device-resident round: inputs copied out of arena slots, checked, used, and outputs left in the slots.

Nothing is read from a slot twice and nothing of ours is read back from it: whoever rewrites its slot meanwhile changes
its own drafts and no more. Nothing here waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.slot_exchange import (
    NUM_MIRROR_WORDS,
    SlotMemory,
    SlotMirror,
    SlotOffsets,
    SlotWishes,
    StatusNumbers,
    TakenSlots,
    leave_slots,
    take_slots,
)
from drafter_service.engine.captures import capture
from drafter_service.engine.forwards import Forward, GraphMemory, make_forward, new_graph_memory
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import Round, RoundShape, make_inputs
from drafter_service.engine.twins import HostTwin, Sizes, Twins
from drafter_service.heads import MtpHead
from drafter_service.memory.hiddens import DTYPES
from drafter_service.memory.layout import ArenaLayout, ArenaWish, lay_out
from drafter_service.state.pool import KvPool
from specdraft.memory.lane_protocol import RELEASED

__all__ = [
    "NUM_MIRROR_WORDS",
    "NUM_STATE_WORDS",
    "LaunchedRound",
    "SlotHost",
    "SlotInputs",
    "SlotPlace",
    "SlotRound",
    "StatusNumbers",
    "capture_slot_round",
    "warm_up_slots",
]

NUM_STATE_WORDS: Final = 3
"""Per sequence: key and row index at which its last unbroken run of keys begins, and its last key."""

TABLE_ENTRIES_MAX: Final = 16_384
"""A page table of so many entries travels with everything else that the host says."""

SPARE_HOSTS: Final = 4
"""Runs of one round that may be under way before more host memory is made."""


@dataclass(frozen=True, slots=True)
class SlotInputs(SlotWishes):
    """What the host says about a round's entries, to be filled before each run.

    Attributes:
        page_table: int32 [B, P].
        min_logprob: float32 [B].
    """

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

    def memory(self) -> SlotMemory:
        """The same as the operations take it."""
        mine, wanted = asdict(self.layout.fields), {part.name for part in fields(SlotOffsets)}
        offsets = SlotOffsets(
            slots=self.layout.slots,
            row_stride=self.layout.row_stride,
            **{name: offset for name, offset in mine.items() if name in wanted},
        )
        return SlotMemory(self.arena, offsets, DTYPES[self.dtype], self.fence, self.ready, RELEASED, self.states)


def _given(shape: RoundShape) -> Sizes:
    """What the host says about a round; a long page table travels by itself."""
    batch, per_entry = shape.batch, (torch.int64, (shape.batch,))
    sizes: dict[str, tuple[torch.dtype, tuple[int, ...]]] = {
        "ticket": (torch.int64, (1,)),
        "is_real": (torch.bool, (batch,)),
        "is_told": (torch.bool, (batch,)),
        "told": (torch.int64, (batch, NUM_STATE_WORDS)),
        "min_logprob": (torch.float32, (batch,)),
    }
    wholes = ("slot", "state_index", "op", "planned", "planned_stop", "max_keys", "num_rows_max")
    sizes |= dict.fromkeys(wholes, per_entry)
    if batch * shape.pages <= TABLE_ENTRIES_MAX:
        sizes["page_table"] = (torch.int32, (batch, shape.pages))
    return sizes


def _left(shape: RoundShape) -> Sizes:
    """What a round leaves for the host."""
    words = NUM_MIRROR_WORDS + shape.pairs + shape.drafts
    return {
        "mirror": (torch.int64, (shape.batch, words)),
        "logprobs": (torch.float32, (shape.batch, max(shape.drafts, 1))),
    }


@dataclass(slots=True)
class SlotHost:
    """A round's side in host memory, of one run: from when it is planned until it has been entered.

    Attributes:
        given: what the host says.
        left: what the round leaves.
        table: a long page table, int32 [B, columns in use], where it is no part of `given`.
    """

    given: HostTwin
    left: HostTwin
    table: Tensor | None = None


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
        device = head.device
        self._head = head
        self.shape = shape
        self._numbers = place.numbers
        self._memory = place.memory()
        self._forward = forward or make_forward(head, pool, shape.batch, shape.batch * shape.pairs)
        self._round = Round(self._forward, shape, pool.shape.page_rows, device)
        self._given, self._left = Twins(_given(shape), device), Twins(_left(shape), device)
        given = dict(self._given.device)
        given.setdefault("page_table", torch.zeros(shape.batch, shape.pages, dtype=torch.int32, device=device))
        self.inputs = SlotInputs(**given)
        self._taken = TakenSlots.empty(shape.batch, shape.pairs, place.width, head.dtype, device)
        self.mirror, self.logprobs = self._left.device["mirror"], self._left.device["logprobs"]
        taken = self._taken
        self._core = replace(
            make_inputs(replace(shape, pairs=1, pages=1), head),
            is_live=taken.is_live,
            first_key=taken.first_key,
            row_begin=taken.row_begin,
            pair_count=taken.pair_count,
            num_drafts=taken.num_drafts,
            tokens=taken.tokens,
            hiddens=taken.hiddens,
            page_table=self.inputs.page_table,
            min_logprob=self.inputs.min_logprob,
        )

    def new_host(self) -> SlotHost:
        """Host memory for a run of it."""
        return SlotHost(self._given.new_host(), self._left.new_host(for_reading=True))

    @torch.inference_mode()
    def send(self, host: SlotHost) -> None:
        """Copies what the host says, on the current stream."""
        self._given.to_device(host.given)
        if host.table is not None:
            self.inputs.page_table[:, : host.table.shape[1]].copy_(host.table, non_blocking=True)

    @torch.inference_mode()
    def collect(self, host: SlotHost) -> None:
        """Copies what the run left, on the current stream; waits for nothing."""
        self._left.start_to_host(host.left)

    @torch.inference_mode()
    def run(self) -> None:
        """The whole round."""
        memory, inputs, taken, overlaps = self._memory, self.inputs, self._taken, self._forward.overlaps
        take_slots(memory, inputs, taken, self._head.config.vocab_size, self._numbers, overlaps=overlaps)
        chains = self._round.run(self._core)
        leave_slots(
            memory,
            inputs,
            taken,
            chains,
            self._head.weights.embedding,
            SlotMirror(self.mirror, self.logprobs),
            self._numbers,
            Stop.POSITION_LIMIT.value,
            overlaps=overlaps,
        )


@dataclass(slots=True)
class LaunchedRound:
    """What is launched for one shape of one lane.

    Attributes:
        round: its buffers.
        launch: runs it on the current stream.
        spare: host memory for runs, of which nobody makes use.
    """

    round: SlotRound
    launch: Callable[[], None]
    spare: list[SlotHost] = field(default_factory=list)

    def take_host(self) -> SlotHost:
        """Host memory for a run. Pinned memory is made before it is needed: that may wait for verifies."""
        return self.spare.pop() if self.spare else self.round.new_host()

    def give_host(self, host: SlotHost) -> None:
        """Gives it back, once nothing on the device uses it any more."""
        host.table = None
        self.spare.append(host)


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
    spare = [made.new_host() for _ in range(SPARE_HOSTS)]
    if head.device.type != "cuda":
        return LaunchedRound(made, made.run, spare)
    # The counters too: the lane may be given up and its pages be unmapped meanwhile.
    counter = torch.zeros_like(place.fence)
    copies = replace(
        place, arena=torch.zeros_like(place.arena), fence=counter, ready=counter, states=place.states.clone()
    )
    # With buffers of its own: rounds of the lane may be under way in those that it shares.
    warm = SlotRound(head, pool, shape, copies)
    return LaunchedRound(made, capture(made.run, head.device, memory.handle, warm=warm.run), spare)


@torch.inference_mode()
def warm_up_slots(head: MtpHead, pool: KvPool, numbers: StatusNumbers) -> None:
    """Has what lanes need compiled, for hidden rows of every type: a round of nobody's over memory of nobody's."""
    device, width = head.device, head.config.hidden_width

    def whole(*size: int) -> Tensor:
        return torch.zeros(size, dtype=torch.int64, device=device)

    for name, dtype in DTYPES.items():
        row_bytes = width * dtype.itemsize
        layout = lay_out(ArenaWish(1, 1, row_bytes, row_bytes, head.config.vocab_size, 0, with_masks=False))
        arena = torch.zeros(layout.size, dtype=torch.uint8, device=device)
        place = SlotPlace(arena, layout, name, width, whole(1), whole(1), whole(2, NUM_STATE_WORDS), numbers)
        SlotRound(head, pool, RoundShape(1, 2, 1, 1), place).run()
