"""What a client asks of its session."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, Literal, TypeAlias, TypedDict

import grpc

from specdraft.memory import ClientGpu
from specdraft.words import DType, HiddenSource

__all__ = ["Memory", "SessionKeywords", "SessionOptions"]

TIMEOUT_MAX_S: Final = 4_000_000.0
"""The `Drive` stream has 32 bits for milliseconds."""

Memory: TypeAlias = Literal["auto", "cuda", "host", "inline"]


class SessionKeywords(TypedDict, total=False):
    """Keyword arguments of `Client` and `AsyncClient`; `SessionOptions` documents them."""

    hidden_source: HiddenSource
    hidden_dtype: Literal["float32", "bfloat16"]
    hidden_width: int
    layer_ids: Sequence[int]
    vocab_size: int
    memory: Memory
    gpu: ClientGpu | None
    slot_count: int
    max_drafts: int
    prefill_rows: int
    timeout_s: float
    client_name: str
    carry_key: bytes
    with_masks: bool
    carries_max: int
    carry_tokens_max: int
    use_drive: bool
    credentials: grpc.ChannelCredentials | None


@dataclass(frozen=True, slots=True)
class SessionOptions:
    """What a client asks of its session.

    Attributes:
        hidden_source: which hidden state the target hands over.
        hidden_dtype: its element type, "float32" or "bfloat16".
        hidden_width: elements of one hidden row; 0 = the head's own.
        layer_ids: for `HiddenSource.LAYERS`: the layers, 0-based.
        vocab_size: the target's vocabulary size, to be compared with the head's; 0 = not compared.
        memory: "cuda" (GPU memory), "host" (shared memory), "inline" (bytes in the messages), or "auto": on a Unix
            socket of the same host GPU memory where `gpu` is given and the service grants it, else shared memory where
            it grants that, else inline. `Client.memory_kind` tells which.
        gpu: the GPU that the target runs on; None = with memory "cuda" the first one that this process sees.
        slot_count: arena slots: sequences that draft at the same time without falling back to inline rows.
        max_drafts: most drafts that will be asked for; 0 = the service's limit.
        prefill_rows: rows of the arena's staging area; 0 = the service's limit.
        timeout_s: deadline of every RPC, in seconds. A method that needs several (a long prompt, finding out where a
            sequence stands after a timeout) may take that many times as long.
        client_name: free text of at most 64 bytes for the service's listings.
        carry_key: secret of 16 to 64 bytes under which carries outlive the session; empty = they end with it.
        with_masks: make room for grammar masks in shared memory; without it they travel inside the messages.
        carries_max: most carries that `Client.conversations` remembers.
        carry_tokens_max: most tokens that it remembers for them, over all of them, at four bytes each.
        use_drive: use the `Drive` stream for everything after `OpenSession`; unary calls where it is not served.
        credentials: `grpc.ssl_channel_credentials(...)` for TCP; None = a plain channel (Unix sockets).
    """

    hidden_source: HiddenSource = HiddenSource.POST_NORM
    hidden_dtype: Literal["float32", "bfloat16"] = "float32"
    hidden_width: int = 0
    layer_ids: Sequence[int] = ()
    vocab_size: int = 0
    memory: Memory = "auto"
    gpu: ClientGpu | None = None
    slot_count: int = 1
    max_drafts: int = 0
    prefill_rows: int = 0
    timeout_s: float = 5.0
    client_name: str = ""
    carry_key: bytes = field(default=b"", repr=False)  # a secret
    with_masks: bool = False
    carries_max: int = 256
    carry_tokens_max: int = 1 << 22
    use_drive: bool = True
    credentials: grpc.ChannelCredentials | None = None

    def __post_init__(self) -> None:
        """Checks what can be checked without the service.

        Raises:
            ValueError: an unknown hidden source, dtype or memory, a deadline that is not positive or more than 46 days,
                or a bound that is negative.
        """
        if self.hidden_source not in tuple(HiddenSource):
            names = ", ".join(f"HiddenSource.{one.name}" for one in HiddenSource)
            message = f"hidden_source {self.hidden_source!r} is none of {names}"
            raise ValueError(message)
        if self.hidden_dtype not in ("float32", "bfloat16"):
            message = f"hidden_dtype {self.hidden_dtype!r} is neither 'float32' nor 'bfloat16'"
            raise ValueError(message)
        if self.memory not in ("auto", "cuda", "host", "inline"):
            message = f"memory {self.memory!r} is none of 'auto', 'cuda', 'host', 'inline'"
            raise ValueError(message)
        if not 0 < self.timeout_s <= TIMEOUT_MAX_S:
            message = f"timeout_s {self.timeout_s} is not between 0 and {TIMEOUT_MAX_S:.0f}"
            raise ValueError(message)

        for name in ("carries_max", "carry_tokens_max"):
            if getattr(self, name) < 0:
                message = f"{name} {getattr(self, name)} is negative"
                raise ValueError(message)

    @property
    def dtype(self) -> DType:
        """`hidden_dtype` as the wire's enumeration."""
        return DType[self.hidden_dtype.upper()]
