"""Target and service as two processes on one GPU: memory, lanes, and faults at the worst moment.

On a machine with a GPU the same tests run with it (`-m gpu`), time-sliced and under MPS; elsewhere files play the GPU's
memory.
"""

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch

from drafter_service.bench.tax import mps_environment
from drafter_service.bench.tax_target import Device
from lane_scene import ROWS, TOKENS, VOCAB, WIDTH, K, Scene, Target, by_messages, done
from on_gpu import DRAFTER_DEVICE
from serving import wait_until
from specdraft import EarlyItem, SpecdraftError
from specdraft.errors import Reason
from specdraft.exchanges import Exchange
from specdraft.memory import DeviceRange
from specdraft.v1 import drafter_pb2 as pb

ON_GPU = pytest.param(DRAFTER_DEVICE, marks=pytest.mark.gpu)
DEVICES = ["simulated", ON_GPU]


@pytest.fixture(params=DEVICES)
def scene(request, tiny_checkpoint):
    """A service of the test's own, not started yet."""
    with _scene(request.param, tiny_checkpoint) as made:
        yield made


@pytest.fixture(scope="module", params=DEVICES)
def shared(request, tiny_checkpoint):
    """One service for the tests that leave it as it was."""
    with _scene(request.param, tiny_checkpoint) as made:
        made.start(max_sessions=64)
        yield made


class _scene(ExitStack):  # noqa: N801  # a context manager, used like a function
    def __init__(self, device, checkpoint):
        super().__init__()
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
        folder = tempfile.TemporaryDirectory(prefix="sd-two-", ignore_cleanup_errors=True)
        self.made = Scene(device, checkpoint, Path(self.enter_context(folder)), self)

    def __enter__(self):
        super().__enter__()
        return self.made


@pytest.fixture
def target(shared):
    made = Target(shared)
    yield made
    made.let_go()
    made.close()
    made.client.close()


WRITES = [(0, 4), (4, 1), (5, 3), (7, 2)]


def test_drafts_through_arena_region_and_lane_are_those_through_messages(shared, target):
    expected = by_messages(shared, WRITES)
    with target.client.open_sequence() as sequence:
        found = [sequence.propose(k, TOKENS[k : k + n], ROWS[k : k + n], num_drafts=K).drafts for k, n in WRITES]
        assert found == expected
    pointer = shared.gpu.driver.allocate(1 << 21)
    buffer = DeviceRange(pointer, ROWS.nbytes)
    rows = ROWS.view(torch.uint8).flatten().to(target.device.torch_device)
    target.device.copy(buffer, rows)
    target.device.synchronize()
    region = target.client.register_region(buffer)
    with target.client.open_sequence() as sequence:
        for (k, n), drafts in zip(WRITES, expected, strict=True):
            rows = buffer[k * WIDTH * 4 : (k + n) * WIDTH * 4]
            assert sequence.propose(k, TOKENS[k : k + n], rows, num_drafts=K).drafts == drafts
    region.close()
    shared.gpu.driver.free(pointer)
    with target.client.open_sequence() as sequence:
        for (k, n), drafts in zip(WRITES, expected, strict=True):
            target.leave(0, k, n)
            assert done(target.propose(sequence, 0)).drafts == drafts


def test_early_batches_of_every_size_draft_as_single_calls(shared, target):
    writes = [(0, 2), (2, 4), (6, 1), (7, 3)]
    sequences = []
    for (key, count), drafts in zip(writes, by_messages(shared, writes), strict=True):
        newest = target.client.open_sequence()
        if key:
            newest.catchup(0, TOKENS[:key], ROWS[:key])
        sequences.append(newest)
        for slot in range(len(sequences)):
            target.leave(slot, key, count)
        early = target.lane.propose_early([EarlyItem(one, slot, K) for slot, one in enumerate(sequences)])
        found = early.outputs(30)
        assert [getattr(one, "drafts", one) for one in found] == [drafts] * len(sequences)


def test_a_round_right_behind_a_catch_up_finds_its_rows(shared, target):
    """Nothing waits for a catch-up but what is in the same stream, and a lane's rounds are in another."""
    length = len(TOKENS) - 4
    with shared.client(memory="inline").open_sequence() as sequence:
        sequence.catchup(0, TOKENS[:length], ROWS[:length])
        expected = sequence.propose(length, TOKENS[length : length + 2], ROWS[length : length + 2], num_drafts=K).drafts
    for _ in range(10):
        with target.client.open_sequence() as sequence:
            target.leave(0, length, 2)
            sequence.catchup(0, TOKENS[:length], ROWS[:length])
            assert done(target.propose(sequence, 0)).drafts == expected


def test_a_round_is_answered_before_its_verify_ends(target):
    with target.client.open_sequence() as sequence:
        target.hold()
        target.leave(0, 0, 2)
        early = target.propose(sequence, 0)
        assert early._answered.wait(10)
        assert not early.is_passed()
        target.let_go()
        assert done(early).row_count == 2


def raw_round(lane, item, ticket):
    """A ticketed request straight onto the stream; returns its error."""
    answers = []
    request = pb.ProposeRequest(
        entries=[lane._entry(item)], lane_ticket=pb.LaneTicket(lane=lane._number, ticket=ticket)
    )
    lane._drive.post(Exchange("Propose", request, 5.0), lambda answer, error: answers.append((answer, error)))
    wait_until(lambda: answers, text="an answer")
    return answers[0][1]


def test_tickets_out_of_order_are_refused_and_get_their_done_all_the_same(target):
    lane = target.lane
    with target.client.open_sequence() as sequence:
        target.leave(0, 0, 2)
        target.device.synchronize()
        for ticket, expected in ((4, 2), (3, 5), (4, 5)):  # ticket 1 proved the lane
            error = raw_round(lane, EarlyItem(sequence, 0, 1), ticket)
            assert error.reason is Reason.TICKET_ORDER
            assert error.details == {"ticket": str(ticket), "expected": str(expected)}
            wait_until(lambda: lane._page.load(lane._done_offset) == 4, text="done of the refused ticket")
        assert raw_round(lane, EarlyItem(sequence, 0, 1), 5) is None
        assert lane._page.load(lane._done_offset) == 4, "the verify has not ended"
        lane._page.store(lane._ready_offset, 5)
        wait_until(lambda: lane._page.load(lane._done_offset) == 5, text="the round")
        sequence.ledger.unsure = True
        assert sequence.state().row_count == 2


def test_a_round_that_is_refused_in_band_does_not_hold_up_its_lane(shared, target):
    with target.client.open_sequence() as sequence:
        target.hold()
        target.leave(0, 0, 2)
        sequence.ledger.last_op = 7
        early = target.propose(sequence, 0)
        target.let_go()
        (error,) = early.outputs(10)
        assert error.reason is Reason.OP_OUT_OF_ORDER
        target.leave(0, 0, 2)
        assert done(target.propose(sequence, 0)).drafts == by_messages(shared, [(0, 2)])[0]
        assert not target.lane.is_released


def test_a_call_that_is_lost_releases_its_lane_and_the_session_opens_another(target):
    with target.client.open_sequence() as sequence:
        target.hold()
        target.leave(0, 0, 2)
        early = target.propose(sequence, 0)
        assert early._answered.wait(5)
        target.lane._drive._stream.cancel()
        wait_until(lambda: target.lane.is_released, text="the release")
        target.let_go()
        (error,) = early.outputs(10)
        assert error.reason is Reason.LANE_RELEASED
        target.lane.close()
        target.device.synchronize()
        row_count = sequence.state().row_count
        assert row_count in {0, 2}, "the round was done, or it was not"
        target.lane = target.client.open_lane(target.device.stream)
        target.leave(0, row_count, 1)
        assert done(target.propose(sequence, 0)).row_count == row_count + 1


def test_two_streams_of_a_client_have_a_lane_each_and_do_not_wait_for_each_other(shared, target):
    other = Target(shared, target.client)
    with target.client.open_sequence() as first, target.client.open_sequence() as second:
        target.hold()
        target.leave(0, 0, 2)
        held = target.propose(first, 0)
        expected = by_messages(shared, WRITES)
        for (key, count), drafts in zip(WRITES, expected, strict=True):
            other.leave(1, key, count)
            assert done(other.propose(second, 1), 10).drafts == drafts
        other.leave(2, 2, 1)
        (error,) = other.propose(first, 2).outputs(10)
        assert error.reason is Reason.IN_FLIGHT_EXHAUSTED, "a sequence has its rounds in one lane at a time"
        assert not held.is_passed()
        target.let_go()
        assert done(held).row_count == 2
    other.close()


class Noise:
    """Writes nonsense into a slot's inputs from a stream of its own, again and again, until it is closed."""

    def __init__(self, shared, target, slot):
        random = torch.Generator().manual_seed(5)
        self.device = Device(shared.gpu)
        self.num_writes = 0

        def whole(low, high, count, dtype):
            return torch.randint(low, high, (count,), generator=random).to(dtype)

        self.parts = []
        for _ in range(32):
            hidden = torch.randn(K + 1, WIDTH, generator=random) * 10 ** whole(-3, 40, 1, torch.float32)
            hidden[0, 0] = [float("nan"), float("inf"), 1.0, 3e38][int(whole(0, 4, 1, torch.int64))]
            values = {
                "first_key": whole(-3, 12, 1, torch.int64) * int(whole(1, 1 << 40, 1, torch.int64)),
                "pair_count": whole(-2, K + 4, 1, torch.int32),
                "tokens": whole(-3, VOCAB + 3, K + 1, torch.int32),
                "hidden": hidden,
            }
            for name, value in values.items():
                data = value.view(torch.uint8).flatten().to(self.device.torch_device)
                self.parts.append((target.lane.arena.slot_field(slot, name, len(data)), data))
        self._ends = threading.Event()
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def _run(self):
        while not self._ends.is_set():
            for number, (field, data) in enumerate(self.parts):
                self.device.copy(field, data)
                if number % 8 == 7:
                    self.device.synchronize()
            self.num_writes += len(self.parts)

    def close(self):
        self._ends.set()
        self._thread.join()


def test_a_slot_rewritten_while_it_is_read_harms_its_own_sequence_alone(shared, target):
    neighbour = Target(shared)
    expected = by_messages(shared, WRITES)
    refusals = 0
    with (
        neighbour.client.open_sequence() as well,
        target.client.open_sequence() as sequence,
        closing(Noise(shared, target, 0)) as noise,
    ):
        for number in range(48):
            state = sequence.state()
            target.leave(0, min(state.last_pair_key + 1, 40), 1 + number % 3)
            (outputs,) = target.propose(sequence, 0).outputs(10)
            if isinstance(outputs, SpecdraftError):
                refusals += 1
            else:
                assert sequence.read_drafts().drafts == outputs.drafts
                assert all(0 <= draft < VOCAB for draft in outputs.drafts)
            if number % 12 == 0:
                key, count = WRITES[number // 12]
                neighbour.leave(0, key, count)
                assert done(neighbour.propose(well, 0)).drafts == expected[number // 12]
    assert noise.num_writes > 100
    assert refusals, "the noise was seen"
    assert not target.lane.is_released
    with target.client.open_sequence() as sequence:
        for (key, count), drafts in zip(WRITES, expected, strict=True):
            target.leave(0, key, count)
            assert done(target.propose(sequence, 0)).drafts == drafts
    neighbour.close()


def test_a_verify_that_never_ends_is_released_within_its_time(scene):
    scene.start(ready_timeout_s=0.3)
    target = Target(scene)
    with target.client.open_sequence() as sequence:
        target.hold()
        target.leave(0, 0, 2)
        early = target.propose(sequence, 0)
        wait_until(lambda: target.lane.is_released, text="the release")
        target.let_go()
        assert isinstance(early.outputs(10)[0], SpecdraftError)
        assert sequence.state().row_count == 0
    target.close()


def test_a_service_killed_with_a_round_under_way_does_not_hold_the_target(scene):
    scene.start()
    expected = by_messages(scene, [(0, 2)])[0]
    target = Target(scene)
    sequence = target.client.open_sequence()
    target.hold()
    target.leave(0, 0, 2)
    early = target.propose(sequence, 0)
    assert early._answered.wait(10)
    os.kill(scene.reached.pid, signal.SIGKILL)
    target.let_go()
    (found,) = early.outputs(10)
    # MPS may bring to its end what it had of the dead service's, and then the drafts are there and right.
    assert isinstance(found, SpecdraftError) or found.drafts == expected
    wait_until(lambda: target.lane.is_over, text="the target's stream")
    target.device.synchronize()
    target.close()


KILLED = """
import sys
from contextlib import ExitStack, closing
from lane_scene import Scene, Target
from drafter_service.bench.tax_target import Verify
scene = Scene.like(ExitStack(), *sys.argv[1:4])
target = Target(scene)
sequence = target.client.open_sequence()
if sys.argv[4] == "stuck":
    target.hold()
else:
    verify = Verify(target.device, 2.0)
    for _ in range(100):
        target.device.enqueue(verify.launch)
target.leave(0, 0, 2)
target.propose(sequence, 0)._answered.wait(10)
print("sent", flush=True)
sys.stdin.read()
"""


@pytest.mark.parametrize("verify", ["stuck", "of short kernels"])
def test_a_client_killed_between_sending_and_the_end_of_its_verify_leaves_nothing(shared, verify):
    sessions = shared.metric("sessions ")
    neighbour = shared.client()
    with shared.elsewhere(KILLED, verify) as process:
        assert process.stdout.readline() == "sent\n"
        process.kill()
    with neighbour.open_sequence() as sequence:
        for key in range(0, 8, 2):
            sequence.propose(key, TOKENS[key : key + 2], ROWS[key : key + 2], num_drafts=1)
    wait_until(lambda: shared.metric("sessions ") == sessions + 1, text="the end of the dead session")
    neighbour.close()
    wait_until(lambda: shared.metric("sessions ") == sessions, text="the end of its neighbour")
    wait_until(lambda: shared.metric('kv_pages{state="live"}') == 0, text="its pages")


# test_lanes_end_to_end.py has it for simulated GPUs: 31 of them are too much for a few cores here.
@pytest.mark.parametrize("shared", [ON_GPU], indirect=True)
def test_many_sessions_that_wait_at_once_do_not_stop_another(shared):
    waiting = [Target(shared, slot_count=1) for _ in range(30)]
    rounds = []
    for target in waiting:
        target.hold()
        target.leave(0, 0, 2)
        rounds.append(target.propose(target.client.open_sequence(), 0))
    last = Target(shared)
    last.leave(0, 0, 2)
    assert done(last.propose(last.client.open_sequence(), 0), 5).row_count == 2
    for target in waiting:
        target.let_go()
    assert [done(one).row_count for one in rounds] == [2] * len(rounds)
    for target in [*waiting, last]:
        target.close()
        target.client.close()


MPS_VARIABLE = "CUDA_MPS_PIPE_DIRECTORY"


@pytest.mark.gpu
@pytest.mark.timeout(180)
@pytest.mark.skipif(MPS_VARIABLE in os.environ, reason="this is the run under MPS")
def test_all_of_this_holds_under_mps():
    assert shutil.which("nvidia-cuda-mps-control"), "MPS comes with the driver"
    # A client killed in a wait that nobody ends is for time slicing: under MPS its kernels share the service's context.
    chosen = ["-m", "gpu", "-k", "not stuck", "-q", "-p", "no:cacheprovider", str(Path(__file__))]
    with mps_environment(os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}) as environment:
        ended = subprocess.run(
            [sys.executable, "-m", "pytest", *chosen], env=environment, capture_output=True, text=True, check=False
        )
    assert ended.returncode == 0, ended.stdout[-8000:] + ended.stderr[-2000:]
