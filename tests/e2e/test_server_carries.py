"""Carries over the wire: how long they live, who sees them, and what gives way to whom."""

import secrets
import time

import pytest

from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from wire import Sequence, Story, open_request, refusal

STORY = Story(5)
UNKNOWN = ("NOT_FOUND", "CARRY_UNKNOWN")
OUTCOMES = ("taken", "installed", "freed", "lost", "expired", "evicted")


def carries(server):
    found = {outcome: server.metric("carries_total", outcome=outcome) for outcome in OUTCOMES}
    return {outcome: count for outcome, count in found.items() if count}


def carry(session, num_rows, label=""):
    sequence = session.sequence(STORY)
    sequence.catchup(0, num_rows)
    info = sequence.take(label=label).carry
    sequence.close()
    return info


def free(session, kv_id):
    return session.call("FreeKV", pb.FreeKVRequest(kv_id=kv_id))


def test_a_carry_ends_with_its_time_and_says_how_much_is_left(start):
    ahead = [0.0]
    server = start(carry_ttl_s=100.0, lease_s=1000.0, clock=lambda: time.monotonic() + ahead[0])
    session, key = server.client().open(), secrets.token_bytes(16)
    keyed = server.client().open(carry_key=key)
    old, listed = carry(session, 5), carry(keyed, 5)
    assert 99_000 < old.expires_in_ms <= 100_000
    ahead[0] = 60.0
    young = carry(session, 5)
    (told,) = server.client().open(carry_key=key).answer.carries
    assert told.kv_id == listed.kv_id
    assert 38_000 < told.expires_in_ms <= 40_000
    ahead[0] = 101.0
    said = refusal(session.sequence(STORY).install, old.kv_id)
    assert said.kind == UNKNOWN
    wait_until(lambda: server.pages() == 2, text="the pages of what is left")
    assert not server.client().open(carry_key=key).answer.carries
    assert session.sequence(STORY).install(young.kv_id).state.row_count == 5
    assert carries(server) == {"taken": 3, "expired": 2, "installed": 1}


def test_the_oldest_carries_give_way_before_anybody_is_refused(start):
    server = start(num_pages=8, carry_share=1.0)
    session = server.client().open()
    kv_ids = [carry(session, 8).kv_id for _ in range(3)]
    session.sequence(STORY).catchup(0, 12)
    assert refusal(free, session, kv_ids[0]).kind == UNKNOWN
    assert carries(server) == {"taken": 3, "evicted": 1}
    too_much = session.sequence(STORY)
    request = pb.CatchupRequest(entries=[too_much.catchup_entry(0, 24)])
    (result,) = session.call("Catchup", request).results
    assert result.status.code == 8
    assert carries(server) == {"taken": 3, "evicted": 1}
    for kv_id in kv_ids[1:]:
        free(session, kv_id)
    assert server.pages() == 3


def test_all_carries_together_hold_no_more_than_their_share(start):
    server = start(num_pages=16, carry_share=0.5)
    session = server.client().open()
    kv_ids = [carry(session, 12).kv_id for _ in range(4)]
    assert server.metric("kv_pages", state="carried") == 6
    assert [refusal(free, session, kv_id).kind for kv_id in kv_ids[:2]] == [UNKNOWN] * 2
    assert carries(server)["evicted"] == 2


def test_giving_up_a_carry_for_the_pairs_does_not_promise_room_for_the_drafts(start):
    server = start(num_pages=4, carry_share=1.0)
    session = server.client().open()
    live, sequence = session.sequence(STORY), session.sequence(STORY)
    live.catchup(0, 8)
    carry(session, 4)
    sequence.catchup(0, 4)
    result = sequence.propose(4, 4, 4)
    assert (len(result.drafts), result.stop_reason) == (1, pb.STOP_REASON_PAGES)
    assert carries(server) == {"taken": 1, "evicted": 1}


def test_a_page_shared_with_a_carry_alone_is_the_sequences_once_the_carry_is_gone(start):
    server = start(num_pages=2, carry_share=1.0)
    session = server.client().open()
    source = session.sequence(STORY)
    source.catchup(0, 8)
    request = pb.ForkSequenceRequest(sequence_id=source.sequence_id, open_id=bytes(16), keep_keys_below=8)
    forked = Sequence(session, session.call("ForkSequence", request), STORY)
    source.take()
    assert server.metric("kv_pages", state="live") == 2
    assert forked.propose(2, 3, 1).state.row_count == 5
    assert carries(server) == {"taken": 1, "evicted": 1}


def test_pages_that_several_carries_share_are_counted_once(start):
    server = start(num_pages=8, carry_share=1.0)
    session = server.client().open()
    source = session.sequence(STORY)
    source.catchup(0, 8)
    request = pb.ForkSequenceRequest(sequence_id=source.sequence_id, open_id=bytes(16), keep_keys_below=8)
    forked = Sequence(session, session.call("ForkSequence", request), STORY)
    source.take()
    forked.take()
    shown = [server.metric("kv_pages", state=state) for state in ("free", "live", "carried")]
    assert shown == [6, 0, 2]


def test_a_key_lists_its_carries_with_labels_and_outlives_sessions(start):
    server = start()
    key = secrets.token_bytes(32)
    first = server.client().open(carry_key=key)
    infos = [carry(first, num_rows, label) for num_rows, label in ((5, "turn 1"), (9, "ü" * 32))]
    first.close()
    second = server.client().open(carry_key=key)
    told = second.answer.carries
    assert [info.kv_id for info in told] == [info.kv_id for info in infos]
    assert [(info.label, info.ranges[0].end) for info in told] == [("turn 1", 5), ("ü" * 32, 9)]
    with_rows, by_itself = second.sequence(STORY), second.sequence(STORY)
    with_rows.install(told[1].kv_id)
    by_itself.catchup(0, 9)
    assert with_rows.propose(9, 1).drafts == by_itself.propose(9, 1).drafts
    assert [info.kv_id for info in server.client().open(carry_key=key).answer.carries] == [infos[0].kv_id]
    assert carries(server) == {"taken": 2, "installed": 1}


def test_without_a_key_carries_end_with_their_session(start):
    server = start()
    session = server.client().open()
    carry(session, 5)
    session.close()
    assert carries(server) == {"taken": 1, "lost": 1}
    assert server.pages() == 0


@pytest.mark.parametrize("key", [b"", secrets.token_bytes(16)])
def test_another_key_neither_sees_nor_takes_a_carry(start, key):
    server = start()
    owner = server.client().open(carry_key=secrets.token_bytes(16))
    kv_id = carry(owner, 5).kv_id
    other = server.client().open(carry_key=key)
    assert not other.answer.carries
    unknown = refusal(other.sequence(STORY).install, bytes(16))
    assert unknown.kind == UNKNOWN
    assert refusal(other.sequence(STORY).install, kv_id) == unknown
    assert refusal(free, other, kv_id) == refusal(free, other, bytes(16))
    free(owner, kv_id)
    assert carries(server) == {"taken": 1, "freed": 1}


@pytest.mark.parametrize("size", [1, 15, 65])
def test_a_key_of_another_size_is_refused(shared_server, size):
    said = refusal(shared_server.client().open, carry_key=bytes(size))
    assert (said.kind, said.details["field"]) == (("INVALID_ARGUMENT", "INVALID_FIELD"), "carry_key")


def test_a_truncate_with_the_bytes_of_the_take_before_it_is_another_request(shared_server):
    session = shared_server.client().open()
    sequence = session.sequence(STORY)
    sequence.catchup(0, 5)
    sequence.take()
    assert sequence.take_request(op=2).SerializeToString() == sequence.truncate_request(0, op=2).SerializeToString()
    said = refusal(sequence.truncate, 0, op=2)
    assert said.kind == ("INVALID_ARGUMENT", "OP_REUSED")
    assert refusal(sequence.close, op=2).kind == said.kind
    session.close()


def test_a_session_is_told_of_the_youngest_carries_that_fit_into_its_answer(start):
    server, key = start(message_bytes=8192), secrets.token_bytes(16)
    sequence = server.client().open(carry_key=key).sequence(STORY)
    kv_ids = [sequence.take(label="x" * 64).carry.kv_id for _ in range(100)]
    answer = server.client().open(carry_key=key).answer
    told = [info.kv_id for info in answer.carries]
    assert told == kv_ids[-len(told) :]
    assert 8192 - 250 < answer.ByteSize() <= 8192
    assert server.metric("sessions") == 2


def test_a_session_that_was_refused_for_its_time_is_not_there(start):
    server, key = start(), secrets.token_bytes(16)
    sequence = server.client().open().sequence(STORY)
    with server.runner.held():
        num_batches = len(server.runner.batches)
        writing = sequence.session.begin("Catchup", pb.CatchupRequest(entries=[sequence.catchup_entry(0, 2)]))
        server.runner.wait_for_batch(num_batches)
        request = open_request(carry_key=key)
        said = refusal(server.client().stub.OpenSession, request, timeout=0.3)
        assert said.code.name == "DEADLINE_EXCEEDED"
    assert writing.result().results[0].status.code == 0
    assert server.metric("sessions") == 1
