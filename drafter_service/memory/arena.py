"""The host arena: a sealed memfd that client and service both map."""

from __future__ import annotations

import fcntl
import mmap
import os
import secrets
import struct
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from drafter_service.memory.layout import NONCE_BYTES, ArenaLayout
from specdraft.errors import Reason, make_error


@dataclass(frozen=True, slots=True)
class SlotOutputs:
    """What a slot tells after a round.

    Attributes:
        op: the operation's number.
        status: 0, or the number of an ErrorReason.
        stop_reason: number of a StopReason.
        drafts: d_1 .. d_n.
        logprobs: one a draft.
        last_embedding: little-endian elements in the session's dtype, or empty.
        row_count: rows stored.
        last_pair_key: newest exact pair, -1 = none.
    """

    op: int
    status: int
    stop_reason: int
    drafts: Sequence[int]
    logprobs: Sequence[float]
    last_embedding: bytes
    row_count: int
    last_pair_key: int


def check_rows(layout: ArenaLayout, offset: int, stride: int, num_rows: int, row_bytes: int) -> None:
    """Raises MEMORY_OUT_OF_BOUNDS for rows that do not lie inside the arena."""
    end = offset + (num_rows - 1) * stride + row_bytes
    if offset < 0 or stride < row_bytes or end > layout.size:
        raise make_error(
            Reason.MEMORY_OUT_OF_BOUNDS,
            f"rows end at byte {end} of an arena of {layout.size}",
            field="row_stride_bytes" if stride < row_bytes else "row_count",
            value=end,
            limit=layout.size,
        )


def pack_outputs(memory: bytearray | mmap.mmap, base: int, layout: ArenaLayout, outputs: SlotOutputs) -> None:
    """Writes the output fields of the slot at `base`, all but `op`."""
    fields = layout.fields
    count = len(outputs.drafts)
    struct.pack_into("<i", memory, base + fields.status, outputs.status)
    struct.pack_into("<i", memory, base + fields.draft_count, count)
    struct.pack_into("<i", memory, base + fields.stop_reason, outputs.stop_reason)
    struct.pack_into(f"<{count}i", memory, base + fields.drafts, *outputs.drafts)
    struct.pack_into(f"<{count}f", memory, base + fields.logprobs, *outputs.logprobs)
    begin = base + fields.last_embedding
    memory[begin : begin + len(outputs.last_embedding)] = outputs.last_embedding
    struct.pack_into("<i", memory, base + fields.row_count, outputs.row_count)
    struct.pack_into("<q", memory, base + fields.last_pair_key, outputs.last_pair_key)


class Offers(Protocol):
    """Where a descriptor is offered to the client."""

    def offer(self, descriptor: int) -> bytes:
        """Makes a token, good once, for a duplicate of the descriptor."""
        ...

    def withdraw(self, token: bytes) -> None:
        """Ends an offer that nobody took."""
        ...


class HostArena:
    """One session's shared memory in host pages.

    The memfd is sealed against shrinking and growing before anybody else can have it: a client that truncated a plain
    mapped file would kill the service with SIGBUS.

    Args:
        layout: where everything lies.
        offers: where its descriptor is offered.

    Attributes:
        nonce: what the service wrote into it.
        token: what the client shows to get the descriptor.
    """

    def __init__(self, layout: ArenaLayout, offers: Offers) -> None:
        self.layout = layout
        self.nonce = secrets.token_bytes(NONCE_BYTES)
        self._lock = threading.Lock()
        self._closed = False
        self._offers = offers
        descriptor = os.memfd_create("specdraft-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        try:
            os.ftruncate(descriptor, layout.size)
            fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            self._map = mmap.mmap(descriptor, layout.size)
            self._map[layout.nonce : layout.nonce + NONCE_BYTES] = self.nonce
            self.token = offers.offer(descriptor)
        finally:
            os.close(descriptor)  # the mapping and the offer hold the memory by themselves

    def copy_rows(self, offset: int, stride: int, num_rows: int, row_bytes: int) -> bytearray:
        """A private copy of rows, packed. The peer may write while it is made, and cannot touch it afterwards.

        Args:
            offset: of the first row, from the arena's start.
            stride: distance between two rows.
            num_rows: rows.
            row_bytes: bytes of one row.

        Raises:
            MEMORY_OUT_OF_BOUNDS: the rows do not lie inside the arena.
        """
        check_rows(self.layout, offset, stride, num_rows, row_bytes)
        copied = bytearray(num_rows * row_bytes)
        with self._lock:
            self._check_open()
            for row in range(num_rows):
                begin = offset + row * stride
                copied[row * row_bytes : (row + 1) * row_bytes] = self._map[begin : begin + row_bytes]
        return copied

    def write_outputs(self, slot: int, outputs: SlotOutputs) -> None:
        """Writes a slot's outputs; `op` last, so that a reader that sees it sees the rest."""
        fields = self.layout.fields
        base = self.layout.slots + slot * fields.stride
        with self._lock:
            self._check_open()
            pack_outputs(self._map, base, self.layout, outputs)
            struct.pack_into("<Q", self._map, base + fields.op, outputs.op)

    def close(self) -> None:
        """Unmaps the arena. The client's mapping stays readable until it lets go of it. Safe to call twice."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._map.close()
        self._offers.withdraw(self.token)

    def _check_open(self) -> None:
        if self._closed:
            raise make_error(Reason.SESSION_UNKNOWN, "the session has ended")
