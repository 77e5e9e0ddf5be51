"""How an entry of a `Propose` wants to be drafted for: counts, confidence, grammar, advice."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import torch

from drafter_service.engine import operations as ops
from drafter_service.memory.hiddens import mask_rows
from drafter_service.server.hiddens import arena_of, check_slot
from drafter_service.server.refusals import invalid_field
from drafter_service.state import Session
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb

if TYPE_CHECKING:
    from torch import Tensor


def draft_wish(session: Session, entry: pb.ProposeEntry, vocab_size: int) -> ops.DraftWish:
    """The wish of an entry, checked. Raises SpecdraftError."""
    limit = session.agreement.max_drafts
    if entry.draft_count > limit:
        raise make_error(
            Reason.TOO_MANY_DRAFTS,
            f"{entry.draft_count} drafts; at most {limit}",
            drafts=entry.draft_count,
            limit=limit,
        )
    min_logprob = entry.min_logprob if entry.HasField("min_logprob") else None
    if min_logprob is not None and math.isnan(min_logprob):
        raise invalid_field("min_logprob", "NaN", "a number")
    if entry.HasField("output_slot"):
        check_slot(arena_of(session), entry.output_slot)
    return ops.DraftWish(
        entry.draft_count,
        min_logprob,
        _masks(session, entry, vocab_size) if entry.HasField("mask") else None,
        recommend=entry.recommend,
        verify_s=entry.verify_us / 1e6 if entry.HasField("verify_us") else None,
        max_drafts=limit,
    )


def _masks(session: Session, entry: pb.ProposeEntry, vocab_size: int) -> Tensor:
    """Masks as bool [1 or K, vocab_size], from the message or a private copy of the arena's."""
    width = -(-vocab_size // 32)
    mask = entry.mask
    if not mask.words and mask.HasField("arena_slot"):
        if mask.arena_row_count not in {1, max(entry.draft_count, 1)}:
            raise _wrong_size(mask.arena_row_count * width, width, entry.draft_count)
        return mask_rows(_arena_words(session, mask, width), vocab_size)
    if len(mask.words) not in {width, max(entry.draft_count, 1) * width}:
        raise _wrong_size(len(mask.words), width, entry.draft_count)
    return mask_rows(torch.tensor(mask.words, dtype=torch.int64), vocab_size)


def _arena_words(session: Session, mask: pb.GrammarMask, width: int) -> Tensor:
    arena = arena_of(session)
    check_slot(arena, mask.arena_slot)
    layout = arena.layout
    if not layout.wish.with_masks:
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, "the session asked for no masks in its arena", kind="mask")
    offset = layout.slots + mask.arena_slot * layout.fields.stride + layout.fields.mask
    copied = arena.copy_rows(offset, width * 4, mask.arena_row_count, width * 4)
    return torch.frombuffer(copied, dtype=torch.int32).long() & 0xFFFFFFFF


def _wrong_size(words: int, width: int, num_drafts: int) -> SpecdraftError:
    expected = f"{width} or {num_drafts} x {width}"
    return make_error(
        Reason.MASK_SIZE_MISMATCH, f"{words} mask words; expected {expected}", words=words, expected=expected
    )
