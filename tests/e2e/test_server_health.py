"""Health: what probes are told, and that no other call keeps them waiting."""

import queue
import sys
import threading
import time
from contextlib import contextmanager

import grpc
import pytest
from grpc_health.v1 import health_pb2

from serving import wait_until
from specdraft.v1 import admin_pb2, admin_pb2_grpc
from specdraft.v1 import drafter_pb2 as pb
from wire import Client, Story, open_request, refusal, refused_entry

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING


@pytest.fixture
def probe_clients():
    clients = []

    def connect(server):
        clients.append(Client(f"127.0.0.1:{server.addresses.health_port}"))
        return clients[-1]

    yield connect
    for client in clients:
        client.close()


def watch(client):
    """Watches health; the statuses arrive in the queue."""
    statuses = queue.SimpleQueue()
    call = client.health.Watch(health_pb2.HealthCheckRequest())

    def collect():
        try:
            for answer in call:
                statuses.put(answer.status)
        except grpc.RpcError:
            return

    threading.Thread(target=collect, daemon=True).start()
    return call, statuses


def test_probes_are_answered_while_watchers_and_held_calls_take_every_other_thread(start, probe_clients):
    server = start(workers=4, max_sessions=4, health_port=0)
    probe = probe_clients(server)
    client = server.client()
    num_places = 4
    watches = [watch(client) for _ in range(2 * (4 + 4))]
    for _, statuses in watches:
        assert statuses.get(timeout=10) == SERVING
    session = client.open()
    sequences = [session.sequence(Story(seed)) for seed in range(num_places + 1)]
    with server.runner.held():
        num_batches = len(server.runner.batches)
        requests = [pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]) for sequence in sequences]
        calls = [session.begin("Propose", request) for request in requests[:-1]]
        server.runner.wait_for_batch(num_batches)
        wait_until(lambda: len(server.service.assembly.engine._in_flight) == num_places)
        for asked in (client, server.client(), probe):
            began = time.monotonic()
            assert asked.check(timeout=1.0) == "SERVING"
            assert time.monotonic() - began < 1.0
        again = server.client()
        call, statuses = watch(again)
        assert statuses.get(timeout=1.0) == SERVING
        call.cancel()
        # One more is told in time that there is no place for it.
        refused = refusal(session.call, "Propose", requests[-1], timeout=1.0)
        assert refused.kind == ("RESOURCE_EXHAUSTED", "IN_FLIGHT_EXHAUSTED")
        assert refused.retry_ms > 0
    assert all(call.result().results[0].status.code == 0 for call in calls)
    for call, _ in watches:
        call.cancel()


def test_one_more_proposal_of_a_busy_sequence_is_refused_at_once_while_workers_are_held(start):
    server = start(workers=16)
    session = server.client().open()
    sequences = [session.sequence(Story(seed)) for seed in range(4)]
    with server.runner.held():
        requests = [pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]) for sequence in sequences]
        later = [pb.ProposeRequest(entries=[sequence.propose_entry(0, 2, op=2)]) for sequence in sequences]
        calls = [session.begin("Propose", request) for request in requests + later]
        engine = server.service.assembly.engine
        wait_until(lambda: engine._in_flight.num_operations == 8)
        third = pb.ProposeRequest(entries=[sequences[0].propose_entry(0, 2, op=3)])
        (result,) = session.call("Propose", third, timeout=5).results
        assert refused_entry(result.status).kind == ("RESOURCE_EXHAUSTED", "IN_FLIGHT_EXHAUSTED")
    assert all(call.result().results[0].status.code == 0 for call in calls)


def test_probes_are_answered_while_the_largest_message_is_read(start, probe_clients):
    server = start(health_port=0, prefill_rows=1024, max_seq_len=2000, num_pages=600)
    probe = probe_clients(server)
    session = server.client().open()
    story = Story(1, length=1024)
    sequences = [session.sequence(story) for _ in range(4)]
    entries = [sequence.catchup_entry(0, 1024) for sequence in sequences]
    calls = [session.begin("Catchup", pb.CatchupRequest(entries=entries[: index + 1])) for index in range(4)]
    while not all(call.done() for call in calls):
        assert probe.check(timeout=1.0) == "SERVING"
    assert all(call.code() is grpc.StatusCode.OK for call in calls)


def test_the_probe_port_serves_health_alone(start, probe_clients):
    probe = probe_clients(start(health_port=0))
    assert probe.check() == "SERVING"
    named = health_pb2.HealthCheckRequest(service="specdraft.v1.Drafter")
    assert probe.health.Check(named, timeout=1).status == SERVING
    unknown = health_pb2.HealthCheckRequest(service="another")
    assert refusal(probe.health.Check, unknown, timeout=1).code is grpc.StatusCode.NOT_FOUND
    assert refusal(probe.info).code is grpc.StatusCode.UNIMPLEMENTED


@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_an_engine_that_died_is_not_serving(start, probe_clients):
    server = start(health_port=0)
    probe = probe_clients(server)
    sequence = server.client().open().sequence(Story(1))

    def die(_):
        raise SystemExit  # ends a thread without a word

    server.runner.fails = die
    call = sequence.session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]), timeout=10)
    wait_until(lambda: probe.check() == "NOT_SERVING")
    assert server.client().check() == "NOT_SERVING"
    assert server.service.has_failed
    call.cancel()


@contextmanager
def stuck(start):
    """A server whose engine is stuck inside, and a client of it; the engine goes on afterwards."""
    ahead = [0.0]
    server = start(clock=lambda: time.monotonic() + ahead[0], lease_s=1000.0)
    client = server.client()
    sequence = client.open().sequence(Story(1))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        call = sequence.session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]))
        server.runner.wait_for_batch(num_batches)
        assert client.check() == "SERVING"
        ahead[0] = 60.0
        wait_until(lambda: client.check() == "NOT_SERVING")
        yield server, client
    call.result()


def test_an_engine_that_is_stuck_is_not_serving_and_recovers_with_it(start):
    with stuck(start) as (server, client):
        assert not server.service.has_failed
    wait_until(lambda: client.check() == "SERVING")


def test_an_engine_that_comes_back_while_draining_stays_not_serving(start):
    with stuck(start) as (server, client):
        server.service.refuse_sessions()
    live = health_pb2.HealthCheckRequest(service="specdraft.live")
    wait_until(lambda: client.health.Check(live, timeout=1).status == SERVING)
    assert client.check() == "NOT_SERVING"


def test_draining_turns_watchers_away_answers_what_was_accepted_and_refuses_the_rest(start, probe_clients):
    server = start(health_port=0)
    client, probe = server.client(), probe_clients(server)
    session = client.open()
    sequences = [session.sequence(Story(seed)) for seed in range(3)]
    drive = session.drive().attached()
    _, statuses = watch(client)
    assert statuses.get(timeout=10) == SERVING
    with server.runner.held():
        num_batches = len(server.runner.batches)
        requests = [pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]) for sequence in sequences]
        running = session.begin("Propose", requests[0])
        server.runner.wait_for_batch(num_batches)
        drive.send(propose=requests[1])
        waiting = session.begin("Propose", requests[2])
        wait_until(lambda: len(server.service.assembly.engine._in_flight) == 3)
        drainer = threading.Thread(target=server.service.drain)
        drainer.start()
        while statuses.get(timeout=10) != NOT_SERVING:
            pass
        assert client.check() == probe.check() == "NOT_SERVING"
        assert refusal(client.stub.OpenSession, open_request(), timeout=5).kind == ("UNAVAILABLE", "DRAINING")
        assert session.drive().ending().kind == ("UNAVAILABLE", "DRAINING")
        wait_until(lambda: server.service.assembly.engine._stopping)
        late = refusal(sequences[0].state)
        assert late.kind == ("UNAVAILABLE", "DRAINING")
        assert late.retry_ms > 0
        said = refused_entry(drive.ask(get_sequence=pb.GetSequenceRequest(sequence_id=bytes(16))).status)
        assert said.kind == ("UNAVAILABLE", "DRAINING")
    drainer.join(10)
    assert [call.result().results[0].status.code for call in (running, waiting)] == [0, 0]
    assert drive.answer_to(1).propose.results[0].status.code == 0
    assert drive.ending().kind == ("UNAVAILABLE", "DRAINING")


def test_an_operator_who_drains_lets_open_sessions_go_on(start):
    server = start()
    client = server.client()
    session = client.open()
    with Client(f"unix:{server.config.socket}.admin") as operator:
        answer = admin_pb2_grpc.DrafterAdminStub(operator.channel).Drain(admin_pb2.DrainRequest(), timeout=5)
    assert answer.session_count == 1
    assert client.check() == "NOT_SERVING"
    assert refusal(client.stub.OpenSession, open_request(), timeout=5).kind == ("UNAVAILABLE", "DRAINING")
    sequence = session.sequence(Story(1))
    sequence.propose(0, 2)
    with session.drive() as drive:
        request = pb.ProposeRequest(entries=[sequence.propose_entry(2, 1)])
        assert drive.ask(propose=request).propose.results[0].status.code == 0


def test_a_service_whose_device_hangs_ends_all_the_same(start):
    server = start(drain_s=0.5)
    session = server.client().open()
    sequences = [session.sequence(Story(seed)) for seed in (1, 2)]
    drive = session.drive().attached()
    server.runner.gate.clear()
    num_batches = len(server.runner.batches)
    call = session.begin("Propose", pb.ProposeRequest(entries=[sequences[0].propose_entry(0, 2)]), timeout=600)
    server.runner.wait_for_batch(num_batches)
    drive.send(propose=pb.ProposeRequest(entries=[sequences[1].propose_entry(0, 2)]), timeout_ms=600_000)
    began = time.monotonic()
    server.service.drain()
    server.service.close()
    assert time.monotonic() - began < 5
    assert call.code() is not grpc.StatusCode.OK
    assert drive.ending() is not None
    # All but the one that is inside the device: `serve` ends without it.
    names = ("rpc", "stream", "drive-reader")
    assert server.service.is_stuck
    wait_until(lambda: sum(thread.name.startswith(names) for thread in busy()) <= 1)


def busy():
    """The threads that run one of our handlers. Services of one process have threads of the same names."""
    frames = sys._current_frames()
    threads = []
    for thread in threading.enumerate():
        frame = frames.get(thread.ident)
        while frame is not None and "/drafter_service/server/" not in frame.f_code.co_filename:
            frame = frame.f_back
        if frame is not None:
            threads.append(thread)
    return threads


def test_two_services_of_one_process_have_their_own_health(start):
    first, second = start(), start()
    second.service.refuse_sessions()
    assert first.client().check() == "SERVING"
    assert second.client().check() == "NOT_SERVING"
    second.service.close()
    call, statuses = watch(first.client())
    assert statuses.get(timeout=5) == SERVING
    call.cancel()
