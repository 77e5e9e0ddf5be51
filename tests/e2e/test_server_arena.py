"""The host arena: proof of the mapping, bounds, private copies, outputs, and the side socket that hands it over."""

import math
import os
import socket
import threading
import time

import grpc
import pytest
import torch

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import error_reason_pb2, session_pb2, tensor_pb2
from wire import TIMEOUT_S, WIDTH, Story, fetch, in_slot, in_staging, refusal, refused_entry

HOST = tensor_pb2.MEMORY_KIND_HOST
BFLOAT16 = tensor_pb2.D_TYPE_BFLOAT16
STORY = Story(7)


@pytest.fixture
def session(shared_server):
    opened = shared_server.client().open(memory_kind=HOST, slot_count=2, prefill_row_count=16)
    yield opened
    opened.close()


def ask(session, sequence, ref, count, *, first_key=0, rpc="Propose", **changes):
    pairs = STORY.pairs(first_key, count, hiddens=ref)
    if rpc == "Propose":
        request = pb.ProposeRequest(entries=[sequence.propose_entry(first_key, count, pairs=pairs, **changes)])
    else:
        request = pb.CatchupRequest(entries=[sequence.catchup_entry(first_key, count, pairs=pairs, **changes)])
    (result,) = session.call(rpc, request).results
    sequence.op = result.state.last_op
    return result


def test_rows_from_slot_staging_and_message_draft_alike_and_the_outputs_are_in_the_slot(session):
    inline = session.sequence(STORY).propose(0, 5)
    with session.arena() as arena:
        arena.put_slot(1, STORY.rows[:5])
        from_slot = ask(session, session.sequence(STORY), in_slot(1, 5), 5, output_slot=1)
        arena.put_staging(11, STORY.rows[:5])
        from_staging = ask(session, session.sequence(STORY), in_staging(11, 5), 5, output_slot=0)
        for slot, result in ((1, from_slot), (0, from_staging)):
            assert (list(result.drafts), list(result.logprobs)) == (list(inline.drafts), list(inline.logprobs))
            outputs = arena.outputs(slot)
            assert outputs.pop("drafts") == list(result.drafts)
            assert outputs.pop("logprobs") == list(result.logprobs)
            assert any(outputs.pop("last_embedding"))
            assert outputs == {
                "status": 0,
                "op": 1,
                "draft_count": 3,
                "stop_reason": pb.STOP_REASON_COMPLETE,
                "row_count": 5,
                "last_pair_key": 4,
            }


def test_a_refused_entry_says_so_in_its_slot(session):
    sequence = session.sequence(STORY)
    with session.arena() as arena:
        arena.put_slot(0, STORY.rows[:3])
        ask(session, sequence, in_slot(0, 3), 3)
        result = ask(session, sequence, in_slot(0, 3), 3, first_key=8, op=2, output_slot=0)
        assert refused_entry(result.status).reason == "MISSING_ROWS"
        outputs = arena.outputs(0)
        assert outputs["status"] == error_reason_pb2.ERROR_REASON_MISSING_ROWS
        assert (outputs["op"], outputs["draft_count"], outputs["row_count"], outputs["last_pair_key"]) == (2, 0, 3, 2)


def test_rows_in_bfloat16_come_from_the_arena_too(shared_server):
    session = shared_server.client().open(memory_kind=HOST, hidden_dtype=BFLOAT16)
    inline = session.sequence(STORY).propose(0, 5, pairs=STORY.pairs(0, 5, dtype=BFLOAT16))
    with session.arena() as arena:
        arena.put_slot(0, STORY.rows[:5].bfloat16())
        result = ask(session, session.sequence(STORY), in_slot(0, 5, BFLOAT16), 5)
        assert list(result.drafts) == list(inline.drafts)
        for value in (math.nan, math.inf):
            rows = STORY.rows[:3].bfloat16()
            rows[2, 63] = value
            arena.put_slot(0, rows)
            said = refused_entry(ask(session, session.sequence(STORY), in_slot(0, 3, BFLOAT16), 3).status)
            assert (said.reason, said.details) == ("HIDDEN_NOT_FINITE", {"row": "2"})
    session.close()


OUT_OF_BOUNDS = {
    "a slot that is not there": (in_slot(2, 3), {"field": "slot", "value": "2", "limit": "2"}),
    "a slot far away": (in_slot(2**32 - 1, 3), {"field": "slot", "limit": "2"}),
    "staging beyond the end": (in_staging(14, 3), {"field": "row_count", "value": "17", "limit": "16"}),
    "staging from the end": (in_staging(16, 3), {"field": "first_row", "value": "16", "limit": "16"}),
    "staging far away": (in_staging(2**32 - 1, 3), {"field": "first_row", "limit": "16"}),
}


@pytest.mark.parametrize("name", OUT_OF_BOUNDS)
@pytest.mark.parametrize("rpc", ["Propose", "Catchup"])
def test_rows_outside_the_arena_are_refused(session, name, rpc):
    ref, details = OUT_OF_BOUNDS[name]
    sequence = session.sequence(STORY)
    with session.arena():
        said = refused_entry(ask(session, sequence, ref, 3, rpc=rpc).status)
    assert said.kind == ("INVALID_ARGUMENT", "MEMORY_OUT_OF_BOUNDS")
    assert details.items() <= said.details.items()
    assert sequence.state().last_op == 0


def test_more_rows_than_a_slot_has_are_refused(session):
    with session.arena():
        said = refused_entry(ask(session, session.sequence(STORY), in_slot(0, 6), 6, rpc="Catchup").status)
    assert said.kind == ("INVALID_ARGUMENT", "MEMORY_OUT_OF_BOUNDS")
    assert said.details == {"field": "row_count", "value": "6", "limit": "5"}


def test_another_stride_than_the_arenas_is_refused(session):
    stride = session.answer.arena.hidden_row_stride_bytes
    with session.arena():
        for ref in (in_slot(0, 2, row_stride_bytes=1), in_staging(0, 2, row_stride_bytes=2**32 - 1)):
            said = refused_entry(ask(session, session.sequence(STORY), ref, 2).status)
            assert said.kind == ("INVALID_ARGUMENT", "INVALID_FIELD")
            assert said.details["field"] == "hiddens.row_stride_bytes"
        result = ask(session, session.sequence(STORY), in_slot(0, 2, row_stride_bytes=stride), 2)
        assert result.status.code == 0


def test_outputs_into_a_slot_that_is_not_there_are_refused(session):
    with session.arena():
        said = refused_entry(ask(session, session.sequence(STORY), in_slot(0, 3), 3, output_slot=2).status)
    assert said.kind == ("INVALID_ARGUMENT", "MEMORY_OUT_OF_BOUNDS")


def test_entries_that_share_an_output_slot_are_refused_and_the_others_go_on(session):
    sequences = [session.sequence(STORY) for _ in range(4)]
    with session.arena():
        entries = [
            one.propose_entry(0, 3, **({} if slot is None else {"output_slot": slot}))
            for one, slot in zip(sequences, [1, 0, 1, None], strict=True)
        ]
        results = session.call("Propose", pb.ProposeRequest(entries=entries)).results
        said = [refused_entry(result.status).kind if result.status.code else None for result in results]
        assert said == [
            ("INVALID_ARGUMENT", "DUPLICATE_SEQUENCE"),
            None,
            ("INVALID_ARGUMENT", "DUPLICATE_SEQUENCE"),
            None,
        ]
        assert [one.state().last_op for one in sequences] == [0, 1, 0, 1]
        for one in (sequences[0], sequences[2]):  # one after the other
            assert ask(session, one, STORY.pairs(0, 3).hiddens, 3, op=1, output_slot=1).status.code == 0


def test_rows_that_are_not_finite_in_the_arena_are_refused(session):
    with session.arena() as arena:
        for value in (math.nan, math.inf, -math.inf):
            rows = STORY.rows[:3].clone()
            rows[1, 0] = value
            for ref, put in ((in_slot(0, 3), arena.put_slot), (in_staging(0, 3), arena.put_staging)):
                put(0, rows)
                said = refused_entry(ask(session, session.sequence(STORY), ref, 3).status)
                assert said.kind == ("INVALID_ARGUMENT", "HIDDEN_NOT_FINITE")
                assert said.details == {"row": "1"}


def test_an_arena_is_not_used_before_its_mapping_is_proven(session):
    sequence = session.sequence(STORY)
    for ref, changes in ((in_slot(0, 3), {}), (in_staging(0, 3), {}), (None, {"output_slot": 0})):
        said = refused_entry(ask(session, sequence, ref or STORY.pairs(0, 3).hiddens, 3, **changes).status)
        assert said.kind == ("FAILED_PRECONDITION", "MAPPING_NOT_PROVEN")
    assert not session.keep_alive().mapping_proven
    said = refusal(session.keep_alive, bytes(16))
    assert said.kind == ("FAILED_PRECONDITION", "MAPPING_NOT_PROVEN")
    assert refusal(session.keep_alive, b"short").kind == said.kind
    with session.drive() as drive:
        answer = drive.ask(keep_alive=session_pb2.KeepAliveRequest(arena_nonce=bytes(16)))
        assert refused_entry(answer.status).kind == said.kind
    assert sequence.state().last_op == 0
    with session.arena() as arena:
        arena.put_slot(0, STORY.rows[:3])
        assert ask(session, sequence, in_slot(0, 3), 3).status.code == 0


def test_what_the_client_writes_after_the_call_changes_nothing(start):
    server = start()
    session = server.client().open(memory_kind=HOST)
    expected = session.sequence(STORY).propose(0, 5)
    with session.arena() as arena, server.runner.held():
        arena.put_slot(0, STORY.rows[:5])
        sequence = session.sequence(STORY)
        num_batches = len(server.runner.batches)
        pairs = STORY.pairs(0, 5, hiddens=in_slot(0, 5))
        call = session.begin("Propose", pb.ProposeRequest(entries=[sequence.propose_entry(0, 5, pairs=pairs)]))
        server.runner.wait_for_batch(num_batches)
        arena.put_slot(0, torch.full((5, WIDTH), math.nan))
    assert list(call.result().results[0].drafts) == list(expected.drafts)


def test_a_retry_is_answered_although_its_slot_holds_something_else_by_now(session):
    sequence = session.sequence(STORY)
    with session.arena() as arena:
        arena.put_slot(0, STORY.rows[:3])
        first = ask(session, sequence, in_slot(0, 3), 3)
        arena.put_slot(0, torch.full((3, WIDTH), math.nan))
        assert ask(session, sequence, in_slot(0, 3), 3, op=1) == first


def test_the_arena_cannot_be_resized_by_its_client(session):
    layout = session.answer.arena
    _, descriptor = fetch(layout.descriptor_socket, layout.descriptor_token)
    for size in (0, layout.size_bytes - 1, layout.size_bytes + 4096):
        with pytest.raises(PermissionError):
            os.ftruncate(descriptor, size)
    os.close(descriptor)


def test_a_descriptor_token_is_good_once_and_only_the_right_one(session):
    layout = session.answer.arena
    path = layout.descriptor_socket
    for token in (bytes(16), b"short\n" + bytes(10), session.token):
        assert fetch(path, token) == (b"\x01", None)
    answer, descriptor = fetch(path, layout.descriptor_token)
    assert answer == b"\x00"
    os.close(descriptor)
    assert fetch(path, layout.descriptor_token) == (b"\x01", None)


def test_a_token_in_pieces_is_understood(session):
    layout = session.answer.arena
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as side:
        side.settimeout(TIMEOUT_S)
        side.connect(layout.descriptor_socket)
        for index in range(16):
            side.sendall(layout.descriptor_token[index : index + 1])
            time.sleep(0.002)
        answer, descriptors, _, _ = socket.recv_fds(side, 1, 1)
    assert answer == b"\x00"
    os.close(descriptors[0])


def test_forty_silent_peers_keep_nobody_from_an_arena(start):
    server = start(max_sessions=64)
    path = f"{server.config.socket}.fd"
    silent = [socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) for _ in range(40)]
    try:
        for peer in silent:
            peer.connect(path)
        session = server.client().open(memory_kind=HOST)
        began = time.monotonic()
        with session.arena() as arena:
            arena.put_slot(0, STORY.rows[:3])
            assert ask(session, session.sequence(STORY), in_slot(0, 3), 3).status.code == 0
        assert time.monotonic() - began < 8
    finally:
        for peer in silent:
            peer.close()


def test_forty_sessions_fetch_their_arenas_at_once(start):
    server = start(max_sessions=64)
    client = server.client()
    sessions = [client.open(memory_kind=HOST) for _ in range(40)]
    failures = []

    def map_one(session):
        try:
            session.arena().map.close()
        except (AssertionError, OSError, grpc.RpcError) as error:
            failures.append(error)

    threads = [threading.Thread(target=map_one, args=(session,)) for session in sessions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
