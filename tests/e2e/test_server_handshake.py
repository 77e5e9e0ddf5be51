"""`GetServerInfo` and `OpenSession`: who fits, who does not, and why."""

import threading

import grpc
import pytest

from drafter_service.server import Service, assembly
from serving import temporary_directory, tiny_config
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2, tensor_pb2
from wire import BOOT_ID, TIMEOUT_S, WIDTH, Client, Story, open_request, refusal, refused, refused_entry

HOST, CUDA, INLINE = tensor_pb2.MEMORY_KIND_HOST, tensor_pb2.MEMORY_KIND_CUDA, tensor_pb2.MEMORY_KIND_INLINE
MISMATCH = ("FAILED_PRECONDITION", "HANDSHAKE_MISMATCH")
INVALID = ("INVALID_ARGUMENT", "INVALID_FIELD")
POST, PRE, LAYERS = "HIDDEN_SOURCE_POST_NORM", "HIDDEN_SOURCE_PRE_NORM", "HIDDEN_SOURCE_LAYERS"
TYPES = "float32, bfloat16, float16"


def mismatch(field, ours, theirs):
    return MISMATCH, {"field": field, "ours": ours, "theirs": theirs}


CASES = {
    "protocol of tomorrow": ({"protocol_version": 2}, *mismatch("protocol_version", "1", "2")),
    "no protocol": ({"protocol_version": 0}, *mismatch("protocol_version", "1", "0")),
    "another hidden source": ({"hidden_source": 1}, *mismatch("hidden_source", POST, PRE)),
    "layers": ({"hidden_source": 3, "layer_ids": [1]}, *mismatch("hidden_source", POST, LAYERS)),
    "a source of tomorrow": ({"hidden_source": 44}, *mismatch("hidden_source", POST, "44")),
    "another width": ({"hidden_width": 2 * WIDTH}, *mismatch("hidden_width", "64", "128")),
    "layer ids": ({"layer_ids": [1, 19, 36]}, *mismatch("layer_ids", "", "1,19,36")),
    "another vocabulary": ({"vocab_size": 256}, *mismatch("vocab_size", "128", "256")),
    "no element type": ({"hidden_dtype": 0}, *mismatch("hidden_dtype", TYPES, "D_TYPE_UNSPECIFIED")),
    "an element type of tomorrow": ({"hidden_dtype": 9}, *mismatch("hidden_dtype", TYPES, "9")),
    "too many drafts": ({"max_drafts": 5}, INVALID, {"field": "max_drafts", "value": "5", "expected": "at most 4"}),
    "a long name": ({"client_name": "x" * 65}, INVALID, {"field": "client_name", "value": "65 bytes"}),
    "a short carry key": ({"carry_key": bytes(15)}, INVALID, {"field": "carry_key", "value": "15 bytes"}),
    "a long carry key": ({"carry_key": bytes(65)}, INVALID, {"field": "carry_key", "value": "65 bytes"}),
    "CUDA memory": (
        {"memory_kind": CUDA},
        ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE"),
        {"kind": "MEMORY_KIND_CUDA"},
    ),
    "memory of tomorrow": ({"memory_kind": 9}, ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE"), {"kind": "9"}),
    "host memory from another host": (
        {"memory_kind": HOST, "boot_id": "00000000-0000-4000-8000-000000000000"},
        ("FAILED_PRECONDITION", "OTHER_HOST"),
        {},
    ),
    "host memory from nowhere": ({"memory_kind": HOST, "boot_id": ""}, ("FAILED_PRECONDITION", "OTHER_HOST"), {}),
    "a huge arena": ({"memory_kind": HOST, "slot_count": 2**32 - 1}, ("RESOURCE_EXHAUSTED", "ARENA_EXHAUSTED"), {}),
    "a huge staging area": (
        {"memory_kind": HOST, "prefill_row_count": 2**32 - 1},
        ("RESOURCE_EXHAUSTED", "ARENA_EXHAUSTED"),
        {},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_client_that_does_not_fit_is_told_what_does_not(scene, name):
    changes, kind, details = CASES[name]
    num_sessions = scene.server.metric("sessions")
    with scene.undisturbed():
        said = refusal(scene.session.client.stub.OpenSession, open_request(**changes), timeout=TIMEOUT_S)
    assert said.kind == kind
    assert said.domain == "specdraft"
    assert details.items() <= said.details.items()
    assert (said.retry_ms > 0) == (kind[0] == "RESOURCE_EXHAUSTED")
    assert scene.server.metric("sessions") == num_sessions


@pytest.mark.parametrize(("boot_id", "words"), [("", "no boot_id was sent"), ("elsewhere", "another host's")])
def test_a_boot_id_that_was_not_sent_is_told_from_another_hosts(scene, boot_id, words):
    request = open_request(memory_kind=HOST, boot_id=boot_id)
    assert words in refusal(scene.session.client.stub.OpenSession, request, timeout=TIMEOUT_S).text


def test_an_arena_beyond_the_limit_names_both_numbers(scene):
    request = open_request(memory_kind=HOST, slot_count=10**6)
    said = refusal(scene.session.client.stub.OpenSession, request, timeout=TIMEOUT_S)
    assert said.details["limit"] == str(256 << 20)
    assert int(said.details["bytes"]) > 256 << 20


def test_thousands_of_layer_ids_come_back_shortened(scene):
    request = open_request(layer_ids=range(100_000))
    said = refusal(scene.session.client.stub.OpenSession, request, timeout=TIMEOUT_S)
    assert said.kind == MISMATCH
    assert len(said.details["theirs"]) == 512


@pytest.mark.parametrize(
    ("boot_id", "kind"), [(BOOT_ID, HOST), (f"{BOOT_ID}\n", HOST), ("elsewhere", INLINE), ("", INLINE)]
)
def test_a_client_that_asks_for_no_kind_gets_what_works_and_is_told(shared_server, boot_id, kind):
    session = shared_server.client().open(memory_kind=0, boot_id=boot_id)
    assert session.answer.memory_kind == kind
    assert session.answer.HasField("arena") == (kind == HOST)
    session.close()


def test_server_info_says_what_the_service_is(shared_server):
    info = shared_server.client().info()
    head, limits = info.head, info.limits
    assert (head.kind, head.hidden_width, head.vocab_size, head.max_seq_len) == ("mtp", WIDTH, 128, 200)
    assert (head.layer_count, head.lookback, head.rank_count, head.block_gamma) == (1, 0, 1, 0)
    assert (limits.max_drafts, limits.propose_batch_max, limits.prefill_rows_max) == (4, 4, 32)
    assert (limits.kv_page_count, limits.kv_page_row_count, limits.lease_ms) == (256, 4, 30_000)
    assert head.kv_bytes_per_row * limits.kv_page_row_count * limits.kv_page_count == shared_server.config.kv_bytes
    assert info.protocol_version == 1
    assert list(info.memory_kinds) == [INLINE, HOST]
    assert (len(info.incarnation), info.boot_id, list(info.device_uuids)) == (16, BOOT_ID, [])
    assert info.runner == session_pb2.RUNNER_EAGER


def test_a_session_may_ask_for_fewer_drafts_and_is_held_to_it(shared_server):
    session = shared_server.client().open(max_drafts=2)
    assert session.answer.max_drafts == 2
    sequence = session.sequence(Story(1))
    assert len(sequence.propose(0, 3, 2).drafts) == 2
    for entry, reason in (
        (sequence.propose_entry(3, 1, 3), "TOO_MANY_DRAFTS"),
        (sequence.propose_entry(3, 4, 2), "TOO_MANY_PAIRS"),
    ):
        (result,) = session.call("Propose", pb.ProposeRequest(entries=[entry])).results
        assert refused_entry(result.status).reason == reason
    session.close()


def test_over_tcp_there_is_inline_memory_only(start):
    server = start(listen="127.0.0.1:0", insecure=True)
    with Client(f"127.0.0.1:{server.addresses.listen_port}") as client:
        assert client.open(memory_kind=0).answer.memory_kind == INLINE
        said = refusal(client.stub.OpenSession, open_request(memory_kind=HOST), timeout=TIMEOUT_S)
        assert said.kind == ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE")
        assert said.details == {"kind": "MEMORY_KIND_HOST"}
        assert "over TCP" in said.text
        client.open().sequence(Story(1)).propose(0, 2)


def test_what_comes_before_the_head_is_loaded_is_told_to_wait(tiny_checkpoint, monkeypatch):
    go_on, real = threading.Event(), assembly.assemble
    monkeypatch.setattr(assembly, "assemble", lambda *args: go_on.wait(20) and real(*args))
    with temporary_directory() as directory:
        config = tiny_config(tiny_checkpoint, directory, health_port=0)
        service = Service(config)
        starter = threading.Thread(target=service.start)
        starter.start()
        with Client(f"unix:{config.socket}") as client:
            grpc.channel_ready_future(client.channel).result(20)
            said = [refusal(client.info), refusal(client.open), refused(begin_drive(client))]
            assert {one.kind for one in said} == {("UNAVAILABLE", "STARTING")}
            assert all(one.retry_ms > 0 for one in said)
            assert client.check() == "NOT_SERVING"
            go_on.set()
            starter.join(20)
            assert client.check() == "SERVING"
            client.open().close()
        service.close()


def begin_drive(client):
    call = client.stub.Drive(iter(()), timeout=TIMEOUT_S)
    call.code()
    return call
