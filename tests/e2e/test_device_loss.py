"""A device that is lost: health turns at once, callers are told, waits are ended, and the process goes."""

import signal
import sys
import time

import grpc
import pytest

from cuda_session import gpu_service
from drafter_service.memory.device_loss import DeviceLoss, is_sticky
from on_gpu import DRAFTER_DEVICE
from processes import flags, serving
from serving import temporary_directory, wait_until
from specdraft import Client
from specdraft.errors import Reason, SpecdraftError
from specdraft.lanes import EarlyItem
from specdraft.memory.cuda import CudaError
from specdraft.v1 import admin_pb2, admin_pb2_grpc, session_pb2
from wire import Story

STORY = Story(31)
LOST = "CUDA_ERROR_ILLEGAL_ADDRESS"


def test_a_lost_device_is_seen_without_a_call_and_told_to_everybody(tiny_checkpoint):
    with gpu_service(tiny_checkpoint) as clients:
        client, raw = clients.client(), clients.server.client()
        sequence = client.open_sequence()
        stream = client.session._arena.gpu.driver.create_stream()
        lane = client.open_lane(stream)
        early = lane.propose_early([EarlyItem(sequence, client.claim_slot(), 1)])
        clients.driver.break_device(LOST)
        wait_until(lambda: raw.check() == "NOT_SERVING", timeout=5, text="health")
        with pytest.raises(SpecdraftError) as caught:
            client.open_sequence()
        assert caught.value.reason is Reason.DEVICE_LOST
        assert isinstance(early.outputs(5)[0], SpecdraftError) or early.is_passed()
        wait_until(lambda: lane.passed >= 1, text="the target's stream goes on")
        assert clients.server.service.has_failed
        clients.is_lost = True


def test_a_batch_that_finds_the_device_lost_is_answered_so(tiny_checkpoint, monkeypatch):
    with gpu_service(tiny_checkpoint) as clients:
        client = clients.client()
        sequence = client.open_sequence()
        switch = clients.server.service.assembly.switch
        monkeypatch.setattr(switch, "_runner", Broken())
        with pytest.raises(SpecdraftError) as caught:
            sequence.propose(0, STORY.tokens[:2], STORY.rows[:2], num_drafts=1)
        assert caught.value.reason is Reason.DEVICE_LOST
        assert clients.server.service.has_failed


class Broken:
    def run(self, entries):
        raise RuntimeError("CUDA error: an illegal memory access was encountered")


def test_the_process_of_a_lost_device_ends_and_says_so_by_its_exit_code(tiny_checkpoint):
    with temporary_directory() as directory:
        (directory / "gpu").mkdir()
        arguments = flags(tiny_checkpoint, directory / "s.sock", simulated_gpu=directory / "gpu", drain_s=1)
        with serving(arguments) as (process, _):
            (directory / "gpu" / "lost").write_text(LOST, encoding="ascii")
            began = time.monotonic()
            assert process.wait(30) == 1
            assert time.monotonic() - began < 30


# `serve`, whose GPU is asked for what is not there when a signal comes: every later call of the process fails.
FAULTY = """
import signal, sys, threading
from drafter_service.cli import main

def fault(*_):
    import torch
    outside = torch.full((1,), 1 << 30, device=sys.argv[1])
    torch.zeros(1, device=sys.argv[1]).index_select(0, outside)

signal.signal(signal.SIGUSR1, lambda *_: threading.Thread(target=fault).start())
sys.exit(main(["serve", *sys.argv[2:]]))
"""


@pytest.mark.gpu
def test_a_gpu_that_is_lost_ends_the_service_and_its_client_drafts_with_the_next_one(tiny_checkpoint):
    with temporary_directory() as directory:
        settings = {"device": DRAFTER_DEVICE, "kv_bytes": "4MiB", "dtype": "float32", "drain_s": 1}
        arguments = flags(tiny_checkpoint, directory / "s.sock", **settings)
        command = [sys.executable, "-c", FAULTY, DRAFTER_DEVICE]
        write = (0, STORY.tokens[:2], STORY.rows[:2])
        with serving(arguments, command) as (process, _):
            client = Client(f"unix:{directory / 's.sock'}", memory="cuda", max_drafts=3, timeout_s=20.0)
            with client.open_sequence() as sequence:
                expected = sequence.propose(*write, num_drafts=3).drafts
            sequence = client.open_sequence()
            process.send_signal(signal.SIGUSR1)
            began = time.monotonic()
            assert process.wait(30) == 1
            assert time.monotonic() - began < 20
            with pytest.raises(SpecdraftError):
                sequence.propose(*write, num_drafts=1)
        with serving(arguments):
            wait_until(lambda: drafts_of(client, write) == expected, timeout=30, text="drafts as before")
            client.close()


def drafts_of(client, write):
    try:
        with client.open_sequence() as sequence:
            return sequence.propose(*write, num_drafts=3).drafts
    except SpecdraftError:
        return None


def test_only_errors_that_stay_mean_the_end():
    loss, told = DeviceLoss(), []
    loss.when_lost(lambda: told.append(True))
    for error in (
        CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY"),
        RuntimeError("CUDA out of memory"),
        ValueError("x"),
    ):
        assert not loss.seen(error)
    assert is_sticky(CudaError("cuStreamQuery", LOST))
    assert loss.seen(RuntimeError("CUDA error: device-side assert triggered"))
    assert loss.seen(CudaError("cuStreamQuery", LOST))
    assert told == [True]


def test_the_runner_is_switched_while_serving_and_drafts_stay_the_same(tiny_checkpoint):
    with gpu_service(tiny_checkpoint) as clients:
        raw = clients.server.client()
        session = raw.open()
        found = []
        with grpc.insecure_channel(f"unix:{clients.server.config.socket}.admin") as channel:
            admin = admin_pb2_grpc.DrafterAdminStub(channel)
            for runner in (session_pb2.RUNNER_EAGER, session_pb2.RUNNER_GRAPH, session_pb2.RUNNER_EAGER):
                before = raw.info().runner
                answer = admin.SetRunner(admin_pb2.SetRunnerRequest(runner=runner), timeout=5)
                assert answer.previous == before
                assert raw.info().runner == runner
                sequence = session.sequence(STORY)
                found.append([list(sequence.propose(key, 2).drafts) for key in range(0, 8, 2)])
        assert found[0] == found[1] == found[2]
