"""A service in its process and a target in this one, on one GPU or a simulated one, for tests of lanes."""

import os
import subprocess
import sys
import urllib.request
from dataclasses import replace
from pathlib import Path

import torch

from drafter_service.bench.tax_target import Device
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from specdraft import Client, ClientGpu, EarlyItem, SpecdraftError
from specdraft.memory.counters import CounterPage
from specdraft.memory.simulated import SimulatedDriver

K, WIDTH, VOCAB = 3, 64, 128
GENERATOR = torch.Generator().manual_seed(3)
TOKENS = torch.randint(VOCAB, (64,), generator=GENERATOR).tolist()
ROWS = torch.randn(64, WIDTH, generator=GENERATOR)


class Scene:
    """The service's process, and clients of this one."""

    def __init__(self, device, checkpoint, folder, stack):
        self.device = device
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
        options = {"memory": "cuda", "gpu": self.gpu, "slot_count": 4, "prefill_rows": 32, "timeout_s": 30.0} | options
        if options["memory"] != "cuda":
            del options["gpu"]
        return self.stack.enter_context(Client(self.reached.target, **options))

    def metric(self, name):
        text = urllib.request.urlopen(self.reached.metrics, timeout=5).read().decode()
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(f"specdraft_{name}"))

    def elsewhere(self, script, *arguments):
        """Starts `script` with a scene like this one in another process; it talks through its pipes."""
        words = [sys.executable, "-c", script, self.device, str(self.folder), self.reached.target, *arguments]
        paths = os.pathsep.join([*(one for one in sys.path if one), str(Path(__file__).parent)])
        environment = os.environ | {"PYTHONPATH": paths}
        return subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment)

    @classmethod
    def like(cls, stack, device, folder, target):
        """What the other process makes of the words that `elsewhere` gives it."""
        made = cls(device, Path("/"), Path(folder), stack)
        made.reached = type("Reached", (), {"target": target})
        return made


class Target:
    """Leaves pairs in slots as a target's kernels would, and can be held."""

    def __init__(self, scene, client=None, **options):
        self.client = client or scene.client(**options)
        self.device = Device(scene.gpu)
        self.lane = self.client.open_lane(self.device.stream)
        self.page = CounterPage()
        self.gate = scene.gpu.driver.register_host(self.page.address, 4096)
        self.sources = []  # what the stream still copies from: freed memory would be another source's at once

    def hold(self):
        """What is enqueued from now on waits for `let_go`."""
        self.lane._gpu.driver.wait_value(self.device.stream, self.gate, 1)

    def let_go(self):
        self.page.store(0, 1)

    def leave(self, slot, first_key, count, rows=ROWS):
        parts = {
            "first_key": torch.tensor([first_key]),
            "pair_count": torch.tensor([count], dtype=torch.int32),
            "tokens": torch.tensor(TOKENS[first_key : first_key + count], dtype=torch.int32),
            "hidden": rows[first_key : first_key + count].contiguous(),
        }
        for name, values in parts.items():
            self.write(slot, name, values)

    def write(self, slot, name, values):
        data = values.view(torch.uint8).flatten().to(self.device.torch_device)
        self.sources.append(data)
        self.device.copy(self.lane.arena.slot_field(slot, name, len(data)), data)

    def propose(self, sequence, slot):
        return self.lane.propose_early([EarlyItem(sequence, slot, K)])

    def close(self):
        self.lane.close()
        self.lane._gpu.driver.unregister_host(self.page.address)
        self.page.close()


def done(early, timeout_s=30):
    """The outputs of a round's only slot; a refusal says itself."""
    (outputs,) = early.outputs(timeout_s)
    assert not isinstance(outputs, SpecdraftError), f"{outputs.reason}: {outputs}"
    return outputs


def by_messages(scene, writes):
    """The drafts of these writes, [(first key, pairs)], by calls that share no memory."""
    with scene.client(memory="inline").open_sequence() as sequence:
        return [
            sequence.propose(key, TOKENS[key : key + n], ROWS[key : key + n], num_drafts=K).drafts for key, n in writes
        ]
