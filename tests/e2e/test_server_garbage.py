"""Garbage and wild messages: never a bug of the service, never a crash, and nobody else notices."""

import grpc
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from scenes import make_scene
from serving import running
from specdraft.v1 import admin_pb2, session_pb2
from specdraft.v1 import drafter_pb2 as pb
from wild import Wild
from wire import TIMEOUT_S, TOKEN_KEY, Client, Story, refused, refused_entry

UNARY = {
    "GetServerInfo": session_pb2.GetServerInfoRequest,
    "OpenSession": session_pb2.OpenSessionRequest,
    "KeepAlive": session_pb2.KeepAliveRequest,
    "CloseSession": session_pb2.CloseSessionRequest,
    "RegisterRegion": session_pb2.RegisterRegionRequest,
    "UnregisterRegion": session_pb2.UnregisterRegionRequest,
    "OpenSequence": pb.OpenSequenceRequest,
    "GetSequence": pb.GetSequenceRequest,
    "ForkSequence": pb.ForkSequenceRequest,
    "Truncate": pb.TruncateRequest,
    "CloseSequence": pb.CloseSequenceRequest,
    "Catchup": pb.CatchupRequest,
    "Propose": pb.ProposeRequest,
    "ReadDrafts": pb.ReadDraftsRequest,
    "TakeKV": pb.TakeKVRequest,
    "InstallKV": pb.InstallKVRequest,
    "FreeKV": pb.FreeKVRequest,
}
ADMIN = {
    "SetRunner": admin_pb2.SetRunnerRequest,
    "ListSessions": admin_pb2.ListSessionsRequest,
}
BUGS = {"INTERNAL", "UNKNOWN", "DATA_LOSS"}
SEEDS = st.integers(0, 2**32 - 1)
FEW = settings(
    max_examples=120,
    derandomize=True,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)


@pytest.fixture(scope="module")
def wild_server(tiny_checkpoint):
    with running(tiny_checkpoint, num_pages=24, max_sequences=12, lease_s=120.0) as server:
        yield server


@pytest.fixture
def wild_scene(wild_server):
    with make_scene(wild_server) as scene:
        yield scene


def known_of(scene):
    """What a client may know, and what it should not."""
    story = Story(1)
    ids = [
        scene.sequence.sequence_id,
        scene.bystander.sequence_id,
        scene.session.answer.session_id,
        scene.session.token,
    ]
    return [*ids, *(story.hidden_bytes(0, count) for count in (1, 2, 3))]


def ask(scene, method, data):
    """Sends bytes; returns the answer's bytes, or None. A bug fails the test."""
    call = scene.session.client.channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
    return answer_or_none(call, data, timeout=TIMEOUT_S, metadata=scene.session.metadata())


def answer_or_none(call, *args, **kwargs):
    try:
        return call(*args, **kwargs)
    except grpc.RpcError as error:
        check_code(refused(error))
    return None


def check_code(said):
    assert said.code.name not in BUGS, said


def tidy(scene, rpc, answer):
    """Keeps the wild client's session alive, and ends those that it opened beside."""
    stub = scene.session.client.stub
    if rpc == "OpenSession" and answer is not None:
        token = session_pb2.OpenSessionResponse.FromString(answer).session_token
        stub.CloseSession(session_pb2.CloseSessionRequest(), timeout=TIMEOUT_S, metadata=((TOKEN_KEY, token),))
    if rpc == "CloseSession" and answer is not None:
        scene.session = scene.session.client.open()
        scene.sequence = scene.session.sequence(Story(1))
    if rpc in {"Catchup", "Propose"} and answer is not None:
        parse = pb.ProposeResponse.FromString if rpc == "Propose" else pb.CatchupResponse.FromString
        check_entries(parse(answer).results)


def check_entries(results):
    for result in results:
        if result.status.code:
            check_code(refused_entry(result.status))


@FEW
@given(seed=SEEDS)
def test_bytes_that_are_no_message_are_refused_and_nobody_else_notices(wild_scene, seed):
    scene = wild_scene
    before = scene.bystander_drafts()
    wild = Wild(seed, known_of(scene))
    for rpc, make in UNARY.items():
        data = wild.bytes() if wild.random.random() < 0.4 else wild.damaged(wild.fill(make()).SerializeToString())
        tidy(scene, rpc, ask(scene, f"/specdraft.v1.Drafter/{rpc}", data))
    assert scene.bystander_drafts() == before
    assert scene.session.client.check() == "SERVING"


@FEW
@given(seed=SEEDS)
def test_wild_messages_are_answered_or_refused_and_nobody_else_notices(wild_scene, seed):
    scene = wild_scene
    before = scene.bystander_drafts()
    wild = Wild(seed, known_of(scene), presence=0.8)
    for rpc, make in UNARY.items():
        request = wild.fill(make())
        tame(wild, scene, request)
        tidy(scene, rpc, ask(scene, f"/specdraft.v1.Drafter/{rpc}", request.SerializeToString()))
    assert scene.bystander_drafts() == before
    assert scene.session.client.check() == "SERVING"


def tame(wild, scene, request):
    """Makes most of a request right, so that what is wrong gets further."""
    sequence = scene.sequence
    for entry in getattr(request, "entries", ()):
        if wild.random.random() < 0.7:
            count = wild.random.choice((1, 2, 3))
            entry.sequence_id, entry.op = sequence.sequence_id, wild.random.choice((1, 2, 3, 4))
            pairs = sequence.story.pairs(wild.random.choice((0, 3, 6, 7)), count, allow_gap=wild.random.random() < 0.3)
            entry.pairs.CopyFrom(pairs)
    if hasattr(request, "lane_ticket") and wild.random.random() < 0.9:
        request.ClearField("lane_ticket")


@settings(FEW, max_examples=60)
@given(seed=SEEDS)
def test_a_wild_stream_is_answered_in_band_and_nobody_else_notices(wild_scene, seed):
    scene = wild_scene
    before = scene.bystander_drafts()
    wild = Wild(seed, known_of(scene), presence=0.4)
    ids = []
    with scene.session.drive() as drive:
        for number in range(20):
            request = wild.fill(pb.DriveRequest(), depth=0)
            kind = request.WhichOneof("request")
            if kind in {"propose", "catchup"}:
                tame(wild, scene, getattr(request, kind))
            request.correlation_id = number
            request.timeout_ms = wild.random.choice((0, 1, 5000, 2**32 - 1))
            drive._requests.put(request)
            ids.append(number)
        answers = [drive.answer() for _ in ids]
        drive.finish()
        assert drive.ending() is None
    assert sorted(answer.correlation_id for answer in answers) == ids
    for answer in answers:
        if answer.status.code:
            check_code(refused_entry(answer.status))
        check_entries(answer.propose.results)
        check_entries(answer.catchup.results)
    assert scene.bystander_drafts() == before


@FEW
@given(seed=SEEDS)
def test_bytes_that_are_no_message_end_a_stream_and_nobody_else_notices(wild_scene, seed):
    scene = wild_scene
    wild = Wild(seed, known_of(scene))
    messages = [wild.damaged(wild.fill(pb.DriveRequest()).SerializeToString()) for _ in range(5)]
    method = "/specdraft.v1.Drafter/Drive"
    stream = scene.session.client.channel.stream_stream(method, request_serializer=bytes, response_deserializer=bytes)
    call = stream(iter(messages), timeout=TIMEOUT_S, metadata=scene.session.metadata())
    answer_or_none(list, call)
    assert scene.session.client.check() == "SERVING"


@FEW
@given(seed=SEEDS)
def test_an_operator_can_send_garbage_too(wild_server, seed):
    wild = Wild(seed)
    with Client(f"unix:{wild_server.config.socket}.admin") as client:
        for rpc, make in ADMIN.items():
            for data in (wild.bytes(), wild.fill(make()).SerializeToString()):
                method = f"/specdraft.v1.DrafterAdmin/{rpc}"
                call = client.channel.unary_unary(method, request_serializer=bytes, response_deserializer=bytes)
                answer_or_none(call, data, timeout=TIMEOUT_S)


def test_nothing_of_all_this_is_left(wild_server):
    assert wild_server.metric("sessions") == 0
    assert wild_server.pages() == 0
    assert wild_server.metric("errors_total", reason="INTERNAL") == 0
    assert len(wild_server.service.assembly.engine._in_flight) == 0
    assert wild_server.allocator.num_pages == 24


def test_bytes_that_are_no_message_are_told_so(scene):
    with scene.undisturbed():
        channel = scene.session.client.channel
        call = channel.unary_unary(
            "/specdraft.v1.Drafter/Propose", request_serializer=bytes, response_deserializer=bytes
        )
        with pytest.raises(grpc.RpcError) as caught:
            call(b"\xff\xff\xff", timeout=TIMEOUT_S, metadata=scene.session.metadata())
        said = refused(caught.value)
        assert said.kind == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert said.details["field"] == "request"
