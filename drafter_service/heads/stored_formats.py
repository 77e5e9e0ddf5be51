"""How a projection is stored: as it is, or in few bits with its scales beside it. Headers only, no torch.

What a weight is follows from the tensors that are there: a config's list of what was left out is often wrong about
the head. The layouts are those of compressed-tensors, modelopt and DeepSeek, as `drafter_kernels.quantize` reads them.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from math import prod
from typing import Final

from drafter_service.heads.safetensors_header import CheckpointError, StoredTensor

_WEIGHT: Final = "weight"
_PACKED: Final = "weight_packed"
# Scales of activations: a weight is read without them.
_OF_ACTIVATIONS: Final = frozenset({"input_scale", "input_global_scale"})
_SCALES: Final = frozenset({"weight_scale", "weight_scale_2", "weight_scale_inv", "weight_global_scale"})
_SUFFIXES: Final = _SCALES | _OF_ACTIVATIONS | {_WEIGHT, _PACKED}
_BLOCK: Final = 128
_NVFP4_BLOCK: Final = 16
_FP8: Final = "F8_E4M3"


class StoredFormat(StrEnum):
    """What a weight is stored in."""

    PLAIN = "as it is"
    NVFP4 = "NVFP4"
    FP8 = "FP8"
    FP8_BLOCKS = "FP8 in blocks"


@dataclass(frozen=True)
class StoredWeight:
    """`stored` holds the elements, `parts` everything that the weight is read from, by what follows its name."""

    stored: StoredTensor
    format: StoredFormat
    shape: tuple[int, ...]
    parts: tuple[tuple[str, StoredTensor], ...]


def find_weight(tensors: Mapping[str, StoredTensor], name: str) -> StoredWeight | None:
    """The weight `name` (which ends in "weight") in whatever format; None if it isn't there.

    Raises CheckpointError naming a scale that is missing, too many or misshapen.
    """
    base = name.removesuffix(_WEIGHT)
    found = {suffix: tensors[base + suffix] for suffix in sorted(_SUFFIXES) if base + suffix in tensors}
    stored = found.get(_PACKED) or found.get(_WEIGHT)
    if stored is None:
        return None
    parts = tuple((suffix, part) for suffix, part in found.items() if suffix not in _OF_ACTIVATIONS)
    if stored.dtype == "U8" and len(stored.shape) == 2:
        return StoredWeight(stored, StoredFormat.NVFP4, _check_nvfp4(found, base), parts)
    if stored.dtype == _FP8 and len(stored.shape) == 2:
        return StoredWeight(stored, _check_fp8(found, base), stored.shape, parts)
    return StoredWeight(stored, StoredFormat.PLAIN, stored.shape, ((_WEIGHT, stored),))


def names_of(weight: StoredWeight, tensors: Mapping[str, StoredTensor], name: str) -> set[str]:
    """The names in a checkpoint that a weight accounts for."""
    if weight.format is StoredFormat.PLAIN:
        return {name}
    base = name.removesuffix(_WEIGHT)
    return {base + suffix for suffix in _SUFFIXES if base + suffix in tensors}


def _check_nvfp4(found: Mapping[str, StoredTensor], base: str) -> tuple[int, int]:
    """The weight's shape. Raises CheckpointError."""
    stored = found.get(_PACKED) or found[_WEIGHT]
    of_tensor = "weight_global_scale" if _PACKED in found else "weight_scale_2"
    _expect(found, base, "weight_scale", of_tensor)
    rows, columns = stored.shape[0], 2 * stored.shape[1]
    if columns % _NVFP4_BLOCK:
        raise CheckpointError(f"{stored.file}: {stored.name} holds {columns} columns, no multiple of {_NVFP4_BLOCK}")
    _expect_tensor(found["weight_scale"], _FP8, (rows, columns // _NVFP4_BLOCK))
    _expect_tensor(found[of_tensor], "F32", (), (1,))
    return rows, columns


def _check_fp8(found: Mapping[str, StoredTensor], base: str) -> StoredFormat:
    """By the shape of the scales. Raises CheckpointError."""
    stored = found[_WEIGHT]
    name = "weight_scale_inv" if "weight_scale_inv" in found else "weight_scale"
    _expect(found, base, name)
    rows, columns = stored.shape
    scale = found[name]
    blocks = (-(-rows // _BLOCK), -(-columns // _BLOCK))
    if name == "weight_scale" and (prod(scale.shape) == 1 or scale.shape in {(rows,), (rows, 1)}):
        return StoredFormat.FP8
    _expect_tensor(scale, scale.dtype, blocks)
    return StoredFormat.FP8_BLOCKS


def _expect(found: Mapping[str, StoredTensor], base: str, *scales: str) -> None:
    stored = found.get(_PACKED) or found[_WEIGHT]
    for scale in scales:
        if scale not in found:
            raise CheckpointError(
                f"{stored.file}: {stored.name} is stored as {stored.dtype}, but {base}{scale} is missing"
            )
    unknown = [found[suffix].name for suffix in found if suffix in _SCALES and suffix not in scales]
    if unknown or (_PACKED in found and _WEIGHT in found):
        named = unknown or [found[_WEIGHT].name]
        raise CheckpointError(f"{stored.file}: {', '.join(named)} beside {stored.name}: which is meant?")


def _expect_tensor(scale: StoredTensor, dtype: str, *shapes: tuple[int, ...]) -> None:
    if scale.dtype != dtype or scale.shape not in shapes:
        raise CheckpointError(
            f"{scale.file}: {scale.name} is {scale.dtype} {scale.shape}, expected {dtype} {shapes[-1]}"
        )
