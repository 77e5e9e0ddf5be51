"""The requests of a `Drive` stream that have no answer yet, and what a broken stream means for them. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, auto
from typing import Final, Generic, TypeVar

from specdraft.errors import (
    InternalError,
    Reason,
    ResourceExhaustedError,
    SpecdraftError,
    UnavailableError,
    UnimplementedError,
)

__all__ = ["After", "Reattachment", "Unanswered"]

W = TypeVar("W")

_FIRST_DELAY_S: Final = 0.02
_MOST_DELAY_S: Final = 0.5
_GOOD_AFTER_S: Final = 1.0
_TOO_LARGE: Final = "message larger than max"  # gRPC's words: other limits of its own have the same code


class Unanswered(Generic[W]):
    """Waiting callers by correlation id, in the order sent. The owner holds a lock where there are threads."""

    def __init__(self) -> None:
        self._last_id = 0
        self._waiting: dict[int, tuple[bytes, W]] = {}

    def next_id(self) -> int:
        """A correlation id that no unanswered request has."""
        self._last_id += 1
        return self._last_id

    def add(self, correlation_id: int, frame: bytes, waiter: W) -> None:
        """Notes a request before it is sent."""
        self._waiting[correlation_id] = frame, waiter

    def take(self, correlation_id: int, kind: type | None = None) -> W | None:
        """The waiter of an answer; None if it has given up, was answered before, or is not of the `kind` given."""
        found = self._waiting.get(correlation_id)
        if found is None or (kind is not None and not isinstance(found[1], kind)):
            return None
        del self._waiting[correlation_id]
        return found[1]

    def take_all(self) -> list[W]:
        """Every waiter, because no answer will come."""
        waiting, self._waiting = self._waiting, {}
        return [waiter for _, waiter in waiting.values()]

    def take_largest(self) -> W | None:
        """The waiter of the largest request, because that one is not to be sent again."""
        largest = max(self._waiting, key=lambda one: len(self._waiting[one][0]), default=0)
        return self.take(largest)

    def frames(self, after_id: int = 0) -> list[tuple[int, bytes]]:
        """What to send again on a new stream, by correlation id: the same bytes, and so the same ops, in order."""
        return [(one, frame) for one, (frame, _) in self._waiting.items() if one > after_id]

    def __len__(self) -> int:
        return len(self._waiting)


class After(Enum):
    """What to do after a stream has ended."""

    ATTACH_AGAIN = auto()
    GIVE_UP = auto()
    STOP = auto()
    USE_UNARY = auto()


@dataclass(slots=True)
class Reattachment:
    """Decides, from how and when a stream ended, whether the token may attach again.

    A broken stream starts a grace period at the service; within it the token attaches again. A stream that the service
    ended because of a later one (`SESSION_FENCED`) is never attached again: two clients would fence each other forever.
    Where the status was lost on the way (gRPC puts INTERNAL in its place), that may have been the reason: the session
    goes on by unary calls, which fence nobody.
    """

    grace_s: float
    _attached_at_s: float = 0.0
    _broken_since_s: float | None = None
    _delay_s: float = _FIRST_DELAY_S

    def attached(self, now_s: float) -> None:
        """A stream was opened (whether it holds is not known yet)."""
        self._attached_at_s = now_s

    def wanted(self, waiting_count: int) -> None:
        """Somebody asks, and they are `waiting_count` now: a lone one gets the whole grace, whatever went before."""
        if waiting_count == 1 and self._broken_since_s is not None:
            self.answered()

    def answered(self) -> None:
        """An answer came: the stream is good."""
        self._broken_since_s = None
        self._delay_s = _FIRST_DELAY_S

    def ended(self, error: SpecdraftError | None, now_s: float) -> After:
        """A stream ended with `error` (None: the service closed it in peace, as it does when it drains)."""
        if isinstance(error, UnimplementedError):
            return After.USE_UNARY
        if isinstance(error, InternalError) and error.reason is None:
            return After.USE_UNARY
        if error is not None and error.reason is not None and not isinstance(error, UnavailableError):
            return After.STOP
        if error is not None and error.reason is Reason.DEVICE_LOST:
            return After.GIVE_UP
        if now_s - self._attached_at_s >= _GOOD_AFTER_S:
            self.answered()
        if self._broken_since_s is None:
            self._broken_since_s = now_s
        if now_s - self._broken_since_s < self.grace_s:
            return After.ATTACH_AGAIN
        self.answered()  # the next use starts afresh
        return After.GIVE_UP

    @staticmethod
    def is_of_the_size(error: SpecdraftError | None) -> bool:
        """Whether a request was larger than the service takes: it would end the next stream too, and is not done."""
        is_of_grpc = isinstance(error, ResourceExhaustedError) and error.reason is None
        return is_of_grpc and _TOO_LARGE in str(error)

    @staticmethod
    def is_of_the_connection(error: SpecdraftError | None) -> bool:
        """Whether it may be that nobody listens any more: then waiting callers need not wait for the next attempt."""
        return isinstance(error, UnavailableError) and error.reason is None

    def next_delay_s(self) -> float:
        """How long to wait before the next attempt."""
        delay_s = self._delay_s
        self._delay_s = min(2 * delay_s, _MOST_DELAY_S)
        return delay_s
