"""Hidden rows named by a message: found, bounded, copied, checked."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import TYPE_CHECKING

from drafter_service.memory import CudaArena, SharedArena
from drafter_service.memory.hiddens import ITEM_BYTES, PackedRows, hidden_rows
from drafter_service.memory.regions import RegionTable
from drafter_service.server.refusals import invalid_field
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
    """The rows that a TensorRef names: a private copy, checked; packed rows may have to be settled before they are.

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
    row_bytes = width * ITEM_BYTES[expected]
    place = ref.WhichOneof("memory")
    if place == "inline":
        data: bytes | bytearray = _inline_rows(ref, row_bytes)
    elif place in {"arena_slot", "arena_staging"}:
        arena = arena_of(session)
        offset = _arena_offset(arena, ref)
        if isinstance(arena, CudaArena):
            return arena.start_hidden_rows(offset, ref.row_count, dtype=expected, head_dtype=head_dtype, width=width)
        data = arena.copy_rows(offset, arena.layout.row_stride, ref.row_count, row_bytes)
    elif place == "region":
        return _region_rows(session, ref, head_dtype)
    else:
        raise invalid_field("hiddens.memory", "not set", "one of arena_slot, arena_staging, region, inline")
    return hidden_rows(data, expected, width, head_dtype)


def _inline_rows(ref: tensor_pb2.TensorRef, row_bytes: int) -> bytes:
    if ref.row_stride_bytes:
        _check_stride(ref, row_bytes)
    expected, inline = ref.row_count * row_bytes, ref.inline
    if len(inline) != expected:
        raise make_error(
            Reason.HIDDEN_SIZE_MISMATCH,
            f"{len(inline)} bytes; {ref.row_count} rows have {expected}",
            bytes=len(inline),
            expected=expected,
        )
    return inline


def _region_rows(session: Session, ref: tensor_pb2.TensorRef, head_dtype: str) -> Tensor:
    agreement = session.agreement
    return regions_of(session).hidden_rows(
        ref.region.region_id,
        ref.region.offset_bytes,
        ref.row_count,
        dtype=agreement.hidden_dtype,
        head_dtype=head_dtype,
        width=agreement.hidden_width,
        stride=ref.row_stride_bytes,
    )


def regions_of(session: Session) -> RegionTable:
    """The session's regions. Raises TRANSPORT_UNAVAILABLE where none can be registered."""
    if not isinstance(session.regions, RegionTable):
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, "clients' memory is not opened for this session", kind="region")
    return session.regions


def arena_of(session: Session) -> SharedArena:
    """The session's arena. Raises TRANSPORT_UNAVAILABLE, or MAPPING_NOT_PROVEN."""
    if not isinstance(session.arena, SharedArena):
        raise make_error(Reason.TRANSPORT_UNAVAILABLE, "this session has no arena", kind="arena")
    if not session.mapping_proven:
        raise make_error(Reason.MAPPING_NOT_PROVEN, "no KeepAlive has returned the arena's nonce yet")
    return session.arena


def _arena_offset(arena: SharedArena, ref: tensor_pb2.TensorRef) -> int:
    """Where the first row is; all of them lie in their slot or the staging area."""
    layout = arena.layout
    if ref.HasField("arena_slot"):
        check_slot(arena, ref.arena_slot.slot)
        offset, num_rows = layout.slot_hidden(ref.arena_slot.slot), layout.wish.max_drafts + 1
        first_row = 0
    else:
        first_row = ref.arena_staging.first_row
        offset, num_rows = layout.staging + first_row * layout.row_stride, layout.wish.num_prefill_rows
    if ref.row_stride_bytes:
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
    return offset


def _check_stride(ref: tensor_pb2.TensorRef, stride: int) -> None:
    if ref.row_stride_bytes not in {0, stride}:
        raise invalid_field("hiddens.row_stride_bytes", ref.row_stride_bytes, f"0 or {stride}")


def check_slot(arena: SharedArena, slot: int) -> None:
    """Raises MEMORY_OUT_OF_BOUNDS for a slot that the arena does not have."""
    limit = arena.layout.wish.num_slots
    if slot >= limit:
        raise make_error(Reason.MEMORY_OUT_OF_BOUNDS, f"slot {slot} of {limit}", field="slot", value=slot, limit=limit)
