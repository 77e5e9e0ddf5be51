"""The Python client of specdraft, a gRPC service that does the drafting half of speculative decoding.

Nothing heavy is imported before it is used: the service itself imports `specdraft.errors` and `specdraft.memory` in
places that never speak gRPC.
"""

from __future__ import annotations

from importlib import import_module
from types import MappingProxyType
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Mapping

    from specdraft.aio.client import AsyncClient
    from specdraft.aio.conversations import AsyncConversations
    from specdraft.aio.sequence import AsyncSequence
    from specdraft.answers import Carry, KeyRange, Proposal, SequenceState, StoredDrafts
    from specdraft.client import Client
    from specdraft.conversations import Conversations
    from specdraft.errors import (
        AbortedError,
        Code,
        DeadlineError,
        FailedPreconditionError,
        InternalError,
        InvalidArgumentError,
        NotFoundError,
        OutOfRangeError,
        Reason,
        ResourceExhaustedError,
        SpecdraftError,
        TransportError,
        UnavailableError,
        UnimplementedError,
    )
    from specdraft.hiddens import HiddenRows
    from specdraft.items import CatchupItem, ProposeItem
    from specdraft.lanes import EarlyItem, EarlyRound, Lane
    from specdraft.memory import ClientGpu
    from specdraft.options import SessionOptions
    from specdraft.pairs import NextPairs, next_pairs
    from specdraft.regions import Region
    from specdraft.sequence import Sequence
    from specdraft.server_info import HeadInfo, Limits, ServerInfo
    from specdraft.turns import Resumed
    from specdraft.words import DType, HiddenSource, MemoryKind, RowsPolicy, StopReason

__all__ = [
    "AbortedError",
    "AsyncClient",
    "AsyncConversations",
    "AsyncSequence",
    "Carry",
    "CatchupItem",
    "Client",
    "ClientGpu",
    "Code",
    "Conversations",
    "DType",
    "DeadlineError",
    "EarlyItem",
    "EarlyRound",
    "FailedPreconditionError",
    "HeadInfo",
    "HiddenRows",
    "HiddenSource",
    "InternalError",
    "InvalidArgumentError",
    "KeyRange",
    "Lane",
    "Limits",
    "MemoryKind",
    "NextPairs",
    "NotFoundError",
    "OutOfRangeError",
    "Proposal",
    "ProposeItem",
    "Reason",
    "Region",
    "ResourceExhaustedError",
    "Resumed",
    "RowsPolicy",
    "Sequence",
    "SequenceState",
    "ServerInfo",
    "SessionOptions",
    "SpecdraftError",
    "StopReason",
    "StoredDrafts",
    "TransportError",
    "UnavailableError",
    "UnimplementedError",
    "next_pairs",
]

_HOMES: Final[Mapping[str, str]] = MappingProxyType(
    {
        name: module
        for module, names in (
            ("aio.client", ("AsyncClient",)),
            ("aio.conversations", ("AsyncConversations",)),
            ("aio.sequence", ("AsyncSequence",)),
            ("answers", ("Carry", "KeyRange", "Proposal", "SequenceState", "StoredDrafts")),
            ("client", ("Client",)),
            ("conversations", ("Conversations",)),
            ("hiddens", ("HiddenRows",)),
            ("items", ("CatchupItem", "ProposeItem")),
            ("lanes", ("EarlyItem", "EarlyRound", "Lane")),
            ("memory", ("ClientGpu",)),
            ("options", ("SessionOptions",)),
            ("pairs", ("NextPairs", "next_pairs")),
            ("regions", ("Region",)),
            ("sequence", ("Sequence",)),
            ("server_info", ("HeadInfo", "Limits", "ServerInfo")),
            ("turns", ("Resumed",)),
            ("words", ("DType", "HiddenSource", "MemoryKind", "RowsPolicy", "StopReason")),
        )
        for name in names
    }
)


def __getattr__(name: str) -> object:
    if name in __all__:
        return getattr(import_module(f"specdraft.{_HOMES.get(name, 'errors')}"), name)
    message = f"module 'specdraft' has no attribute {name!r}"
    raise AttributeError(message)


def __dir__() -> list[str]:
    return sorted(__all__)
