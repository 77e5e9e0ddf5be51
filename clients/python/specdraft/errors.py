"""Every error that specdraft raises: one list of reasons, each bound once to a status code and an exception.

The service raises these inside, one place turns them into statuses, and the client turns statuses back into the
same exceptions. Nothing here imports gRPC: the numbers of `Code` are those of `google.rpc.Code`.
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import IntEnum, StrEnum
from types import MappingProxyType

__all__ = [
    "DOMAIN",
    "REASON_CODES",
    "AbortedError",
    "Code",
    "DeadlineError",
    "FailedPreconditionError",
    "InternalError",
    "InvalidArgumentError",
    "NotFoundError",
    "OutOfRangeError",
    "Reason",
    "ResourceExhaustedError",
    "SpecdraftError",
    "TransportError",
    "UnavailableError",
    "UnimplementedError",
    "make_error",
]

DOMAIN = "specdraft"
"""`google.rpc.ErrorInfo.domain` of every error that specdraft raises."""


class Code(IntEnum):
    """Status codes, numbered as `google.rpc.Code`."""

    OK = 0
    CANCELLED = 1
    UNKNOWN = 2
    INVALID_ARGUMENT = 3
    DEADLINE_EXCEEDED = 4
    NOT_FOUND = 5
    ALREADY_EXISTS = 6
    PERMISSION_DENIED = 7
    RESOURCE_EXHAUSTED = 8
    FAILED_PRECONDITION = 9
    ABORTED = 10
    OUT_OF_RANGE = 11
    UNIMPLEMENTED = 12
    INTERNAL = 13
    UNAVAILABLE = 14
    DATA_LOSS = 15
    UNAUTHENTICATED = 16


class Reason(StrEnum):
    """Reasons, named as `specdraft.v1.ErrorReason` without its prefix. The proto says what each one means."""

    INVALID_FIELD = "INVALID_FIELD"
    DEADLINE_REQUIRED = "DEADLINE_REQUIRED"
    TOKEN_OUT_OF_RANGE = "TOKEN_OUT_OF_RANGE"
    PAIR_COUNT_MISMATCH = "PAIR_COUNT_MISMATCH"
    TOO_MANY_PAIRS = "TOO_MANY_PAIRS"
    TOO_MANY_DRAFTS = "TOO_MANY_DRAFTS"
    BATCH_TOO_LARGE = "BATCH_TOO_LARGE"
    DUPLICATE_SEQUENCE = "DUPLICATE_SEQUENCE"
    HIDDEN_DTYPE_MISMATCH = "HIDDEN_DTYPE_MISMATCH"
    HIDDEN_SIZE_MISMATCH = "HIDDEN_SIZE_MISMATCH"
    HIDDEN_NOT_FINITE = "HIDDEN_NOT_FINITE"
    MEMORY_OUT_OF_BOUNDS = "MEMORY_OUT_OF_BOUNDS"
    MASK_SIZE_MISMATCH = "MASK_SIZE_MISMATCH"
    OP_REUSED = "OP_REUSED"
    MISSING_ROWS = "MISSING_ROWS"
    NEEDS_LOOKBACK = "NEEDS_LOOKBACK"
    HANDSHAKE_MISMATCH = "HANDSHAKE_MISMATCH"
    TRANSPORT_UNAVAILABLE = "TRANSPORT_UNAVAILABLE"
    OTHER_HOST = "OTHER_HOST"
    SAME_PID = "SAME_PID"
    GPU_UUID_NOT_VISIBLE = "GPU_UUID_NOT_VISIBLE"
    MEMORY_NOT_SHAREABLE = "MEMORY_NOT_SHAREABLE"
    SEQUENCE_NOT_EMPTY = "SEQUENCE_NOT_EMPTY"
    KV_MISMATCH = "KV_MISMATCH"
    MULTIMODAL_UNSUPPORTED = "MULTIMODAL_UNSUPPORTED"
    ROWS_POLICY_UNSUPPORTED = "ROWS_POLICY_UNSUPPORTED"
    MAPPING_NOT_PROVEN = "MAPPING_NOT_PROVEN"
    OP_OUT_OF_ORDER = "OP_OUT_OF_ORDER"
    SESSION_FENCED = "SESSION_FENCED"
    DRAFT_MISMATCH = "DRAFT_MISMATCH"
    TICKET_ORDER = "TICKET_ORDER"
    LANE_RELEASED = "LANE_RELEASED"
    SESSION_UNKNOWN = "SESSION_UNKNOWN"
    SEQUENCE_UNKNOWN = "SEQUENCE_UNKNOWN"
    CARRY_UNKNOWN = "CARRY_UNKNOWN"
    REGION_UNKNOWN = "REGION_UNKNOWN"
    POSITION_LIMIT = "POSITION_LIMIT"
    PAGES_EXHAUSTED = "PAGES_EXHAUSTED"
    SEQUENCES_EXHAUSTED = "SEQUENCES_EXHAUSTED"
    SESSIONS_EXHAUSTED = "SESSIONS_EXHAUSTED"
    REGIONS_EXHAUSTED = "REGIONS_EXHAUSTED"
    ARENA_EXHAUSTED = "ARENA_EXHAUSTED"
    IN_FLIGHT_EXHAUSTED = "IN_FLIGHT_EXHAUSTED"
    STARTING = "STARTING"
    DRAINING = "DRAINING"
    DEVICE_LOST = "DEVICE_LOST"
    TIMEOUT = "TIMEOUT"
    NOT_IMPLEMENTED = "NOT_IMPLEMENTED"
    INTERNAL = "INTERNAL"


class SpecdraftError(Exception):
    """An answer other than OK.

    Attributes:
        code: the status code.
        reason: why, or None when gRPC itself made the status (size, deadline, cancellation, connection).
        details: the figures behind it, by the names documented in `error_reason.proto`.
        retry_delay_ms: when trying again makes sense, in milliseconds; 0 = not said.
    """

    code: Code = Code.UNKNOWN

    def __init__(
        self,
        reason: Reason | None,
        message: str,
        details: Mapping[str, str] | None = None,
        retry_delay_ms: int = 0,
    ) -> None:
        super().__init__(message)
        self.reason = reason
        self.message = message
        self.details: Mapping[str, str] = MappingProxyType(dict(details or {}))
        self.retry_delay_ms = retry_delay_ms

    def __str__(self) -> str:
        name = self.reason.value if self.reason else self.code.name
        return f"{name}: {self.message}"


class InvalidArgumentError(SpecdraftError):
    """The request is wrong by itself."""

    code = Code.INVALID_ARGUMENT


class FailedPreconditionError(SpecdraftError):
    """Well-formed, but not for this sequence, head, device or host."""

    code = Code.FAILED_PRECONDITION


class AbortedError(SpecdraftError):
    """Overtaken by something later."""

    code = Code.ABORTED


class NotFoundError(SpecdraftError):
    """Unknown, foreign or expired."""

    code = Code.NOT_FOUND


class OutOfRangeError(SpecdraftError):
    """Past the position limit."""

    code = Code.OUT_OF_RANGE


class ResourceExhaustedError(SpecdraftError):
    """Pages, sequences, sessions, regions, bytes or rounds in flight are used up."""

    code = Code.RESOURCE_EXHAUSTED


class UnavailableError(SpecdraftError):
    """Starting, draining, device lost, or no connection."""

    code = Code.UNAVAILABLE


class DeadlineError(SpecdraftError):
    """The deadline passed first."""

    code = Code.DEADLINE_EXCEEDED


class UnimplementedError(SpecdraftError):
    """In the contract, and not in this build."""

    code = Code.UNIMPLEMENTED


class InternalError(SpecdraftError):
    """A bug in the service."""

    code = Code.INTERNAL


class TransportError(SpecdraftError):
    """A status that gRPC made and that has no class above (cancelled, unknown, unauthenticated)."""

    def __init__(self, code: Code, message: str) -> None:
        super().__init__(None, message)
        self.code = code


_BY_CODE: Mapping[type[SpecdraftError], tuple[Reason, ...]] = MappingProxyType(
    {
        InvalidArgumentError: (
            Reason.INVALID_FIELD,
            Reason.DEADLINE_REQUIRED,
            Reason.TOKEN_OUT_OF_RANGE,
            Reason.PAIR_COUNT_MISMATCH,
            Reason.TOO_MANY_PAIRS,
            Reason.TOO_MANY_DRAFTS,
            Reason.BATCH_TOO_LARGE,
            Reason.DUPLICATE_SEQUENCE,
            Reason.HIDDEN_DTYPE_MISMATCH,
            Reason.HIDDEN_SIZE_MISMATCH,
            Reason.HIDDEN_NOT_FINITE,
            Reason.MEMORY_OUT_OF_BOUNDS,
            Reason.MASK_SIZE_MISMATCH,
            Reason.OP_REUSED,
        ),
        FailedPreconditionError: (
            Reason.MISSING_ROWS,
            Reason.NEEDS_LOOKBACK,
            Reason.HANDSHAKE_MISMATCH,
            Reason.TRANSPORT_UNAVAILABLE,
            Reason.OTHER_HOST,
            Reason.SAME_PID,
            Reason.GPU_UUID_NOT_VISIBLE,
            Reason.MEMORY_NOT_SHAREABLE,
            Reason.SEQUENCE_NOT_EMPTY,
            Reason.KV_MISMATCH,
            Reason.MULTIMODAL_UNSUPPORTED,
            Reason.ROWS_POLICY_UNSUPPORTED,
            Reason.MAPPING_NOT_PROVEN,
        ),
        AbortedError: (
            Reason.OP_OUT_OF_ORDER,
            Reason.SESSION_FENCED,
            Reason.DRAFT_MISMATCH,
            Reason.TICKET_ORDER,
            Reason.LANE_RELEASED,
        ),
        NotFoundError: (
            Reason.SESSION_UNKNOWN,
            Reason.SEQUENCE_UNKNOWN,
            Reason.CARRY_UNKNOWN,
            Reason.REGION_UNKNOWN,
        ),
        OutOfRangeError: (Reason.POSITION_LIMIT,),
        ResourceExhaustedError: (
            Reason.PAGES_EXHAUSTED,
            Reason.SEQUENCES_EXHAUSTED,
            Reason.SESSIONS_EXHAUSTED,
            Reason.REGIONS_EXHAUSTED,
            Reason.ARENA_EXHAUSTED,
            Reason.IN_FLIGHT_EXHAUSTED,
        ),
        UnavailableError: (Reason.STARTING, Reason.DRAINING, Reason.DEVICE_LOST),
        DeadlineError: (Reason.TIMEOUT,),
        UnimplementedError: (Reason.NOT_IMPLEMENTED,),
        InternalError: (Reason.INTERNAL,),
    }
)

_CLASSES: Mapping[Reason, type[SpecdraftError]] = MappingProxyType(
    {reason: cls for cls, reasons in _BY_CODE.items() for reason in reasons}
)

REASON_CODES: Mapping[Reason, Code] = MappingProxyType({reason: cls.code for reason, cls in _CLASSES.items()})
"""The status code of each reason."""


def make_error(reason: Reason, message: str, *, retry_delay_ms: int = 0, **details: object) -> SpecdraftError:
    """Builds the exception that belongs to `reason`; `details` are turned into text."""
    text = {name: str(value) for name, value in details.items()}
    return _CLASSES[reason](reason, message, text, retry_delay_ms)
