"""What holds for the length of a session, and how the service's answer says it."""

from __future__ import annotations

from dataclasses import dataclass

from specdraft.answers import Carry
from specdraft.channel import MESSAGE_SIZE_MAX_BYTES
from specdraft.errors import SpecdraftError, UnavailableError
from specdraft.memory import ArenaLayout, SlotLayout
from specdraft.options import SessionOptions
from specdraft.server_info import ServerInfo
from specdraft.v1 import session_pb2, tensor_pb2
from specdraft.words import DType, MemoryKind

__all__ = ["SessionTerms", "closed_error", "inherited_error", "read_layout", "read_terms"]


@dataclass(frozen=True, slots=True)
class SessionTerms:
    """What holds for the length of a session.

    Attributes:
        dtype, width: of the hidden rows.
        max_drafts: K_max of this session; a propose takes at most K_max + 1 pairs.
        entries_max: most entries of one call.
        rows_max: most pairs of one `Catchup` entry.
        message_size_max_bytes: largest request.
        lease_s, grace_s: how long the session lives after its last call, and after its stream broke.
        memory_kind: how hidden rows travel.
        carries: found under the carry key when the session opened.
        layer_count: decoder layers of the head.
        page_rows: rows of a page of the service's KV pool.
        mask_words: 32-bit words of one mask row, where the arena has room for masks; 0 = it has none.
    """

    session_id: bytes
    dtype: DType
    width: int
    max_drafts: int
    entries_max: int
    rows_max: int
    message_size_max_bytes: int
    lease_s: float
    grace_s: float
    timeout_s: float
    memory_kind: MemoryKind
    incarnation: bytes
    carries: tuple[Carry, ...]
    layer_count: int
    page_rows: int
    mask_words: int = 0

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one hidden row."""
        return self.width * self.dtype.size_bytes


def read_terms(options: SessionOptions, info: ServerInfo, answer: session_pb2.OpenSessionResponse) -> SessionTerms:
    """Joins what was asked, what the service is, and what it granted."""
    limits = info.limits
    kind = MemoryKind(answer.memory_kind)
    rows_max = limits.prefill_rows_max
    if kind is not MemoryKind.INLINE:
        rows_max = min(rows_max, answer.arena.prefill_row_count or rows_max)
    return SessionTerms(
        session_id=answer.session_id,
        dtype=options.dtype,
        width=options.hidden_width or info.head.hidden_width,
        max_drafts=answer.max_drafts,
        entries_max=limits.propose_batch_max,
        rows_max=rows_max,
        message_size_max_bytes=limits.message_size_max_bytes or MESSAGE_SIZE_MAX_BYTES,
        lease_s=answer.lease_ms / 1000,
        grace_s=limits.grace_ms / 1000,
        timeout_s=options.timeout_s,
        memory_kind=kind,
        incarnation=answer.incarnation,
        carries=tuple(Carry.read(one) for one in answer.carries),
        layer_count=info.head.layer_count,
        page_rows=limits.kv_page_row_count,
        mask_words=-(-info.head.vocab_size // 32) if answer.arena.slot.mask_offset_bytes else 0,
    )


def read_layout(arena: tensor_pb2.Arena, terms: SessionTerms) -> ArenaLayout:
    """The arena's layout, without its secrets."""
    names = [name for name in ArenaLayout.__slots__ if name not in ("slot", "row_size_bytes", "max_drafts")]
    slot = SlotLayout(**{name: getattr(arena.slot, name) for name in SlotLayout.__slots__})
    fields = {name: getattr(arena, name) for name in names}
    return ArenaLayout(**fields, slot=slot, row_size_bytes=terms.row_size_bytes, max_drafts=terms.max_drafts)


def closed_error() -> SpecdraftError:
    """What using a closed client raises."""
    return UnavailableError(None, "this client is closed")


def inherited_error() -> SpecdraftError:
    """What using a client raises in a process that has it from before a fork: the connection is its parent's."""
    return UnavailableError(None, "this client belongs to the process that it was opened in: open another after a fork")
