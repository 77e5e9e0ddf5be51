"""The one place where exceptions become statuses, deadlines are demanded and calls are timed."""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable, Iterator, Mapping
from concurrent import futures
from typing import Any, NoReturn

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.protobuf.message import DecodeError
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from drafter_service.server.refusals import invalid_field, shortened, shortened_details
from drafter_service.telemetry import Metrics
from specdraft.errors import DOMAIN, Code, Reason, SpecdraftError, make_error

_log = logging.getLogger(__name__)


NO_DEADLINE_S = 1e8
"""gRPC gives a deadline of decades to a call that has none."""


PROMPT_METHODS = frozenset({"GetServerInfo", "KeepAlive"})
"""Calls that wait for nobody."""


class Ended(Exception):
    """Raised by a handler whose call gRPC has ended already; there is nobody to answer."""


class Handlers:
    """Wraps every handler of our services on its way to a server.

    A `grpc.ServerInterceptor` could do it too, anew for each call: eight functions of Python's that every call would
    wait for.

    Args:
        server: gets the wrapped handlers.
        metrics: counts and times.
        clock: monotonic seconds.
        streams: threads for streams, so that unary calls and streams cannot take each other's; None = the server's.
        prompt: threads for the calls that never wait, so that calls that do cannot take theirs; None = the server's.
    """

    def __init__(
        self,
        server: grpc.Server,
        metrics: Metrics,
        clock: Callable[[], float],
        streams: futures.ThreadPoolExecutor | None = None,
        prompt: futures.ThreadPoolExecutor | None = None,
    ) -> None:
        self._server = server
        self._metrics = metrics
        self._clock = clock
        self._streams = streams
        self._prompt = prompt

    def register(self, add_to_server: Callable[[Any, Any], None], servicer: object) -> None:
        """Registers a servicer with the generated function that does it, which takes this for the server."""
        add_to_server(servicer, self)

    def add_generic_rpc_handlers(self, handlers: object) -> None:
        """Called by the generated function, with handlers that it gives again by their names: nothing is to be done."""

    def add_registered_method_handlers(self, service: str, handlers: Mapping[str, Any]) -> None:
        """Called by the generated function."""
        wrapped = {method: self._wrap(method, handler) for method, handler in handlers.items()}
        self._server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, wrapped),))
        self._server.add_registered_method_handlers(service, wrapped)

    def _wrap(self, method: str, handler: Any) -> Any:
        decode = functools.partial(_decoded, handler.request_deserializer)
        if handler.response_streaming:
            return grpc.stream_stream_rpc_method_handler(
                self._streaming(method, handler.stream_stream), decode, handler.response_serializer
            )
        return grpc.unary_unary_rpc_method_handler(
            self._unary(method, handler.unary_unary), decode, handler.response_serializer
        )

    def _unary(self, method: str, handle: Callable[..., Any]) -> Callable[..., Any]:
        def handle_unary(request: Any, context: grpc.ServicerContext) -> Any:
            began = self._clock()
            code = Code.OK
            try:
                _require_deadline(method, context)
                return handle(_understood(request), context)
            except Ended:
                code = Code.CANCELLED
                context.abort(grpc.StatusCode.CANCELLED, "the call has ended")
            except Exception as error:  # noqa: BLE001  # every exception becomes a status here
                refusal = self._refusal(method, error)
                code = refusal.code
                abort(context, refusal)
            finally:
                self._metrics.rpc_done(method, code, self._clock() - began)

        if method in PROMPT_METHODS:
            pooled: Any = handle_unary
            pooled.experimental_thread_pool = self._prompt
        return handle_unary

    def _streaming(self, method: str, handle: Callable[..., None]) -> Callable[..., None]:
        """A handler that gets a function to send answers with, from any thread, in place of yielding them."""

        def handle_stream(
            requests: Iterator[Any], context: grpc.ServicerContext, send: Callable[[Any | None], None]
        ) -> None:
            try:
                handle(map(_understood, requests), context, send)
            except (Ended, grpc.RpcError):
                pass  # RpcError: the client had gone before the answer
            except Exception as error:  # noqa: BLE001  # as above
                abort(context, self._refusal(method, error))
            send(None)

        # gRPC looks for both on the function that answers; its own health service uses them too.
        pooled: Any = handle_stream
        pooled.experimental_non_blocking = True
        pooled.experimental_thread_pool = self._streams
        return handle_stream

    def _refusal(self, method: str, error: Exception) -> SpecdraftError:
        if not isinstance(error, SpecdraftError):
            _log.error("%s failed", method, exc_info=error)
            error = make_error(Reason.INTERNAL, "the call failed inside the service")
        if error.reason is not None:
            self._metrics.error(error.reason)
        return error


def _decoded(deserialize: Callable[[bytes], Any], data: bytes) -> Any:
    """The message, or the error to raise: gRPC would call bytes that are no message an error of ours."""
    try:
        return deserialize(data)
    except DecodeError:
        return invalid_field("request", f"{len(data)} bytes", "a message of the call's type")


def _understood(request: Any) -> Any:
    if isinstance(request, SpecdraftError):
        raise request
    return request


def _require_deadline(method: str, context: grpc.ServicerContext) -> None:
    remaining: float | None = context.time_remaining()  # the stubs leave the None out
    if remaining is None or remaining > NO_DEADLINE_S:
        raise make_error(Reason.DEADLINE_REQUIRED, f"{method} needs a deadline")


def abort(context: grpc.ServicerContext, error: SpecdraftError) -> NoReturn:
    """Ends the call with the error's status, `google.rpc.ErrorInfo` and, where it has a delay, `RetryInfo`."""
    info = error_details_pb2.ErrorInfo(reason=error.reason or "", domain=DOMAIN, metadata=shortened_details(error))
    details = [_packed(info)]
    if error.retry_delay_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_delay_ms)
        details.append(_packed(error_details_pb2.RetryInfo(retry_delay=delay)))
    status = status_pb2.Status(code=int(error.code), message=shortened(error.message), details=details)
    context.abort_with_status(rpc_status.to_status(status))
    raise AssertionError("abort_with_status raises")


def _packed(message: Any) -> any_pb2.Any:
    packed = any_pb2.Any()
    packed.Pack(message)
    return packed
