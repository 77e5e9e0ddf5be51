"""Calls that are refused as a whole: the same refusal over a unary call and over the stream, in its own clothes."""

import secrets

import grpc
import pytest

from serving import wait_until
from specdraft.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from specdraft.v1 import drafter_pb2 as pb
from wire import TIMEOUT_S, TOKEN_KEY, Client, Story, refusal, refused_entry

RPCS = {
    "propose": "Propose",
    "catchup": "Catchup",
    "truncate": "Truncate",
    "open_sequence": "OpenSequence",
    "close_sequence": "CloseSequence",
    "get_sequence": "GetSequence",
    "take_kv": "TakeKV",
    "install_kv": "InstallKV",
    "free_kv": "FreeKV",
    "fork_sequence": "ForkSequence",
    "read_drafts": "ReadDrafts",
    "keep_alive": "KeepAlive",
}
OPEN_ID = bytes(range(16))


def case(name, member, make, code, reason, /, **details):
    return pytest.param(member, make, (code, reason), details, id=name)


def field(name, member, make, of, /, **details):
    return case(name, member, make, "INVALID_ARGUMENT", "INVALID_FIELD", field=of, **details)


def unbuilt(name, member, make, what):
    return case(name, member, make, "UNIMPLEMENTED", "NOT_IMPLEMENTED", name=what)


def opened(**changes):
    return lambda _: pb.OpenSequenceRequest(**{"open_id": OPEN_ID} | changes)


CASES = [
    field("empty-catchup", "catchup", lambda s: pb.CatchupRequest(), "entries", value="0"),
    field("empty-propose", "propose", lambda s: pb.ProposeRequest(), "entries", value="0"),
    case(
        "catchup-of-five",
        "catchup",
        lambda s: pb.CatchupRequest(entries=[s.catchup_entry(6, 1)] * 5),
        "INVALID_ARGUMENT",
        "BATCH_TOO_LARGE",
        entries="5",
        limit="4",
    ),
    case(
        "propose-of-five",
        "propose",
        lambda s: pb.ProposeRequest(entries=[s.propose_entry(6, 1)] * 5),
        "INVALID_ARGUMENT",
        "BATCH_TOO_LARGE",
        entries="5",
        limit="4",
    ),
    field("no-open-id", "open_sequence", opened(open_id=b""), "open_id", value="0 bytes"),
    field("short-open-id", "open_sequence", opened(open_id=b"short"), "open_id", value="5 bytes"),
    field("long-open-id", "open_sequence", opened(open_id=bytes(17)), "open_id", value="17 bytes"),
    field("budget", "open_sequence", opened(budget_tokens=201), "budget_tokens", value="201", expected="at most 200"),
    field("rows-policy", "open_sequence", opened(rows_policy=77), "rows_policy", value="77"),
    field("truncate-op-0", "truncate", lambda s: with_op_0(s.truncate_request(3)), "op", value="0"),
    field("close-op-0", "close_sequence", lambda s: with_op_0(s.close_request()), "op", value="0"),
    field("take-op-0", "take_kv", lambda s: with_op_0(s.take_request()), "op", value="0"),
    field("install-op-0", "install_kv", lambda s: with_op_0(s.install_request(bytes(16))), "op", value="0"),
    field("truncate-below-0", "truncate", lambda s: s.truncate_request(-1), "first_key", value="-1"),
    field("label-of-65-bytes", "take_kv", lambda s: s.take_request(label="x" * 65), "label", value="65 bytes"),
    field("label-of-33-letters", "take_kv", lambda s: s.take_request(label="ä" * 33), "label", value="66 bytes"),
    field(
        "keep-below-0",
        "install_kv",
        lambda s: s.install_request(bytes(16), keep_keys_below=-1),
        "keep_keys_below",
        value="-1",
    ),
    case(
        "install-into-rows",
        "install_kv",
        lambda s: s.install_request(bytes(16)),
        "FAILED_PRECONDITION",
        "SEQUENCE_NOT_EMPTY",
        last_pair_key="5",
    ),
    case("free-unknown", "free_kv", lambda s: pb.FreeKVRequest(kv_id=bytes(16)), "NOT_FOUND", "CARRY_UNKNOWN"),
    case(
        "truncate-op-left-out", "truncate", lambda s: s.truncate_request(3, op=3), "ABORTED", "OP_OUT_OF_ORDER", op="3"
    ),
    case("take-op-left-out", "take_kv", lambda s: s.take_request(op=9), "ABORTED", "OP_OUT_OF_ORDER", last_op="1"),
    case("close-op-left-out", "close_sequence", lambda s: s.close_request(op=9), "ABORTED", "OP_OUT_OF_ORDER"),
    case("truncate-as-op-1", "truncate", lambda s: s.truncate_request(3, op=1), "INVALID_ARGUMENT", "OP_REUSED"),
    case("take-as-op-1", "take_kv", lambda s: s.take_request(op=1), "INVALID_ARGUMENT", "OP_REUSED"),
]


def with_op_0(request):
    request.op = 0
    return request


@pytest.mark.parametrize(("member", "make", "kind", "details"), CASES)
def test_a_wrong_call_is_refused_by_name_and_nothing_else_happens(scene, member, make, kind, details):
    request = make(scene.sequence)
    with scene.undisturbed():
        over_unary = refusal(scene.session.call, RPCS[member], request)
        with scene.session.drive() as drive:
            in_band = refused_entry(drive.ask(**{member: request}).status)
            assert (
                drive.ask(get_sequence=pb.GetSequenceRequest(sequence_id=scene.sequence.sequence_id)).status.code == 0
            )
    assert over_unary.kind == kind
    assert over_unary.domain == "specdraft"
    assert details.items() <= over_unary.details.items()
    assert over_unary == in_band


@pytest.mark.parametrize("member", sorted(RPCS))
def test_a_call_without_a_deadline_is_refused(scene, member):
    request = getattr(pb.DriveRequest(), member)
    with scene.undisturbed():
        method = getattr(scene.session.client.stub, RPCS[member])
        over_unary = refusal(method, request, metadata=scene.session.metadata())
        with scene.session.drive() as drive:
            in_band = refused_entry(drive.ask(timeout_ms=0, **{member: request}).status)
    assert over_unary.kind == in_band.kind == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")


def test_opening_and_asking_need_a_deadline_too(scene):
    stub = scene.session.client.stub
    for method, request in (
        (stub.GetServerInfo, session_pb2.GetServerInfoRequest()),
        (stub.OpenSession, session_pb2.OpenSessionRequest()),
        (stub.CloseSession, session_pb2.CloseSessionRequest()),
    ):
        said = refusal(method, request, metadata=scene.session.metadata())
        assert said.kind == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")


@pytest.mark.parametrize("rpc", ["RegisterRegion", "UnregisterRegion"])
def test_sessions_without_gpu_memory_have_no_regions(scene, rpc):
    said = refusal(scene.session.call, rpc, getattr(session_pb2, f"{rpc}Request")())
    assert said.kind == ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE")
    assert said.details == {"kind": "region"}


def test_sessions_without_gpu_memory_take_no_tickets(scene):
    request = pb.ProposeRequest(entries=[scene.sequence.propose_entry(6, 1)], lane_ticket=pb.LaneTicket(ticket=1))
    with scene.undisturbed(), scene.session.drive() as drive:
        said = refused_entry(drive.ask(propose=request).status)
    assert said.kind == ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE")
    assert said.details == {"kind": "lane"}


def test_a_request_on_the_stream_that_asks_for_nothing_is_refused_in_band(scene):
    with scene.undisturbed(), scene.session.drive() as drive:
        said = refused_entry(drive.ask().status)
    assert said.kind == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert said.details["field"] == "request"


def test_an_id_that_waits_for_its_answer_ends_the_stream_when_used_again(start):
    server = start()
    sequence = server.client().open().sequence(Story(1))
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
    drive = sequence.session.drive()
    with server.runner.held():
        num_batches = len(server.runner.batches)
        drive.send(correlation_id=7, propose=request)
        server.runner.wait_for_batch(num_batches)
        (served,) = server.service._servicer._drives
        drive.send(correlation_id=7, get_sequence=pb.GetSequenceRequest(sequence_id=sequence.sequence_id))
        wait_until(served._is_over.is_set)
    answer = drive.answer()
    assert (answer.correlation_id, answer.propose.results[0].status.code) == (7, 0)
    said = drive.ending()
    assert said.kind == ("INVALID_ARGUMENT", "INVALID_FIELD")
    assert said.details["field"] == "correlation_id"


def calls_that_need_a_session(scene):
    for member, rpc in RPCS.items():
        yield rpc, getattr(pb.DriveRequest(), member)
    for rpc in ("CloseSession", "RegisterRegion", "UnregisterRegion"):
        yield rpc, getattr(session_pb2, f"{rpc}Request")()


def test_unknown_and_ended_sessions_are_answered_alike(scene):
    ended = scene.session.client.open()
    ended.close()
    answers = []
    for token in (ended.token, bytes(16), secrets.token_bytes(16), b"", b"x", bytes(3000)):
        for rpc, request in calls_that_need_a_session(scene):
            method = getattr(scene.session.client.stub, rpc)
            answers.append(refusal(method, request, timeout=TIMEOUT_S, metadata=((TOKEN_KEY, token),)))
        drive = scene.session.drive(token)
        answers.append(drive.ending())
    method = scene.session.client.stub.KeepAlive
    answers.append(refusal(method, session_pb2.KeepAliveRequest(), timeout=TIMEOUT_S))
    assert answers[0].kind == ("NOT_FOUND", "SESSION_UNKNOWN")
    assert all(answer == answers[0] for answer in answers)


def test_unknown_foreign_and_closed_sequences_are_answered_alike(scene):
    closed = scene.session.sequence()
    closed.close()
    answers = []
    with scene.undisturbed():
        for sequence_id in (bytes(16), b"", closed.sequence_id, scene.bystander.sequence_id):
            for rpc, request in (
                ("GetSequence", pb.GetSequenceRequest()),
                ("Truncate", pb.TruncateRequest(op=1)),
                ("CloseSequence", pb.CloseSequenceRequest(op=7)),
                ("TakeKV", pb.TakeKVRequest(op=1)),
                ("InstallKV", pb.InstallKVRequest(op=1)),
            ):
                request.sequence_id = sequence_id
                answers.append(refusal(scene.session.call, rpc, request))
    assert answers[0].kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    assert all(answer == answers[0] for answer in answers)


def test_unknown_foreign_and_freed_carries_are_answered_alike(scene):
    session = scene.session
    theirs = scene.bystander.session.sequence(Story(5))
    theirs.catchup(0, 3)
    foreign = theirs.take().carry.kv_id
    mine = session.sequence(Story(6))
    mine.catchup(0, 3)
    freed = mine.take().carry.kv_id
    session.call("FreeKV", pb.FreeKVRequest(kv_id=freed))
    answers = []
    with scene.undisturbed():
        for kv_id in (bytes(16), b"", bytes(4000), freed, foreign):
            answers.append(refusal(session.call, "FreeKV", pb.FreeKVRequest(kv_id=kv_id)))
            answers.append(refusal(session.call, "InstallKV", mine.install_request(kv_id)))
    assert answers[0].kind == ("NOT_FOUND", "CARRY_UNKNOWN")
    assert all(answer == answers[0] for answer in answers)
    theirs.install(foreign)
    assert theirs.state().row_count == 3
    theirs.close()


def test_a_carry_of_another_head_is_refused_and_stays(scene):
    sequence = scene.session.sequence(Story(6))
    sequence.catchup(0, 3)
    carry = sequence.take(label="kept").carry
    assert (carry.label, [(r.begin, r.end) for r in carry.ranges]) == ("kept", [(0, 3)])
    said = refusal(scene.session.call, "InstallKV", sequence.install_request(carry.kv_id, head_fingerprint="another"))
    assert said.kind == ("FAILED_PRECONDITION", "KV_MISMATCH")
    assert said.details["field"] == "head_fingerprint"
    assert said.details["theirs"] == "another"
    assert said.details["ours"] == scene.session.client.info().head.fingerprint
    sequence.install(carry.kv_id, head_fingerprint=said.details["ours"])
    assert sequence.state().row_count == 3


def test_a_carry_longer_than_the_sequence_may_be_is_refused_and_stays(scene):
    sequence = scene.session.sequence(Story(6))
    sequence.catchup(0, 9)
    carry = sequence.take().carry
    short = scene.session.sequence(Story(6), budget_tokens=8)
    said = refusal(scene.session.call, "InstallKV", short.install_request(carry.kv_id))
    assert said.kind == ("OUT_OF_RANGE", "POSITION_LIMIT")
    assert said.details == {"key": "8", "limit": "8"}
    short.install(carry.kv_id, keep_keys_below=8)
    assert short.state().row_count == 8


def test_what_a_caller_says_comes_back_shortened(scene):
    said = refusal(
        scene.session.call, "InstallKV", empty(scene).install_request(take(scene), head_fingerprint="f" * 10**6)
    )
    assert said.kind == ("FAILED_PRECONDITION", "KV_MISMATCH")
    assert len(said.details["theirs"]) == 512
    assert len(said.text) == 512


def test_what_a_caller_says_comes_back_in_few_bytes_too(scene):
    sequence, kv_id = empty(scene), take(scene)
    for character in "ä€😀":
        request = sequence.install_request(kv_id, head_fingerprint=character * 10**4)
        for _ in range(20):  # gRPC takes metadata of more than 8 KiB now and then
            said = refusal(scene.session.call, "InstallKV", request)
            assert said.kind == ("FAILED_PRECONDITION", "KV_MISMATCH")
        assert len(said.details["theirs"].encode()) <= 512
        assert len(said.text.encode()) <= 512
        assert said.details["theirs"].endswith(f"{character}...")


def test_a_sequence_of_many_ranges_is_refused_in_few_words(scene):
    sequence = scene.session.sequence(Story(6))
    for first_key in range(0, 190, 2):
        sequence.catchup(first_key, 1, pairs=sequence.story.pairs(first_key, 1, allow_gap=True))
    said = refusal(scene.session.call, "Truncate", sequence.truncate_request(0, op=999))
    assert said.kind == ("ABORTED", "OP_OUT_OF_ORDER")
    assert said.details["row_count"] == "95"
    assert said.details["ranges"].startswith("0-1,2-3,")
    assert len(said.details["ranges"]) <= 512
    assert len(sequence.state().ranges) == 95


def empty(scene):
    return scene.session.sequence(Story(6))


def take(scene):
    sequence = scene.session.sequence(Story(6))
    sequence.catchup(0, 3)
    return sequence.take().carry.kv_id


def test_a_message_one_byte_too_large_is_refused_by_grpc_and_the_largest_is_not(start):
    limit = 8192
    server = start(message_bytes=limit)
    session = server.client().open()
    frame = pb.InstallKVRequest(sequence_id=bytes(16), op=1, kv_id=bytes(16), head_fingerprint="x" * 200)
    fill = "x" * (limit - frame.ByteSize() + 200)
    while len(fill) > 0:
        frame.head_fingerprint = fill
        if frame.ByteSize() == limit:
            break
        fill = fill[: len(fill) - (frame.ByteSize() - limit)]
    assert frame.ByteSize() == limit
    assert refusal(session.call, "InstallKV", frame).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    frame.head_fingerprint += "x"
    said = refusal(session.call, "InstallKV", frame)
    assert said.kind == ("RESOURCE_EXHAUSTED", "")
    assert said.domain == ""
    session.sequence(Story(1)).propose(0, 2)
    drive = session.drive().attached()
    drive.send(install_kv=frame)
    assert drive.ending().kind == ("RESOURCE_EXHAUSTED", "")
    assert server.client().check() == "SERVING"
    session.sequence(Story(1)).propose(0, 2)


def test_a_deadline_that_passes_ends_the_call_and_frees_its_thread(start):
    server = start(workers=1, max_sessions=1)
    sequence = server.client().open().sequence(Story(1))
    with server.runner.held():
        request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
        said = refusal(sequence.session.call, "Propose", request, timeout=0.3)
        assert said.code is grpc.StatusCode.DEADLINE_EXCEEDED
        # Two threads: the first call's and this one's. A third call needs the first one's back.
        calls = [sequence.session.begin("Propose", request, timeout=30) for _ in range(2)]
        calls[0].cancel()
        calls[1].cancel()
        assert sequence.session.keep_alive().lease_ms
    assert sequence.state().last_op == 1
    assert len(sequence.propose(0, 2, op=1).drafts) == 3


def test_the_stream_says_when_the_time_of_a_request_is_over_and_a_retry_learns_what_became_of_it(start):
    server = start()
    sequence = server.client().open().sequence(Story(1))
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
    with sequence.session.drive() as drive:
        with server.runner.held():
            said = refused_entry(drive.ask(timeout_ms=200, propose=request).status)
            assert said.kind == ("DEADLINE_EXCEEDED", "TIMEOUT")
        (result,) = drive.ask(propose=request).propose.results
        assert (result.status.code, result.state.last_op, len(result.drafts)) == (0, 1, 3)
        assert len(server.runner.batches) == 2  # the self-test's and one


def test_the_stream_says_so_however_busy_it_is_with_other_answers(start):
    server = start()
    sequence = server.client().open().sequence(Story(1))
    with sequence.session.drive() as drive, server.runner.held():
        request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
        late = drive.send(timeout_ms=200, propose=request)
        for _ in range(5000):
            drive.ask(keep_alive=session_pb2.KeepAliveRequest())
            if late in drive._put_by:
                break
        assert refused_entry(drive.answer_to(late).status).kind == ("DEADLINE_EXCEEDED", "TIMEOUT")


def test_an_operation_whose_deadline_passed_before_it_began_is_not_done(start):
    server = start()
    first, second = (server.client().open().sequence(Story(seed)) for seed in (1, 2))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        running = first.session.begin("Propose", pb.ProposeRequest(entries=[first.propose_entry(0, 2)]))
        server.runner.wait_for_batch(num_batches)
        request = pb.ProposeRequest(entries=[second.propose_entry(0, 2)])
        assert refusal(second.session.call, "Propose", request, timeout=0.2).code is grpc.StatusCode.DEADLINE_EXCEEDED
    assert running.result().results[0].status.code == 0
    assert second.state().last_op == 0
    second.propose(0, 2)


def test_the_admin_service_is_not_on_the_main_socket_and_an_unknown_method_is_nowhere(scene):
    channel = scene.session.client.channel
    admin = admin_pb2_grpc.DrafterAdminStub(channel)
    said = refusal(admin.ListSessions, admin_pb2.ListSessionsRequest(), timeout=TIMEOUT_S)
    assert said.kind == ("UNIMPLEMENTED", "")
    unknown = channel.unary_unary(
        "/specdraft.v1.Drafter/Conjure", request_serializer=bytes, response_deserializer=bytes
    )
    assert refusal(unknown, b"", timeout=TIMEOUT_S).kind == ("UNIMPLEMENTED", "")


def test_the_admin_socket_refuses_what_it_does_not_know(shared_server):
    with Client(f"unix:{shared_server.config.socket}.admin") as client:
        admin = admin_pb2_grpc.DrafterAdminStub(client.channel)
        for runner, kind in (
            (session_pb2.RUNNER_GRAPH, ("UNIMPLEMENTED", "NOT_IMPLEMENTED")),
            (session_pb2.RUNNER_UNSPECIFIED, ("INVALID_ARGUMENT", "INVALID_FIELD")),
            (99, ("INVALID_ARGUMENT", "INVALID_FIELD")),
        ):
            request = admin_pb2.SetRunnerRequest(runner=runner)
            assert refusal(admin.SetRunner, request, timeout=TIMEOUT_S).kind == kind
        assert refusal(admin.SetRunner, request).kind == ("INVALID_ARGUMENT", "DEADLINE_REQUIRED")
        assert refusal(client.info).kind == ("UNIMPLEMENTED", "")


def test_a_sequence_whose_places_are_taken_is_refused_and_only_for_its_owner(start):
    server = start()
    owner, other = server.client().open(), server.client().open()
    sequence, theirs = owner.sequence(Story(1)), other.sequence(Story(2))
    with server.runner.held():
        num_batches = len(server.runner.batches)
        request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
        first = owner.begin("Propose", request)
        server.runner.wait_for_batch(num_batches)
        # A retry joins the operation in flight and takes no place of its own; the next operation does.
        retried = owner.begin("Propose", request)
        second = owner.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(2, 1, op=2)]))
        in_flight = server.service.assembly.engine._in_flight
        wait_until(lambda: in_flight.num_operations == 2)
        taken = pb.CatchupRequest(entries=[sequence.catchup_entry(3, 1, op=3)])
        with owner.drive() as drive:
            answer = drive.ask(catchup=taken)
        said = refused_entry(answer.catchup.results[0].status)
        assert said.kind == ("RESOURCE_EXHAUSTED", "IN_FLIGHT_EXHAUSTED")
        assert said.details == {"limit": "2"}
        assert said.retry_ms > 0
        # Naming somebody else's sequence takes none of its places, and tells nothing about them.
        named = pb.CatchupRequest(entries=[sequence.catchup_entry(0, 1), theirs.catchup_entry(0, 1)])
        foreign = other.begin("Catchup", named)
    assert first.result().results == retried.result().results
    assert second.result().results[0].state.last_op == 2
    unknown, good = foreign.result().results
    assert refused_entry(unknown.status).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    assert good.status.code == 0
