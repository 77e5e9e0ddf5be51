"""Where everything lies in a session's arena. Pure arithmetic; clients are told the result and never compute it."""

from __future__ import annotations

from dataclasses import dataclass

ALIGNMENT = 64
"""Every field starts at a multiple of this: a cache line, and what vector loads like."""

NONCE_BYTES = 16


@dataclass(frozen=True, slots=True)
class ArenaWish:
    """What a session's arena must hold.

    Attributes:
        num_slots: slots.
        max_drafts: K; a slot takes K + 1 pairs.
        hidden_row_bytes: bytes of one hidden row.
        embedding_bytes: bytes of the last draft's embedding.
        vocab_size: V; for masks.
        num_prefill_rows: rows of the staging area.
        with_masks: whether slots have room for masks.
    """

    num_slots: int
    max_drafts: int
    hidden_row_bytes: int
    embedding_bytes: int
    vocab_size: int
    num_prefill_rows: int
    with_masks: bool


@dataclass(frozen=True, slots=True)
class SlotFields:
    """Byte offsets of a slot's fields from the slot's start; `mask` is 0 when there is none."""

    first_key: int
    pair_count: int
    tokens: int
    hidden: int
    mask: int
    status: int
    op: int
    draft_count: int
    stop_reason: int
    drafts: int
    logprobs: int
    last_embedding: int
    row_count: int
    last_pair_key: int
    stride: int


@dataclass(frozen=True, slots=True)
class ArenaLayout:
    """Byte offsets from the arena's start.

    Attributes:
        wish: what it holds.
        fields: inside a slot.
        nonce: the service's nonce.
        slots: slot 0.
        staging: row 0 of the staging area.
        row_stride: distance between two hidden rows.
        size: of the whole.
    """

    wish: ArenaWish
    fields: SlotFields
    nonce: int
    slots: int
    staging: int
    row_stride: int
    size: int

    def slot_hidden(self, slot: int) -> int:
        """Offset of hidden row 0 of a slot."""
        return self.slots + slot * self.fields.stride + self.fields.hidden


def lay_out(wish: ArenaWish) -> ArenaLayout:
    """Lays out an arena."""
    row_stride = _aligned(wish.hidden_row_bytes)
    fields = _slot_fields(wish, row_stride)
    slots = _aligned(NONCE_BYTES)
    staging = slots + wish.num_slots * fields.stride
    size = staging + wish.num_prefill_rows * row_stride
    return ArenaLayout(wish, fields, 0, slots, staging, row_stride, size)


def _slot_fields(wish: ArenaWish, row_stride: int) -> SlotFields:
    num_rows = wish.max_drafts + 1
    mask_bytes = wish.max_drafts * -(-wish.vocab_size // 32) * 4 if wish.with_masks else 0
    sizes = {
        "status": 4,
        "op": 8,
        "draft_count": 4,
        "stop_reason": 4,
        "drafts": wish.max_drafts * 4,
        "logprobs": wish.max_drafts * 4,
        "last_embedding": wish.embedding_bytes,
        "row_count": 4,
        "last_pair_key": 8,
        "first_key": 8,
        "pair_count": 4,
        "tokens": num_rows * 4,
        "hidden": num_rows * row_stride,
        "mask": mask_bytes,
    }
    offsets = {}
    end = 0
    for name, size in sizes.items():
        offsets[name] = end
        end += _aligned(size)
    if not mask_bytes:
        offsets["mask"] = 0
    return SlotFields(**offsets, stride=end)


def _aligned(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
