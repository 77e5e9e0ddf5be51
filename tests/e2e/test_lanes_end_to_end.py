"""Early rounds through a real service on a simulated GPU: drafts, order, refusals, deaths, and what is left."""

import ctypes
import threading
import time
from contextlib import contextmanager

import pytest

from cuda_session import PIDS, gpu_service, open_gate
from drafter_service.engine import lane_rounds
from drafter_service.engine.lane_rounds import LaneDesk
from drafter_service.memory.lanes import OPEN_WAITS_MAX
from lane_targets import STORY, K, Target, expected
from serving import wait_until
from specdraft.errors import Reason, SpecdraftError
from specdraft.lanes import EarlyItem, Lane
from specdraft.memory import ClientGpu
from specdraft.memory.cuda import DEFAULT_STREAM
from specdraft.memory.lane_protocol import RELEASED
from specdraft.memory.simulated import SimulatedDriver
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2, tensor_pb2


@pytest.fixture
def clients(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, max_sessions=64, max_lanes=4, ready_timeout_s=20.0) as made:
        yield made


def test_early_rounds_draft_what_host_synchronised_ones_do(clients):
    target = Target(clients)
    writes = [(0, 4), (4, 1), (4, 3), (7, 2), (9, 4)]
    with target.client.open_sequence() as sequence:
        slot = target.client.claim_slot()
        found = []
        for first_key, count in writes:
            target.verify(slot, first_key, count)
            (outputs,) = target.propose(sequence, slot).outputs(10)
            assert not isinstance(outputs, SpecdraftError), outputs
            found.append(outputs.drafts)
        assert found == expected(clients, writes)
        state = sequence.state()
        assert (state.row_count, state.last_pair_key) == (13, 12)
        assert sequence.read_drafts().drafts == found[-1]
        sequence.propose(13, STORY.tokens[13:14], STORY.rows[13:14], num_drafts=1)
        target.verify(slot, 14, 1)
        (outputs,) = target.propose(sequence, slot).outputs(10)
        assert outputs.row_count == 15
    assert len(target.seen) == len(writes) + 1


def test_what_the_device_is_done_with_counts_before_anybody_has_looked(clients, monkeypatch):
    target = Target(clients)
    watchdog = clients.server.service.assembly._lanes.desk.watchdog
    with target.client.open_sequence() as sequence:
        slot = target.client.claim_slot()
        with monkeypatch.context() as patched:
            patched.setattr(watchdog, "_look", lambda lane: None)
            for first_key in range(4):
                gate = target.gate()
                target.verify(slot, first_key, 1, gate)
                early = target.propose(sequence, slot)
                assert early._answered.wait(10)  # the round is on a stream that waits: nobody has to look for it to run
                open_gate(gate)
                (outputs,) = early.outputs(10)
                assert not isinstance(outputs, SpecdraftError), outputs
        watchdog.wake()
        assert sequence.state().row_count == 4


def test_a_round_is_answered_and_waited_for_while_the_verify_still_runs(clients):
    target = Target(clients)
    gate = target.gate()
    with target.client.open_sequence() as sequence:
        first, second = target.client.claim_slot(), target.client.claim_slot()
        target.verify(first, 0, 3, gate)
        one = target.propose(sequence, first)
        target.verify(second, 3, 2)
        two = target.propose(sequence, second)
        assert one._answered.wait(5)
        assert two._answered.wait(5)
        assert not one.is_passed()
        third = target.propose(sequence, first)
        assert third._answered.wait(5)
        open_gate(gate)
        (refused,) = third.outputs(10)
        assert refused.reason is Reason.IN_FLIGHT_EXHAUSTED, "the books lag at most two rounds behind"
        drafts = [one.outputs(10)[0].drafts if n else None for n, one in enumerate([one, two])]
        assert drafts[1] == expected(clients, [(0, 3), (3, 2)])[1]
        assert sequence.state().row_count == 5, "GetSequence waits for what is under way"


def test_several_sequences_share_a_round_and_one_bad_slot_fails_alone(clients):
    target = Target(clients)
    sequences = [target.client.open_sequence() for _ in range(3)]
    slots = [target.client.claim_slot() for _ in range(3)]
    for slot in slots:
        target.verify(slot, 0, 2)
    target.verify(slots[1], 5, 1)  # a gap
    early = target.lane.propose_early([EarlyItem(s, slot, K) for s, slot in zip(sequences, slots, strict=True)])
    first, second, third = early.outputs(10)
    assert first.drafts == third.drafts == expected(clients, [(0, 2)])[0]
    assert second.reason is Reason.MISSING_ROWS
    assert sequences[1].state().row_count == 0
    assert sequences[1].ledger.last_op == 1, "what the device refused has used its number"


def test_a_round_that_is_refused_in_band_does_not_hold_up_its_lane(clients):
    target = Target(clients)
    with target.client.open_sequence() as sequence:
        slot = target.client.claim_slot()
        target.verify(slot, 0, 2)
        sequence.ledger.last_op = 7
        (error,) = target.propose(sequence, slot).outputs(10)
        assert error.reason is Reason.OP_OUT_OF_ORDER
        target.verify(slot, 0, 2)
        (outputs,) = target.propose(sequence, slot).outputs(10)
        assert outputs.drafts == expected(clients, [(0, 2)])[0]
        assert not target.lane.is_released


def raw_round(lane, entry, ticket):
    """A ticketed request straight onto the stream."""
    answers = []
    request = pb.ProposeRequest(entries=[entry], lane_ticket=pb.LaneTicket(lane=lane._number, ticket=ticket))
    from specdraft.exchanges import Exchange

    lane._drive.post(Exchange("Propose", request, 5.0), lambda answer, error: answers.append(error))
    wait_until(lambda: answers, text="an answer")
    return answers[0]


@contextmanager
def no_memory(monkeypatch):
    """Rounds that were not made before cannot be, as without memory on the device."""

    def fail(*_):
        raise RuntimeError("CUDA out of memory")

    with monkeypatch.context() as patched:
        patched.setattr(lane_rounds, "capture_slot_round", fail)
        yield


def test_a_round_that_cannot_be_made_is_refused_in_its_turn_and_leaves_nothing(clients, monkeypatch):
    monkeypatch.setattr(LaneDesk, "_first_shapes", lambda *_: iter(()))
    target = Target(clients)
    desk = clients.server.service.assembly._lanes.desk
    (context,) = desk._contexts.values()
    room, pages = len(context.free_indices), clients.server.pages()
    slot = target.client.claim_slot()
    with target.client.open_sequence() as sequence:
        target.verify(slot, 0, 2)
        with no_memory(monkeypatch):
            (refused,) = target.propose(sequence, slot).outputs(10)
        assert refused.reason is Reason.INTERNAL
        assert sequence.state().row_count == 0
        assert (len(context.free_indices), desk._planned, clients.server.pages()) == (room, {}, pages)
        target.verify(slot, 0, 2)
        (outputs,) = target.propose(sequence, slot).outputs(10)
        assert outputs.drafts == expected(clients, [(0, 2)])[0], "the operation's number was not used"
    assert not clients.server.service.assembly.loss.is_lost


def test_a_lane_whose_rounds_cannot_be_made_is_refused_at_once_and_takes_no_room(clients, monkeypatch):
    gpu = clients.gpu_of_client()
    client = clients.client(gpu, slot_count=4)
    stream = gpu.driver.create_stream()
    with no_memory(monkeypatch):
        for _ in range(6):  # more than the session may have
            began = time.monotonic()
            with pytest.raises(SpecdraftError) as refused:
                client.open_lane(stream)
            assert refused.value.reason is Reason.INTERNAL
            assert time.monotonic() - began < 5
    desk = clients.server.service.assembly._lanes.desk
    wait_until(lambda: not desk._contexts, text="the end of the lanes")
    client.open_lane(stream).close()


def test_tickets_out_of_order_are_refused_and_released_lanes_take_none(clients):
    target = Target(clients)
    with target.client.open_sequence() as sequence:
        entry = target.lane._entry(EarlyItem(sequence, 0, 1))
        error = raw_round(target.lane, entry, 4)
        assert error.reason is Reason.TICKET_ORDER
        assert error.details == {"ticket": "4", "expected": "2"}, "the first one proved the lane"
        wait_until(lambda: target.lane._page.load(target.lane._done_offset) == 4, text="done of the refused ticket")
        assert raw_round(target.lane, entry, 3).reason is Reason.TICKET_ORDER
        target.clients.server.service._servicer._parts.sessions.listed()[0].lanes.release()
        assert raw_round(target.lane, entry, 5).reason is Reason.LANE_RELEASED


class Hasty(SimulatedDriver):
    """A device on which a store overtakes the copies before it, as it could between GPUs that are not coherent."""

    def __init__(self, *arguments, **options):
        super().__init__(*arguments, **options)
        self.may_copy = threading.Event()

    def copy(self, stream, target, source, size):
        if stream != DEFAULT_STREAM:
            self.launch(stream, lambda: self.may_copy.wait(20))
        super().copy(stream, target, source, size)

    def write_value(self, stream, pointer, value):
        ctypes.c_int64.from_address(pointer).value = value


def test_a_lane_that_is_not_in_order_is_refused_and_the_session_goes_on_without(clients, monkeypatch):
    driver, invert = Hasty(clients.directory, pid=next(PIDS)), lane_rounds._invert

    def invert_too_early(nonce):
        invert(nonce)
        driver.may_copy.set()

    monkeypatch.setattr(lane_rounds, "_invert", invert_too_early)
    driver.make_current(0)
    client = clients.client(ClientGpu(driver, pid=driver.pid), slot_count=4)
    with pytest.raises(SpecdraftError, match="in order; calls without tickets work") as caught:
        client.open_lane(driver.create_stream())
    assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
    assert caught.value.details["kind"] == "lane"
    with client.open_sequence() as sequence:
        found = sequence.propose(0, STORY.tokens[:2], STORY.rows[:2], num_drafts=K)
        assert found.drafts == expected(clients, [(0, 2)])[0]
    client.close()
    clients.forget(client)
    driver.close()


def test_tickets_come_over_drive_only_and_lanes_need_cuda_memory(clients):
    raw = clients.server.client()
    inline = raw.open(memory_kind=tensor_pb2.MEMORY_KIND_INLINE)
    from wire import refusal

    assert refusal(inline.call, "OpenLane", session_pb2.OpenLaneRequest()).reason == "TRANSPORT_UNAVAILABLE"
    request = pb.ProposeRequest(lane_ticket=pb.LaneTicket(lane=1, ticket=1))
    assert refusal(inline.call, "Propose", request).details["field"] == "lane_ticket"


def test_a_session_has_only_so_many_lanes_and_a_released_one_makes_room(clients):
    target = Target(clients)
    lanes = [target.lane, *(target.client.open_lane(target.driver.create_stream()) for _ in range(3))]
    with pytest.raises(SpecdraftError) as caught:
        target.client.open_lane(target.stream)
    assert caught.value.reason is Reason.IN_FLIGHT_EXHAUSTED
    assert len({lane._number for lane in lanes}) == 4


def test_a_client_with_too_few_hardware_queues_is_refused_by_itself(clients, monkeypatch):
    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with pytest.raises(SpecdraftError, match="CUDA_DEVICE_MAX_CONNECTIONS"):
        Target(clients)


def test_a_verify_that_never_ends_is_released_and_the_sequence_goes_on(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, ready_timeout_s=0.2) as clients:
        target = Target(clients)
        gate = target.gate()
        with target.client.open_sequence() as sequence:
            slot = target.client.claim_slot()
            target.verify(slot, 0, 2, gate)
            early = target.propose(sequence, slot)
            wait_until(lambda: target.lane._page.load(target.lane._done_offset) == RELEASED, text="the release")
            open_gate(gate)
            (error,) = early.outputs(10)
            assert error.reason is Reason.LANE_RELEASED
            assert clients.server.metric("ready_timeouts_total") == 1
            assert sequence.state().row_count == 0
            sequence.propose(0, STORY.tokens[:2], STORY.rows[:2], num_drafts=2)
            target.lane.close()
            target.lane = target.client.open_lane(target.stream)
            target.verify(slot, 2, 1)
            assert target.propose(sequence, slot).outputs(10)[0].row_count == 3
            wait_until(lambda: clients.server.metric("propose_stage_seconds_count", stage="ready_wait") == 1)


def test_a_stream_that_breaks_releases_the_lane_and_another_is_opened(clients):
    target = Target(clients)
    gate = target.gate()
    with target.client.open_sequence() as sequence:
        slot = target.client.claim_slot()
        target.verify(slot, 0, 2, gate)
        early = target.propose(sequence, slot)
        assert early._answered.wait(5)
        target.lane._drive._stream.cancel()
        wait_until(lambda: target.lane.is_released, text="the release")
        open_gate(gate)
        (error,) = early.outputs(10)
        assert error.reason is Reason.LANE_RELEASED
        wait_until(lambda: target.lane.is_over, text="the end of the lane")
        sequence.state()
        target.lane = target.client.open_lane(target.stream)
        state = sequence.state()
        target.verify(slot, state.last_pair_key + 1, 1)
        assert target.propose(sequence, slot).outputs(10)[0].row_count == state.row_count + 1


def test_a_client_that_dies_with_a_round_under_way_leaves_nothing_and_disturbs_nobody(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, lease_s=0.4, grace_s=0.1, ready_timeout_s=20.0) as clients:
        target = Target(clients)
        sequence = target.client.open_sequence()
        target.verify(0, 0, 2, target.gate())
        target.propose(sequence, 0)
        neighbour = clients.client()
        pages = clients.server.pages
        target.client._session._lease.close()
        target.client._session._transport.drive._stream.cancel()
        target.client._channel.close()
        with neighbour.open_sequence() as other:
            for key in range(0, 8, 2):
                other.propose(key, STORY.tokens[key : key + 2], STORY.rows[key : key + 2], num_drafts=1)
        wait_until(lambda: pages() == 0, text="the pages of the dead")
        wait_until(lambda: clients.driver.num_registered == 0, text="its lane")
        clients.forget(target.client)


def test_a_service_that_goes_away_releases_the_target(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, ready_timeout_s=20.0) as clients:
        target = Target(clients)
        sequence = target.client.open_sequence()
        gate = target.gate()
        target.verify(0, 0, 2, gate)
        early = target.propose(sequence, 0)
        clients.server.service.close()
        open_gate(gate)
        began = time.monotonic()
        (error,) = early.outputs(10)
        assert isinstance(error, SpecdraftError), "there are no drafts"
        assert time.monotonic() - began < 10
        wait_until(lambda: target.lane.passed >= 1, text="the target's stream")


def test_thirty_sessions_that_wait_at_once_do_not_stop_another(clients):
    process = clients.gpu_of_client(num_queues=64)  # one process for all: its threads are this one's too
    waiting = [Target(clients, process, slot_count=1) for _ in range(OPEN_WAITS_MAX + 6)]
    gates = [target.gate() for target in waiting]
    rounds = []
    for target, gate in zip(waiting, gates, strict=True):
        sequence = target.client.open_sequence()
        target.verify(0, 0, 2, gate)
        rounds.append(target.propose(sequence, 0))
    assert all(one._answered.wait(10) for one in rounds)
    assert clients.server.service.assembly._lanes.desk.watchdog.num_open_waits == OPEN_WAITS_MAX
    last = Target(clients, process)
    sequence = last.client.open_sequence()
    last.verify(0, 0, 2)
    assert last.propose(sequence, 0).outputs(10)[0].drafts == expected(clients, [(0, 2)])[0]
    for gate in reversed(gates):
        open_gate(gate)
    assert all(one.outputs(10)[0].row_count == 2 for one in rounds)


def test_lanes_of_the_client_are_the_public_class(clients):
    assert isinstance(Target(clients).lane, Lane)


def test_rounds_that_warm_up_touch_nobody(clients):
    server = clients.server
    client = clients.client()
    with client.open_sequence() as sequence:
        sequence.propose(0, STORY.tokens[:6], STORY.rows[:6], num_drafts=K)
        before = server.digest(sequence.sequence_id), server.pages(), sequence.state()
        server.service.assembly._lanes.warm_up()
        assert (server.digest(sequence.sequence_id), server.pages(), sequence.state()) == before
        sequence.propose(6, STORY.tokens[6:7], STORY.rows[6:7], num_drafts=K)
