"""Answers on a stream belong to the requests that they answer, also when ids and operations come again."""

import pytest

from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from wire import Story, refused_entry


@pytest.fixture
def server(start):
    return start()


def propose(sequence, first_key, count, draft_count, op=None):
    return pb.ProposeRequest(entries=[sequence.propose_entry(first_key, count, draft_count, op=op)])


def test_an_id_used_again_after_its_time_was_over_gets_its_own_answer(server):
    session = server.client().open()
    first, second = session.sequence(Story(1)), session.sequence(Story(2))
    stream = session.drive()
    with server.runner.held():
        stream.send(correlation_id=7, timeout_ms=50, propose=propose(first, 0, 1, 2))
        assert refused_entry(stream.answer().status).kind == ("DEADLINE_EXCEEDED", "TIMEOUT")
        stream.send(correlation_id=7, propose=propose(second, 0, 5, 3))
        wait_until(lambda: len(server.service.assembly.engine._in_flight) == 2)
    answer = stream.answer()
    assert answer.correlation_id == 7
    (result,) = answer.propose.results
    assert (result.state.row_count, len(result.drafts)) == (5, 3)


def test_an_id_used_again_for_another_kind_of_request_ends_nothing(server):
    session = server.client().open()
    sequence = session.sequence(Story(1))
    stream = session.drive()
    with server.runner.held():
        stream.send(correlation_id=7, timeout_ms=50, propose=propose(sequence, 0, 1, 2))
        assert refused_entry(stream.answer().status).kind == ("DEADLINE_EXCEEDED", "TIMEOUT")
        stream.send(correlation_id=7, get_sequence=pb.GetSequenceRequest(sequence_id=sequence.sequence_id))
    assert stream.answer().get_sequence.state.row_count == 1
    assert stream.ask(get_sequence=pb.GetSequenceRequest(sequence_id=sequence.sequence_id)).status.code == 0


def test_retries_of_what_is_in_flight_join_it_however_much_that_is(server):
    """Both rounds that may be in flight, sent again on the stream that takes over."""
    session = server.client().open()
    sequence = session.sequence(Story(1))
    requests = [propose(sequence, 0, 2, 2, op=1), propose(sequence, 2, 2, 2, op=2)]
    before = session.drive()
    with server.runner.held():
        num_batches = len(server.runner.batches)
        for request in requests:
            before.send(propose=request)
        server.runner.wait_for_batch(num_batches)
        in_flight = server.service.assembly.engine._in_flight
        wait_until(lambda: in_flight.num_operations == 2, text="the second round")
        after = session.drive()
        ids = [after.send(propose=request) for request in requests]
        assert before.ending().kind == ("ABORTED", "SESSION_FENCED")
        wait_until(lambda: [len(one) for tags in in_flight._flying.values() for one in tags.values()] == [2, 2])
    results = [after.answer_to(correlation_id).propose.results[0] for correlation_id in ids]
    assert [result.status.code for result in results] == [0, 0]
    assert [result.state.last_op for result in results] == [1, 2]
    assert len(server.runner.batches) - num_batches == 2
