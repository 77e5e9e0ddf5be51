"""The enumerations of the wire, as Python callers see them, and the names that client and service must agree on."""

from __future__ import annotations

from enum import IntEnum
from typing import Any, Final

__all__ = [
    "PROTOCOL_VERSION",
    "TOKEN_METADATA_KEY",
    "DType",
    "HiddenSource",
    "MemoryKind",
    "RowsPolicy",
    "StopReason",
    "wire",
]

PROTOCOL_VERSION: Final = 1
"""Version of the protocol that this client speaks."""

TOKEN_METADATA_KEY: Final = "specdraft-token-bin"
"""Binary metadata that carries the session's token."""


class HiddenSource(IntEnum):
    """Where in the target the hidden states are taken; numbered as `specdraft.v1.HiddenSource`."""

    PRE_NORM = 1
    POST_NORM = 2
    LAYERS = 3


class MemoryKind(IntEnum):
    """How hidden rows reach the service; numbered as `specdraft.v1.MemoryKind`."""

    INLINE = 1
    HOST = 2
    CUDA = 3


class DType(IntEnum):
    """Element type of hidden rows; numbered as `specdraft.v1.DType`."""

    FLOAT32 = 1
    BFLOAT16 = 2
    FLOAT16 = 3

    @property
    def size_bytes(self) -> int:
        """Bytes of one element."""
        return 4 if self is DType.FLOAT32 else 2


class RowsPolicy(IntEnum):
    """Which rows a sequence keeps; numbered as `specdraft.v1.RowsPolicy`."""

    EXACT = 1
    APPROXIMATE = 2


class StopReason(IntEnum):
    """Why drafting ended; numbered as `specdraft.v1.StopReason`."""

    UNSPECIFIED = 0
    COMPLETE = 1
    NOT_ASKED = 2
    CONFIDENCE = 3
    GRAMMAR = 4
    POSITION_LIMIT = 5
    PAGES = 6


def wire(word: IntEnum) -> Any:
    """A word as its number: the generated stubs know only their own enumerations, which do not exist at run time."""
    return int(word)
