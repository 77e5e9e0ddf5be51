"""A lane, and what its rounds use."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from drafter_service.engine.lane_plan import PlannedSlot
from drafter_service.engine.round_core import RoundShape
from drafter_service.engine.slot_round import LaunchedRound, SlotHost, SlotPlace
from drafter_service.memory.lanes import Lane, LaneWork
from drafter_service.memory.layout import NONCE_BYTES


@dataclass(slots=True)
class LaneRecord:
    """A round that was planned."""

    ticket: int
    planned: list[PlannedSlot]
    indices: list[int]
    launched: LaunchedRound
    host: SlotHost


@dataclass(slots=True)
class LaneContext:
    """A lane, and what its rounds use. The engine's, but for `lane`.

    Attributes:
        session_id: whose it is.
        lane: its counters and its stream.
        place: where its rounds read and write.
        num_pairs: R.
        followers: by sequence, the operation of the round that follows its last one here, and its forks until then.
    """

    session_id: bytes
    lane: Lane
    place: SlotPlace
    num_pairs: int
    rounds: dict[RoundShape, LaunchedRound] = field(default_factory=dict)
    works: dict[int, LaneWork] = field(default_factory=dict)
    records: deque[LaneRecord] = field(default_factory=deque)
    indices: dict[bytes, int] = field(default_factory=dict)
    free_indices: list[int] = field(default_factory=list)
    followers: dict[bytes, tuple[int, int]] = field(default_factory=dict)
    graph_memory: Any = None

    def index_of(self, sequence_id: bytes) -> int:
        """Where the device keeps the sequence's state while rounds of it are under way."""
        if sequence_id not in self.indices:
            self.indices[sequence_id] = self.free_indices.pop()
        return self.indices[sequence_id]

    def forget(self) -> None:
        """Lets go of host memory while the stream that used it exists: freeing pinned memory asks that stream."""
        self.works.clear()
        self.records.clear()
        for launched in self.rounds.values():
            launched.spare.clear()

    @property
    def nonce(self) -> Tensor:
        """The arena's 16 bytes that prove mappings."""
        begin = self.place.layout.nonce
        return self.place.arena[begin : begin + NONCE_BYTES]

    @property
    def is_passed(self) -> bool:
        """Whether the device is done with the oldest round.

        Once the lane was taken down everything counts as passed: what is among the works never came onto the stream.
        """
        first = self.records[0].ticket if self.records else None
        return first is not None and first <= self.lane.passed and first not in self.works
