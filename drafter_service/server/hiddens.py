"""Hidden rows named by a message: found, bounded, copied, checked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from drafter_service.memory import HostArena
from drafter_service.memory.hiddens import DTYPES, PackedRows, hidden_rows
from drafter_service.server.refusals import invalid_field, not_implemented
from drafter_service.state import Session
from specdraft.errors import Reason, make_error
from specdraft.v1 import tensor_pb2

if TYPE_CHECKING:
    from torch import Tensor

DTYPE_NAMES: Mapping[int, str] = MappingProxyType(
    {
        tensor_pb2.D_TYPE_FLOAT32: "float32",
        tensor_pb2.D_TYPE_BFLOAT16: "bfloat16",
        tensor_pb2.D_TYPE_FLOAT16: "float16",
    }
)
"""Element types by their number on the wire."""


def read_hiddens(session: Session, ref: tensor_pb2.TensorRef, head_dtype: str) -> Tensor | PackedRows:
    """The rows that a TensorRef names: a private copy, checked.

    Returns:
        [row_count, hidden width], in the head's element type `head_dtype`.
    """
    expected, given = session.agreement.hidden_dtype, DTYPE_NAMES.get(ref.dtype, "unspecified")
    if given != expected:
        raise make_error(
            Reason.HIDDEN_DTYPE_MISMATCH,
            f"hidden rows are {given}; the session sends {expected}",
            dtype=given,
            expected=expected,
        )
    width = session.agreement.hidden_width
    row_bytes = width * DTYPES[expected].itemsize
    place = ref.WhichOneof("memory")
    if place == "inline":
        data: bytes | bytearray = _inline_rows(ref, row_bytes)
    elif place in {"arena_slot", "arena_staging"}:
        data = _arena_rows(session, ref, row_bytes)
    elif place == "region":
        raise not_implemented("TensorRef.region")
    else:
        raise invalid_field("hiddens.memory", "not set", "one of arena_slot, arena_staging, region, inline")
    return hidden_rows(data, expected, width, head_dtype)


def _inline_rows(ref: tensor_pb2.TensorRef, row_bytes: int) -> bytes:
    _check_stride(ref, row_bytes)
    expected = ref.row_count * row_bytes
    if len(ref.inline) != expected:
        raise make_error(
            Reason.HIDDEN_SIZE_MISMATCH,
            f"{len(ref.inline)} bytes; {ref.row_count} rows have {expected}",
            bytes=len(ref.inline),
            expected=expected,
        )
    return ref.inline


def arena_of(session: Session) -> HostArena:
    """The session's arena. Raises TRANSPORT_UNAVAILABLE, or MAPPING_NOT_PROVEN."""
    if not isinstance(session.arena, HostArena):
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, "this session has no arena", kind="arena")
    if not session.mapping_proven:
        raise make_error(Reason.MAPPING_NOT_PROVEN, "no KeepAlive has returned the arena's nonce yet")
    return session.arena


def _arena_rows(session: Session, ref: tensor_pb2.TensorRef, row_bytes: int) -> bytearray:
    arena = arena_of(session)
    layout = arena.layout
    if ref.HasField("arena_slot"):
        check_slot(arena, ref.arena_slot.slot)
        offset, num_rows = layout.slot_hidden(ref.arena_slot.slot), layout.wish.max_drafts + 1
        first_row = 0
    else:
        first_row = ref.arena_staging.first_row
        offset, num_rows = layout.staging + first_row * layout.row_stride, layout.wish.num_prefill_rows
    _check_stride(ref, layout.row_stride)
    end = first_row + ref.row_count
    if end > num_rows:
        raise make_error(
            Reason.MEMORY_OUT_OF_BOUNDS,
            f"rows [{first_row}, {end}) of {num_rows}",
            field="first_row" if first_row >= num_rows else "row_count",
            value=first_row if first_row >= num_rows else end,
            limit=num_rows,
        )
    return arena.copy_rows(offset, layout.row_stride, ref.row_count, row_bytes)


def _check_stride(ref: tensor_pb2.TensorRef, stride: int) -> None:
    if ref.row_stride_bytes not in {0, stride}:
        raise invalid_field("hiddens.row_stride_bytes", ref.row_stride_bytes, f"0 or {stride}")


def check_slot(arena: HostArena, slot: int) -> None:
    """Raises MEMORY_OUT_OF_BOUNDS for a slot that the arena does not have."""
    limit = arena.layout.wish.num_slots
    if slot >= limit:
        raise make_error(Reason.MEMORY_OUT_OF_BOUNDS, f"slot {slot} of {limit}", field="slot", value=slot, limit=limit)
