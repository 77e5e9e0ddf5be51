"""What the service answers, as frozen Python values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specdraft.v1 import drafter_pb2, session_pb2
from specdraft.words import StopReason

__all__ = ["Carry", "KeyRange", "Proposal", "SequenceState"]

_STOP_REASONS: Final = frozenset(StopReason)


@dataclass(frozen=True, slots=True)
class KeyRange:
    """Keys begin <= key < end."""

    begin: int
    end: int


@dataclass(frozen=True, slots=True)
class SequenceState:
    """Where a sequence stands after an operation.

    Attributes:
        last_op: last accepted operation number.
        row_count: rows stored.
        last_pair_key: key of the newest exact pair; -1 = none.
        ranges: keys that have a row, ascending, neighbours merged.
        first_approximate_key: first key of the approximate rows; -1 = none.
    """

    last_op: int
    row_count: int
    last_pair_key: int
    ranges: tuple[KeyRange, ...]
    first_approximate_key: int

    @classmethod
    def read(cls, message: drafter_pb2.SequenceState) -> SequenceState:
        """Reads the message of the same name."""
        return cls(
            message.last_op,
            message.row_count,
            message.last_pair_key,
            _ranges(message.ranges),
            message.first_approximate_key,
        )


@dataclass(frozen=True, slots=True)
class Proposal:
    """Drafts for one sequence.

    Attributes:
        drafts: d_1..d_n, guesses for t_{P+1}..t_{P+n} where P - 1 is the key of the last pair given; n <= K.
        logprobs: natural logarithm of each draft's probability.
        stop_reason: why there are not more.
        state: where the sequence stands.
    """

    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    state: SequenceState

    @classmethod
    def read(cls, message: drafter_pb2.ProposeResult, state: SequenceState) -> Proposal:
        """Reads a result whose status is OK; `state` is the one that it brings."""
        number = int(message.stop_reason)
        return cls(
            tuple(message.drafts),
            tuple(message.logprobs),
            StopReason(number) if number in _STOP_REASONS else StopReason.UNSPECIFIED,
            state,
        )


@dataclass(frozen=True, slots=True)
class Carry:
    """Rows taken out of a sequence, waiting to be installed.

    Attributes:
        kv_id: id, 16 bytes.
        ranges: keys that it holds.
        label: the name given in `take_kv`.
        expires_in_ms: given up this long after the answer, in milliseconds; 0 = with the session.
        head_fingerprint: head that made the rows; empty where the service did not say.
    """

    kv_id: bytes
    ranges: tuple[KeyRange, ...]
    label: str
    expires_in_ms: int
    head_fingerprint: str = ""

    @classmethod
    def read(cls, message: session_pb2.CarryInfo, head_fingerprint: str = "") -> Carry:
        """Reads a `CarryInfo`."""
        return cls(message.kv_id, _ranges(message.ranges), message.label, message.expires_in_ms, head_fingerprint)


def _ranges(messages: Iterable[session_pb2.KeyRange]) -> tuple[KeyRange, ...]:
    return tuple(KeyRange(one.begin, one.end) for one in messages)
