"""The `Drive` stream for threads: many callers, one stream, one thread that reads it."""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any, Final

import grpc

from specdraft.channel import RECONNECTED_WITHIN_S
from specdraft.errors import DeadlineError, SpecdraftError, UnavailableError
from specdraft.exchanges import DRIVE_FIELDS, Exchange, drive_frame
from specdraft.listening import is_refused
from specdraft.statuses import check_entry, error_of_call
from specdraft.terms import closed_error
from specdraft.unanswered import After, Reattachment, Unanswered

__all__ = ["Attach", "Drive", "DriveUnsupported"]

Attach = Callable[[Iterator[bytes]], Any]
"""Opens a stream that sends the frames of an iterator; iterating over what it returns gives `DriveResponse`s."""

_JOIN_TIMEOUT_S: Final = 5.0
_STUCK_JOIN_TIMEOUT_S: Final = 0.1
_LOOK_S: Final = 0.2
"""How often a waiting caller looks whether the reader still reads a stream that has ended."""


class DriveUnsupported(Exception):
    """The service has no `Drive`: the request goes by a unary call."""


class _Waiter:
    """One caller. A bare lock is the cheapest thing in Python that one thread can wake another with."""

    __slots__ = ("answer", "error", "signal")

    def __init__(self) -> None:
        self.signal = threading.Lock()
        self.signal.acquire()
        self.answer: Any = None
        self.error: Exception | None = None

    def finish(self, answer: Any, error: Exception | None) -> None:
        self.answer, self.error = answer, error
        self.signal.release()


class _Callback:
    """Somebody who does not wait, and is called by the reading thread."""

    __slots__ = ("_rpc", "_tell")

    def __init__(self, rpc: str, tell: Callable[[Any, Exception | None], None]) -> None:
        self._rpc = rpc
        self._tell = tell

    def finish(self, answer: Any, error: Exception | None) -> None:
        if error is None:
            try:
                check_entry(answer.status)
                answer = getattr(answer, DRIVE_FIELDS[self._rpc])
            except SpecdraftError as refusal:
                error = refusal
        self._tell(answer, error)


class Drive:
    """One session's stream. It attaches at once, and again (with every unanswered request) when it breaks.

    While nobody listens at `target`, it goes on trying, and those who wait are told at once.

    When a connection breaks in the moment in which a stream is opened on it, gRPC (1.84) may end the stream and never
    wake who reads it: `is_active()` is false, the next answer never comes. Callers that wait look out for that, and a
    new reader takes the place of the one that is lost.
    """

    def __init__(self, attach: Attach, grace_s: float, target: str) -> None:
        self._attach = attach
        self._target = target
        self._lock = threading.Lock()
        self._unanswered: Unanswered[_Waiter | _Callback] = Unanswered()
        self._reattachment = Reattachment(max(grace_s, RECONNECTED_WITHIN_S))
        self._outgoing: queue.SimpleQueue[bytes | None] | None = None
        self._stream: Any = None
        self._break_listeners: dict[Callable[[], None], None] = {}  # in the order in which they came
        self._ended_stream: Any = None  # seen by a waiting caller to have ended, while the reader was still in it
        self._final: Exception | None = None
        self._closed = threading.Event()
        self._wanted = threading.Event()  # cuts the pause between two attempts short
        self._reader: threading.Thread | None = None
        with self._lock:
            self._start_reader()

    def call(self, exchange: Exchange) -> Any:
        """Sends the request and waits for its answer.

        Raises:
            SpecdraftError: what the service answered, or `DeadlineError` after `timeout_s`.
            DriveUnsupported: the service does not serve the stream.
        """
        waiter = _Waiter()
        with self._lock:
            if self._final is not None:
                raise self._final
            correlation_id = self._unanswered.next_id()
            frame = drive_frame(exchange, correlation_id)
            self._unanswered.add(correlation_id, frame, waiter)
            self._reattachment.wanted(len(self._unanswered))
            if self._outgoing is not None:
                self._outgoing.put(frame)
            elif self._reader is None:
                self._start_reader()
            else:
                self._wanted.set()
        if not self._wait(waiter, exchange.timeout_s):
            with self._lock:
                gave_up = self._unanswered.take(correlation_id) is not None
            if gave_up:
                raise DeadlineError(None, f"no answer to {exchange.rpc} within {exchange.timeout_s:g} s")
            waiter.signal.acquire()  # the answer came in between
        if waiter.error is not None:
            raise waiter.error
        check_entry(waiter.answer.status)
        return getattr(waiter.answer, DRIVE_FIELDS[exchange.rpc])

    def arrived(self, answer: Any) -> None:
        """Wakes the caller who waits for an answer, before the reader has it. For the thread in which gRPC takes it in.

        That thread holds a lock of gRPC's, so it waits for none of ours: what cannot be told now, and what is told to
        callbacks, is left to the reader. gRPC takes an answer in when the reader is done with the one before it.
        """
        if not self._lock.acquire(blocking=False):
            return
        try:
            waiter = self._unanswered.take(answer.correlation_id, _Waiter)
        finally:
            self._lock.release()
        if waiter is not None:
            waiter.finish(answer, None)

    def post(self, exchange: Exchange, tell: Callable[[Any, Exception | None], None]) -> None:
        """Sends the request and goes on; `tell` gets the answer or the error, once, in another thread.

        Raises:
            UnavailableError: no stream is attached right now; nothing was sent.
        """
        with self._lock:
            if self._outgoing is None or self._final is not None:
                raise UnavailableError(None, "no stream to the service is attached")
            correlation_id = self._unanswered.next_id()
            frame = drive_frame(exchange, correlation_id)
            self._unanswered.add(correlation_id, frame, _Callback(exchange.rpc, tell))
            self._outgoing.put(frame)

    def when_broken(self, listener: Callable[[], None]) -> None:
        """Has `listener` called, in the reading thread, whenever the stream has ended, until it is to be forgotten."""
        with self._lock:
            self._break_listeners[listener] = None

    def forget(self, listener: Callable[[], None]) -> None:
        """`listener` is called no more, unless that has begun already. One that is not known may be given."""
        with self._lock:
            self._break_listeners.pop(listener, None)

    def close(self) -> None:
        """Ends the stream and its thread; callers that still wait get `UnavailableError`."""
        self._closed.set()
        self._wanted.set()
        with self._lock:
            reader, stream = self._reader, self._stream
            self._final = self._final or closed_error()
            self._end_sending()
        timeout_s = _JOIN_TIMEOUT_S
        if stream is not None and not stream.cancel() and not stream.is_active():
            timeout_s = _STUCK_JOIN_TIMEOUT_S
        if reader is not None:
            reader.join(timeout_s)

    def _wait(self, waiter: _Waiter, timeout_s: float) -> bool:
        """Whether the answer came in time."""
        deadline_s = time.monotonic() + timeout_s
        while timeout_s > _LOOK_S:
            if waiter.signal.acquire(timeout=_LOOK_S):
                return True
            self._replace_lost_reader()
            timeout_s = deadline_s - time.monotonic()
        return waiter.signal.acquire(timeout=max(timeout_s, 0.0))

    def _replace_lost_reader(self) -> None:
        """Starts another reader if this one has sat in a stream that has ended since the last look."""
        with self._lock:
            stream = self._stream
            if stream is None or self._closed.is_set() or stream.is_active():
                return
            if stream is self._ended_stream:
                self._stream = None
                self._start_reader(stream)
            self._ended_stream = stream

    def _start_reader(self, ended_stream: Any = None) -> None:
        self._reader = threading.Thread(target=self._read, args=(ended_stream,), name="specdraft-drive", daemon=True)
        self._reader.start()

    def _read(self, ended_stream: Any) -> None:
        """Body of the reader thread: one stream after another, until one ends for good, or another reader took over."""
        while True:
            if ended_stream is None:
                after, error = self._read_stream()
            else:
                after, error = self._ended(error_of_call(ended_stream))
                ended_stream = None
            if threading.current_thread() is not self._reader:
                return
            if after is After.ATTACH_AGAIN and self._reattachment.is_of_the_connection(error):
                self._tell_if_nobody_listens()
            if after is After.ATTACH_AGAIN and self._reattachment.is_of_the_size(error):
                self._tell_the_largest(error)
            if after is not After.ATTACH_AGAIN or not self._pause():
                self._finish(after, error)
                return

    def _pause(self) -> bool:
        """Waits before the next attempt; whether there is to be one."""
        self._wanted.wait(self._reattachment.next_delay_s())
        self._wanted.clear()
        return not self._closed.is_set()

    def _tell_the_largest(self, error: SpecdraftError | None) -> None:
        with self._lock:
            waiter = self._unanswered.take_largest()
        if waiter is not None:
            waiter.finish(None, error)

    def _tell_if_nobody_listens(self) -> None:
        with self._lock:
            waiting = len(self._unanswered)
        if not waiting or not is_refused(self._target):
            return
        with self._lock:
            waiters = self._unanswered.take_all()
        for waiter in waiters:
            waiter.finish(None, UnavailableError(None, f"nobody listens at {self._target}"))

    def _read_stream(self) -> tuple[After, SpecdraftError | None]:
        error: SpecdraftError | None = None
        try:
            for answer in self._open_stream():
                with self._lock:
                    waiter = self._unanswered.take(answer.correlation_id)
                    self._reattachment.answered()
                if waiter is not None:
                    waiter.finish(answer, None)
        except grpc.RpcError as failure:
            error = error_of_call(failure)
        except ValueError:  # the channel was closed
            self._closed.set()
        return self._ended(error)

    def _ended(self, error: SpecdraftError | None) -> tuple[After, SpecdraftError | None]:
        with self._lock:
            if threading.current_thread() is not self._reader:
                return After.GIVE_UP, error
            self._stream = None
            listeners = list(self._break_listeners)
        for listener in listeners:
            listener()
        with self._lock:
            self._end_sending()
            return self._reattachment.ended(error, time.monotonic()), error

    def _open_stream(self) -> Any:
        with self._lock:
            outgoing: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
            for _, frame in self._unanswered.frames():
                outgoing.put(frame)
            if self._closed.is_set():
                return ()
            self._stream = self._attach(iter(outgoing.get, None))
            self._outgoing = outgoing
            self._reattachment.attached(time.monotonic())
            return self._stream

    def _end_sending(self) -> None:
        # gRPC's own sending thread sits in the queue: None ends its iterator.
        if self._outgoing is not None:
            self._outgoing.put(None)
            self._outgoing = None

    def _finish(self, after: After, error: SpecdraftError | None) -> None:
        outcome: Exception = error or UnavailableError(None, "the stream to the service has ended")
        with self._lock:
            self._reader = self._stream = None
            if self._closed.is_set():
                outcome = closed_error()
            elif after is After.USE_UNARY:
                outcome = self._final = DriveUnsupported()
            elif after is After.STOP:
                self._final = outcome
            waiters = self._unanswered.take_all()
        for waiter in waiters:
            waiter.finish(None, outcome)
