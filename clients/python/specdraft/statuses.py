"""Statuses into exceptions: whole calls (`google.rpc.Status` in the trailers) and single entries (`EntryStatus`)."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Final

from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2
from grpc_status import rpc_status

from specdraft.errors import (
    DOMAIN,
    REASON_CODES,
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
from specdraft.v1 import drafter_pb2, error_reason_pb2

__all__ = ["check_entry", "error_of_call", "error_of_entry", "is_uncertain"]

_CLASSES: Final[Mapping[Code, type[SpecdraftError]]] = MappingProxyType(
    {
        cls.code: cls
        for cls in (
            InvalidArgumentError,
            FailedPreconditionError,
            AbortedError,
            NotFoundError,
            OutOfRangeError,
            ResourceExhaustedError,
            UnavailableError,
            DeadlineError,
            UnimplementedError,
            InternalError,
        )
    }
)
_REASON_PREFIX: Final = "ERROR_REASON_"
_UNCERTAIN: Final = frozenset({Code.UNAVAILABLE, Code.DEADLINE_EXCEEDED, Code.CANCELLED, Code.UNKNOWN, Code.INTERNAL})


def is_uncertain(error: SpecdraftError) -> bool:
    """Whether the operation that failed so may have been done, or may still be."""
    return error.code in _UNCERTAIN


def error_of_call(call: Any) -> SpecdraftError:
    """The exception for a failed call (a `grpc.RpcError` of either stack), from its `ErrorInfo` if there is one."""
    status = call.code()
    code, message = Code(status.value[0]), call.details() or status.name
    reason, details, retry_delay_ms = None, {}, 0
    for detail in _rich_details(call):
        if detail.Is(error_details_pb2.ErrorInfo.DESCRIPTOR):
            info = error_details_pb2.ErrorInfo()
            detail.Unpack(info)
            if info.domain == DOMAIN:
                reason, details = _reason(info.reason), dict(info.metadata)
        elif detail.Is(error_details_pb2.RetryInfo.DESCRIPTOR):
            retry = error_details_pb2.RetryInfo()
            detail.Unpack(retry)
            retry_delay_ms = retry.retry_delay.ToMilliseconds()
    return _make(code, reason, message, details, retry_delay_ms)


def error_of_entry(status: drafter_pb2.EntryStatus) -> SpecdraftError | None:
    """The exception for one entry of a call, or None if it went well."""
    if status.code == Code.OK:
        return None
    try:
        reason = _reason(error_reason_pb2.ErrorReason.Name(status.reason).removeprefix(_REASON_PREFIX))
    except ValueError:
        reason = None
    try:
        code = Code(status.code)
    except ValueError:
        code = Code.UNKNOWN
    return _make(code, reason, status.message, dict(status.details), status.retry_delay_ms)


def check_entry(status: drafter_pb2.EntryStatus) -> None:
    """Raises the entry's exception if it failed."""
    error = error_of_entry(status)
    if error is not None:
        raise error


def _rich_details(call: Any) -> list[Any]:
    # A status that disagrees with its own details, or does not parse, is treated as one without details: the code and
    # the text are still good.
    try:
        status = rpc_status.from_call(call)
    except (ValueError, DecodeError):
        return []
    return [] if status is None else list(status.details)


def _reason(name: str) -> Reason | None:
    # A newer service may know reasons that this client does not.
    return Reason(name) if name in Reason.__members__ else None


def _make(
    code: Code, reason: Reason | None, message: str, details: Mapping[str, str], retry_delay_ms: int
) -> SpecdraftError:
    cls = _CLASSES.get(REASON_CODES[reason] if reason else code)
    if cls is None:
        return TransportError(code, message)
    return cls(reason, message, details, retry_delay_ms)
