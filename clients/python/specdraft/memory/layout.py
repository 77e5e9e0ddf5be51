"""Where things lie in an arena: the numbers of `specdraft.v1.Arena`, without its secrets."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["ArenaLayout", "SlotLayout"]


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Byte offsets of a slot's fields from the slot's start, named as in `specdraft.v1.SlotLayout`."""

    first_key_offset_bytes: int
    pair_count_offset_bytes: int
    tokens_offset_bytes: int
    hidden_offset_bytes: int
    mask_offset_bytes: int
    status_offset_bytes: int
    op_offset_bytes: int
    draft_count_offset_bytes: int
    stop_reason_offset_bytes: int
    drafts_offset_bytes: int
    logprobs_offset_bytes: int
    last_embedding_offset_bytes: int
    row_count_offset_bytes: int
    last_pair_key_offset_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """An arena as laid out by the service, offsets and sizes in bytes.

    Attributes:
        row_size_bytes: hidden width times the size of one element.
        max_drafts: K; a slot holds K + 1 hidden rows and K drafts.
    """

    size_bytes: int
    slot_count: int
    slots_offset_bytes: int
    slot_stride_bytes: int
    staging_offset_bytes: int
    prefill_row_count: int
    hidden_row_stride_bytes: int
    nonce_offset_bytes: int
    row_size_bytes: int
    max_drafts: int
    slot: SlotLayout

    @property
    def slot_row_count(self) -> int:
        """Hidden rows that one slot holds."""
        return self.max_drafts + 1

    def slot_offset_bytes(self, slot: int) -> int:
        """Start of a slot.

        Raises:
            IndexError: there is no such slot.
        """
        if not 0 <= slot < self.slot_count:
            message = f"slot {slot} is outside 0..{self.slot_count - 1}"
            raise IndexError(message)
        return self.slots_offset_bytes + slot * self.slot_stride_bytes

    def slot_rows_offset_bytes(self, slot: int, row_count: int) -> int:
        """Start of the slot's hidden rows.

        Raises:
            IndexError: no such slot, or it holds fewer than `row_count` rows.
        """
        start = self.slot_offset_bytes(slot)
        if not 0 <= row_count <= self.slot_row_count:
            message = f"{row_count} rows do not fit into a slot of {self.slot_row_count}"
            raise IndexError(message)
        return start + self.slot.hidden_offset_bytes

    def staging_rows_offset_bytes(self, first_row: int, row_count: int) -> int:
        """Start of `row_count` rows of the staging area.

        Raises:
            IndexError: the area ends before.
        """
        if first_row < 0 or row_count < 0 or first_row + row_count > self.prefill_row_count:
            message = (
                f"rows {first_row}..{first_row + row_count} are outside a staging area of {self.prefill_row_count}"
            )
            raise IndexError(message)
        return self.staging_offset_bytes + first_row * self.hidden_row_stride_bytes
