"""The rules for CUDA handles, one test each, with a simulated GPU; each has bitten somebody with a real one."""

import ctypes
import logging
import re
import threading
import time

import pytest
import torch

from drafter_service.memory.cuda_arena import GRANULE
from drafter_service.memory.gpu import GpuLimits, GpuMemory
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.memory.regions import RegionWish
from specdraft.errors import Reason, SpecdraftError
from specdraft.memory.counters import CounterPage
from specdraft.memory.cuda import format_uuid
from specdraft.memory.mappings import Mappings, check_range
from specdraft.memory.simulated import SimulatedDriver

CPU = torch.device("cpu")
WIDTH = 8
ROW_BYTES = WIDTH * 4
SIZE = 1 << 16


@pytest.fixture
def machine(tmp_path):
    with_gpus = Machine(tmp_path)
    yield with_gpus
    with_gpus.close()


class Machine:
    """A service and clients on one host with two simulated GPUs."""

    def __init__(self, directory):
        self.directory = directory
        self.drivers = []
        self.driver = self.process(100)
        self.gpu = GpuMemory(self.driver, 0, CPU, GpuLimits(8 * GRANULE, 3), pid=100)
        self.regions = self.gpu.make_regions()
        self.client = self.process(200)

    def process(self, pid, **options):
        driver = SimulatedDriver(self.directory, pid=pid, num_devices=2, **options)
        driver.make_current(0)
        self.drivers.append(driver)
        return driver

    def exported(self, size=SIZE, client=None):
        client = client or self.client
        pointer = client.allocate(size)
        return pointer, client.export_handle(pointer)

    def settle(self):
        assert self.gpu.reaper.wait_idle(5)

    def close(self):
        self.regions.close()
        self.gpu.close()
        assert self.driver.num_imports == 0
        assert self.driver.num_bytes == 0
        for driver in self.drivers:
            driver.close()
        assert not list(self.directory.iterdir())


def rows_at(pointer, values):
    """Writes rows of equal numbers, dense."""
    for index, value in enumerate(values):
        row = torch.full((WIDTH,), float(value))
        ctypes.memmove(pointer + index * ROW_BYTES, row.data_ptr(), ROW_BYTES)


def read(regions, region_id, offset, num_rows, **options):
    layout = {"dtype": "float32", "head_dtype": "float32", "width": WIDTH}
    return regions.hidden_rows(region_id, offset, num_rows, **layout | options)


def refused(reason, call, *arguments, **options):
    with pytest.raises(SpecdraftError) as caught:
        call(*arguments, **options)
    assert caught.value.reason is reason
    return caught.value


def test_rule_1_a_handle_opens_the_base_and_offsets_count_from_there(machine):
    pointer, handle = machine.exported()
    rows_at(pointer + 4096 + 64, [1, 2, 3])
    region = machine.regions.register(RegionWish(handle, SIZE, 4096, 4096))
    assert read(machine.regions, region, 64, 3)[:, 0].tolist() == [1.0, 2.0, 3.0]
    assert read(machine.regions, region, 64, 2, stride=2 * ROW_BYTES)[:, 0].tolist() == [1.0, 3.0]


@pytest.mark.parametrize(
    ("allocation", "offset", "length"),
    [
        (SIZE, SIZE + 1, 0),
        (SIZE, 0, SIZE + 1),
        (SIZE, 4096, SIZE),
        (2 * SIZE, 0, 2 * SIZE),
        (SIZE, (1 << 64) - 64, 128),
    ],
)
def test_rule_1_what_lies_outside_the_allocation_is_refused_whatever_the_numbers(machine, allocation, offset, length):
    _, handle = machine.exported()
    refused(Reason.MEMORY_OUT_OF_BOUNDS, machine.regions.register, RegionWish(handle, allocation, offset, length))
    machine.settle()
    assert len(machine.gpu.mappings) == 0


@pytest.mark.parametrize(
    ("offset", "num_rows", "stride"), [(4096, 1, 0), (0, 129, 0), ((1 << 64) - 32, 2, 0), (0, 2, 8)]
)
def test_rule_1_rows_outside_the_region_are_refused(machine, offset, num_rows, stride):
    _, handle = machine.exported()
    region = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
    refused(Reason.MEMORY_OUT_OF_BOUNDS, read, machine.regions, region, offset, num_rows, stride=stride)


def test_rule_2_an_exported_allocation_holds_one_arena_and_nothing_else(machine):
    arenas = [
        machine.gpu.make_arena(lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False))) for _ in range(2)
    ]
    ranges = [machine.driver.address_range(arena.pointer) for arena in arenas]
    assert ranges == [(arena.pointer, GRANULE) for arena in arenas]
    mapped = machine.client.open_handle(arenas[0].handle)
    assert machine.client.address_range(mapped)[1] == GRANULE
    for arena in arenas:
        arena.close()


def test_rule_2_what_was_exported_once_is_never_another_session_s(machine):
    layout = lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False))
    first = machine.gpu.make_arena(layout)
    spy = machine.client.open_handle(first.handle)
    first.close()
    machine.settle()
    second = machine.gpu.make_arena(layout)
    second.write_outputs(0, outputs())
    secret = ctypes.string_at(second.pointer, GRANULE)
    assert ctypes.string_at(spy, GRANULE) != secret
    second.close()


def outputs():
    from drafter_service.memory import SlotOutputs

    return SlotOutputs(7, 0, 1, (3, 4), (-0.5, -1.0), b"\1" * 64, 9, 8)


def test_rule_3_an_allocation_is_opened_once_however_many_regions_lie_in_it(machine):
    pointer, handle = machine.exported()
    rows_at(pointer, range(200))
    sessions = [machine.gpu.make_regions() for _ in range(2)]
    ids = [session.register(RegionWish(handle, SIZE, 4096 * n, 4096)) for n, session in enumerate(sessions)]
    failures = []

    def work(session, region, expected):
        found = [read(session, region, 0, 3)[:, 0].tolist() for _ in range(100)]
        failures.extend(one for one in found if one != expected)

    expected = [[0.0, 1.0, 2.0], [128.0, 129.0, 130.0]]
    threads = [threading.Thread(target=work, args=(sessions[n % 2], ids[n % 2], expected[n % 2])) for n in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert (machine.driver.num_opens, machine.driver.num_imports) == (1, 1)
    sessions[0].close()
    machine.settle()
    assert machine.driver.num_imports == 1
    sessions[1].close()
    machine.settle()
    assert machine.driver.num_imports == 0


def test_rule_3_every_failure_closes_what_it_opened(machine, monkeypatch):
    _, handle = machine.exported()
    refused(Reason.MEMORY_OUT_OF_BOUNDS, machine.regions.register, RegionWish(handle, 2 * SIZE, SIZE, 64))
    with monkeypatch.context() as patch:
        patch.setattr("drafter_service.memory.regions.bytes_at", broken)
        with pytest.raises(RuntimeError, match="broken"):
            machine.regions.register(RegionWish(handle, SIZE, 0, 64))
    for _ in range(3):
        machine.regions.register(RegionWish(handle, SIZE, 0, 64))
    error = refused(Reason.REGIONS_EXHAUSTED, machine.regions.register, RegionWish(handle, SIZE, 0, 64))
    assert error.details["limit"] == "3"
    machine.regions.close()
    machine.settle()
    assert machine.driver.num_imports == 0


def broken(*_):
    raise RuntimeError("broken on purpose")


def test_rule_4_gpus_are_named_by_uuid(machine):
    machine.gpu.check_client(200, machine.client.devices()[1])
    error = refused(Reason.GPU_UUID_NOT_VISIBLE, machine.gpu.check_client, 200, b"another gpu 0000")
    assert error.details["asked"] == format_uuid(b"another gpu 0000")
    assert error.details["visible"] == ", ".join(map(format_uuid, machine.driver.devices()))
    refused(Reason.GPU_UUID_NOT_VISIBLE, machine.gpu.check_client, 200, b"")


def test_rule_4_a_gpu_without_peer_access_is_refused(machine):
    lonely = machine.process(300, has_peers=False)
    gpu = GpuMemory(lonely, 0, CPU, GpuLimits(GRANULE, 0), pid=300)
    gpu.check_client(200, lonely.devices()[0])
    error = refused(Reason.GPU_UUID_NOT_VISIBLE, gpu.check_client, 200, lonely.devices()[1])
    assert "out of reach" in str(error)
    gpu.close()


def test_rule_5_equal_pids_are_told_before_the_driver_says_something_else(machine):
    error = refused(Reason.SAME_PID, machine.gpu.check_client, 100, machine.driver.devices()[0])
    assert error.details["pid"] == "100"
    twin = machine.process(100)
    _, handle = machine.exported(client=twin)
    refused(Reason.SAME_PID, machine.regions.register, RegionWish(handle, SIZE, 0, 64))


def test_rule_6_memory_that_cannot_be_shared_is_named(machine):
    error = refused(Reason.MEMORY_NOT_SHAREABLE, machine.regions.register, RegionWish(b"x" * 64, SIZE, 0, 64))
    assert "expandable segments" in str(error)
    assert "CUDA_ERROR_INVALID_HANDLE" in str(error)


def test_rule_7_a_repeated_handle_is_other_memory(machine):
    pointer, handle = machine.exported()
    rows_at(pointer, [1])
    old = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
    machine.regions.unregister(old, 1)
    machine.client.free(pointer)
    pointer, again = machine.exported()
    assert again == handle
    rows_at(pointer, [2])
    new = machine.regions.register(RegionWish(again, SIZE, 0, 4096))
    assert new != old
    assert read(machine.regions, new, 0, 1)[0, 0] == 2.0
    refused(Reason.REGION_UNKNOWN, read, machine.regions, old, 0, 1)


def test_rule_8_the_memory_of_a_client_that_died_is_let_go_with_its_session(machine):
    pointer, handle = machine.exported()
    rows_at(pointer, [5])
    region = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
    machine.client.close()
    assert read(machine.regions, region, 0, 1)[0, 0] == 5.0, "the mapping stays readable"
    machine.regions.close()
    machine.settle()
    assert machine.driver.num_imports == 0
    refused(Reason.REGION_UNKNOWN, read, machine.regions, region, 0, 1)


def test_rule_9_handles_are_in_no_text(machine, caplog):
    caplog.set_level(logging.DEBUG)
    _, handle = machine.exported()
    secret = handle.rstrip(b"\0").decode()
    texts = [repr(RegionWish(handle, SIZE, 0, 64))]
    for wish in (RegionWish(handle, 2 * SIZE, 0, 64), RegionWish(b"x" + handle[1:], SIZE, 0, 64)):
        with pytest.raises(SpecdraftError) as caught:
            machine.regions.register(wish)
        texts += [str(caught.value), repr(caught.value), repr(caught.value.details)]
    arena = machine.gpu.make_arena(lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False)))
    texts += [repr(arena), caplog.text]
    assert not [text for text in texts if secret in text or re.search(r"\\x00|x0-", text) or repr(handle) in text]
    arena.close()


def test_rule_10_every_thread_that_calls_has_a_context(machine):
    _, handle = machine.exported()
    done = []

    def call():
        region = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
        arena = machine.gpu.make_arena(lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False)))
        machine.regions.unregister(region, 1)
        arena.close()
        done.append(True)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert done
    machine.settle()


def test_a_region_is_unregistered_only_once_nobody_reads_it(machine):
    _, handle = machine.exported()
    region = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
    with machine.regions._reading(region):
        refused(Reason.TIMEOUT, machine.regions.unregister, region, 0.01)
    machine.regions.unregister(region, 1)
    refused(Reason.REGION_UNKNOWN, machine.regions.unregister, region, 1)


def test_a_region_whose_rows_are_not_finite_is_told(machine):
    pointer, handle = machine.exported()
    rows_at(pointer, [1, float("nan")])
    region = machine.regions.register(RegionWish(handle, SIZE, 0, 4096))
    assert refused(Reason.HIDDEN_NOT_FINITE, read, machine.regions, region, 0, 2).details["row"] == "1"


def test_arenas_keep_to_their_budget_and_nothing_is_lost(machine):
    layout = lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False))
    arenas = [machine.gpu.make_arena(layout) for _ in range(7)]
    machine.settle()
    refused_here = []
    while len(arenas) < 9 and not refused_here:
        try:
            arenas.append(machine.gpu.make_arena(layout))
        except SpecdraftError as error:
            refused_here.append(error.reason)
    assert (len(arenas), refused_here) == (8, [Reason.ARENA_EXHAUSTED])
    for arena in arenas:
        arena.close()
        arena.close()
    machine.settle()
    assert machine.driver.num_bytes == machine.gpu.pool.num_bytes <= GRANULE


def test_a_lost_device_is_called_so(machine):
    _, handle = machine.exported()
    machine.driver.break_device("CUDA_ERROR_ILLEGAL_ADDRESS")
    layout = lay_out(ArenaWish(1, 2, ROW_BYTES, 64, 32, 4, with_masks=False))
    assert "ILLEGAL_ADDRESS" in str(refused(Reason.DEVICE_LOST, machine.gpu.make_arena, layout))
    refused(Reason.DEVICE_LOST, machine.regions.register, RegionWish(handle, SIZE, 0, 64))
    machine.driver.break_device("")


def test_a_mapping_that_is_being_closed_is_closed_before_its_handle_is_opened_again(machine):
    jobs = []
    mappings = Mappings(machine.driver, 0, jobs.append)
    _, handle = machine.exported()
    first = mappings.open(handle, SIZE)
    mappings.close(handle)
    opened = []
    thread = threading.Thread(target=lambda: opened.append(mappings.open(handle, SIZE)))
    thread.start()
    assert not opened
    jobs.pop()()
    thread.join()
    assert opened[0].generation == first.generation + 1
    mappings.close(handle)
    jobs.pop()()


def test_ranges_do_not_wrap_around():
    check_range(64, 64, 0)
    check_range(64, 0, 64)
    for offset, length in ((-1, 1), (0, -1), (65, 0), (1, 64), (1 << 70, 1)):
        refused(Reason.MEMORY_OUT_OF_BOUNDS, check_range, 64, offset, length)


def test_memory_of_another_size_does_not_wait_for_a_lane_that_waits(machine):
    pool = machine.gpu.pool
    pointer, size = pool.take(GRANULE)
    assert machine.gpu.reaper.wait_idle(5), "one more of that size is kept ready"
    stream = machine.driver.create_stream()
    page = CounterPage()
    machine.driver.wait_value(stream, machine.driver.register_host(page.address, 4096), 1)
    began = time.monotonic()
    bigger = pool.take(2 * GRANULE)
    assert time.monotonic() - began < 1, "nothing was freed meanwhile"
    page.store(0, 1)
    pool.give(pointer, size)
    pool.give(*bigger)
    assert machine.gpu.reaper.wait_idle(10)
    machine.driver.unregister_host(page.address)
