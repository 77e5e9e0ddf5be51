"""Rounds with tickets behind calls about their sequences, and calls behind rounds."""

import threading
from contextlib import suppress

import pytest

from cuda_session import gpu_service, open_gate
from drafter_service.engine.lane_order import LaneOrder
from drafter_service.engine.operations import Task
from lane_targets import STORY, Target, busy, desk, expected, twin_of
from serving import wait_until
from specdraft.errors import Reason, SpecdraftError


@pytest.fixture
def clients(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, max_sessions=64, max_lanes=4, ready_timeout_s=20.0) as made:
        yield made


CALLS = {
    "propose": (lambda sequence: sequence.propose(0, STORY.tokens[:1], STORY.rows[:1], 1), 1),
    "catchup": (lambda sequence: sequence.catchup(0, STORY.tokens[:1], STORY.rows[:1]), 1),
    "truncate": (lambda sequence: sequence.truncate(0), 0),
    "take_kv": (lambda sequence: sequence.take_kv(), 0),
    "fork": (lambda sequence: sequence.fork(4), 4),
    "close": (lambda sequence: sequence.close(), None),
}
"""Calls about a sequence of nine rows, and the key that a round may begin at behind them; None = at none."""


@pytest.mark.parametrize(("call", "first_key"), CALLS.values(), ids=CALLS)
def test_a_round_that_is_sent_behind_a_call_about_its_sequence_is_done_behind_it(clients, monkeypatch, call, first_key):
    target = Target(clients)
    sequence, other = target.client.open_sequence(), target.client.open_sequence()
    sequence.catchup(0, STORY.tokens[:9], STORY.rows[:9])
    engine = clients.server.service.assembly.engine
    accepted, accept = [], engine.accept
    monkeypatch.setattr(engine, "accept", lambda call: accept(call) or accepted.append(call.operations[0]))
    mine = {sequence.sequence_id, other.sequence_id}
    with busy(clients):
        calls = []
        # One call of each session in turn: behind so many the engine would meet a round that followed nobody first.
        desk(clients)._later(lambda: None)
        for action in (*(twin_of(other, 0).state for _ in range(6)), lambda: call(sequence)):
            calls.append(threading.Thread(target=action))
            calls[-1].start()
            wait_until(lambda: sum(one.sequence_id in mine for one in accepted) == len(calls), text="the call")
        target.verify(0, first_key or 0, 4)
        early = target.propose(twin_of(sequence, 1 if first_key == 4 else 2), 0)  # a fork has no number
        wait_until(lambda: isinstance(accepted[-1], Task), text="the round")
    (outputs,) = early.outputs(10)
    for one in calls:
        one.join()
    if first_key is None:
        assert outputs.reason is Reason.SEQUENCE_UNKNOWN
        return
    before = [(0, first_key)] if first_key else []
    assert outputs.drafts == expected(clients, [*before, (first_key, 4)])[-1]
    assert twin_of(sequence, 0).state().row_count == first_key + 4


@pytest.mark.parametrize("call", [call for call, _ in CALLS.values()], ids=CALLS)
def test_a_call_that_meets_a_round_in_the_engine_all_the_same_does_not_touch_its_rows_and_pages(
    clients, monkeypatch, call
):
    target = Target(clients)
    gate, sequence = target.gate(), target.client.open_sequence()
    sequence.catchup(0, STORY.tokens[:9], STORY.rows[:9])
    target.verify(0, 4, 4, gate)
    early = target.propose(twin_of(sequence, 1), 0)
    assert early._answered.wait(10)
    with monkeypatch.context() as patch:
        patch.setattr(LaneOrder, "_must_wait", lambda *_: False)
        with suppress(SpecdraftError):  # a close that is refused is the client's to repeat
            call(twin_of(sequence, 1))
    assert clients.server.metric("errors_total", reason="IN_FLIGHT_EXHAUSTED") == 1
    (record,) = [record for context in desk(clients)._contexts.values() for record in context.records]
    (planned,) = record.planned
    assert list(planned.sequence.pages) == list(planned.pages)
    assert not set(planned.pages) & set(clients.server.allocator.free_pages())
    assert clients.server.allocator.num_shared == 0
    open_gate(gate)
    assert early.outputs(10)[0].drafts == expected(clients, [(0, 4), (4, 4)])[1]
    sequence.ledger.unsure = True
    assert sequence.state().row_count == 8


def test_a_round_is_done_behind_a_call_that_waits_for_the_round_before_it(clients):
    target = Target(clients)
    gate, sequence = target.gate(), target.client.open_sequence()
    target.verify(0, 0, 2, gate)
    early = target.propose(sequence, 0)
    assert early._answered.wait(10)
    call = threading.Thread(target=twin_of(sequence, 1).catchup, args=(2, STORY.tokens[2:5], STORY.rows[2:5]))
    call.start()
    wait_until(lambda: desk(clients)._order.num_parked, text="the call that waits")
    target.verify(1, 5, 4)
    behind = target.propose(twin_of(sequence, 2), 1)
    wait_until(lambda: desk(clients)._order.num_parked == 2, text="the round behind it")
    open_gate(gate)
    call.join()
    drafts = expected(clients, [(0, 2), (2, 3), (5, 4)])
    assert (early.outputs(10)[0].drafts, behind.outputs(10)[0].drafts) == (drafts[0], drafts[2])
    assert desk(clients)._order.num_parked == 0


def test_a_round_whose_lane_is_released_while_it_waits_for_a_call_is_told_so_and_leaves_nothing(clients):
    target = Target(clients)
    gate, sequence = target.gate(), target.client.open_sequence()
    num_pages = clients.server.pages()
    with busy(clients):
        call = threading.Thread(target=sequence.catchup, args=(0, STORY.tokens[:3], STORY.rows[:3]))
        call.start()
        wait_until(lambda: len(clients.server.service.assembly.engine._in_flight) == 2, text="the call")
        target.verify(0, 3, 2, gate)
        early = target.propose(twin_of(sequence, 1), 0)
        (context,) = desk(clients)._contexts.values()
        wait_until(lambda: context.lane.state.last == 2, text="the round")
        desk(clients).watchdog.release(context.lane)
    call.join()
    open_gate(gate)
    (outputs,) = early.outputs(10)
    assert outputs.reason is Reason.LANE_RELEASED
    wait_until(lambda: not desk(clients)._contexts, text="the end of the lane")
    assert twin_of(sequence, 0).state().row_count == 3
    twin_of(sequence, 1).close()
    assert clients.server.pages() == num_pages
