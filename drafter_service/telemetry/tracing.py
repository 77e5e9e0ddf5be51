"""OpenTelemetry spans of Propose, stage by stage. OpenTelemetry is imported only where somebody wants spans."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterable
from typing import Any, TypeVar

_T = TypeVar("_T")

SERVICE_NAME = "drafter-service"
NANOSECONDS = 1_000_000_000
CLOSE_S = 2.0
"""Most time for the last spans to get out. Without a collector OpenTelemetry would try for ten seconds and more."""


class Tracing:
    """Makes spans, of which each has its stages as children: decode, queue, device, reply.

    Where they go and which are kept say OpenTelemetry's own variables: `OTEL_EXPORTER_OTLP_ENDPOINT`,
    `OTEL_TRACES_SAMPLER` and so on. Raises ImportError without the extra `tracing`.

    Args:
        exporter: takes finished spans; None = over OTLP.
    """

    def __init__(self, exporter: Any = None) -> None:
        from opentelemetry import trace
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        name = os.environ.get("OTEL_SERVICE_NAME", SERVICE_NAME)
        self._provider = TracerProvider(resource=Resource.create({"service.name": name}), shutdown_on_exit=False)
        self._provider.add_span_processor(BatchSpanProcessor(exporter or _over_otlp()))
        self._propagator = TraceContextTextMapPropagator()
        self.tracer = self._provider.get_tracer(SERVICE_NAME)
        self.in_span = trace.set_span_in_context
        self.failed = trace.Status(trace.StatusCode.ERROR)
        self.last_run: Callable[[], tuple[float, float]] = lambda: (0.0, 0.0)
        self.clock = time.monotonic
        self._offset_ns = 0

    def follow(self, last_run: Callable[[], tuple[float, float]], clock: Callable[[], float]) -> None:
        """Learns where the times are.

        Args:
            last_run: begin and end of the batch that ran last; asked in the engine's thread.
            clock: monotonic seconds, the one that `last_run` tells.
        """
        self.last_run, self.clock = last_run, clock
        self._offset_ns = time.time_ns() - int(clock() * NANOSECONDS)

    def parent_in(self, metadata: Iterable[tuple[str, Any]]) -> Any:
        """The caller's context: W3C `traceparent` and `tracestate` of a call's metadata."""
        return self._propagator.extract({key: value for key, value in metadata if isinstance(value, str)})

    def begin(self, parent: Any, num_entries: int) -> ProposeTrace:
        """A Propose has arrived."""
        return ProposeTrace(self, parent, num_entries)

    def close(self) -> None:
        """Sends what is left, and gives up after CLOSE_S: the end must not wait for a collector."""
        sender = threading.Thread(target=self._provider.shutdown, name="last spans", daemon=True)
        sender.start()
        sender.join(CLOSE_S)

    def wall_ns(self, at: float) -> int:
        """A time of the clock, as OpenTelemetry counts."""
        return int(at * NANOSECONDS) + self._offset_ns


class ProposeTrace:
    """The span of one Propose; it is made when the answer is."""

    def __init__(self, tracing: Tracing, parent: Any, num_entries: int) -> None:
        self._tracing = tracing
        self._parent = parent
        self._num_entries = num_entries
        self._begin = self._decoded = tracing.clock()

    def decoded(self) -> None:
        """The request has been checked; it is about to be submitted."""
        self._decoded = self._tracing.clock()

    def around(self, fill: Callable[[_T], None]) -> Callable[[_T], None]:
        """Around what fills the answer. Called in the engine's thread, right after the batch."""
        tracing = self._tracing
        ran, done = tracing.last_run(), tracing.clock()

        def fill_and_tell(answer: _T) -> None:
            is_well = False
            try:
                fill(answer)
                is_well = True
            finally:
                self._tell(ran, done, is_well=is_well)

        return fill_and_tell

    def _tell(self, ran: tuple[float, float], done: float, *, is_well: bool) -> None:
        tracing, end = self._tracing, self._tracing.clock()
        began, ended = ran
        if began < self._decoded:  # it was answered without a batch
            began = ended = done
        stages = [("decode", self._begin, self._decoded), ("queue", self._decoded, began)]
        stages += [("device", began, ended)] if ended > began else []
        stages.append(("reply", ended, end))
        span = tracing.tracer.start_span(
            "Propose",
            context=self._parent,
            start_time=tracing.wall_ns(self._begin),
            attributes={"specdraft.entry_count": self._num_entries},
        )
        if not is_well:
            span.set_status(tracing.failed)
        inside = tracing.in_span(span)
        for name, first, last in stages:
            child = tracing.tracer.start_span(name, context=inside, start_time=tracing.wall_ns(first))
            child.end(tracing.wall_ns(last))
        span.end(tracing.wall_ns(end))


def _over_otlp() -> Any:
    from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter

    return OTLPSpanExporter()
