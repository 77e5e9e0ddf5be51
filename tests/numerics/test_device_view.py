"""GPU memory that torch did not allocate, as tensors."""

import pytest
import torch

from drafter_service.memory.device_view import bytes_at, on_device, peer_bytes_at, rows_of

DEVICES = ["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("view", [bytes_at, peer_bytes_at])
def test_what_is_written_through_a_view_is_in_the_memory(device, view):
    device = torch.device(device)
    memory = torch.arange(64, dtype=torch.uint8, device=device)
    seen = view(memory.data_ptr(), 64, device)
    assert seen.device == memory.device
    assert seen.data_ptr() == memory.data_ptr()
    rows = rows_of(seen, 4, 16, 3, 8)
    assert rows.tolist() == [list(range(begin, begin + 8)) for begin in (4, 20, 36)]
    seen[5] = 200
    rows.bitwise_not_()
    assert memory[5] == 55
    assert memory[60] == 60


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="a second GPU is missing")
def test_a_peer_s_memory_is_read_where_it_lies():
    cuda = pytest.importorskip("cuda.bindings.driver")
    first, second = torch.device("cuda:0"), torch.device("cuda:1")
    memory = torch.arange(64, dtype=torch.uint8, device=second)
    with on_device(first):
        torch.zeros(1, device=first)
        _, context = cuda.cuDevicePrimaryCtxRetain(1)
        # Memory of another process is opened with the way to it; for our own it has to be asked for.
        (code,) = cuda.cuCtxEnablePeerAccess(context, 0)
    assert code.name in {"CUDA_SUCCESS", "CUDA_ERROR_PEER_ACCESS_ALREADY_ENABLED"}
    seen = bytes_at(memory.data_ptr(), 64, first)
    assert seen.device == first
    with on_device(first):
        seen.bitwise_not_()
        torch.cuda.synchronize()
    assert memory.tolist() == [255 - value for value in range(64)]
