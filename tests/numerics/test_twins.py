"""Small tensors that travel together: what is written here is there, and a stream that waits holds nobody up."""

from __future__ import annotations

import threading

import pytest
import torch

from drafter_service.engine.twins import INLINE_BYTES_MAX, Twins
from specdraft.memory import ClientGpu
from specdraft.memory.counters import COUNTER_PAGE_SIZE_BYTES, CounterPage

SIZES = {
    "flags": (torch.bool, (3,)),
    "numbers": (torch.int64, (2, 3)),
    "pages": (torch.int32, (2, 4)),
    "floors": (torch.float32, (2,)),
}
NUM_COPIES = 32


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def test_every_tensor_goes_to_its_like_and_back(device):
    twins = Twins(SIZES, torch.device(device))
    host, back = twins.new_host(), twins.new_host(for_reading=True)
    host.views["flags"][1] = True
    host.views["numbers"][4] = -7
    host.views["pages"][5] = 9
    host.views["floors"][0] = 0.5
    twins.to_device(host)
    assert {name: tensor.flatten().tolist() for name, tensor in twins.device.items()} == {
        "flags": [False, True, False],
        "numbers": [0, 0, 0, 0, -7, 0],
        "pages": [0, 0, 0, 0, 0, 9, 0, 0],
        "floors": [0.5, 0.0],
    }
    twins.device["numbers"][1, 2] = 3
    twins.to_host(back)
    assert back.tensors["numbers"].tolist() == [[0, 0, 0], [0, -7, 3]]
    assert host.tensors["numbers"].tolist() == [[0, 0, 0], [0, -7, 0]]


@pytest.mark.gpu
@pytest.mark.parametrize("num_bytes", [INLINE_BYTES_MAX, 16 * INLINE_BYTES_MAX])
def test_a_stream_that_waits_holds_nobody_who_copies(num_bytes):
    gpu, device, page = ClientGpu(), torch.device("cuda:0"), CounterPage()
    twins = Twins({"words": (torch.int64, (num_bytes // 8,))}, device)
    hosts = [twins.new_host() for _ in range(NUM_COPIES)]
    backs = [twins.new_host(for_reading=True) for _ in range(NUM_COPIES)]
    stream = torch.cuda.Stream(device)
    torch.cuda.synchronize(device)
    gpu.driver.make_current(0)
    gate = gpu.driver.register_host(page.address, COUNTER_PAGE_SIZE_BYTES)
    gpu.driver.wait_value(stream.cuda_stream, gate, 1)

    def copy():
        with torch.cuda.stream(stream):
            for number, (host, back) in enumerate(zip(hosts, backs, strict=True)):
                host.tensors["words"].fill_(number + 1)
                twins.to_device(host)
                twins.start_to_host(back)

    copying = threading.Thread(target=copy)
    copying.start()
    copying.join(10.0)
    has_ended, are_still = not copying.is_alive(), all(back.tensors["words"][0] == 0 for back in backs)
    page.store(0, 1)
    copying.join()
    stream.synchronize()
    gpu.driver.unregister_host(page.address)
    page.close()
    assert has_ended
    assert are_still
    assert [back.tensors["words"].unique().tolist() for back in backs] == [[i + 1] for i in range(NUM_COPIES)]
