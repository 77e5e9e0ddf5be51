"""Sessions: leases, streams that break and come back, what the end of a session gives up, and what is kept secret."""

import logging
import threading
import time

import grpc
import pytest

from serving import num_descriptors, wait_until
from specdraft.v1 import admin_pb2, admin_pb2_grpc, session_pb2, tensor_pb2
from specdraft.v1 import drafter_pb2 as pb
from wire import TIMEOUT_S, Client, Story, open_request, refusal, refused_entry

HOST = tensor_pb2.MEMORY_KIND_HOST
UNKNOWN = ("NOT_FOUND", "SESSION_UNKNOWN")


class Clock:
    """Monotonic seconds that can be moved on."""

    def __init__(self):
        self.ahead = 0.0

    def __call__(self):
        return time.monotonic() + self.ahead


@pytest.fixture
def clock():
    return Clock()


@pytest.fixture
def server(start, clock):
    return start(clock=clock, lease_s=30.0, grace_s=5.0)


def expired(server):
    return lambda: server.metric("sessions") == 0 and server.metric("sequences") == 0


def test_a_session_whose_opening_was_not_answered_in_time_is_not_kept(start):
    server = start(max_sessions=2)
    client = server.client()
    client.open(memory_kind=HOST).close()
    baseline = num_descriptors()
    sequence = client.open().sequence(Story(1))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        call = sequence.session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]))
        server.runner.wait_for_batch(num_batches)
        for _ in range(3):  # a caller who tries again: its carries are asked of an engine that is at work
            request = open_request(carry_key=bytes(range(16)), memory_kind=HOST)
            late = refusal(client.stub.OpenSession, request, timeout=0.2)
            assert late.code is grpc.StatusCode.DEADLINE_EXCEEDED
            wait_until(lambda: server.metric("sessions") == 1)
    call.result()
    wait_until(lambda: num_descriptors() == baseline)
    assert client.open(carry_key=bytes(range(16)), memory_kind=HOST).sequence(Story(2)).propose(0, 2)


def test_a_lease_that_ends_gives_up_everything(server, clock):
    client = server.client()
    client.open().close()
    baseline = num_descriptors()
    sessions = [client.open(memory_kind=HOST) for _ in range(3)]  # nobody fetches the arenas
    for session in sessions:
        sequence = session.sequence(Story(1))
        sequence.catchup(0, 20)
        sequence.take()
        sequence.catchup(0, 20)
    assert server.pages() == 30
    clock.ahead += 29
    time.sleep(0.3)
    assert server.metric("sessions") == 3
    clock.ahead += 2
    wait_until(expired(server))
    wait_until(lambda: server.pages() == 0)
    wait_until(lambda: num_descriptors() == baseline)
    assert server.metric("sessions_ended_total", end_reason="expired") == 3
    assert refusal(sessions[0].keep_alive).kind == UNKNOWN


@pytest.mark.parametrize("renew", ["unary", "keep_alive", "stream"])
def test_any_call_renews_the_lease(server, clock, renew):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    drive = session.drive().attached()
    calls = {
        "unary": sequence.state,
        "keep_alive": session.keep_alive,
        "stream": lambda: drive.ask(keep_alive=session_pb2.KeepAliveRequest()),
    }
    for _ in range(4):
        clock.ahead += 20
        calls[renew]()
    assert sequence.state().last_op == 0
    drive.cancel()


def test_an_open_stream_alone_does_not_renew_and_is_told_the_end(server, clock):
    session = server.client().open()
    drive = session.drive().attached()
    clock.ahead += 31
    assert drive.ending().kind == UNKNOWN
    wait_until(expired(server))


def test_a_refused_keep_alive_is_a_call_too(server, clock):
    session = server.client().open(memory_kind=HOST)
    clock.ahead += 20
    refusal(session.keep_alive, bytes(16))
    clock.ahead += 20
    assert session.keep_alive().lease_ms == 30_000


def test_a_broken_stream_leaves_a_grace_in_which_it_can_come_back(server, clock):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 3)
    session.drive().attached().cancel()
    wait_until(lambda: next(iter(server.service.assembly.sessions.listed())).drive is None)
    clock.ahead += 4
    with session.drive() as drive:
        request = pb.ProposeRequest(entries=[sequence.propose_entry(3, 1)])
        assert drive.ask(propose=request).propose.results[0].status.code == 0
        clock.ahead += 20
        assert sequence.state().row_count == 4


def test_a_broken_stream_that_does_not_come_back_ends_its_session_after_the_grace(server, clock):
    session = server.client().open()
    session.sequence(Story(1)).catchup(0, 3)
    session.drive().attached().cancel()
    wait_until(lambda: all(one.drive is None for one in server.service.assembly.sessions.listed()))
    clock.ahead += 6
    wait_until(lambda: expired(server)() and server.pages() == 0)
    assert refusal(session.keep_alive).kind == UNKNOWN


def test_a_stream_that_ends_well_starts_no_grace(server, clock):
    session = server.client().open()
    drive = session.drive().attached()
    drive.ask(keep_alive=session_pb2.KeepAliveRequest())
    drive.finish()
    assert drive.ending() is None
    clock.ahead += 20
    assert session.keep_alive().lease_ms


def before_the_next_stream(server, monkeypatch, happens):
    """Something happens after a stream's session was found, and before the stream is the session's."""
    sessions = server.service.assembly.sessions
    attach = sessions.attach

    def attach_late(session, drive):
        monkeypatch.undo()
        happens()
        attach(session, drive)

    monkeypatch.setattr(sessions, "attach", attach_late)


def test_a_stream_that_comes_while_the_one_before_is_missed_has_a_whole_lease(server, clock, monkeypatch):
    session = server.client().open()
    first = session.drive().attached()
    (inner,) = server.service.assembly.sessions.listed()

    def break_the_first():
        first.cancel()
        wait_until(lambda: inner.drive is None, text="the end of the first stream")

    before_the_next_stream(server, monkeypatch, break_the_first)
    with session.drive().attached() as second:
        wait_until(lambda: inner.drive is not None, text="the second stream")
        clock.ahead += 10
        assert second.ask(keep_alive=session_pb2.KeepAliveRequest()).status.code == 0


def test_a_stream_that_comes_while_its_session_is_closed_ends(server, monkeypatch):
    session = server.client().open()
    before_the_next_stream(server, monkeypatch, session.close)
    drive = session.drive()
    assert drive.ending().kind == UNKNOWN
    assert server.metric("sessions") == 0


def test_a_second_stream_takes_over_and_fences_the_first(server):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    first = session.drive().attached()
    second = session.drive().attached()
    said = first.ending()
    assert said.kind == ("ABORTED", "SESSION_FENCED")
    assert said.domain == "specdraft"
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 3)])
    assert second.ask(propose=request).propose.results[0].status.code == 0
    second.finish()
    assert second.ending() is None


def test_what_comes_on_a_fenced_stream_is_not_begun(server):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    first = session.drive().attached()
    drive = next(iter(server.service._servicer._drives))
    drive._is_over.set()  # as if its end had not been delivered yet
    first.send(propose=pb.ProposeRequest(entries=[sequence.propose_entry(0, 3)]))
    first.finish()
    first.ending()
    assert sequence.state().last_op == 0


def test_a_fenced_stream_whose_client_reads_nothing_gives_its_thread_back(server, clock):
    session = server.client(options=[("grpc.http2.bdp_probe", 0)]).open()
    sequence = session.sequence(Story(1))
    for first_key in range(0, 190, 2):  # answers of a kilobyte
        sequence.catchup(first_key, 1, pairs=sequence.story.pairs(first_key, 1, allow_gap=True))
    asked = pb.GetSequenceRequest(sequence_id=sequence.sequence_id)
    requests = [pb.DriveRequest(correlation_id=i, timeout_ms=60_000, get_sequence=asked) for i in range(5000)]
    # Nobody iterates over its answers.
    call = session.client.stub.Drive(iter(requests), metadata=session.metadata())
    drives = server.service._servicer._drives
    wait_until(is_still(lambda: [(drive._sending.locked(), len(drive._asked)) for drive in drives]))
    assert [drive._sending.locked() for drive in drives] == [True]
    second = session.drive().attached()
    assert len(drives) == 2
    clock.ahead += 6
    session.keep_alive()
    wait_until(lambda: len(drives) == 1)
    assert second.ask(keep_alive=session_pb2.KeepAliveRequest()).status.code == 0
    call.cancel()
    second.cancel()


def is_still(look):
    """Whether what is looked at has not changed for a while."""
    seen = []

    def check():
        seen.append(look())
        return len(seen) > 60 and all(one == seen[-1] for one in seen[-60:])

    return check


def test_closing_ends_stream_sequences_and_token_at_once(server):
    session = server.client().open(memory_kind=HOST)
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 9)
    drive = session.drive().attached()
    session.close()
    assert drive.ending().kind == UNKNOWN
    assert refusal(session.close).kind == UNKNOWN
    assert refusal(sequence.state).kind == UNKNOWN
    wait_until(lambda: server.pages() == 0)
    assert server.metric("sessions_ended_total", end_reason="closed") == 1


def test_closing_waits_for_what_runs_and_gives_its_pages_back(server):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        call = session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 5, 4)]))
        server.runner.wait_for_batch(num_batches)
        session.close()
        assert server.pages() > 0, "pages return only when nothing can touch them any more"
    assert call.result().results[0].status.code == 0
    wait_until(lambda: server.pages() == 0 and server.metric("sequences") == 0)


def test_a_crowd_of_waiting_calls_keeps_nobody_else_from_renewing_his_lease(start):
    others_threads = set(threading.enumerate())
    server = start(workers=2, max_sessions=4)
    crowd, other = server.client().open(), server.client().open()
    sequences = [crowd.sequence(Story(1)) for _ in range(10)]
    with server.runner.held():
        requests = [pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]) for sequence in sequences]
        calls = [crowd.begin("Propose", request) for request in requests]
        num_threads = server.config.workers + server.config.max_sessions

        def is_full():
            ours = set(threading.enumerate()) - others_threads
            return sum(one.name.startswith("rpc") for one in ours) == num_threads

        wait_until(is_full, text="the crowd in all threads")
        assert other.call("KeepAlive", session_pb2.KeepAliveRequest(), timeout=2).lease_ms == 30_000
        assert other.client.info(timeout=2).limits.sessions_max == 4
    assert all(call.result().results[0].status.code == 0 for call in calls)


def test_secrets_are_in_no_log_no_error_and_no_listing(server, caplog):
    caplog.set_level(logging.DEBUG)
    session = server.client().open(memory_kind=HOST, client_name="a target")
    arena = session.arena()
    sequence = session.sequence(Story(1))
    said = [
        refusal(session.call, "Truncate", sequence.truncate_request(0, op=9)),
        refusal(session.keep_alive, bytes(16)),
        refused_entry(
            session.call("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(9, 2)])).results[0].status
        ),
    ]
    server.runner.fails = lambda entries: True
    session.call("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)]))
    listing = list_sessions(server)
    assert [one.client_name for one in listing.sessions] == ["a target"]
    assert listing.sessions[0].session_id == session.answer.session_id
    session.close()
    said.append(refusal(session.keep_alive))
    text = "\n".join([caplog.text, *map(repr, said), repr(listing)])
    assert "broken on purpose" in text, "the log was caught"
    for secret in (session.token, session.answer.arena.descriptor_token, arena.nonce()):
        for spelling in (secret.hex(), repr(secret)[2:-1], secret.decode("latin-1")):
            assert spelling not in text
    arena.map.close()


def test_the_log_says_whose_session_opened_and_ended_in_one_line_each(server, caplog):
    caplog.set_level(logging.INFO)
    session = server.client().open(client_name="a target\nwith two lines")
    session.close()
    server.client().open().close()
    name = session.answer.session_id.hex()[:12]
    lines = [record.getMessage() for record in caplog.records if name in record.getMessage()]
    assert [line.split(";")[0] for line in lines] == [
        f"session {name} 'a target\\nwith two lines' opened",
        f"session {name} 'a target\\nwith two lines' ended: closed",
    ]
    assert "''" not in caplog.text


def list_sessions(server):
    with Client(f"unix:{server.config.socket}.admin") as client:
        admin = admin_pb2_grpc.DrafterAdminStub(client.channel)
        return admin.ListSessions(admin_pb2.ListSessionsRequest(), timeout=TIMEOUT_S)


def test_many_sessions_leave_nothing(start):
    server = start(max_sessions=8)
    client = server.client()
    client.open(memory_kind=HOST).close()
    descriptors, threads = num_descriptors(), threading.active_count()
    for number in range(200):
        session = client.open(memory_kind=HOST)
        if number % 20 == 0:
            session.sequence(Story(1)).propose(0, 5, 4)
            with session.drive() as drive:
                drive.ask(keep_alive=session_pb2.KeepAliveRequest())
        session.close()
    wait_until(lambda: num_descriptors() <= descriptors)
    wait_until(lambda: threading.active_count() <= threads + 16)  # the pools' own
    wait_until(lambda: (server.pages(), server.metric("sessions"), server.metric("sequences")) == (0, 0, 0))
    assert len(server.service.assembly.engine._in_flight) == 0
