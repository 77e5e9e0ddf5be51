"""Hidden rows in whatever form the caller has them, as plain bytes. Imports neither torch nor numpy."""

from __future__ import annotations

import ctypes
from typing import Any, Final

from specdraft.memory import DeviceRange
from specdraft.values import value
from specdraft.words import DType

__all__ = ["HiddenRows", "read_rows"]

_FORMATS: Final = {
    "f": "float32",
    "<f": "float32",
    "=f": "float32",
    "H": "bfloat16",
    "<H": "bfloat16",
    "=H": "bfloat16",
    "d": "float64",
    "<d": "float64",
    "e": "float16",
    "<e": "float16",
}
_TYPES: Final = {DType.FLOAT32: "torch.float32", DType.BFLOAT16: "torch.bfloat16", DType.FLOAT16: "torch.float16"}
_RAW_FORMATS: Final = frozenset({"B", "b", "c"})


@value
class HiddenRows:
    """Dense hidden rows.

    Attributes:
        data: `row_count * width` elements, little-endian, row after row, as a flat view of bytes, or where they lie in
            GPU memory.
        dtype: element type (bfloat16 as raw bits).
        row_count: rows.
        width: elements of a row.
        owner: whatever keeps the bytes alive while `data` is used.
    """

    data: memoryview | DeviceRange
    dtype: DType
    row_count: int
    width: int
    owner: object = None

    def __post_init__(self) -> None:
        """Checks that the bytes are there.

        Raises:
            ValueError: `data` does not hold `row_count` rows.
        """
        expected = self.row_count * self.row_size_bytes
        if self.data.nbytes != expected:
            message = (
                f"{self.data.nbytes} bytes are not {self.row_count} rows of {self.width} {self.dtype.name} ({expected})"
            )
            raise ValueError(message)

    @property
    def row_size_bytes(self) -> int:
        """Bytes of one row."""
        return self.width * self.dtype.size_bytes

    def rows(self, begin: int, end: int) -> HiddenRows:
        """The rows begin <= i < end, sharing the bytes."""
        if begin == 0 and end == self.row_count:
            return self
        size = self.row_size_bytes
        view = self.data[begin * size : end * size]
        return HiddenRows(view, self.dtype, end - begin, self.width, self.owner)


def read_rows(value: object, dtype: DType, width: int) -> HiddenRows:
    """Reads hidden rows without copying them where that is possible.

    Args:
        value: `HiddenRows`; bytes, bytearray or a memoryview of raw bytes; a buffer of shape [rows, width] (a numpy
            array of float32, or of uint16 holding bfloat16 bits); a torch tensor of shape [rows, width] on the CPU, or
            on the session's GPU, where whatever computes it is in the default stream or done; or a `DeviceRange`.
        dtype: the session's element type.
        width: the session's hidden width.

    Raises:
        ValueError: another dtype, width or shape; the message names what was given and what is expected.
    """
    if isinstance(value, HiddenRows):
        if (value.dtype, value.width) != (dtype, width):
            raise _mismatch(f"{value.dtype.name} rows of {value.width}", dtype, width)
        return value
    if isinstance(value, DeviceRange):
        row_count, rest = divmod(value.nbytes, width * dtype.size_bytes)
        if rest:
            raise _mismatch(f"{value.nbytes} bytes of GPU memory", dtype, width)
        return HiddenRows(value, dtype, row_count, width, value)
    if hasattr(value, "untyped_storage"):
        return _read_tensor(value, dtype, width)
    try:
        view = memoryview(value)  # type: ignore[arg-type]
    except TypeError:
        raise _mismatch(f"a {type(value).__name__}", dtype, width) from None
    return _read_buffer(view, dtype, width)


def _read_buffer(view: memoryview, dtype: DType, width: int) -> HiddenRows:
    raw = view.format in _RAW_FORMATS
    given = "bytes" if raw else _FORMATS.get(view.format, f"elements of format {view.format!r}")
    if not raw and (given != dtype.name.lower() or view.ndim != 2 or view.shape is None or view.shape[1] != width):
        raise _mismatch(f"{given} of shape {list(view.shape or ())}", dtype, width)
    flat = view.cast("B") if view.c_contiguous and view.nbytes else memoryview(view.tobytes())
    row_count, rest = divmod(flat.nbytes, width * dtype.size_bytes)
    if rest:
        raise _mismatch(f"{flat.nbytes} bytes", dtype, width)
    return HiddenRows(flat, dtype, row_count, width, view)


def _read_tensor(tensor: Any, dtype: DType, width: int) -> HiddenRows:
    """Reads a torch tensor through its address: bfloat16 has no buffer protocol, and torch must not be imported."""
    shape, place = tensor.shape, tensor.device.type
    if (
        len(shape) != 2
        or shape[1] != width
        or str(tensor.dtype) != _TYPES[dtype]
        or (place != "cuda" and place != "cpu")  # noqa: PLR1714  # quicker than a set
    ):
        kind = str(tensor.dtype).removeprefix("torch.")
        raise _mismatch(f"a {kind} tensor of shape {list(shape)} on {tensor.device}", dtype, width)
    dense = tensor if tensor.is_contiguous() else tensor.detach().contiguous()
    row_count = shape[0]
    if row_count == 0:
        return HiddenRows(memoryview(b""), dtype, 0, width)
    pointer, size = dense.data_ptr(), row_count * width * dtype.size_bytes
    if place == "cuda":
        return HiddenRows(DeviceRange(pointer, size), dtype, row_count, width, dense)
    block = (ctypes.c_char * size).from_address(pointer)
    return HiddenRows(memoryview(block).cast("B"), dtype, row_count, width, dense)


def _mismatch(given: str, dtype: DType, width: int) -> ValueError:
    return ValueError(f"hidden rows are {given}; this session takes {dtype.name.lower()} [rows, {width}]")
