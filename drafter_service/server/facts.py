"""What the running service is, as clients see it. Made once the head is loaded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from drafter_service.config import ServiceConfig
from drafter_service.engine.switch import RunnerKind
from specdraft.v1 import session_pb2

PROTOCOL_VERSION = 1

RUNNERS: Mapping[RunnerKind, session_pb2.Runner] = MappingProxyType(
    {RunnerKind.EAGER: session_pb2.RUNNER_EAGER, RunnerKind.GRAPH: session_pb2.RUNNER_GRAPH}
)
"""Runners by their number on the wire."""


@dataclass(frozen=True, slots=True)
class HeadFacts:
    """The loaded head.

    Attributes:
        model_type: of its configuration.
        fingerprint: of configuration and weights.
        hidden_width: elements of one hidden row.
        head_width: H.
        dtype: "float32" or "bfloat16".
        hidden_source: "pre_norm" or "post_norm".
        vocab_size: ids are < vocab_size.
        draft_vocab_size: ids that can be drafted.
        max_seq_len: longest sequence, in tokens.
        num_layers: decoder layers.
        num_kv_heads: key/value heads.
        head_dim: elements of one of them.
        kv_bytes_per_row: over all layers.
    """

    model_type: str
    fingerprint: str
    hidden_width: int
    head_width: int
    dtype: str
    hidden_source: str
    vocab_size: int
    draft_vocab_size: int
    max_seq_len: int
    num_layers: int
    num_kv_heads: int
    head_dim: int
    kv_bytes_per_row: int


@dataclass(frozen=True, slots=True)
class ServiceFacts:
    """The service.

    Attributes:
        config: its settings.
        head: the loaded head.
        num_pages: pages of the KV pool.
        incarnation: 16 random bytes, new at every start.
        boot_id: of the host.
        version: of the distribution.
        descriptor_socket: path of the side socket; None = no host arenas.
        levers: every setting that changes what is drafted, resolved.
    """

    config: ServiceConfig
    head: HeadFacts
    num_pages: int
    incarnation: bytes
    boot_id: str
    version: str
    descriptor_socket: Path | None
    levers: Mapping[str, str]


def read_boot_id() -> str:
    """The kernel's boot id; empty where there is none."""
    path = Path("/proc/sys/kernel/random/boot_id")
    return path.read_text(encoding="ascii").strip() if path.exists() else ""
