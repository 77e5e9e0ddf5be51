"""What the service answers, as frozen Python values."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from specdraft.v1 import drafter_pb2, session_pb2
from specdraft.words import StopReason

__all__ = ["Carry", "KeyRange", "Proposal", "SequenceState", "StoredDrafts"]

_STOP_REASONS: Final = {int(reason): reason for reason in StopReason}


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
        recommended_drafts: if asked for: the number of drafts with which the most tokens a second are to be expected,
            for the next round; 0 = do not draft now. None = not asked for.
    """

    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    state: SequenceState
    recommended_drafts: int | None = None

    @classmethod
    def read(cls, message: drafter_pb2.ProposeResult, state: SequenceState) -> Proposal:
        """Reads a result whose status is OK; `state` is the one that it brings."""
        return cls(
            tuple(message.drafts),
            tuple(message.logprobs),
            _stop_reason(message.stop_reason),
            state,
            message.recommended_drafts if message.HasField("recommended_drafts") else None,
        )


@dataclass(frozen=True, slots=True)
class StoredDrafts:
    """The drafts of a sequence's last round, from the service's own copy.

    Attributes:
        drafts: d_1..d_n.
        logprobs: natural logarithm of each draft's probability.
        stop_reason: why there are not more.
        last_embedding: embedding of d_n, [head_width] elements of the session's dtype, little-endian; empty where it
            was not asked for, or there is no draft.
    """

    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]
    stop_reason: StopReason
    last_embedding: bytes

    @classmethod
    def read(cls, message: drafter_pb2.ReadDraftsResponse) -> StoredDrafts:
        """Reads a `ReadDraftsResponse`."""
        reason = _stop_reason(message.stop_reason)
        return cls(tuple(message.drafts), tuple(message.logprobs), reason, message.last_embedding)


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

    @property
    def last_key(self) -> int:
        """Its largest key; -1 = it has none."""
        return self.ranges[-1].end - 1 if self.ranges else -1

    @classmethod
    def read(cls, message: session_pb2.CarryInfo, head_fingerprint: str = "") -> Carry:
        """Reads a `CarryInfo`."""
        return cls(message.kv_id, _ranges(message.ranges), message.label, message.expires_in_ms, head_fingerprint)


def _stop_reason(number: int) -> StopReason:
    # A newer service may know reasons that this client does not.
    return _STOP_REASONS.get(int(number), StopReason.UNSPECIFIED)


def _ranges(messages: Iterable[session_pb2.KeyRange]) -> tuple[KeyRange, ...]:
    return tuple([KeyRange(one.begin, one.end) for one in messages])
