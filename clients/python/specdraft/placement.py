"""Where the hidden rows and the mask of one request lie: an arena slot, the staging area, or the message itself."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import replace
from typing import Final, Literal, TypeAlias

from specdraft.hiddens import HiddenRows
from specdraft.memory import CudaArena, DeviceRange, HostArena, SlotPool, StagingRows
from specdraft.regions import Regions
from specdraft.terms import SessionTerms
from specdraft.v1 import drafter_pb2, tensor_pb2
from specdraft.values import value
from specdraft.words import wire

__all__ = ["MESSAGE_MARGIN_BYTES", "TOKEN_SIZE_BYTES", "ClientArena", "Placed", "Placement"]

TOKEN_SIZE_BYTES: Final = 5
"""Longest varint of a token id."""

MESSAGE_MARGIN_BYTES: Final = 1024
"""Room for the ids, numbers and tags of one entry and of the frame around it, in bytes; a grammar mask is extra."""

_MASK_WORD_BYTES: Final = 4

ClientArena: TypeAlias = HostArena | CudaArena


@value
class Placed:
    """Rows that lie somewhere.

    Attributes:
        ref: how the request names them.
        row_count: how many of the rows given were placed: the first ones.
        message_size_bytes: what they and their tokens add to the message.
        kind, slot: what to give back.
        mask: how the request names its grammar mask; None = it has none.
        is_under_way: they are being copied there; see `Placement.wait_for`.
    """

    ref: tensor_pb2.TensorRef
    row_count: int
    message_size_bytes: int
    kind: Literal["slot", "staging", "inline", "region"]
    slot: int = 0
    mask: drafter_pb2.GrammarMask | None = None
    is_under_way: bool = False


class Placement:
    """Copies hidden rows to where the service reads them. Used by several threads.

    A place belongs to one request, and to nobody else until the service is known to be done with it.

    Attributes:
        inline_rows_max: most rows of one request that travel inside the message.
    """

    def __init__(self, terms: SessionTerms, arena: ClientArena | None, regions: Regions | None = None) -> None:
        self._terms = terms
        self._wire_dtype = wire(terms.dtype)
        self._arena = arena
        self._regions = regions
        self._lock = threading.Lock()
        self._slots = SlotPool(arena.layout.slot_count if arena else 0)
        self._staging = StagingRows(arena.layout.prefill_row_count if arena else 0)
        room = terms.message_size_max_bytes - MESSAGE_MARGIN_BYTES
        self.inline_rows_max = max(1, room // (terms.row_size_bytes + TOKEN_SIZE_BYTES))

    def place(self, rows: HiddenRows) -> Placed:
        """Places the rows in a slot, else in the staging area, else (as many as a message takes) inline.

        Rows that lie in a region stay there. Those in GPU memory are on their way when this returns.

        Raises:
            ValueError: the rows are in GPU memory, and this session shares none.
        """
        if isinstance(rows.data, DeviceRange):
            if not isinstance(self._arena, CudaArena):
                text = "the hidden rows are in GPU memory, and this session shares none"
                raise ValueError(text)  # noqa: TRY004  # the type is right, the session is not
            place = self._regions.find(rows.data) if self._regions is not None and rows.row_count else None
            if place is not None:
                return Placed(self._ref(rows, region=place), rows.row_count, self._message_size(rows), "region")
        if self._arena is not None and rows.row_count:
            placed = self._place_in_slot(self._arena, rows) or self._place_in_staging(self._arena, rows)
            if placed is not None:
                return placed
        kept = rows.rows(0, min(rows.row_count, self.inline_rows_max))
        ref = tensor_pb2.TensorRef(inline=bytes(kept.data), dtype=self._wire_dtype, row_count=kept.row_count)
        size = MESSAGE_MARGIN_BYTES + kept.data.nbytes + TOKEN_SIZE_BYTES * kept.row_count
        return Placed(ref, kept.row_count, size, "inline")

    def wait_for(self, placed: Iterable[Placed]) -> None:
        """Waits until rows are where `place` has said: what does not need them is done before."""
        for one in placed:
            if one.is_under_way:
                assert isinstance(self._arena, CudaArena), "only there rows are under way"
                self._arena.gpu.wait()
                return

    def place_mask(self, placed: Placed, words: array[int]) -> Placed:
        """Puts a mask beside rows that lie in a slot, if the session has room for masks there; else in the message.

        Args:
            placed: where the rows are.
            words: [W] or [K, W] flattened. What is neither goes into the message: the service says what is wrong.
        """
        width, arena = self._terms.mask_words, self._arena
        row_count, rest = divmod(len(words), width) if width else (0, 1)
        if arena is None or placed.kind != "slot" or rest or not 1 <= row_count <= arena.layout.max_drafts:
            mask = drafter_pb2.GrammarMask(words=words)
            size = placed.message_size_bytes + _MASK_WORD_BYTES * len(words)
            return replace(placed, mask=mask, message_size_bytes=size)
        arena.write_mask(placed.slot, words)
        return replace(placed, mask=drafter_pb2.GrammarMask(arena_slot=placed.slot, arena_row_count=row_count))

    def release(self, placed: Placed) -> None:
        """Gives a place back, once the service no longer reads it."""
        with self._lock:
            if placed.kind == "slot":
                self._slots.give(placed.slot)
            elif placed.kind == "staging":
                self._staging.release()

    def claim_slot(self) -> int:
        """A slot for device-resident rounds, the caller's until `give_slot`.

        Raises:
            ValueError: none is free; ask for more by `slot_count`.
        """
        with self._lock:
            slot = self._slots.take()
        if slot is None:
            raise ValueError("no arena slot is free: ask for more by slot_count")
        return slot

    def give_slot(self, slot: int) -> None:
        """Gives a claimed slot back."""
        with self._lock:
            self._slots.give(slot)

    @property
    def in_use_count(self) -> int:
        """Slots and staging claims not given back."""
        with self._lock:
            slot_count = self._arena.layout.slot_count if self._arena else 0
            return slot_count - self._slots.free_count + self._staging.claim_count

    def _place_in_slot(self, arena: ClientArena, rows: HiddenRows) -> Placed | None:
        if rows.row_count > arena.layout.slot_row_count:
            return None
        with self._lock:
            slot = self._slots.take()
        if slot is None:
            return None
        is_under_way = _write(arena, rows, arena.slot_rows(slot, rows.row_count))
        # In place: a message that is put into another is copied.
        ref = tensor_pb2.TensorRef(dtype=self._wire_dtype, row_count=rows.row_count)
        ref.arena_slot.slot = slot
        ref.arena_slot.SetInParent()  # slot 0 is the default, and would not be there
        return Placed(ref, rows.row_count, self._message_size(rows), "slot", slot, is_under_way=is_under_way)

    def _place_in_staging(self, arena: ClientArena, rows: HiddenRows) -> Placed | None:
        with self._lock:
            first_row = self._staging.claim(rows.row_count)
        if first_row is None:
            return None
        is_under_way = _write(arena, rows, arena.staging_rows(first_row, rows.row_count))
        ref = self._ref(rows, arena_staging=tensor_pb2.ArenaStaging(first_row=first_row))
        return Placed(ref, rows.row_count, self._message_size(rows), "staging", is_under_way=is_under_way)

    def _ref(
        self,
        rows: HiddenRows,
        arena_slot: tensor_pb2.ArenaSlot | None = None,
        arena_staging: tensor_pb2.ArenaStaging | None = None,
        region: tensor_pb2.RegionRange | None = None,
    ) -> tensor_pb2.TensorRef:
        return tensor_pb2.TensorRef(
            arena_slot=arena_slot,
            arena_staging=arena_staging,
            region=region,
            dtype=self._wire_dtype,
            row_count=rows.row_count,
        )

    @staticmethod
    def _message_size(rows: HiddenRows) -> int:
        return MESSAGE_MARGIN_BYTES + TOKEN_SIZE_BYTES * rows.row_count


def _write(arena: ClientArena, rows: HiddenRows, target: memoryview | DeviceRange) -> bool:
    """Copies rows; whether they are still under way, as those in GPU memory are."""
    if isinstance(target, DeviceRange):
        assert isinstance(arena, CudaArena), "only it has such views"
        if isinstance(rows.data, DeviceRange):
            arena.start_rows(rows.data, target)
            return True
        arena.write_rows(rows.data, target)
    else:
        assert isinstance(arena, HostArena), "only it has such views"
        assert isinstance(rows.data, memoryview), "place has checked it"
        arena.write_rows(rows.data, target)
    return False
