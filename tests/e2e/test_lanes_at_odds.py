"""Lanes against calls without tickets, against each other and against their own ends."""

import threading
from contextlib import contextmanager

import pytest

from cuda_session import gpu_service
from lane_targets import STORY, K, Target, expected, open_gate
from serving import wait_until
from specdraft.errors import Reason, SpecdraftError


@pytest.fixture
def clients(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, max_sessions=64, max_lanes=4, ready_timeout_s=20.0) as made:
        yield made


@contextmanager
def busy(clients):
    """The engine is at work on somebody else's call, and takes up nothing else meanwhile."""
    server = clients.server
    with clients.client() as neighbour, neighbour.open_sequence() as sequence:
        before = len(server.runner.batches)
        call = threading.Thread(target=sequence.propose, args=(0, STORY.tokens[:1], STORY.rows[:1], 1))
        with server.runner.held():
            call.start()
            server.runner.wait_for_batch(before)
            yield
        call.join()


def desk(clients):
    return clients.server.service.assembly._lanes.desk


def test_a_round_that_never_ran_is_not_entered_when_its_lane_is_gone_before_the_engine_looks(clients):
    target = Target(clients)
    sequence = target.client.open_sequence()
    slot = target.client.claim_slot()
    for key in (0, 2):
        target.verify(slot, key, 2)
        assert target.propose(sequence, slot).outputs(10)[0].row_count == key + 2
    sequence.truncate(1)
    gate = target.gate()
    with busy(clients):
        registered = clients.driver.num_registered
        target.verify(slot, 1, 1, gate)
        target.propose(sequence, slot)
        session = clients.server.service._servicer._parts.sessions.listed()[0]
        wait_until(lambda: session.lanes._contexts[target.lane._number].lane.state.last == 4)
        target.lane._drive._stream.cancel()
        wait_until(lambda: clients.driver.num_registered == registered - 2, text="the end of the lane")
    open_gate(gate)
    state = sequence.state()
    assert (state.last_op, state.row_count, state.last_pair_key) == (3, 1, 0)


def test_a_lane_and_a_call_that_use_one_number_do_not_both_write(clients):
    target = Target(clients)
    gate = target.gate()
    with target.client.open_sequence() as sequence:
        slot = target.client.claim_slot()
        found = []

        def call():
            try:
                found.append(sequence.propose(0, STORY.tokens[:1], STORY.rows[:1], 1))
            except SpecdraftError as error:
                found.append(error)

        with busy(clients):
            other = threading.Thread(target=call)
            other.start()
            wait_until(lambda: clients.server.service.assembly.engine._inbox.qsize(), text="the call")
            target.verify(slot, 0, 4, gate)
            early = target.propose(sequence, slot)
        assert early._answered.wait(10)
        other.join()
        free = set(clients.server.allocator.free_pages())
        for context in desk(clients)._contexts.values():
            for record in context.records:
                for planned in record.planned:
                    assert not free & set(planned.pages), "pages of a round under way are free"
        open_gate(gate)
        print(found, early.outputs(10))
        print(sequence.state())
