"""GPU memory that torch did not allocate, as tensors."""

import pytest
import torch

from drafter_service.memory.cuda_arena import GRANULE
from drafter_service.memory.device_view import bytes_at, on_device, peer_bytes_at, rows_of
from drafter_service.memory.gpu import GpuLimits, GpuMemory
from drafter_service.memory.hiddens import FEW_BYTES, PackedRows, RowsToCome, tensor_of
from drafter_service.memory.layout import ArenaWish, lay_out
from specdraft.errors import Reason, SpecdraftError
from specdraft.memory.cuda_bindings import CudaBindingsDriver
from specdraft.memory.simulated import SimulatedDriver

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


@pytest.fixture(params=DEVICES)
def gpu(request, tmp_path):
    device = torch.device(request.param)
    driver = SimulatedDriver(tmp_path) if device.type == "cpu" else CudaBindingsDriver()
    made = GpuMemory(driver, 0, device, GpuLimits(4 * GRANULE, 0), pid=1)
    yield made
    made.close()
    if isinstance(driver, SimulatedDriver):
        driver.close()


@pytest.mark.parametrize("width", [64, 63], ids=["dense", "with gaps"])
@pytest.mark.parametrize("is_few", [True, False])
def test_rows_of_an_arena_are_read_as_they_were_left_and_refused_for_one_bad_number(gpu, width, is_few):
    num_rows = 5 if is_few else FEW_BYTES // (2 * width) + 1
    arena = gpu.make_arena(lay_out(ArenaWish(1, 4, 2 * width, 2 * width, 128, 1024, with_masks=False)))
    rows = torch.randn(num_rows, width, generator=torch.Generator().manual_seed(1)).bfloat16()
    offset, stride = arena.layout.staging, arena.layout.row_stride
    there = rows_of(arena.memory, offset, stride, num_rows, 2 * width)
    there.copy_(rows.view(torch.uint8))

    def read(count=num_rows):
        return arena.hidden_rows(offset, count, dtype="bfloat16", head_dtype="bfloat16", width=width)

    found = read()
    assert isinstance(found, PackedRows) is is_few
    assert torch.equal(tensor_of(found).cpu(), rows)
    rows[3, width - 1] = torch.inf
    there.copy_(rows.view(torch.uint8))
    assert torch.equal(tensor_of(read(3)).cpu(), rows[:3])
    with pytest.raises(SpecdraftError, match="row 3") as caught:
        read()
    assert caught.value.reason is Reason.HIDDEN_NOT_FINITE
    with pytest.raises(SpecdraftError) as caught:
        arena.hidden_rows(offset, 1025, dtype="bfloat16", head_dtype="bfloat16", width=width)
    assert caught.value.reason is Reason.MEMORY_OUT_OF_BOUNDS
    arena.close()


def test_copies_under_way_are_each_their_own_and_of_what_was_there_then(gpu):
    width = 64
    arena = gpu.make_arena(lay_out(ArenaWish(1, 4, 2 * width, 2 * width, 128, 64, with_masks=False)))
    memory = arena.memory[arena.layout.staging :].view(torch.bfloat16)
    started = []
    for turn in range(4):
        memory.fill_(turn)
        coming = arena.start_hidden_rows(
            arena.layout.staging, 2 + turn, dtype="bfloat16", head_dtype="bfloat16", width=width
        )
        assert isinstance(coming, RowsToCome)
        started.append(coming)
    del started[1]  # nobody asks for it any more
    memory.fill_(torch.nan)
    found = [tensor_of(coming.settled()) for coming in reversed(started)]
    assert [(len(rows), rows.unique().tolist()) for rows in found] == [(5, [3]), (4, [2]), (2, [0])]
    coming = arena.start_hidden_rows(arena.layout.staging, 1, dtype="bfloat16", head_dtype="bfloat16", width=width)
    with pytest.raises(SpecdraftError, match="row 0"):
        coming.settled()
    assert len(gpu.pool.landings) == 3, "they are used again"
    arena.close()
    with pytest.raises(SpecdraftError) as caught:
        arena.start_hidden_rows(arena.layout.staging, 1, dtype="bfloat16", head_dtype="bfloat16", width=width)
    assert caught.value.reason is Reason.SESSION_UNKNOWN
