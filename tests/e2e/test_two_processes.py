"""Target and service as two processes on one GPU: memory, lanes, and deaths at the worst moment.

On a machine with a GPU the same tests run with it (`-m gpu`); elsewhere files play the GPU's memory.
"""

import json
import os
import signal
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from drafter_service.bench.tax_target import Device, range_bytes
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from serving import wait_until
from specdraft import Client, ClientGpu, EarlyItem, SpecdraftError
from specdraft.memory import DeviceRange
from specdraft.memory.counters import CounterPage
from specdraft.memory.simulated import SimulatedDriver

K, WIDTH, VOCAB = 3, 64, 128
GENERATOR = torch.Generator().manual_seed(3)
TOKENS = torch.randint(VOCAB, (64,), generator=GENERATOR).tolist()
ROWS = torch.randn(64, WIDTH, generator=GENERATOR)


@pytest.fixture(params=["simulated", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def scene(request, tiny_checkpoint):
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="sd-two-", ignore_cleanup_errors=True)))
        yield Scene(request.param, tiny_checkpoint, folder, stack)


class Scene:
    """The service's process, and clients of this one."""

    def __init__(self, device, checkpoint, folder, stack):
        self.is_simulated = device == "simulated"
        self.folder = folder
        self.stack = stack
        driver = SimulatedDriver(folder, num_queues=64) if self.is_simulated else None
        if driver is not None:
            driver.make_current(0)
            stack.callback(driver.close)
        self.gpu = ClientGpu(driver)
        changes = {"device": "cpu", "simulated_gpu": folder} if self.is_simulated else {"device": device}
        self.config = ServiceConfig(
            checkpoint=checkpoint,
            kv_bytes=4 * MIB,
            max_batch=4,
            max_drafts=K,
            max_seq_len=128,
            lm_head="as-stored",
            dtype="float32",
            max_lanes=2,
            lease_s=2.0,
            grace_s=0.3,
            ready_timeout_s=30.0,
            allow_client_regions=True,
            torch_threads=1,
            log_level="warning",
            **changes,
        )

    def start(self, **changes):
        self.service = ServiceProcess(replace(self.config, **changes))
        self.reached = self.stack.enter_context(self.service)
        return self.reached

    def client(self, **options):
        options = {"memory": "cuda", "gpu": self.gpu, "slot_count": 2, "prefill_rows": 32, "timeout_s": 30.0} | options
        if options["memory"] != "cuda":
            del options["gpu"]
        return self.stack.enter_context(Client(self.reached.target, **options))

    def metric(self, name):
        text = urllib.request.urlopen(self.reached.metrics, timeout=5).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"specdraft_{name}"))


def done(early, timeout_s=30):
    """The outputs of a round's only slot; a refusal says itself."""
    (outputs,) = early.outputs(timeout_s)
    assert not isinstance(outputs, SpecdraftError), f"{outputs.reason}: {outputs}"
    return outputs


class Target:
    """Leaves pairs in slots as a target's kernels would, and can be held."""

    def __init__(self, scene, **options):
        self.client = scene.client(**options)
        self.device = Device(scene.gpu)
        self.lane = self.client.open_lane(self.device.stream)
        self.page = CounterPage()
        self.gate = scene.gpu.driver.register_host(self.page.address, 4096)
        self.sources = []  # what the stream still copies from: freed memory would be another source's at once

    def hold(self):
        self.lane._gpu.driver.wait_value(self.device.stream, self.gate, 1)

    def let_go(self):
        self.page.store(0, 1)

    def leave(self, slot, first_key, count):
        tokens = torch.tensor(TOKENS[first_key : first_key + count], dtype=torch.int32)
        parts = {
            "first_key": torch.tensor([first_key]),
            "pair_count": torch.tensor([count], dtype=torch.int32),
            "tokens": tokens,
            "hidden": ROWS[first_key : first_key + count].contiguous(),
        }
        for name, values in parts.items():
            data = values.view(torch.uint8).flatten()
            field = self.lane.arena.slot_field(slot, name, len(data))
            view = range_bytes(field, self.device.torch_device)
            self.sources.append(data.to(view.device))
            self.device.enqueue(partial(view.copy_, self.sources[-1]))

    def propose(self, sequence, slot):
        return self.lane.propose_early([EarlyItem(sequence, slot, K)])

    def close(self):
        self.lane.close()
        self.lane._gpu.driver.unregister_host(self.page.address)
        self.page.close()


def by_messages(scene, writes):
    with scene.client(memory="inline").open_sequence() as sequence:
        return [
            sequence.propose(key, TOKENS[key : key + n], ROWS[key : key + n], num_drafts=K).drafts for key, n in writes
        ]


WRITES = [(0, 4), (4, 1), (5, 3), (7, 2)]


def test_drafts_through_arena_region_and_lane_are_those_through_messages(scene):
    scene.start()
    expected = by_messages(scene, WRITES)
    target = Target(scene)
    with target.client.open_sequence() as sequence:
        found = [sequence.propose(k, TOKENS[k : k + n], ROWS[k : k + n], num_drafts=K).drafts for k, n in WRITES]
        assert found == expected
    pointer = scene.gpu.driver.allocate(1 << 21)
    buffer = DeviceRange(pointer, ROWS.nbytes)
    range_bytes(buffer, target.device.torch_device).copy_(ROWS.view(torch.uint8).flatten())
    target.device.synchronize()
    if not scene.is_simulated:
        torch.cuda.synchronize()
    region = target.client.register_region(buffer)
    with target.client.open_sequence() as sequence:
        for (k, n), drafts in zip(WRITES, expected, strict=True):
            rows = buffer[k * WIDTH * 4 : (k + n) * WIDTH * 4]
            assert sequence.propose(k, TOKENS[k : k + n], rows, num_drafts=K).drafts == drafts
    region.close()
    scene.gpu.driver.free(pointer)
    slot = target.client.claim_slot()
    with target.client.open_sequence() as sequence:
        for (k, n), drafts in zip(WRITES, expected, strict=True):
            target.leave(slot, k, n)
            assert done(target.propose(sequence, slot)).drafts == drafts
    target.close()


def test_a_round_is_answered_before_its_verify_ends(scene):
    scene.start()
    target = Target(scene)
    slot = target.client.claim_slot()
    with target.client.open_sequence() as sequence:
        target.hold()
        target.leave(slot, 0, 2)
        early = target.propose(sequence, slot)
        assert early._answered.wait(10)
        assert not early.is_passed()
        target.let_go()
        assert done(early).row_count == 2
    target.close()


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
    target = Target(scene)
    sequence = target.client.open_sequence()
    target.hold()
    target.leave(0, 0, 2)
    early = target.propose(sequence, 0)
    assert early._answered.wait(10)
    os.kill(scene.reached.pid, signal.SIGKILL)
    target.let_go()
    assert isinstance(early.outputs(10)[0], SpecdraftError)
    wait_until(lambda: target.lane.is_over, text="the target's stream")
    target.device.synchronize()
    target.close()


KILLED = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import pytest, torch
import test_two_processes as t
from contextlib import ExitStack
from pathlib import Path
scene = t.Scene(sys.argv[2], Path("/"), Path(sys.argv[3]), ExitStack())
scene.reached = type("Reached", (), {"target": sys.argv[4]})
target = t.Target(scene)
sequence = target.client.open_sequence()
target.hold()
target.leave(0, 0, 2)
target.propose(sequence, 0)._answered.wait(10)
print("sent", flush=True)
sys.stdin.read()
"""


def test_a_client_killed_between_sending_and_the_end_of_its_verify_leaves_nothing(scene):
    scene.start()
    neighbour = scene.client()
    paths = json.dumps([*sys.path, str(Path(__file__).parent)])
    device = "simulated" if scene.is_simulated else "cuda:0"
    command = [sys.executable, "-c", KILLED, paths, device, str(scene.folder), scene.reached.target]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout.readline() == "sent\n"
        process.kill()
    with neighbour.open_sequence() as sequence:
        for key in range(0, 8, 2):
            sequence.propose(key, TOKENS[key : key + 2], ROWS[key : key + 2], num_drafts=1)
    wait_until(lambda: scene.metric("sessions ") == 1, text="the end of the dead session")
    wait_until(lambda: scene.metric('kv_pages{state="live"}') == 0, text="its pages")


# test_lanes_end_to_end.py has it for simulated GPUs: 31 of them are too much for a few cores here.
@pytest.mark.parametrize("scene", [pytest.param("cuda:0", marks=pytest.mark.gpu)], indirect=True)
def test_many_sessions_that_wait_at_once_do_not_stop_another(scene):
    scene.start()
    waiting = [Target(scene, slot_count=1) for _ in range(30)]
    rounds = []
    for target in waiting:
        target.hold()
        target.leave(0, 0, 2)
        rounds.append(target.propose(target.client.open_sequence(), 0))
    last = Target(scene)
    last.leave(0, 0, 2)
    assert done(last.propose(last.client.open_sequence(), 0), 5).row_count == 2
    for target in waiting:
        target.let_go()
    assert [done(one).row_count for one in rounds] == [2] * len(rounds)
    for target in [*waiting, last]:
        target.close()
