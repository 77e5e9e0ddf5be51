"""What runs out: pages, sequences, sessions. Excess is refused with a delay, and nothing is left half-done."""

import pytest

from serving import num_descriptors, wait_until
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import TIMEOUT_S, Client, Story, open_request, refusal, refused_entry

PAGES = ("RESOURCE_EXHAUSTED", "PAGES_EXHAUSTED")


def test_pages_that_run_out_in_the_middle_of_a_batch_refuse_only_what_does_not_fit(start):
    server = start(num_pages=4)
    session = server.client().open()
    sequences = [session.sequence(Story(seed)) for seed in range(4)]
    sequences[1].catchup(0, 2)
    state, digest = sequences[1].state(), server.digest(sequences[1].sequence_id)
    sizes = (8, 9, 3, 5)  # 2 pages, 2 of 1 left, 1, 2 of none left
    firsts = (0, 2, 0, 0)
    entries = [seq.catchup_entry(*where) for seq, *where in zip(sequences, firsts, sizes, strict=True)]
    results = session.call("Catchup", pb.CatchupRequest(entries=entries)).results
    assert [result.status.code for result in results] == [0, 8, 0, 8]
    said = [refused_entry(results[index].status) for index in (1, 3)]
    assert [one.kind for one in said] == [PAGES, PAGES]
    assert [one.details for one in said] == [{"needed": "2", "free": "1"}, {"needed": "2", "free": "0"}]
    assert all(one.retry_ms > 0 for one in said)
    assert results[1].state == sequences[1].state() == state
    assert server.digest(sequences[1].sequence_id) == digest
    assert sequences[3].state().last_op == 0
    assert server.pages() == 4
    sequences[0].close(op=2)
    sequences[3].catchup(0, 5)
    session.close()
    wait_until(lambda: server.pages() == 0)


def test_a_proposal_whose_pairs_do_not_fit_is_refused_and_its_pages_come_back(start):
    server = start(num_pages=2)
    session = server.client().open()
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 7)
    request = pb.ProposeRequest(entries=[sequence.propose_entry(7, 5, 4)])
    for _ in range(20):
        (result,) = session.call("Propose", request).results
        assert refused_entry(result.status).kind == PAGES
    assert server.pages() == 2
    assert sequence.truncate(3).state.row_count == 3
    assert server.pages() == 1
    sequence.propose(3, 5, 0)


def test_reserved_pages_are_taken_at_once_and_given_back(start):
    server = start(num_pages=6)
    session = server.client().open()
    reserved = session.sequence(Story(1), budget_tokens=16, reserve=True)
    assert server.pages() == 4
    request = pb.OpenSequenceRequest(open_id=bytes(16), budget_tokens=12, reserve=True)
    said = refusal(session.call, "OpenSequence", request)
    assert said.kind == PAGES
    assert said.details == {"needed": "3", "free": "2"}
    assert said.retry_ms > 0
    assert server.pages() == 4
    reserved.catchup(0, 16)
    assert server.pages() == 4
    reserved.truncate(0)
    assert server.pages() == 4
    reserved.close()
    assert server.pages() == 0
    session.call("OpenSequence", request)


def test_sequences_beyond_the_limit_are_refused_per_session(start):
    server = start(max_sequences=3)
    session, other = server.client().open(), server.client().open()
    mine = [session.sequence(Story(seed)) for seed in range(3)]
    request = pb.OpenSequenceRequest(open_id=bytes(16))
    said = refusal(session.call, "OpenSequence", request)
    with session.drive() as drive:
        assert refused_entry(drive.ask(open_sequence=request).status) == said
    assert said.kind == ("RESOURCE_EXHAUSTED", "SEQUENCES_EXHAUSTED")
    assert said.details == {"limit": "3"}
    assert said.retry_ms > 0
    other.sequence(Story(1)).propose(0, 2)
    mine[0].close()
    session.call("OpenSequence", request)


@pytest.mark.parametrize("kind", [tensor_pb2.MEMORY_KIND_INLINE, tensor_pb2.MEMORY_KIND_HOST])
def test_sessions_beyond_the_limit_are_refused_and_leave_no_memory(start, kind):
    server = start(max_sessions=2)
    client = server.client()
    first, _ = client.open(memory_kind=kind), client.open(memory_kind=kind)
    before = num_descriptors()
    for _ in range(20):
        said = refusal(client.stub.OpenSession, open_request(memory_kind=kind), timeout=TIMEOUT_S)
        assert said.kind == ("RESOURCE_EXHAUSTED", "SESSIONS_EXHAUSTED")
        assert said.details == {"limit": "2"}
        assert said.retry_ms > 0
    assert num_descriptors() == before
    first.close()
    client.open(memory_kind=kind).sequence(Story(1)).propose(0, 2)


def test_everything_comes_back_when_sequences_carries_and_sessions_end(start):
    server = start(num_pages=64)
    session = server.client().open()
    for seed in range(5):
        sequence = session.sequence(Story(seed))
        sequence.catchup(0, 30)
        sequence.propose(30, 1, 4)
        if seed % 2:
            sequence.take()
    carried, live, free = (server.metric("kv_pages", state=state) for state in ("carried", "live", "free"))
    assert (carried, live, free) == (16, 24, 24)
    session.close()
    wait_until(lambda: server.metric("kv_pages", state="free") == 64)
    assert [server.metric("kv_pages", state=state) for state in ("carried", "live")] == [0, 0]
    assert server.metric("sequences") == 0
    assert len(server.ledger.vault.carries) == 0


def test_more_streams_than_sessions_find_a_place_beside_the_calls(start):
    server = start(workers=1, max_sessions=4)
    clients = [Client(f"unix:{server.config.socket}") for _ in range(4)]
    sessions = [client.open() for client in clients]
    drives = [session.drive().attached() for session in sessions]
    later = [session.drive().attached() for session in sessions]
    for drive in drives:
        assert drive.ending().kind == ("ABORTED", "SESSION_FENCED")
    for session, drive in zip(sessions, later, strict=True):
        sequence = session.sequence(Story(1))
        request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2)])
        assert drive.ask(propose=request).propose.results[0].status.code == 0
    for client in clients:
        client.close()
