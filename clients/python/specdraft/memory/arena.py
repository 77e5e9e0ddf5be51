"""A host arena mapped into this process."""

from __future__ import annotations

import mmap
import os
import struct
from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

from specdraft.memory.descriptors import NONCE_SIZE_BYTES, check_descriptor

if TYPE_CHECKING:
    from array import array
    from types import TracebackType

    from specdraft.memory.layout import ArenaLayout

__all__ = ["HostArena", "SlotOutputs"]


@dataclass(frozen=True, slots=True)
class SlotOutputs:
    """What a round left in a slot.

    Attributes:
        status: 0, or the number of a `specdraft.v1.ErrorReason`.
        op: the operation that the outputs belong to.
        drafts: token ids d_1..d_n.
        logprobs: natural logarithms, one a draft.
        stop_reason: number of a `specdraft.v1.StopReason`.
        row_count: rows stored after the round.
        last_pair_key: key of the newest exact pair; -1 = none.
    """

    status: int
    op: int
    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: int
    row_count: int
    last_pair_key: int


class HostArena:
    """The mapping of one session's host arena.

    Views are zero-copy. `close` never invalidates a view that somebody still holds: the pages are then unmapped when
    the last view is released.
    """

    def __init__(self, descriptor: int, layout: ArenaLayout) -> None:
        """Maps the arena and takes over `descriptor` (it is closed here, also on failure).

        Raises:
            FailedPreconditionError: `TRANSPORT_UNAVAILABLE`: the file is not sealed, or too small.
        """
        self.layout = layout
        try:
            check_descriptor(descriptor, layout.size_bytes)
            access = mmap.PROT_READ | mmap.PROT_WRITE
            self._mapping: mmap.mmap | None = mmap.mmap(descriptor, layout.size_bytes, mmap.MAP_SHARED, access)
        finally:
            os.close(descriptor)
        self._view = memoryview(self._mapping)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Gives the mapping up. May be called twice."""
        mapping, self._mapping = self._mapping, None
        self._view.release()
        if mapping is not None:
            # BufferError: somebody holds a view, and the mapping goes with it.
            with suppress(BufferError):
                mapping.close()

    def nonce(self) -> bytes:
        """The 16 bytes that prove to the service that this is its arena."""
        start = self.layout.nonce_offset_bytes
        return bytes(self._view[start : start + NONCE_SIZE_BYTES])

    def slot_rows(self, slot: int, row_count: int) -> memoryview:
        """Bytes of the first `row_count` hidden rows of a slot, `hidden_row_stride_bytes` apart.

        Raises:
            IndexError: outside the arena.
        """
        return self._rows(self.layout.slot_rows_offset_bytes(slot, row_count), row_count)

    def staging_rows(self, first_row: int, row_count: int) -> memoryview:
        """Bytes of `row_count` rows of the staging area, `hidden_row_stride_bytes` apart.

        Raises:
            IndexError: outside the arena.
        """
        return self._rows(self.layout.staging_rows_offset_bytes(first_row, row_count), row_count)

    def write_rows(self, rows: memoryview, target: memoryview) -> None:
        """Copies dense rows (`row_size_bytes` apart) into a view of `slot_rows` or `staging_rows`.

        Raises:
            ValueError: the sizes differ.
        """
        size, stride = self.layout.row_size_bytes, self.layout.hidden_row_stride_bytes
        if stride == size:
            target[:] = rows
            return
        if rows.nbytes % size or rows.nbytes // size * stride != target.nbytes:
            message = (
                f"{rows.nbytes} bytes are not the {target.nbytes // stride} rows of {size} bytes that the view holds"
            )
            raise ValueError(message)
        for row in range(rows.nbytes // size):
            target[row * stride : row * stride + size] = rows[row * size : (row + 1) * size]

    def write_mask(self, slot: int, words: array[int]) -> None:
        """Writes the grammar mask of a slot, row after row; the session must have asked for masks.

        Args:
            slot: its index.
            words: at most [max_drafts, W] 32-bit words, flattened; the caller knows W.

        Raises:
            IndexError: there is no such slot.
        """
        start = self.layout.slot_offset_bytes(slot) + self.layout.slot.mask_offset_bytes
        self._view[start : start + len(words) * words.itemsize] = memoryview(words).cast("B")

    def slot_outputs(self, slot: int) -> SlotOutputs:
        """Reads what the last round left in a slot. Valid until the slot is used again.

        Raises:
            IndexError: there is no such slot.
        """
        start, fields, limit = self.layout.slot_offset_bytes(slot), self.layout.slot, self.layout.max_drafts
        count = min(max(self._number("<i", start + fields.draft_count_offset_bytes), 0), limit)
        return SlotOutputs(
            status=self._number("<i", start + fields.status_offset_bytes),
            op=self._number("<Q", start + fields.op_offset_bytes),
            drafts=struct.unpack_from(f"<{count}i", self._view, start + fields.drafts_offset_bytes),
            logprobs=struct.unpack_from(f"<{count}f", self._view, start + fields.logprobs_offset_bytes),
            stop_reason=self._number("<i", start + fields.stop_reason_offset_bytes),
            row_count=self._number("<i", start + fields.row_count_offset_bytes),
            last_pair_key=self._number("<q", start + fields.last_pair_key_offset_bytes),
        )

    def _rows(self, start: int, row_count: int) -> memoryview:
        return self._view[start : start + row_count * self.layout.hidden_row_stride_bytes]

    def _number(self, kind: str, offset: int) -> int:
        (value,) = struct.unpack_from(kind, self._view, offset)
        return int(value)
