"""ReadDrafts: the drafts of the last round, from the service's own copy."""

import pytest
import torch

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import DTYPES, Story, refusal, refused_entry

STORY = Story(6)


def read(sequence, op=None, **changes):
    request = pb.ReadDraftsRequest(sequence_id=sequence.sequence_id, op=op or sequence.op, **changes)
    return sequence.session.call("ReadDrafts", request)


def test_the_last_round_is_read_as_it_was_answered_as_often_as_wanted(scene):
    result = scene.sequence.propose(6, 2, 4)
    for _ in range(3):
        answer = read(scene.sequence)
        told = (list(answer.drafts), list(answer.logprobs), answer.stop_reason)
        assert told == (list(result.drafts), list(result.logprobs), result.stop_reason)
        assert answer.last_embedding == b""
    with scene.session.drive() as drive:
        request = pb.ReadDraftsRequest(sequence_id=scene.sequence.sequence_id, op=2)
        assert drive.ask(read_drafts=request).read_drafts == answer
    assert scene.sequence.state() == result.state


def test_only_the_last_operation_is_kept_and_only_if_it_drafted(scene):
    sequence = scene.sequence
    sequence.propose(6, 1)
    for op in (1, 3):
        said = refusal(read, sequence, op)
        assert said.kind == ("ABORTED", "OP_OUT_OF_ORDER")
        assert (said.details["op"], said.details["last_op"], said.details["ranges"]) == (str(op), "2", "0-7")
    for change in (lambda: sequence.catchup(7, 1), lambda: sequence.truncate(3)):
        change()
        assert refusal(read, sequence).kind == ("ABORTED", "OP_OUT_OF_ORDER")
    sequence.propose(3, 1, 0)
    answer = read(sequence, with_last_embedding=True)
    assert (list(answer.drafts), answer.stop_reason) == ([], pb.STOP_REASON_NOT_ASKED)
    assert answer.last_embedding == b""


@pytest.mark.parametrize("dtype", [tensor_pb2.D_TYPE_FLOAT32, tensor_pb2.D_TYPE_BFLOAT16])
def test_the_embedding_is_the_heads_own_of_the_last_draft(shared_server, dtype):
    session = shared_server.client().open(hidden_dtype=dtype)
    sequence = session.sequence(STORY)
    result = sequence.propose(0, 3, pairs=STORY.pairs(0, 3, dtype=dtype))
    table = shared_server.service.assembly.head.weights.embedding
    expected = table[result.drafts[-1]].to(DTYPES[dtype])
    given = torch.frombuffer(bytearray(read(sequence, with_last_embedding=True).last_embedding), dtype=DTYPES[dtype])
    assert torch.equal(given, expected)
    session.close()


def test_a_round_that_the_grammar_ended_at_once_has_no_embedding(scene):
    mask = pb.GrammarMask(words=[0] * 4)
    scene.sequence.propose(6, 1, 3, mask=mask)
    answer = read(scene.sequence, with_last_embedding=True)
    assert (list(answer.drafts), answer.stop_reason, answer.last_embedding) == ([], pb.STOP_REASON_GRAMMAR, b"")


def test_unknown_foreign_and_missing_are_refused(scene):
    said = refusal(read, scene.bystander, 1)
    request = pb.ReadDraftsRequest(sequence_id=scene.bystander.sequence_id, op=1)
    foreign = refusal(scene.session.call, "ReadDrafts", request)
    unknown = refusal(scene.session.call, "ReadDrafts", pb.ReadDraftsRequest(sequence_id=bytes(16), op=1))
    assert said.reason == "OP_OUT_OF_ORDER"
    assert foreign == unknown
    assert unknown.kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    request = pb.ReadDraftsRequest(sequence_id=scene.sequence.sequence_id)
    said = refusal(scene.session.call, "ReadDrafts", request)
    assert (said.kind, said.details["field"]) == (("INVALID_ARGUMENT", "INVALID_FIELD"), "op")
    with scene.session.drive() as drive:
        assert refused_entry(drive.ask(read_drafts=request).status) == said


def test_a_fork_has_no_round_of_its_own(scene):
    scene.sequence.propose(6, 1)
    request = pb.ForkSequenceRequest(
        sequence_id=scene.sequence.sequence_id, open_id=b"a fork's open_id", keep_keys_below=7
    )
    forked = scene.session.call("ForkSequence", request).sequence_id
    said = refusal(scene.session.call, "ReadDrafts", pb.ReadDraftsRequest(sequence_id=forked, op=2))
    assert said.reason == "OP_OUT_OF_ORDER"
