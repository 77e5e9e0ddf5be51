"""Calls whose callers have gone while they were done: what they bring reaches nobody, and no slot of an arena."""

import time

import grpc
import pytest

from drafter_service.server.drive import GONE_S
from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import Story


@pytest.mark.parametrize("timeout_s", [30.0, 0.3], ids=["cancelled", "late"])
def test_what_is_done_after_its_caller_has_gone_is_neither_counted_nor_written_as_an_answer(start, timeout_s):
    server = start()
    session = server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_HOST, slot_count=1)
    sequence = session.sequence(Story(1))
    with session.arena() as arena:
        with server.runner.held():
            num_batches = len(server.runner.batches)
            request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2, output_slot=0)])
            call = session.begin("Propose", request, timeout=timeout_s)
            server.runner.wait_for_batch(num_batches)
            if timeout_s > 1:
                call.cancel()
            assert call.code() in {grpc.StatusCode.CANCELLED, grpc.StatusCode.DEADLINE_EXCEEDED}
            session.keep_alive()  # behind it on the same connection: the service has heard of it by now
        codes = ("OK", "CANCELLED", "DEADLINE_EXCEEDED")
        by_code = wait_until(
            lambda: [code for code in codes if server.metric("rpc_duration_seconds_count", method="Propose", code=code)]
        )
        assert by_code != ["OK"]
        assert arena.outputs(0)["op"] == 0
        assert sequence.propose(0, 2, op=1, output_slot=0).state.last_op == 1
        assert arena.outputs(0)["op"] == 1


@pytest.mark.parametrize("num_readers", [1, 2])
def test_what_is_done_after_its_stream_was_cancelled_is_not_written_into_its_slot(start, num_readers):
    server = start()
    session = server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_HOST, slot_count=1)
    sequence = session.sequence(Story(1))
    with session.arena() as arena:
        drive = session.drive().attached()
        if num_readers == 1:  # after requests that came one at a time
            for _ in range(3):
                drive.ask(get_sequence=pb.GetSequenceRequest(sequence_id=sequence.sequence_id))
        with server.runner.held():
            num_batches = len(server.runner.batches)
            drive.send(propose=pb.ProposeRequest(entries=[sequence.propose_entry(0, 2, output_slot=0)]))
            server.runner.wait_for_batch(num_batches)
            if num_readers == 2:  # the other one takes the end of the requests for a good one
                drive.finish()
                time.sleep(4 * GONE_S)
            drive.cancel()
            session.keep_alive()  # behind it on the same connection: the service has heard of it by now
        wait_until(lambda: not server.service._servicer._drives, timeout=5)
        assert arena.outputs(0)["op"] == 0
        assert sequence.propose(0, 2, op=1, output_slot=0).state.last_op == 1
        assert arena.outputs(0)["op"] == 1
