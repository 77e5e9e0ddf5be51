"""Operations sent twice, operations that failed on the device, and what a sequence looks like afterwards."""

import pytest
import torch

from drafter_service.state import sequences
from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2
from wire import Story, refusal, refused_entry

COUNTERS = (
    "rows_written_total",
    "proposals_total",
    "draft_tokens_total",
    "accepted_tokens_total",
    "unjudged_proposals_total",
    "batch_size_count",
)


def standing(scene):
    sequence = scene.sequence
    return sequence.state(), scene.server.digest(sequence.sequence_id), scene.server.metrics(*COUNTERS)


def make_request(sequence, member):
    return {
        "catchup": lambda: pb.CatchupRequest(entries=[sequence.catchup_entry(4, 5)]),
        "propose": lambda: pb.ProposeRequest(entries=[sequence.propose_entry(4, 5)]),
        "truncate": lambda: sequence.truncate_request(3),
        "take_kv": lambda: sequence.take_request(label="carried"),
        "keep_alive": session_pb2.KeepAliveRequest,
    }[member]()


RPCS = {"catchup": "Catchup", "propose": "Propose", "truncate": "Truncate", "take_kv": "TakeKV"}


@pytest.mark.parametrize("member", RPCS)
def test_an_operation_sent_again_is_answered_again_and_done_once(scene, member):
    request = make_request(scene.sequence, member)
    first = scene.session.call(RPCS[member], request)
    after = standing(scene)
    assert after[0].last_op == 2
    assert scene.session.call(RPCS[member], request) == first
    for _ in range(2):  # a stream, and one after it has broken
        with scene.session.drive() as drive:
            answer = drive.ask(**{member: request})
            assert answer.status.code == 0
            assert getattr(answer, member) == first
    assert scene.session.call(RPCS[member], request) == first
    assert standing(scene) == after


def test_an_operation_of_the_stream_sent_again_is_answered_again(scene):
    request = make_request(scene.sequence, "propose")
    with scene.session.drive() as drive:
        first = drive.ask(propose=request).propose
        after = standing(scene)
        assert drive.ask(propose=request).propose == first
    assert scene.session.call("Propose", request) == first
    assert standing(scene) == after


def test_only_the_last_operation_is_answered_again(scene):
    request = make_request(scene.sequence, "catchup")
    scene.session.call("Catchup", request)
    scene.session.call("Truncate", scene.sequence.truncate_request(3, op=3))
    after = standing(scene)
    (result,) = scene.session.call("Catchup", request).results
    said = refused_entry(result.status)
    assert said.kind == ("ABORTED", "OP_OUT_OF_ORDER")
    assert said.details == {"op": "2", "last_op": "3", "row_count": "3", "last_pair_key": "2", "ranges": "0-3"}
    assert standing(scene) == after


def test_an_overlap_rewinds_and_a_retried_catchup_is_not_applied_twice(scene):
    sequence = scene.session.sequence(Story(5))
    sequence.catchup(0, 4)
    request = pb.CatchupRequest(entries=[sequence.catchup_entry(4, 4)])
    first = sequence.session.call("Catchup", request)
    digest = scene.server.digest(sequence.sequence_id)
    assert sequence.session.call("Catchup", request) == first
    assert sequence.state().row_count == 8
    assert scene.server.digest(sequence.sequence_id) == digest
    changed = sequence.story.pairs(4, 4)
    changed.tokens[1] = (changed.tokens[1] + 1) % 128
    sequence.catchup(4, 4, op=3, pairs=changed)
    assert sequence.state().row_count == 8
    assert scene.server.digest(sequence.sequence_id) != digest
    sequence.catchup(4, 4)
    assert scene.server.digest(sequence.sequence_id) == digest


def test_a_retried_open_finds_the_same_sequence(scene):
    request = pb.OpenSequenceRequest(open_id=b"0123456789abcdef", budget_tokens=20)
    first = scene.session.call("OpenSequence", request)
    num_sequences = scene.server.metric("sequences")
    again = scene.session.call("OpenSequence", request)
    with scene.session.drive() as drive:
        over_stream = drive.ask(open_sequence=request).open_sequence
    assert again == over_stream == first
    assert scene.server.metric("sequences") == num_sequences
    # Another session's open_id is its own.
    theirs = scene.bystander.session.call("OpenSequence", request)
    assert theirs.sequence_id != first.sequence_id


class HeadFault:
    """Makes the head's last step fail for one sequence's rows, after its rows were written."""

    def __init__(self, monkeypatch, server):
        head = server.service.assembly.head
        self._finish = head.finish
        self.is_on = True
        monkeypatch.setattr(head, "finish", self.finish)

    def finish(self, inputs, keys, reader):
        if self.is_on and torch.any(keys == 99):
            raise RuntimeError("broken on purpose")
        return self._finish(inputs, keys, reader)


def test_a_fault_of_the_device_fails_its_entry_alone_and_leaves_its_rows_as_they_were(start, monkeypatch):
    server = start()
    fault = HeadFault(monkeypatch, server)
    session = server.client().open()
    sequence, other = session.sequence(Story(1)), session.sequence(Story(2))
    sequence.catchup(0, 6)
    for first_key in range(90, 103):  # rows up to key 102, so that a write at 97 .. 99 overwrites live ones
        sequence.catchup(first_key, 1, pairs=sequence.story.pairs(first_key, 1, allow_gap=True))
    state, digest, pages = sequence.state(), server.digest(sequence.sequence_id), server.pages()
    server.poison_free_pages()
    request = pb.ProposeRequest(entries=[sequence.propose_entry(97, 3), other.propose_entry(0, 2)])
    answer = session.call("Propose", request)
    bad, good = answer.results
    assert refused_entry(bad.status).kind == ("INTERNAL", "INTERNAL")
    assert refused_entry(bad.status).text == "the operation failed inside the service"
    assert (good.status.code, len(good.drafts)) == (0, 3)
    state.last_op += 1  # the number is used up
    assert sequence.state() == bad.state == state
    assert server.digest(sequence.sequence_id) == digest
    assert server.pages() == pages + 1
    assert session.call("Propose", request) == answer
    with session.drive() as drive:
        assert drive.ask(propose=request).propose == answer
    assert sequence.state() == state
    fault.is_on = False
    assert session.call("Propose", request) == answer, "the number is used up"
    sequence.op = state.last_op
    assert len(sequence.propose(97, 3).drafts) == 3
    assert server.client().check() == "SERVING"


def test_a_batch_that_fails_once_is_done_entry_by_entry(start):
    server = start()
    session = server.client().open()
    sequences = [session.sequence(Story(seed)) for seed in (1, 2, 3)]
    expected = [list(session.sequence(Story(seed)).propose(0, 3).drafts) for seed in (1, 2, 3)]
    server.runner.fails = lambda entries: len(entries) > 1
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 3) for sequence in sequences])
    results = session.call("Propose", request).results
    assert [list(result.drafts) for result in results] == expected


def test_a_device_that_fails_always_fails_entries_and_not_the_service(start):
    server = start()
    session = server.client().open()
    sequence = session.sequence(Story(1))
    sequence.catchup(0, 6)
    state, digest, pages = sequence.state(), server.digest(sequence.sequence_id), server.pages()
    server.runner.fails = lambda entries: True
    for op in range(2, 6):
        request = pb.CatchupRequest(entries=[sequence.catchup_entry(3, 20, op=op)])
        (result,) = session.call("Catchup", request).results
        assert refused_entry(result.status).kind == ("INTERNAL", "INTERNAL")
        state.last_op = op
        assert sequence.state() == state
    assert (server.digest(sequence.sequence_id), server.pages()) == (digest, pages)
    server.runner.fails = lambda entries: False
    assert server.client().check() == "SERVING"
    sequence.propose(6, 1, op=6)


def test_a_call_whose_client_left_is_done_and_its_retry_learns_it(start):
    server = start()
    session = server.client().open()
    sequence = session.sequence(Story(1))
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 3)])
    with server.runner.held():
        num_batches = len(server.runner.batches)
        call = session.begin("Propose", request)
        server.runner.wait_for_batch(num_batches)
        call.cancel()
    wait_until(lambda: sequence.state().last_op == 1)
    num_batches = len(server.runner.batches)
    assert len(session.call("Propose", request).results[0].drafts) == 3
    assert len(server.runner.batches) == num_batches


def test_closing_again_is_answered_and_everything_else_is_unknown(scene):
    sequence = scene.session.sequence(Story(5))
    request = pb.CloseSequenceRequest(sequence_id=sequence.sequence_id, op=1)
    assert scene.session.call("CloseSequence", request) == scene.session.call("CloseSequence", request)
    request.accepted_drafts = 1
    assert refusal(scene.session.call, "CloseSequence", request).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    assert refusal(sequence.state).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")


def test_a_retried_close_is_answered_however_many_sequences_others_have_closed(scene, monkeypatch):
    monkeypatch.setattr(sequences, "MAX_CLOSED", 4)
    mine, theirs = scene.session, scene.bystander.session
    sequence = mine.sequence()
    request = sequence.close_request()
    mine.call("CloseSequence", request)
    for _ in range(6):
        theirs.sequence().close()
    assert mine.call("CloseSequence", request) == pb.CloseSequenceResponse()
    for _ in range(4):
        mine.sequence().close()
    assert refusal(mine.call, "CloseSequence", request).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
