"""Lanes against calls without tickets, against each other and against their own ends."""

import gc
import threading
import weakref
from contextlib import suppress

import pytest

from cuda_session import gpu_service, open_gate
from drafter_service.server import lanes
from drafter_service.server.drive import Drive
from drafter_service.server.servicer import DrafterServicer
from lane_targets import STORY, K, Target, busy, desk, expected, twin_of
from serving import wait_until
from specdraft import EarlyItem, ProposeItem
from specdraft.errors import Reason, SpecdraftError


@pytest.fixture
def clients(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, max_sessions=64, max_lanes=4, ready_timeout_s=20.0) as made:
        yield made


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


def test_a_call_does_not_overtake_one_about_its_sequence_that_waits_for_a_round_of_another(clients):
    target = Target(clients)
    gate, slot = target.gate(), target.client.claim_slot()
    held, free = target.client.open_sequence(), target.client.open_sequence()
    target.verify(slot, 0, 2, gate)
    early = target.propose(held, slot)
    assert early._answered.wait(10)
    found = []
    both = [
        ProposeItem(free, 0, STORY.tokens[:2], STORY.rows[:2], K),
        ProposeItem(held, 2, STORY.tokens[2:3], STORY.rows[2:3], K),
    ]
    first = threading.Thread(target=lambda: found.extend(target.client.propose_batch(both)))
    first.start()
    wait_until(lambda: desk(clients)._order.num_parked, text="the call that waits")
    twin = twin_of(free, 1)
    second = threading.Thread(target=lambda: found.append(twin.propose(2, STORY.tokens[2:4], STORY.rows[2:4], K)))
    second.start()
    wait_until(lambda: desk(clients)._order.num_parked == 2, text="the one behind it")
    open_gate(gate)
    first.join()
    second.join()
    drafts = expected(clients, [(0, 2), (2, 1)])
    assert [one.drafts for one in found[:2]] == drafts
    assert found[2].drafts == expected(clients, [(0, 2), (2, 2)])[1]
    assert twin.state().last_op == 2


def test_a_round_with_more_sequences_than_the_lane_has_room_for_does_those_that_fit(clients, monkeypatch):
    monkeypatch.setattr("drafter_service.server.lanes.STATES_MAX", 2)
    target = Target(clients)
    sequences = [target.client.open_sequence() for _ in range(3)]
    for _ in range(2):
        for slot, sequence in enumerate(sequences):
            target.verify(slot, sequence.state().row_count, 2)
        early = target.lane.propose_early([EarlyItem(one, slot, K) for slot, one in enumerate(sequences)])
        first, second, third = early.outputs(10)
        assert first.drafts == second.drafts
        assert third.reason is Reason.IN_FLIGHT_EXHAUSTED
    assert [one.state().row_count for one in sequences] == [4, 4, 0]


def test_a_lane_that_is_not_ready_in_time_takes_no_place(clients, monkeypatch):
    target = Target(clients)
    calls = clients.server.service.assembly._lanes
    session = clients.server.service._servicer._parts.sessions.listed()[0]
    with busy(clients):
        for _ in range(4):
            with pytest.raises(SpecdraftError) as caught:
                calls.open(session, 0.01)
            assert caught.value.reason is Reason.TIMEOUT
    assert [target.beside() for _ in range(3)]


def test_first_lanes_of_a_session_that_open_at_once_are_lanes_of_one_session(clients, monkeypatch):
    client = clients.client(slot_count=1)
    calls = clients.server.service.assembly._lanes
    session = clients.server.service._servicer._parts.sessions.listed()[0]
    made, make = threading.Barrier(2, timeout=0.3), lanes.SessionLanes.__init__

    def slowly(*arguments):
        with suppress(threading.BrokenBarrierError):
            made.wait()
        make(*arguments)

    monkeypatch.setattr(lanes.SessionLanes, "__init__", slowly)
    numbers = []
    threads = [threading.Thread(target=lambda: numbers.append(calls.open(session, 10).lane)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(numbers) == [1, 2]
    client.close()
    clients.settle()
    assert clients.driver.num_registered == 0


@pytest.mark.parametrize("missed", ["_look", "_on_news"])
def test_a_sequence_changes_its_lane_as_soon_as_the_device_is_done_with_its_round(clients, monkeypatch, missed):
    first = Target(clients)
    second = first.beside()
    watchdog = desk(clients).watchdog
    with first.client.open_sequence() as sequence, monkeypatch.context() as patched:
        patched.setattr(watchdog, missed, lambda *_: None)
        found = []
        for number, target in enumerate([first, first, first, second, second, second, first, second]):
            target.verify(0, number, 1)
            (outputs,) = target.propose(sequence, 0).outputs(10)
            found.append(getattr(outputs, "drafts", outputs))
            here = [context.lane for context in desk(clients)._contexts.values()]
            wait_until(
                lambda here=here: all(lane.passed == lane.state.last for lane in here), text="the collected copy"
            )
        assert found == expected(clients, [(number, 1) for number in range(8)])
        patched.undo()
        for lane in list(desk(clients)._contexts):
            watchdog._on_news(lane, ())


@pytest.mark.parametrize(("kept", "reserve"), [(5, False), (8, False), (5, True), (0, True), (0, False)])
def test_rounds_go_on_after_a_rewind_into_pages_that_a_fork_shares_and_leave_them_alone(clients, kept, reserve):
    target = Target(clients)
    writes = [(kept, 2), (kept + 2, 4)]
    drafts = expected(clients, [(key, min(4, kept - key)) for key in range(0, kept, 4)] + writes)[-2:]
    num_pages = clients.server.pages()
    with target.client.open_sequence(24, reserve=reserve) as sequence:
        sequence.catchup(0, STORY.tokens[:14], STORY.rows[:14])
        with sequence.fork(14) as fork:
            before = clients.server.digest(fork.sequence_id)
            sequence.truncate(kept)
            found = []
            for first_key, count in writes:
                target.verify(0, first_key, count)
                (outputs,) = target.propose(sequence, 0).outputs(10)
                found.append(getattr(outputs, "drafts", outputs))
            assert found == drafts
            assert sequence.state().row_count == kept + 6
            assert clients.server.digest(fork.sequence_id) == before
    assert clients.server.pages() == num_pages


def test_a_call_of_another_thread_and_a_round_of_its_sequence_take_turns(clients):
    target = Target(clients)
    slot, first, second = target.client.claim_slot(), [], []
    with target.client.open_sequence() as sequence:

        def propose():
            first.append(sequence.propose(0, STORY.tokens[:2], STORY.rows[:2], K))

        with busy(clients):
            threads = [threading.Thread(target=propose)]
            threads[0].start()
            wait_until(sequence.lock.locked, text="the call")
            target.verify(slot, 2, 3)
            threads.append(threading.Thread(target=lambda: second.append(target.propose(sequence, slot))))
            threads[1].start()
        for thread in threads:
            thread.join()
        found = [*first, *second[0].outputs(10)]
        assert [one.drafts for one in found] == expected(clients, [(0, 2), (2, 3)])


def test_a_lane_keeps_nothing_of_rounds_that_are_answered_and_they_can_still_be_read(clients):
    target = Target(clients)
    with target.client.open_sequence() as sequence, target.client.open_sequence() as other:
        target.verify(1, 0, 2)
        early = target.propose(other, 1)
        for key in range(12):
            target.verify(0, key, 1)
            assert target.propose(sequence, 0).outputs(10)[0].row_count == key + 1
        assert not target.lane._book.accepted | target.lane._book.open
        assert early.outputs(10)[0].drafts == expected(clients, [(0, 2)])[0]


def test_released_lanes_that_were_replaced_leave_no_thread_and_after_the_session_no_page(clients):
    target = Target(clients)
    session = clients.server.service._servicer._parts.sessions.listed()[0]

    def watchers():
        return sum(thread.name == "specdraft-lane" for thread in threading.enumerate())

    for _ in range(5):
        session.lanes.release()
        wait_until(lambda: target.lane.is_over, text="the end of the lane")
        target.lane = target.client.open_lane(target.stream)
    wait_until(lambda: watchers() == 1, text="the ends of their threads")
    session.lanes.release()
    wait_until(lambda: target.lane.is_over, text="the end of the lane")
    with target.client.open_sequence() as sequence, pytest.raises(SpecdraftError):
        target.propose(sequence, 0)
    wait_until(lambda: watchers() == 0, text="the end of the last one's")
    target.client.close()
    assert target.driver.num_registered == 0


def test_the_arena_waits_for_lanes_that_the_end_of_a_stream_is_giving_up_while_the_session_ends(clients, monkeypatch):
    target = Target(clients)
    sequence = target.client.open_sequence()
    target.verify(0, 0, 2, target.gate())
    assert target.propose(sequence, 0)._answered.wait(10)
    session = clients.server.service._servicer._parts.sessions.listed()[0]
    watchdog, begins, goes_on = desk(clients).watchdog, threading.Event(), threading.Event()
    release = watchdog.release

    def slowly(lane):
        begins.set()
        assert goes_on.wait(10)
        release(lane)

    monkeypatch.setattr(watchdog, "release", slowly)
    end_of_stream = threading.Thread(target=session.lanes.release)
    end_of_stream.start()
    assert begins.wait(10)
    session.lanes.close()
    assert not session.lanes._closed(), "a round is under way that reads and writes the arena"
    assert len(session.arena.memory)
    goes_on.set()
    end_of_stream.join()
    wait_until(session.lanes._closed, text="the end of the lane")


@pytest.fixture
def late_ends(tiny_checkpoint, monkeypatch):
    """A service that notices the ends of `late` streams once it may, and tells when a stream is over."""
    late, notices, ended = set(), threading.Event(), threading.Event()
    respond, serve = Drive.respond, DrafterServicer.Drive

    def respond_late(drive):
        try:
            respond(drive)
        finally:
            if drive in late:
                assert notices.wait(10)

    def serve_stream(*arguments):
        try:
            serve(*arguments)
        finally:
            ended.set()

    monkeypatch.setattr(Drive, "respond", respond_late)
    monkeypatch.setattr(DrafterServicer, "Drive", serve_stream)
    with gpu_service(tiny_checkpoint, max_lanes=4, ready_timeout_s=20.0) as clients:
        yield clients, late, notices, ended
        notices.set()


def session_of(clients):
    (session,) = clients.server.service._servicer._parts.sessions.listed()
    return session


def attach_again(target, session, late):
    """The client has another stream; the end of the one before it is noticed late."""
    before = session.drive
    late.add(before)
    target.lane._drive._stream.cancel()
    wait_until(lambda: session.drive not in {before, None}, text="the next stream")


def test_the_end_of_a_stream_that_is_noticed_late_leaves_the_lanes_of_its_successor_alone(late_ends):
    clients, late, notices, ended = late_ends
    target = Target(clients)
    session = session_of(clients)
    attach_again(target, session, late)
    target.lane = target.client.open_lane(target.stream)
    (context,) = session.lanes._contexts.values()
    gate = target.gate()
    with target.client.open_sequence() as sequence:
        target.verify(0, 0, 2, gate)
        early = target.propose(sequence, 0)
        assert early._answered.wait(10)
        assert not ended.is_set()
        notices.set()
        assert ended.wait(10)
        assert not context.lane.state.is_released
        open_gate(gate)
        assert early.outputs(10)[0].drafts == expected(clients, [(0, 2)])[0]


def test_the_lanes_of_a_stream_are_over_when_another_takes_over_however_late_its_end_is_noticed(late_ends):
    clients, late, _, ended = late_ends
    target = Target(clients)
    session = session_of(clients)
    (context,) = session.lanes._contexts.values()
    attach_again(target, session, late)
    wait_until(lambda: context.lane.is_over, text="the end of the lane")
    assert not ended.is_set()
    with pytest.raises(SpecdraftError) as caught:
        session.lanes.find(context.lane.number)
    assert caught.value.reason is Reason.LANE_RELEASED


def test_a_lane_that_is_opened_between_two_streams_is_the_next_ones_and_is_over_with_it(clients):
    transport = clients.client(slot_count=1)._session._transport
    session, calls = session_of(clients), clients.server.service.assembly._lanes
    wait_until(lambda: session.drive is not None, text="the first stream")
    for _ in range(2):
        transport.stop_drive()
        wait_until(lambda: session.drive is None, text="its end")
        number = calls.open(session, 10).lane
        context = session.lanes.find(number)
        transport.start_drive(5.0)
        wait_until(lambda: session.drive is not None, text="the next stream")
        assert session.lanes.find(number) is context
        assert not context.lane.state.is_released
    assert [one.lane.number for one in session.lanes._contexts.values()] == [number]
    transport.stop_drive()
    wait_until(lambda: context.lane.is_over, text="the end of the lane")


def test_outputs_that_a_later_round_overwrote_are_told_from_those_of_a_released_lane(clients):
    target = Target(clients)
    other = target.beside()
    with target.client.open_sequence() as first, target.client.open_sequence() as second:
        target.verify(0, 0, 2)
        early = target.propose(first, 0)
        early.outputs(10)
        other.verify(0, 0, 4)
        later = other.propose(second, 0)  # also its sequence's first operation
        assert later.outputs(10)[0].drafts == expected(clients, [(0, 4)])[0]
        (error,) = early.outputs(10)
        assert error.reason is Reason.OP_OUT_OF_ORDER
        assert "slot 0 was given to a later round" in str(error)
        assert not target.lane.is_released
        assert not first.ledger.unsure
        assert first.read_drafts().drafts == expected(clients, [(0, 2)])[0]
        other.verify(0, 4, 1)
        other.propose(second, 0).outputs(10)
        assert later.outputs(10)[0].reason is Reason.OP_OUT_OF_ORDER
        target.lane.release()
        assert early.outputs(10)[0].reason is Reason.LANE_RELEASED


def test_a_later_round_that_was_refused_leaves_the_outputs_of_the_one_before_it(clients):
    target = Target(clients)
    with target.client.open_sequence() as first, target.client.open_sequence() as second:
        target.verify(0, 0, 2)
        early = target.propose(first, 0)
        early.outputs(10)
        for _ in range(2):
            second.ledger.last_op, second.ledger.unsure = 7, False
            (refused,) = target.propose(second, 0).outputs(10)
            assert refused.reason is Reason.OP_OUT_OF_ORDER
        assert early.outputs(10)[0].drafts == expected(clients, [(0, 2)])[0]


def test_lanes_that_were_closed_are_forgotten(clients):
    target = Target(clients)
    drive, closed = target.lane._drive, []
    for _ in range(8):
        lane = target.client.open_lane(target.stream)
        closed.append(weakref.ref(lane))
        lane.close()
        lane.close()
        del lane
    assert list(drive._break_listeners) == [target.lane.release]
    target.client.open_lane(target.stream).close()  # the session looks which ones are over
    gc.collect()
    assert [one() for one in closed] == [None] * 8
    drive._stream.cancel()
    wait_until(lambda: target.lane.is_released, text="the release of the one that is open")
    assert not drive._break_listeners
