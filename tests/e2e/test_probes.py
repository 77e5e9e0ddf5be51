"""What probes are told, and when: while loading, draining, after the engine or the device is lost, under load."""

import signal
import threading
import time
from contextlib import ExitStack, contextmanager

import grpc
import pytest
import torch
from grpc_health.v1 import health_pb2, health_pb2_grpc

from drafter_service import cli
from drafter_service.server import Service, health
from processes import begin, flags, places, serving
from serving import GatedRunner, temporary_directory, tiny_config, wait_until
from specdraft.v1 import drafter_pb2 as pb
from wire import Client, Story, refusal

READY, LIVE = "", health.LIVENESS
ANSWER_S = 1.0
"""The kubelet's usual patience."""


class Kubelet:
    """Asks as the kubelet does: a new connection for every look."""

    def __init__(self, port):
        self.target = f"127.0.0.1:{port}"

    def look(self, service):
        with grpc.insecure_channel(self.target, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            request = health_pb2.HealthCheckRequest(service=service)
            answer = health_pb2_grpc.HealthStub(channel).Check(request, timeout=ANSWER_S, wait_for_ready=True)
        return health_pb2.HealthCheckResponse.ServingStatus.Name(answer.status)

    def looks(self):
        return self.look(READY), self.look(LIVE)


@contextmanager
def held_calls_and_watchers(server, num_calls, num_watchers):
    """So many calls that wait for the runner, and so many streams that watch health."""
    with ExitStack() as stack:
        client = server.client()
        session = client.open()
        for _ in range(num_watchers):
            call = client.health.Watch(health_pb2.HealthCheckRequest())
            assert next(call).status == health_pb2.HealthCheckResponse.SERVING
            stack.callback(call.cancel)
        sequences = [session.sequence(Story(seed)) for seed in range(num_calls)]
        with server.runner.held():
            for sequence in sequences:
                request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
                call = session.begin("Propose", request, timeout=60)
                stack.callback(call.cancel)
            wait_until(lambda: len(server.service.assembly.engine._in_flight) == num_calls, text="held calls")
            yield


def test_under_twice_as_many_watchers_and_held_calls_as_workers_probes_are_answered(start):
    server = start(workers=8, max_sessions=8, health_port=0)
    kubelet = Kubelet(server.addresses.health_port)
    with held_calls_and_watchers(server, num_calls=8, num_watchers=16):
        began = time.monotonic()
        assert kubelet.looks() == ("SERVING", "SERVING")
        assert time.monotonic() - began < 2 * ANSWER_S
        server.service.refuse_sessions()
        assert kubelet.looks() == ("NOT_SERVING", "SERVING")


@contextmanager
def watchers_during_the_load(socket, num_watchers):
    """So many streams that watch health while a service loads; yields them, each after its first answer."""
    with Client(f"unix:{socket}") as client, ExitStack() as stack:
        watchers = []
        for _ in range(num_watchers):
            call = client.health.Watch(health_pb2.HealthCheckRequest())
            stack.callback(call.cancel)
            assert next(call).status == health_pb2.HealthCheckResponse.NOT_SERVING
            watchers.append(call)
        # No call can be held yet: each hears at once that the head is still being loaded.
        assert refusal(client.open).reason == "STARTING"
        yield watchers


def test_a_slow_load_is_alive_and_not_ready_though_watchers_are_open(tiny_checkpoint):
    gate = threading.Event()

    class Slow(GatedRunner):
        def run(self, entries):
            gate.wait(60)
            return super().run(entries)

    with temporary_directory() as directory:
        config = tiny_config(tiny_checkpoint, directory, health_port=0)
        service = Service(config, wrap_runner=Slow)
        ports = []
        start_probes = service._start_probes
        service._start_probes = lambda: ports.append(start_probes()) or ports[0]
        starter = threading.Thread(target=service.start)
        starter.start()
        try:
            wait_until(lambda: ports, text="the probe port")
            kubelet = Kubelet(ports[0])
            with watchers_during_the_load(config.socket, 16) as watchers:
                for _ in range(3):
                    assert kubelet.looks() == ("NOT_SERVING", "SERVING")
                # A process that is killed while it loads, again and again, is seen by the alert SpecdraftRestarts.
                seen = {sample.name for family in service.registry.collect() for sample in family.samples}
                assert {"process_start_time_seconds", "specdraft_build_info"} <= seen
                gate.set()
                wait_until(lambda: kubelet.looks() == ("SERVING", "SERVING"))
                assert {next(call).status for call in watchers} == {health_pb2.HealthCheckResponse.SERVING}
        finally:
            gate.set()
            starter.join(60)
            service.close()


def test_an_operator_who_drains_does_not_have_the_container_killed(start):
    server = start(health_port=0)
    server.service.refuse_sessions()
    assert Kubelet(server.addresses.health_port).looks() == ("NOT_SERVING", "SERVING")


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_killed_engine_thread_is_neither_ready_nor_alive_though_watchers_and_calls_are_held(start):
    server = start(workers=8, max_sessions=8, health_port=0)
    kubelet = Kubelet(server.addresses.health_port)

    def die(_):
        raise SystemExit

    server.runner.fails = die
    with held_calls_and_watchers(server, num_calls=8, num_watchers=16):
        assert kubelet.looks() == ("SERVING", "SERVING")
        server.runner.gate.set()
        wait_until(lambda: kubelet.looks() == ("NOT_SERVING", "NOT_SERVING"))
        assert server.service.failure == "the engine has died"


def lose_the_device(runner, service):
    """From now on the device answers nothing."""

    def fail(_=None):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    runner.fails = fail
    service.assembly.device.probe = fail


def test_a_lost_device_is_neither_ready_nor_alive_though_watchers_and_calls_are_held(start):
    server = start(workers=8, max_sessions=8, health_port=0)
    kubelet = Kubelet(server.addresses.health_port)
    with held_calls_and_watchers(server, num_calls=8, num_watchers=16):
        lose_the_device(server.runner, server.service)
        assert kubelet.looks() == ("SERVING", "SERVING")  # nobody has asked the device yet
        server.runner.gate.set()
        wait_until(lambda: kubelet.looks() == ("NOT_SERVING", "NOT_SERVING"))
        assert server.service.failure == "the device is lost"
        assert server.metric("device_faults_total") >= 1


def test_a_fault_that_the_device_recovers_from_is_counted_and_no_more(start):
    server = start(health_port=0)
    faults = [torch.AcceleratorError("CUDA error: invalid argument")] * 2

    def fail_twice(_):
        if faults:
            raise faults.pop()
        return False

    server.runner.fails = fail_twice
    session = server.client().open()
    sequence = session.sequence(Story(1))
    (failed,) = session.call("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])).results
    assert failed.status.code == grpc.StatusCode.INTERNAL.value[0]
    assert server.metric("device_faults_total") == 2  # in the batch, and by itself
    assert Kubelet(server.addresses.health_port).looks() == ("SERVING", "SERVING")
    sequence.op += 1
    sequence.propose(0, 2)


def test_memory_that_does_not_suffice_is_no_fault_of_the_device(start):
    server = start()

    def too_much(_):
        raise torch.OutOfMemoryError("CUDA out of memory")

    server.runner.fails = too_much
    session = server.client().open()
    session.call("Propose", pb.ProposeRequest(entries=[session.sequence(Story(1)).propose_entry(0, 2)]))
    assert server.metric("device_faults_total") == 0
    assert not server.service.has_failed


def test_a_process_that_has_lost_its_device_ends_with_exit_code_1(tiny_checkpoint, monkeypatch, capsys):
    made = []

    class Breaking(Service):
        def __init__(self, config):
            self.runner = None
            super().__init__(config, wrap_runner=self._wrap)
            made.append(self)

        def _wrap(self, runner):
            self.runner = GatedRunner(runner)
            return self.runner

    monkeypatch.setattr("drafter_service.server.Service", Breaking)
    monkeypatch.setattr(signal, "signal", lambda *_: None)  # only the main thread may
    with temporary_directory() as directory:
        arguments = ["serve", *flags(tiny_checkpoint, directory / "s.sock", drain_s=1)]
        codes = []
        serving_thread = threading.Thread(target=lambda: codes.append(cli.main(arguments)))
        serving_thread.start()
        wait_until(lambda: made and made[0]._health._wants_to_serve, timeout=60, text="SERVING")
        lose_the_device(made[0].runner, made[0])
        with Client(f"unix:{directory / 's.sock'}") as client:
            session = client.open()
            session.call("Propose", pb.ProposeRequest(entries=[session.sequence(Story(1)).propose_entry(0, 2)]))
        serving_thread.join(30)
    assert codes == [1]
    assert "the device is lost" in capsys.readouterr().err


def rounds_until_refused(target, committed):
    """Unary rounds on one sequence; what was answered is noted down."""
    with Client(target) as client:
        session = client.open()
        sequence = session.sequence(Story(1))
        try:
            while True:
                request = pb.ProposeRequest(entries=[sequence.propose_entry(sequence.op % 50, 1)])
                (result,) = session.call("Propose", request, timeout=30).results
                if result.status.code:
                    committed.append(result.status.code)
                    return
                sequence.op = result.state.last_op
                committed.append(("done", sequence.op))
        except grpc.RpcError as error:
            committed.append(error.code().name)


def test_sigterm_under_load_ends_inside_the_grace_period_and_loses_no_committed_operation(tiny_checkpoint):
    grace_s = 10
    with temporary_directory() as directory, ExitStack() as stack:
        socket = directory / "s.sock"
        arguments = flags(tiny_checkpoint, socket, health_port=0, drain_s=grace_s, workers=8, kv_bytes="1MiB")
        process, reached = stack.enter_context(serving(arguments))
        target = f"unix:{socket}"
        watcher = stack.enter_context(Client(target))
        statuses = [watcher.health.Watch(health_pb2.HealthCheckRequest()) for _ in range(16)]
        assert all(next(call).status == health_pb2.HealthCheckResponse.SERVING for call in statuses)
        logs = [[] for _ in range(8)]
        threads = [threading.Thread(target=rounds_until_refused, args=(target, log)) for log in logs]
        for thread in threads:
            thread.start()
        wait_until(lambda: all(len(log) > 5 for log in logs), timeout=30, text="load")
        assert Kubelet(reached["health"]).looks() == ("SERVING", "SERVING")
        began = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(grace_s + 5) == 0
        assert time.monotonic() - began < grace_s
        for thread in threads:
            thread.join(10)
    for log in logs:
        *done, why = log
        # No number is missing: what was answered was carried out, in order, once.
        assert done == [("done", op) for op in range(1, len(done) + 1)]
        assert why in {"UNAVAILABLE", grpc.StatusCode.UNAVAILABLE.value[0]}


def test_the_exec_probe_asks_for_readiness_or_liveness(tiny_checkpoint, capsys):
    with temporary_directory() as directory:
        process = begin(flags(tiny_checkpoint, directory / "s.sock"))
        try:
            target = places(process)["socket"]
            assert cli.main(["health", "--target", target]) == 0
            assert cli.main(["health", "--target", target, "--service", LIVE]) == 0
            assert cli.main(["health", "--target", target, "--service", "another"]) == 1
        finally:
            process.terminate()
            process.communicate(timeout=30)
        assert cli.main(["health", "--target", target, "--timeout-s", "0.5"]) == 1
    said = capsys.readouterr()
    assert said.out.splitlines()[:3] == ["SERVING", "SERVING", "NOT_FOUND"]
    assert "no health service is called 'another'" in said.err
