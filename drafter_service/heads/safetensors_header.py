"""Reading the header of one safetensors file: 8 bytes of length, that much JSON, then the data.

No torch: a bad file must be refused before an accelerator is touched.
"""

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

# Bits, because the four-bit types pack two elements into a byte.
DTYPE_BITS: Final[Mapping[str, int]] = {
    "BOOL": 8,
    "U8": 8,
    "I8": 8,
    "F8_E4M3": 8,
    "F8_E5M2": 8,
    "F8_E8M0": 8,
    "I16": 16,
    "U16": 16,
    "F16": 16,
    "BF16": 16,
    "I32": 32,
    "U32": 32,
    "F32": 32,
    "I64": 64,
    "U64": 64,
    "F64": 64,
}
# The bound of the format's own library; a real header has a few hundred bytes a tensor.
_HEADER_BYTES_MAX: Final = 100_000_000
_LENGTH_BYTES: Final = 8


class CheckpointError(ValueError):
    """A checkpoint that cannot be used, in one line that names the file, key or tensor."""


@dataclass(frozen=True)
class StoredTensor:
    """Where one tensor lies. `begin` and `end` are byte offsets in the file itself."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        """Bytes of the tensor in the file."""
        return self.end - self.begin


@dataclass(frozen=True)
class SafetensorsHeader:
    """The tensors of one file by name, and the writer's metadata."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_json_object(path: Path) -> dict[str, object]:
    """The JSON object in a file. Raises CheckpointError naming the file."""
    try:
        text = path.read_bytes()
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    return _parse_object(path, text)


def read_header(path: Path) -> SafetensorsHeader:
    """The header of a safetensors file, with every length and offset checked against the file's size.

    Raises CheckpointError naming the file (and the tensor) if it is cut short, too long or not of this format.
    """
    try:
        file_bytes = path.stat().st_size
        with path.open("rb") as stream:
            length_field = stream.read(_LENGTH_BYTES)
            header_bytes = int.from_bytes(length_field, "little")
            if len(length_field) < _LENGTH_BYTES or header_bytes > min(file_bytes - _LENGTH_BYTES, _HEADER_BYTES_MAX):
                raise CheckpointError(
                    f"{path}: cut short or not safetensors: {file_bytes} bytes cannot hold its header"
                )
            text = stream.read(header_bytes)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read ({error.strerror})") from error
    entries = _parse_object(path, text)
    metadata = entries.pop("__metadata__", {})
    data_begin = _LENGTH_BYTES + header_bytes
    tensors = {name: _stored_tensor(path, name, entry, data_begin) for name, entry in entries.items()}
    data_end = max((tensor.end for tensor in tensors.values()), default=data_begin)
    if data_end > file_bytes:
        last = max(tensors.values(), key=lambda tensor: tensor.end)
        raise CheckpointError(f"{path}: cut short: tensor {last.name} ends at byte {last.end} of {file_bytes}")
    if data_end < file_bytes:
        raise CheckpointError(f"{path}: {file_bytes - data_end} bytes after the last tensor")
    return SafetensorsHeader(tensors, _string_map(metadata))


def _stored_tensor(path: Path, name: str, entry: object, data_begin: int) -> StoredTensor:
    match entry:
        case {"dtype": str(dtype), "shape": list(shape), "data_offsets": [int(begin), int(end)]}:
            pass
        case _:
            raise CheckpointError(f"{path}: tensor {name} has no valid dtype, shape and data_offsets")
    if any(type(size) is not int or size < 0 for size in shape) or not 0 <= begin <= end:
        raise CheckpointError(f"{path}: tensor {name} has no valid dtype, shape and data_offsets")
    bits = DTYPE_BITS.get(dtype)
    if bits is not None and math.prod(shape) * bits != (end - begin) * 8:
        raise CheckpointError(f"{path}: tensor {name} has {end - begin} bytes, which {dtype} {shape} does not fill")
    return StoredTensor(name, path, dtype, tuple(shape), data_begin + begin, data_begin + end)


def _parse_object(path: Path, text: bytes) -> dict[str, object]:
    try:
        parsed = json.loads(text, object_pairs_hook=_unique_keys)
    except (ValueError, RecursionError) as error:
        raise CheckpointError(f"{path}: not valid JSON ({error})") from error
    if not isinstance(parsed, dict):
        raise CheckpointError(f"{path}: not a JSON object")
    return parsed


def _unique_keys(pairs: list[tuple[str, object]]) -> dict[str, object]:
    # Python keeps the last of two equal keys, other readers the first: nobody could tell which was meant.
    found = dict(pairs)
    if len(found) < len(pairs):
        raise ValueError("a key appears twice")
    return found


def _string_map(value: object) -> dict[str, str]:
    if not isinstance(value, dict):
        return {}
    return {key: text for key, text in value.items() if isinstance(text, str)}
