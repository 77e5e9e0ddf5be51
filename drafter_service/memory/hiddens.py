"""Hidden rows as they arrive: bytes in, a private and checked tensor out."""

from __future__ import annotations

import ctypes
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

import torch
from torch import Tensor

from specdraft.errors import Reason, make_error

DTYPES: Mapping[str, torch.dtype] = MappingProxyType(
    {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
)
"""Element types of hidden rows, by the name used in the handshake."""


ITEM_BYTES: Mapping[str, int] = MappingProxyType({name: dtype.itemsize for name, dtype in DTYPES.items()})
"""Bytes of an element."""

FEW_BYTES = 64 << 10
"""A round's rows: so many are looked at on the host, wherever they lie."""

_LARGE_TOPS: Mapping[str, bytes] = MappingProxyType(
    {"float32": b"\x7f\xff", "bfloat16": b"\x7f\xff", "float16": b"\x7c\x7d\x7e\x7f\xfc\xfd\xfe\xff"}
)
"""Upper bytes (the sign, and the exponent's upper bits) of NaN, of infinities, and but for float16 of the largest."""


@dataclass(slots=True)
class PackedRows:
    """A round's few rows, private and checked, not a tensor yet: whoever runs the batch wakes torch up, once.

    Attributes:
        buffer: packed little-endian elements of the head's type.
        width: elements of a row.
        dtype: name of that type.
    """

    buffer: bytearray
    width: int
    dtype: str

    def settled(self) -> Tensor | PackedRows:
        """The rows, once they are there and checked."""
        return self

    def tensor(self) -> Tensor:
        """The rows [rows, width], over the same memory."""
        return torch.frombuffer(self.buffer, dtype=DTYPES[self.dtype]).view(-1, self.width)


class RowsToCome(PackedRows):
    """A round's few rows that are being copied. They are nothing before they are settled, once.

    Args:
        copied: waits for the copy, and returns it.
        dtype: name of its elements' type.
        width: elements of a row.
        head_dtype: name of the element type that the head computes in.
    """

    __slots__ = ("_copied", "_given_dtype")

    def __init__(self, copied: Callable[[], bytearray], dtype: str, width: int, head_dtype: str) -> None:
        super().__init__(bytearray(), width, head_dtype)
        self._copied = copied
        self._given_dtype = dtype

    def settled(self) -> Tensor | PackedRows:
        """The rows, as `hidden_rows` gives them. Raises HIDDEN_NOT_FINITE."""
        return hidden_rows(self._copied(), self._given_dtype, self.width, self.dtype)


def tensor_of(rows: Tensor | PackedRows) -> Tensor:
    """Rows as a tensor [rows, width]."""
    return rows.tensor() if isinstance(rows, PackedRows) else rows


def hidden_rows(data: bytes | bytearray, dtype: str, width: int, head_dtype: str) -> Tensor | PackedRows:
    """Packed little-endian rows [rows, width] in the head's element type.

    Args:
        data: private to the service. A bytearray is used in place, bytes are copied.
        dtype: name of the element type.
        width: elements of a row; len(data) is a multiple of the row's bytes.
        head_dtype: name of the element type that the head computes in.

    Raises:
        HIDDEN_NOT_FINITE: an element is NaN or infinite, or becomes so in the head's type; names the first such row.
    """
    buffer = data if isinstance(data, bytearray) else bytearray(data)
    if dtype == head_dtype and len(buffer) <= FEW_BYTES and _has_no_large(buffer, dtype):
        return PackedRows(buffer, width, dtype)
    rows = torch.frombuffer(buffer, dtype=DTYPES[dtype]).view(-1, width)
    if head_dtype != dtype:
        rows = rows.to(DTYPES[head_dtype])
    _require_finite(rows)
    return rows


def checked_rows(rows: Tensor, head_dtype: str) -> Tensor:
    """Private rows [rows, width], on whatever device, in the head's element type.

    Raises:
        HIDDEN_NOT_FINITE: as `hidden_rows`.
    """
    rows = rows.to(DTYPES[head_dtype])
    _require_finite(rows)
    return rows


def _has_no_large(buffer: bytearray, dtype: str) -> bool:
    """Whether all elements are so small that none is NaN or infinite; without waking torch up."""
    size = ITEM_BYTES[dtype]
    tops = buffer[size - 1 :: size]
    return not any(map(tops.__contains__, _LARGE_TOPS[dtype]))


def _require_finite(rows: Tensor) -> None:
    # A sum is finite only if all its terms are; only when it is not (which overflow can cause too) look at each.
    if math.isfinite(rows.sum(dtype=torch.float64).item()):
        return
    finite = torch.isfinite(rows).all(dim=1)
    if not finite.all():
        row = int((~finite).nonzero()[0, 0])
        raise make_error(Reason.HIDDEN_NOT_FINITE, f"hidden row {row} holds NaN or an infinity", row=row)


def mask_rows(words: Tensor, vocab_size: int) -> Tensor:
    """Grammar mask words as bool [rows, vocab_size]; bit id % 32 of word id // 32 allows id.

    Args:
        words: int64, unsigned values, a multiple of ceil(vocab_size / 32).
        vocab_size: ids.
    """
    packed = words.view(-1, -(-vocab_size // 32), 1)
    bits = (packed >> torch.arange(32)) & 1
    return bits.flatten(1)[:, :vocab_size].bool()


def embedding_bytes(embedding: Tensor, dtype: str) -> bytes:
    """An embedding [H] as little-endian elements of a hidden dtype."""
    packed = embedding.to(DTYPES[dtype]).contiguous().cpu()
    return ctypes.string_at(packed.data_ptr(), packed.nbytes)
