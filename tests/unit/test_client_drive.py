"""The `Drive` stream of the Python client: it is used, cut, taken over, missing; nothing is done twice."""

import queue
import socket
import threading
import time

import grpc
import numpy as np
import pytest

from fake_service import FakeService, wait_until
from specdraft import AbortedError, Client, DeadlineError, NotFoundError, Reason, UnavailableError
from specdraft.drive import Drive, _Waiter
from specdraft.errors import InternalError, ResourceExhaustedError, UnimplementedError, make_error
from specdraft.exchanges import Exchange, drive_frame
from specdraft.listening import is_refused
from specdraft.unanswered import After, Reattachment, Unanswered
from specdraft.v1 import drafter_pb2

ROW = np.ones((1, 8), dtype=np.float32)


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.target, timeout_s=3.0) as client:
        yield client


def test_operations_go_over_the_stream(service, client):
    sequence = client.open_sequence()
    sequence.propose(0, [1], ROW, 1)
    assert client.is_driving
    assert {call.rpc for call in service.calls if call.over_drive} == {"OpenSequence", "Propose"}
    assert len(service.streams) == 1


def test_without_drive_operations_are_unary(tmp_path):
    with FakeService(tmp_path, has_drive=False) as service, Client(service.target) as client:
        sequence = client.open_sequence()
        assert [sequence.propose(key, [1], ROW, 1).drafts for key in range(3)] == [(7,)] * 3
        assert not client.is_driving
        assert not any(call.over_drive for call in service.calls)


@pytest.mark.parametrize("was_done", [True, False])
def test_a_request_without_an_answer_is_sent_again_and_done_once(service, client, was_done):
    sequence = client.open_sequence()
    (service.after if was_done else service.faults)["Propose"] = [service.cut]
    proposal = sequence.propose(0, [1], ROW, 2)
    assert proposal.drafts == (7, 7)
    assert proposal.state.last_op == 1
    first, second = service.requests("Propose")
    assert first == second
    assert sequence.propose(1, [1], ROW, 2).state.last_op == 2
    assert not service.requests("GetSequence")


def test_many_waiting_requests_survive_a_cut(service, client):
    sequences = [client.open_sequence() for _ in range(8)]
    arrived, release = threading.Semaphore(0), threading.Event()
    service.faults["Propose"] = [lambda: (arrived.release(), release.wait(5))]
    results = {}

    def work(index):
        results[index] = sequences[index].propose(0, [index], ROW, 1).state.last_op

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    arrived.acquire()
    service.cut()
    release.set()
    for thread in threads:
        thread.join()
    assert results == dict.fromkeys(range(8), 1)


def test_a_broken_connection_is_mended_within_the_grace(service, client):
    sequence = client.open_sequence()
    sequence.propose(0, [1], ROW, 1)
    for key in range(1, 4):
        service.server.stop(None).wait()
        service.side.close()
        service.side_path.unlink()
        service.start()
        assert sequence.propose(key, [1], ROW, 1).state.last_op == key + 1


def test_an_idle_stream_attaches_again_by_itself(service, client):
    wait_until(lambda: service.streams)
    service.cut()
    wait_until(lambda: service.streams)


@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0])
def test_after_the_grace_waiting_requests_fail_and_the_next_one_tries_anew(tmp_path, later_s):
    with FakeService(tmp_path, grace_ms=300) as service, Client(service.target, timeout_s=5.0) as client:
        sequence = client.open_sequence()
        service.server.stop(None).wait()
        started = time.monotonic()
        with pytest.raises(UnavailableError):
            sequence.propose(0, [1], ROW, 1)
        assert time.monotonic() - started < 4
        time.sleep(later_s)
        service.side.close()
        service.side_path.unlink()
        service.start()
        assert sequence.propose(0, [1], ROW, 1).state.last_op == 1


def test_when_nobody_listens_waiting_and_later_calls_are_told_at_once(tmp_path):
    with FakeService(tmp_path, grace_ms=60_000) as service, Client(service.target, timeout_s=20.0) as client:
        sequence = client.open_sequence()
        service.faults["Propose"] = [lambda: service.server.stop(None)]
        started = time.monotonic()
        for _ in range(5):
            with pytest.raises(UnavailableError):
                sequence.propose(0, [1], ROW, 1)
        assert time.monotonic() - started < 5
        service.side.close()
        service.side_path.unlink()
        service.start()
        assert sequence.propose(0, [1], ROW, 1).drafts == (7,)


def test_a_stream_whose_status_was_lost_is_not_attached_again(service, client):
    sequence = client.open_sequence()
    service.faults["Propose"] = [lambda: service.cut(InternalError(None, "reset"))]
    assert sequence.propose(0, [1], ROW, 1).state.last_op == 1
    assert not client.is_driving
    assert not service.streams
    assert sequence.propose(1, [1], ROW, 1).state.last_op == 2


def test_too_large_a_message_is_told_and_not_sent_again(tmp_path):
    service = FakeService(tmp_path, message_bytes=4096)
    with service, Client(service.target, memory="inline", timeout_s=5.0) as client:
        sequence = client.open_sequence()
        with pytest.raises(ResourceExhaustedError) as caught:
            sequence.propose(0, [1], ROW, 1, mask=[0] * 2000)
        assert caught.value.reason is None
        assert sequence.propose(0, [1], ROW, 1).state.last_op == 1
        assert client.is_driving


def test_only_a_refused_connection_means_that_nobody_listens(tmp_path):
    path = tmp_path / "some.sock"
    assert is_refused(f"unix://{path}")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        assert is_refused(f"unix:{path}")
        listener.listen()
        assert not is_refused(f"unix://{path}")
    with socket.create_server(("localhost", 0)) as listener:
        port = listener.getsockname()[1]
        assert not is_refused(f"localhost:{port}")
    assert is_refused(f"localhost:{port}")
    assert not is_refused("dns:///somewhere")


def test_a_stream_taken_over_is_not_attached_again(service, client):
    sequence = client.open_sequence()
    service.cut(make_error(Reason.SESSION_FENCED, "another one"))
    with pytest.raises(AbortedError) as caught:
        sequence.propose(0, [1], ROW, 1)
    assert caught.value.reason is Reason.SESSION_FENCED
    time.sleep(0.2)
    assert not service.streams
    with pytest.raises(AbortedError):
        client.open_sequence()


def test_an_unknown_session_ends_the_stream(service, client):
    sequence = client.open_sequence()
    service.token = b"restarted"
    service.cut()
    with pytest.raises(NotFoundError):
        sequence.propose(0, [1], ROW, 1)


def test_a_late_answer_is_dropped(service, client):
    slow, quick = client.open_sequence(), client.open_sequence()
    release = threading.Event()
    service.after["Propose"] = [lambda: release.wait(10)]
    with pytest.raises(DeadlineError):
        slow.propose(0, [1], ROW, 1)
    release.set()
    assert quick.propose(0, [1], ROW, 3).drafts == (7, 7, 7)


def test_a_timeout_in_band_is_a_deadline_error(service, client):
    sequence = client.open_sequence()
    service.faults["Propose"] = [make_error(Reason.TIMEOUT, "too slow")]
    with pytest.raises(DeadlineError) as caught:
        sequence.propose(0, [1], ROW, 1)
    assert caught.value.reason is Reason.TIMEOUT
    assert sequence.propose(0, [1], ROW, 1).state.last_op == 1


def test_closing_wakes_those_who_wait(service):
    client = Client(service.target, timeout_s=20.0)
    sequence, caught = client.open_sequence(), []
    arrived, release = threading.Event(), threading.Event()
    service.faults["Propose"] = [lambda: (arrived.set(), release.wait(10))]

    def work():
        try:
            sequence.propose(0, [1], ROW, 1)
        except UnavailableError as error:
            caught.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    arrived.wait(5)
    threading.Timer(0.1, release.set).start()
    client.close()
    thread.join(5)
    assert not thread.is_alive()
    assert len(caught) <= 1


def test_a_frame_is_the_message_that_protobuf_would_make():
    for request, rpc, name in (
        (drafter_pb2.GetSequenceRequest(sequence_id=b"x" * 16), "GetSequence", "get_sequence"),
        (drafter_pb2.TakeKVRequest(sequence_id=b"x" * 16, op=3, label="y" * 300), "TakeKV", "take_kv"),
        (drafter_pb2.ReadDraftsRequest(), "ReadDrafts", "read_drafts"),
    ):
        frame = drive_frame(Exchange(rpc, request, 1.5), 77)
        expected = drafter_pb2.DriveRequest(correlation_id=77, timeout_ms=1500, **{name: request})
        assert drafter_pb2.DriveRequest.FromString(frame) == expected


def test_unanswered_requests_are_sent_again_in_their_order():
    unanswered = Unanswered()
    ids = [unanswered.next_id() for _ in range(4)]
    for one in ids:
        unanswered.add(one, bytes([one]), f"waiter {one}")
    assert unanswered.take(ids[1]) == "waiter 2"
    assert unanswered.take(ids[1]) is None
    assert unanswered.frames() == [(1, b"\1"), (3, b"\3"), (4, b"\4")]
    assert unanswered.frames(3) == [(4, b"\4")]
    unanswered.add(5, b"longer", "the largest")
    assert unanswered.take_largest() == "the largest"
    assert unanswered.take_all() == ["waiter 1", "waiter 3", "waiter 4"]
    assert len(unanswered) == 0
    assert unanswered.take_largest() is None


@pytest.mark.parametrize(
    ("error", "after"),
    [
        (None, After.ATTACH_AGAIN),
        (UnavailableError(None, "broken"), After.ATTACH_AGAIN),
        (ResourceExhaustedError(None, "too large"), After.ATTACH_AGAIN),
        (InternalError(None, "reset"), After.USE_UNARY),
        (make_error(Reason.DRAINING, ""), After.ATTACH_AGAIN),
        (make_error(Reason.DEVICE_LOST, ""), After.GIVE_UP),
        (make_error(Reason.SESSION_FENCED, ""), After.STOP),
        (make_error(Reason.SESSION_UNKNOWN, ""), After.STOP),
        (make_error(Reason.MAPPING_NOT_PROVEN, ""), After.STOP),
        (make_error(Reason.NOT_IMPLEMENTED, ""), After.USE_UNARY),
        (UnimplementedError(None, "unknown method"), After.USE_UNARY),
    ],
)
def test_what_follows_the_end_of_a_stream(error, after):
    reattachment = Reattachment(grace_s=5.0)
    reattachment.attached(0.0)
    assert reattachment.ended(error, 0.1) is after


def test_the_grace_begins_when_the_stream_breaks_and_ends_with_a_good_one():
    broken, reattachment = UnavailableError(None, "broken"), Reattachment(grace_s=5.0)
    reattachment.attached(0.0)
    assert reattachment.ended(broken, 100.0) is After.ATTACH_AGAIN
    for now in (101.0, 103.0, 104.9):
        reattachment.attached(now)
        assert reattachment.ended(broken, now) is After.ATTACH_AGAIN
    reattachment.attached(105.0)
    reattachment.answered()
    assert reattachment.ended(broken, 105.1) is After.ATTACH_AGAIN
    reattachment.attached(110.1)
    assert reattachment.ended(broken, 110.2) is After.GIVE_UP
    reattachment.attached(120.0)
    assert reattachment.ended(broken, 120.1) is After.ATTACH_AGAIN
    delays = [reattachment.next_delay_s() for _ in range(8)]
    assert delays == sorted(delays)
    assert delays[-1] <= 0.5


@pytest.mark.parametrize(("waiting_count", "after"), [(1, After.ATTACH_AGAIN), (2, After.GIVE_UP)])
def test_who_comes_alone_gets_the_whole_grace_whatever_went_before(waiting_count, after):
    broken, reattachment = UnavailableError(None, "broken"), Reattachment(grace_s=5.0)
    reattachment.attached(0.0)
    assert reattachment.ended(broken, 0.5) is After.ATTACH_AGAIN
    reattachment.attached(5.4)
    reattachment.wanted(waiting_count)
    assert reattachment.ended(broken, 5.6) is after


class _Ended(grpc.RpcError):
    """What gRPC leaves when it loses the last event of a stream: the stream is over, and its reader is never woken."""

    def __init__(self):
        self.wakes_up = threading.Event()

    def __iter__(self):
        return self

    def __next__(self):
        self.wakes_up.wait()
        raise self

    def is_active(self):
        return False

    def cancel(self):
        return False

    def code(self):
        return grpc.StatusCode.UNAVAILABLE

    def details(self):
        return "failed to connect"

    def trailing_metadata(self):
        return ()


def test_a_reader_that_grpc_forgot_is_replaced_and_its_requests_are_sent_again(tmp_path):
    lost, streams = _Ended(), []

    def answers(frames):
        for frame in frames:
            asked = drafter_pb2.DriveRequest.FromString(frame)
            yield drafter_pb2.DriveResponse(correlation_id=asked.correlation_id, truncate={})

    def attach(frames):
        streams.append(frames)
        return lost if len(streams) == 1 else answers(frames)

    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "socket"))
        listener.listen()
        drive = Drive(attach, 60.0, f"unix://{tmp_path}/socket")
        drive.call(Exchange("Truncate", drafter_pb2.TruncateRequest(), 30.0))
        assert len(streams) == 2
        lost.wakes_up.set()
        drive.call(Exchange("Truncate", drafter_pb2.TruncateRequest(), 30.0))
        assert len(streams) == 2
        drive._stream = None  # a generator has no is_active
        drive.close()


def test_closing_does_not_wait_for_a_reader_that_grpc_forgot():
    lost = _Ended()
    drive = Drive(lambda frames: lost, 60.0, "unix:///nowhere")
    wait_until(lambda: drive._stream is lost)
    started = time.monotonic()
    drive.close()
    assert time.monotonic() - started < 4
    lost.wakes_up.set()


class _Held:
    """A stream whose answers have arrived before its reader gets them: each only when it is let go."""

    def __init__(self):
        self.drive = None
        self.let_go = threading.Semaphore(0)
        self.arrived = threading.Semaphore(0)

    def __call__(self, frames):
        for frame in frames:
            asked = drafter_pb2.DriveRequest.FromString(frame)
            answer = drafter_pb2.DriveResponse(correlation_id=asked.correlation_id, truncate={})
            self.drive.arrived(answer)
            self.arrived.release()
            assert self.let_go.acquire(timeout=5)
            yield answer


def test_a_caller_gets_an_answer_that_has_arrived_before_the_reader_has_it():
    held = _Held()
    drive = held.drive = Drive(held, 60.0, "unix:///nowhere")
    exchange = Exchange("Truncate", drafter_pb2.TruncateRequest(), 5.0)
    for _ in range(3):
        assert drive.call(exchange) == drafter_pb2.TruncateResponse()
        held.let_go.release()  # what the reader finds then has been told
    drive._stream = None  # a generator has no cancel
    drive.close()


def test_callbacks_and_what_arrives_in_a_bad_moment_are_left_to_the_reader():
    held, told = _Held(), queue.SimpleQueue()
    drive = held.drive = Drive(held, 60.0, "unix:///nowhere")
    exchange = Exchange("Truncate", drafter_pb2.TruncateRequest(), 5.0)
    wait_until(lambda: drive._outgoing is not None)
    drive.post(exchange, lambda answer, error: told.put((answer, error)))
    assert held.arrived.acquire(timeout=5)
    assert told.empty()
    held.let_go.release()
    assert told.get(timeout=5) == (drafter_pb2.TruncateResponse(), None)
    with drive._lock:
        drive._unanswered.add(99, b"", waiter := _Waiter())
        drive.arrived(drafter_pb2.DriveResponse(correlation_id=99))
        assert waiter.answer is None
    drive.arrived(drafter_pb2.DriveResponse(correlation_id=99))
    assert waiter.answer.correlation_id == 99
    drive._stream = None
    drive.close()
