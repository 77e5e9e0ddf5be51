"""Spans of Propose: by stage, in the caller's trace, over OTLP; and nothing of it where it is off."""

import subprocess
import sys
from concurrent import futures

import grpc
import pytest
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from drafter_service.telemetry import tracing
from processes import environment, flags, serving
from serving import temporary_directory, wait_until
from specdraft.v1 import drafter_pb2 as pb
from wire import Client, Story

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
PARENT = "00f067aa0ba902b7"
TRACEPARENT = ("traceparent", f"00-{TRACE}-{PARENT}-01")


@pytest.fixture
def exporter(monkeypatch):
    made = InMemorySpanExporter()
    monkeypatch.setattr(tracing, "_over_otlp", lambda: made)
    return made


@pytest.fixture
def server(exporter, start):
    return start(tracing=True)


def finished(server, exporter, count):
    """The first `count` proposals' spans, each with its stages by name."""
    provider = server.service.assembly.tracing._provider
    spans = []

    def arrived():
        provider.force_flush()
        spans[:] = exporter.get_finished_spans()
        return len([span for span in spans if span.name == "Propose"]) >= count

    wait_until(arrived, text="the spans")
    roots = [span for span in spans if span.name == "Propose"]
    assert len(roots) == count
    return [
        (root, {span.name: span for span in spans if span.parent and span.parent.span_id == root.context.span_id})
        for root in roots
    ]


def test_a_propose_is_a_span_with_its_stages_one_after_the_other(server, exporter):
    sequence = server.client().open().sequence(Story(1))
    sequence.propose(0, 2)
    ((root, stages),) = finished(server, exporter, 1)
    assert list(stages) == ["decode", "queue", "device", "reply"]
    times = [root.start_time, *(time for span in stages.values() for time in (span.start_time, span.end_time))]
    assert [*times, root.end_time] == sorted([*times, root.end_time])
    for before, after in zip(list(stages.values()), list(stages.values())[1:], strict=False):
        assert before.end_time == after.start_time
    assert (root.start_time, root.end_time) == (stages["decode"].start_time, stages["reply"].end_time)
    assert root.attributes["specdraft.entry_count"] == 1
    assert root.resource.attributes["service.name"] == "drafter-service"


def test_the_time_of_a_held_batch_is_the_devices(server, exporter):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        call = session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]))
        server.runner.wait_for_batch(num_batches)
        held_from = tracing.time.time_ns()
        wait_until(lambda: tracing.time.time_ns() - held_from > 50_000_000)
    call.result()
    ((_, stages),) = finished(server, exporter, 1)
    device = stages["device"]
    assert device.start_time <= held_from
    assert device.end_time - device.start_time >= 50_000_000


def test_the_context_comes_from_the_calls_metadata(server, exporter):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
    metadata = (*session.metadata(), TRACEPARENT)
    session.client.stub.Propose(request, timeout=10, metadata=metadata)
    ((root, _),) = finished(server, exporter, 1)
    assert f"{root.context.trace_id:032x}" == TRACE
    assert f"{root.parent.span_id:016x}" == PARENT


def test_proposals_of_a_stream_belong_to_the_trace_that_it_was_opened_in(server, exporter):
    session = server.client().open()
    sequences = [session.sequence(Story(seed)) for seed in (1, 2)]
    requests = [
        pb.DriveRequest(
            correlation_id=index,
            timeout_ms=10_000,
            propose=pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]),
        )
        for index, sequence in enumerate(sequences, 1)
    ]
    metadata = (*session.metadata(), TRACEPARENT)
    answers = list(session.client.stub.Drive(iter(requests), metadata=metadata))
    assert len(answers) == 2
    for root, stages in finished(server, exporter, 2):
        assert f"{root.context.trace_id:032x}" == TRACE
        assert "device" in stages


def test_a_trace_that_is_not_sampled_is_not_exported(server, exporter):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    for flag in ("00", "01"):
        request = pb.ProposeRequest(entries=[sequence.propose_entry(sequence.op, 1)])
        context = ("traceparent", f"00-{TRACE}-{PARENT}-{flag}")
        session.client.stub.Propose(request, timeout=10, metadata=(*session.metadata(), context))
        sequence.op += 1
    assert len(finished(server, exporter, 1)) == 1


def test_other_calls_and_what_is_refused_before_it_begins_make_no_span(server, exporter):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 3)
    sequence.state()
    with pytest.raises(grpc.RpcError):
        session.client.stub.Propose(pb.ProposeRequest(), timeout=10)
    sequence.propose(3, 1)
    finished(server, exporter, 1)


def test_a_propose_that_is_refused_entry_by_entry_has_no_device_stage(server, exporter):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    session.call("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(5, 2)]))
    ((_, stages),) = finished(server, exporter, 1)
    assert list(stages) == ["decode", "queue", "reply"]


class Collector(trace_service_pb2_grpc.TraceServiceServicer):
    """What an OpenTelemetry collector is to us."""

    def __init__(self):
        self.names = []

    def Export(self, request, context):
        for resource in request.resource_spans:
            for scope in resource.scope_spans:
                self.names += [span.name for span in scope.spans]
        return trace_service_pb2.ExportTraceServiceResponse()


def test_spans_reach_a_collector_over_otlp_and_the_last_ones_before_the_end(tiny_checkpoint):
    collector = Collector()
    receiver = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(collector, receiver)
    port = receiver.add_insecure_port("127.0.0.1:0")
    receiver.start()
    try:
        with temporary_directory() as directory:
            arguments = flags(tiny_checkpoint, directory / "s.sock", tracing="true")
            where = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{port}"}
            with serving(arguments, **where) as (process, reached), Client(f"unix:{reached['socket']}") as client:
                client.open().sequence(Story(1)).propose(0, 2)
                process.terminate()
                assert process.wait(30) == 0
    finally:
        receiver.stop(0).wait()
    assert sorted(collector.names) == ["Propose", "decode", "device", "queue", "reply"]


OFF = """
import sys
from pathlib import Path
from drafter_service.config import ServiceConfig
from drafter_service.server import Service
checkpoint, directory = map(Path, sys.argv[1:])
config = ServiceConfig(checkpoint=checkpoint, socket=directory / "s.sock", device="cpu", kv_bytes=1 << 20,
    metrics_port=None, health_port=None)
service = Service(config)
service.start()
service.close()
print([name for name in sys.modules if name.split(".")[0] == "opentelemetry"])
"""


def test_nothing_of_it_is_imported_where_it_is_off(tiny_checkpoint):
    with temporary_directory() as directory:
        command = [sys.executable, "-c", OFF, str(tiny_checkpoint), str(directory)]
        done = subprocess.run(command, env=environment(), check=True, capture_output=True, text=True)
    assert done.stdout.strip() == "[]"


def test_where_the_extra_is_missing_the_setting_says_so(start, monkeypatch):
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.resources", None)
    with pytest.raises(Exception, match="--tracing needs OpenTelemetry, the extra tracing"):
        start(tracing=True)
