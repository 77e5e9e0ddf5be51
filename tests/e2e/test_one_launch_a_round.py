"""After warming up a round is one graph launch, as a profiler's trace of the service shows."""

import json
import os
import subprocess
import sys
from collections import Counter

import pytest
from torch.profiler import ProfilerActivity, profile

from lane_scene import K
from on_gpu import DRAFTER_DEVICE
from serving import running
from wire import Story

pytestmark = pytest.mark.gpu

NUM_ROUNDS = 20

EARLY_ROUNDS = """
import sys
from contextlib import ExitStack
from lane_scene import Scene, Target, done
target = Target(Scene.like(ExitStack(), *sys.argv[1:4]))
sequence = target.client.open_sequence()
for count in (5, int(sys.argv[4])):
    for _ in range(count):
        target.leave(0, 0, 2)
        done(target.propose(sequence, 0))
    print("done", flush=True)
    sys.stdin.readline()
target.close()
"""

ROUNDS_OF_CALLS = """
import sys
from contextlib import ExitStack
from lane_scene import K, ROWS, TOKENS, Scene
with ExitStack() as stack:
    client = Scene.like(stack, *sys.argv[1:4]).client()
    sequence, rows = client.open_sequence(), ROWS[:2].cuda()
    for count in (5, int(sys.argv[4])):
        for _ in range(count):
            sequence.truncate(0)
            assert len(sequence.propose(0, TOKENS[:2], rows, K).drafts) == K
        print("done", flush=True)
        sys.stdin.readline()
"""


@pytest.fixture
def server(tiny_checkpoint):
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    with running(tiny_checkpoint, device=DRAFTER_DEVICE, runner="graph", max_drafts=K, ready_timeout_s=20.0) as made:
        yield made


def calls_of(trace, folder):
    """How often each function of the runtime and of the driver was called."""
    trace.export_chrome_trace(str(folder / "trace.json"))
    events = json.loads((folder / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
    return Counter(one["name"] for one in events if one.get("cat") in {"cuda_runtime", "cuda_driver"})


def calls_of_process(server, folder, script):
    """What the service calls for `NUM_ROUNDS` rounds of a client in another process, once it is warm."""
    words = [sys.executable, "-c", script, "cuda:0", str(folder), f"unix:{server.config.socket}", str(NUM_ROUNDS)]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(one for one in sys.path if one)}
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment) as process:
        assert process.stdout.readline() == "done\n"
        with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
            process.stdin.write("\n")
            process.stdin.flush()
            assert process.stdout.readline() == "done\n"
        process.stdin.write("\n")
        process.stdin.close()
        assert process.wait(20) == 0
    return calls_of(trace, folder)


def kernels_in(calls):
    return {name: count for name, count in calls.items() if "LaunchKernel" in name}


def test_a_host_synchronised_round_is_one_graph_launch_and_one_copy_each_way(server, tmp_path):
    sequence = server.client().open().sequence(Story(3))
    for _ in range(3):
        sequence.truncate(0)
        sequence.propose(0, 2, K)
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        for _ in range(NUM_ROUNDS):
            sequence.truncate(0)
            assert len(sequence.propose(0, 2, K).drafts) == K
    calls = calls_of(trace, tmp_path)
    assert calls["cudaGraphLaunch"] == calls["cudaStreamSynchronize"] == NUM_ROUNDS, calls
    assert calls["cudaMemcpyAsync"] == 2 * NUM_ROUNDS, calls
    assert not kernels_in(calls), calls


def test_rows_in_gpu_memory_are_one_copy_more(server, tmp_path):
    calls = calls_of_process(server, tmp_path, ROUNDS_OF_CALLS)
    assert calls["cudaGraphLaunch"] == NUM_ROUNDS, calls
    assert calls["cudaStreamSynchronize"] == calls["cudaEventSynchronize"] == NUM_ROUNDS, calls
    assert calls["cudaMemcpyAsync"] == 3 * NUM_ROUNDS, calls
    assert not kernels_in(calls), calls


def test_an_early_round_is_one_graph_launch_and_no_other_kernel(server, tmp_path):
    calls = calls_of_process(server, tmp_path, EARLY_ROUNDS)
    assert calls["cudaGraphLaunch"] == NUM_ROUNDS, calls
    assert not kernels_in(calls), calls
