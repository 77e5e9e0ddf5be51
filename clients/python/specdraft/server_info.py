"""What a service is: the answer of `GetServerInfo`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType

from specdraft.v1 import session_pb2

__all__ = ["HeadInfo", "Limits", "ServerInfo"]


@dataclass(frozen=True, slots=True)
class HeadInfo:
    """The loaded head; fields as in `specdraft.v1.HeadInfo` (enumerations as their numbers)."""

    model_type: str
    kind: str
    fingerprint: str
    hidden_width: int
    head_width: int
    dtype: int
    hidden_source: int
    layer_ids: tuple[int, ...]
    vocab_size: int
    draft_vocab_size: int
    max_seq_len: int
    layer_count: int
    lookback: int
    block_gamma: int
    rank_count: int
    kv_bytes_per_row: int


@dataclass(frozen=True, slots=True)
class Limits:
    """What calls and sessions may ask for; fields as in `specdraft.v1.Limits`."""

    max_drafts: int
    propose_batch_max: int
    prefill_rows_max: int
    message_size_max_bytes: int
    sessions_max: int
    sequences_per_session_max: int
    in_flight_per_sequence_max: int
    kv_page_count: int
    kv_page_row_count: int
    lease_ms: int
    grace_ms: int


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """What this service is.

    Attributes:
        runner: number of a `specdraft.v1.Runner`.
        memory_kinds: numbers of `specdraft.v1.MemoryKind` that `OpenSession` grants.
        incarnation: 16 random bytes, new at every start of the service.
        boot_id: the kernel's boot id of the service's host.
        levers: every setting that changes what is drafted.
    """

    service_version: str
    protocol_version: int
    head: HeadInfo
    limits: Limits
    runner: int
    memory_kinds: tuple[int, ...]
    incarnation: bytes
    boot_id: str
    levers: Mapping[str, str]

    @classmethod
    def read(cls, message: session_pb2.GetServerInfoResponse) -> ServerInfo:
        """Reads the message of the same name."""
        return cls(
            service_version=message.service_version,
            protocol_version=message.protocol_version,
            head=_read_head(message.head),
            limits=Limits(**{name: getattr(message.limits, name) for name in Limits.__slots__}),
            runner=message.runner,
            memory_kinds=tuple(message.memory_kinds),
            incarnation=message.incarnation,
            boot_id=message.boot_id,
            levers=MappingProxyType(dict(message.levers)),
        )


def _read_head(message: session_pb2.HeadInfo) -> HeadInfo:
    fields = {name: getattr(message, name) for name in HeadInfo.__slots__}
    return HeadInfo(**{**fields, "layer_ids": tuple(message.layer_ids)})
