"""Driver calls: the real package's names and argument counts, and a simulated GPU that bites where a real one does."""

import ctypes
import inspect
import re
import threading
from types import SimpleNamespace
from typing import ClassVar

import pytest

from drafter_service.memory.device_loss import is_sticky
from specdraft.memory.cuda import CudaDriver, CudaError, connections_problem, format_uuid
from specdraft.memory.cuda_bindings import CudaBindingsDriver
from specdraft.memory.simulated import SimulatedDriver

driver = pytest.importorskip("cuda.bindings.driver", reason="cuda-bindings is not installed")

CALLS = {
    "devices": (),
    "make_current": (0,),
    "allocate": (4096,),
    "free": (64,),
    "export_handle": (64,),
    "open_handle": (bytes(range(64)),),
    "close_handle": (64,),
    "address_range": (64,),
    "register_host": (64, 4096),
    "unregister_host": (64,),
    "create_stream": (),
    "destroy_stream": (7,),
    "is_done": (7,),
    "synchronize": (7,),
    "write_value": (7, 64, 3),
    "wait_value": (7, 64, 3),
    "copy": (7, 64, 128, 32),
    "fill": (7, 64, 0, 32),
    "can_access_peer": (0, 1),
}


class CheckedBindings:
    """Calls answer success, and have the names, argument names and argument counts of the real package."""

    VALUES: ClassVar = {"cuMemGetAddressRange": (64, 4096), "cuDeviceGetCount": (2,), "cuDeviceCanAccessPeer": (1,)}
    NOTHING = re.compile(
        "cu(Init|CtxSetCurrent|MemFree|IpcClose|MemHostRegister|MemHostUn|StreamDestroy|StreamQ|StreamS|StreamW|Memcpy|Memset)"
    )

    def __init__(self, failing=None):
        self.called = []
        self.failing = failing or {}

    def __getattr__(self, name):
        real = getattr(driver, name)
        if not name.startswith("cu") or not callable(real):
            return real
        return lambda *arguments: self.call(name, real, arguments)

    def call(self, name, real, arguments):
        parameters = re.match(rf"{name}\((.*)\)", real.__doc__)[1]
        names = [one.split(":")[0].split()[-1] for one in parameters.split(",")] if parameters else []
        assert len(names) == len(arguments), (name, names)
        self.called.append((name, dict(zip(names, arguments, strict=True))))
        if name in self.failing:
            return (getattr(driver.CUresult, self.failing[name]),)
        if name == "cuIpcGetMemHandle":
            handle = driver.CUipcMemHandle()
            ctypes.memmove(handle.getPtr(), bytes(range(64)), 64)
            return driver.CUresult.CUDA_SUCCESS, handle
        if name == "cuDeviceGetUuid":
            return driver.CUresult.CUDA_SUCCESS, SimpleNamespace(bytes=b"u" * 16)
        values = () if self.NOTHING.match(name) else self.VALUES.get(name, (64,))
        return driver.CUresult.CUDA_SUCCESS, *values


def test_both_drivers_have_exactly_the_methods_of_the_interface():
    methods = {name for name in vars(CudaDriver) if not name.startswith("_")}
    assert methods == set(CALLS)
    for kind in (CudaBindingsDriver, SimulatedDriver):
        for name in methods:
            wanted = list(inspect.signature(getattr(CudaDriver, name)).parameters)
            assert list(inspect.signature(getattr(kind, name)).parameters) == wanted


@pytest.mark.parametrize("method", CALLS)
def test_every_call_fits_the_installed_package(method):
    bindings = CheckedBindings()
    getattr(CudaBindingsDriver(bindings), method)(*CALLS[method])
    assert len(bindings.called) > 1, "cuInit, and what the method is for"


def test_values_and_pointers_stand_where_the_package_wants_them():
    bindings = CheckedBindings()
    real = CudaBindingsDriver(bindings)
    real.wait_value(7, 64, 3)
    real.write_value(8, 72, 4)
    real.copy(9, 64, 128, 32)
    real.fill(9, 64, 1, 32)
    called = dict(bindings.called)
    assert called["cuStreamWaitValue64"] == {"stream": 7, "addr": 64, "value": 3, "flags": 0}
    assert called["cuStreamWriteValue64"] == {"stream": 8, "addr": 72, "value": 4, "flags": 0}
    assert called["cuMemcpyAsync"] == {"dst": 64, "src": 128, "ByteCount": 32, "hStream": 9}
    assert called["cuMemsetD8Async"] == {"dstDevice": 64, "uc": 1, "N": 32, "hStream": 9}
    assert driver.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ == 0
    assert driver.CUstreamWriteValue_flags.CU_STREAM_WRITE_VALUE_DEFAULT == 0


def test_handles_are_copied_byte_for_byte():
    bindings = CheckedBindings()
    real = CudaBindingsDriver(bindings)
    assert real.export_handle(64) == bytes(range(64))
    real.open_handle(bytes(range(64)))
    opened = dict(bindings.called)["cuIpcOpenMemHandle"]["handle"]
    assert ctypes.string_at(opened.getPtr(), 64) == bytes(range(64))
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        real.open_handle(b"short")


def test_errors_carry_the_driver_s_name_and_never_an_argument():
    bindings = CheckedBindings(
        {"cuIpcOpenMemHandle": "CUDA_ERROR_INVALID_HANDLE", "cuStreamQuery": "CUDA_ERROR_NOT_READY"}
    )
    real = CudaBindingsDriver(bindings)
    with pytest.raises(CudaError) as caught:
        real.open_handle(b"secret!!" * 8)
    assert str(caught.value) == "cuIpcOpenMemHandle: CUDA_ERROR_INVALID_HANDLE"
    assert not caught.value.is_sticky
    assert real.is_done(7) is False


def test_every_sticky_error_is_one_that_the_package_knows():
    from specdraft.memory.cuda import _STICKY

    assert {result.name for result in driver.CUresult} >= _STICKY
    assert CudaError("cuStreamQuery", "CUDA_ERROR_ILLEGAL_ADDRESS").is_sticky
    assert not CudaError("cuMemAlloc", "CUDA_ERROR_OUT_OF_MEMORY").is_sticky


TORCHS_ADVICE = """
Search for it in https://docs.nvidia.com/cuda/cuda-runtime-api/group__CUDART__TYPES.html for more information.
CUDA kernel errors might be asynchronously reported at some other API call, so the stacktrace below might be incorrect.
For debugging consider passing CUDA_LAUNCH_BLOCKING=1
Compile with `TORCH_USE_CUDA_DSA` to enable device-side assertions.
"""


@pytest.mark.parametrize(
    ("text", "is_the_end"),
    [
        ("CUDA error: an illegal memory access was encountered", True),
        ("CUDA error: device-side assert triggered", True),
        ("CUDA error: operation failed due to a previous error during capture", False),
        ("CUDA error: operation not permitted when stream is capturing", False),
        ("CUDA out of memory. Tried to allocate 2.00 GiB.", False),
    ],
)
def test_what_torch_advises_behind_every_error_does_not_make_it_the_end_of_the_device(text, is_the_end):
    assert is_sticky(RuntimeError(text + TORCHS_ADVICE)) is is_the_end


def test_a_machine_without_a_driver_says_so():
    def no_library(_flags):
        raise OSError("no libcuda")

    with pytest.raises(CudaError, match="cuInit: OSError"):
        CudaBindingsDriver(SimpleNamespace(cuInit=no_library))


def test_lanes_need_a_hardware_queue_each_and_one_for_the_rest():
    assert connections_problem("32", 24) == ""
    assert connections_problem(None, 7) == ""
    assert "by default" in connections_problem(None, 8)
    assert "at least 2" in connections_problem("1", 1)
    assert connections_problem(None, 1, is_mps=True) == ""
    assert "at least 3" in connections_problem(None, 2, is_mps=True)


def test_uuids_are_written_as_the_vendor_s_tools_do():
    assert format_uuid(bytes(range(16))) == "GPU-00010203-0405-0607-0809-0a0b0c0d0e0f"


@pytest.fixture
def machine(tmp_path):
    """Two processes on one simulated GPU whose streams only move when they are told to."""
    made = [SimulatedDriver(tmp_path, pid=pid, num_queues=2, runs=False, block_s=0.05) for pid in (100, 200)]
    for one in made:
        one.make_current(0)
    yield made
    for one in made:
        one.close()
    assert not list(tmp_path.iterdir())


def read(pointer, size=4):
    return ctypes.string_at(pointer, size)


def test_what_one_process_writes_the_other_reads(machine):
    service, client = machine
    pointer = service.allocate(8192)
    mapped = client.open_handle(service.export_handle(pointer))
    ctypes.memmove(mapped + 4096, b"rows", 4)
    assert mapped != pointer
    assert read(pointer + 4096) == b"rows"
    assert client.address_range(mapped + 5000) == (mapped, 8192)


def test_a_handle_repeats_after_free_and_realloc_and_an_old_mapping_stays_readable(machine):
    service, client = machine
    pointer = service.allocate(4096)
    handle = service.export_handle(pointer)
    mapped = client.open_handle(handle)
    ctypes.memmove(pointer, b"old.", 4)
    service.free(pointer)
    again = service.allocate(4096)
    ctypes.memmove(again, b"new.", 4)
    assert service.export_handle(again) == handle
    assert read(mapped) == b"old."
    assert read(client.open_handle(handle)) == b"new."


def test_what_cannot_be_shared_is_refused(machine, tmp_path):
    service, client = machine
    with pytest.raises(CudaError, match="INVALID_VALUE"):
        service.export_handle(service.allocate_virtual(4096))
    with pytest.raises(CudaError, match="INVALID_HANDLE"):
        client.open_handle(b"nothing".ljust(64, b"\0"))
    twin = SimulatedDriver(tmp_path, pid=100, runs=False)
    twin.make_current(0)
    with pytest.raises(CudaError, match="INVALID_CONTEXT"):
        twin.open_handle(service.export_handle(service.allocate(4096)))
    twin.close()


def test_a_wait_holds_its_hardware_queue_and_whatever_blocks_while_it_is_open(machine):
    service, _ = machine
    page = service.allocate(4096)
    streams = [service.create_stream() for _ in range(3)]  # two queues: the first and the third share one
    service.wait_value(streams[0], page, 1)
    for index, stream in enumerate(streams):
        service.write_value(stream, page + 64 * (index + 1), 7)
    service.drain()
    assert [read(page + 64 * n, 1) for n in (1, 2, 3)] == [b"\0", b"\7", b"\0"]
    assert service.num_open_waits == 1
    with pytest.raises(TimeoutError, match="a wait is open"):
        service.free(page)
    ctypes.c_int64.from_address(page).value = (1 << 63) - 1
    service.drain()
    assert read(page + 192, 1) == b"\7"
    service.free(page)


def test_calls_need_a_context_in_their_own_thread(machine):
    service, _ = machine
    caught = []

    def call():
        with pytest.raises(CudaError, match="INVALID_CONTEXT") as error:
            service.allocate(4096)
        caught.append(error.value)

    thread = threading.Thread(target=call)
    thread.start()
    thread.join()
    assert caught


def test_a_sticky_error_ends_every_later_call(machine):
    service, _ = machine
    stream = service.create_stream()
    with pytest.raises(CudaError, match="ILLEGAL_ADDRESS"):
        service.write_value(stream, 64, 1)
    with pytest.raises(CudaError) as caught:
        service.is_done(stream)
    assert caught.value.is_sticky
