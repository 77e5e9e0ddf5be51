"""A GPU played by files and threads of the host: for tests without a GPU, and for dry runs. It computes nothing.

It behaves like the real driver where that has bitten somebody: IPC handles repeat after free and realloc; an exporter
that dies leaves its importers' mappings readable; virtual-memory allocations cannot be exported; equal pids are
refused; streams share a few hardware queues, in which an open wait stops everything behind it; freeing and unmapping
block while a wait is open; a sticky error ends every later call; calls need a current context. A file "lost" in the
directory that holds the name of such an error breaks the device for all.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from specdraft.memory.cuda import IPC_HANDLE_SIZE_BYTES, CudaError

__all__ = ["SimulatedDriver"]

_IDLE_S: Final = 100e-6
_EMPTY_S: Final = 0.05
_WORD_BYTES: Final = 8


@dataclass(slots=True)
class _Memory:
    mapping: mmap.mmap
    view: ctypes.Array[ctypes.c_char] | None
    address: int
    size: int
    path: Path | None  # None: virtual memory, which has no handle
    device: int

    def unmap(self) -> None:
        self.view = None
        with suppress(BufferError):  # somebody still looks at it: the pages go with the last view
            self.mapping.close()


@dataclass(slots=True)
class _Command:
    stream: int
    run: Callable[[], bool]  # False: not yet
    is_wait: bool = False


class SimulatedDriver:
    """One process's view of simulated GPUs. Device pointers are addresses of host memory, so that anybody can look.

    Args:
        directory: where the GPUs' memory lies; processes with the same one share them.
        pid: of this process, as others see it.
        num_devices: GPUs that it sees: the first ones of the directory.
        num_queues: hardware queues; with more streams than these, some share one.
        runs: a thread works off the streams; False = `step` does.
        has_peers: whether the GPUs reach each other's memory.
        block_s: a call that blocks longer than this raises: a test must not hang.
    """

    def __init__(
        self,
        directory: Path,
        *,
        pid: int = 0,
        num_devices: int = 1,
        num_queues: int = 32,
        runs: bool = True,
        has_peers: bool = True,
        block_s: float = 10.0,
    ) -> None:
        self.pid = pid or os.getpid()
        self.num_opens = 0
        self._directory = directory
        self._death = directory / "lost"
        self._num_devices = num_devices
        self._has_peers = has_peers
        self._block_s = block_s
        self._lock = threading.Condition()
        self._current = threading.local()
        self._own: dict[int, _Memory] = {}
        self._imported: dict[int, _Memory] = {}
        self._registered: dict[int, int] = {}
        self._queues: list[deque[_Command]] = [deque() for _ in range(num_queues)]
        self._streams: dict[int, int] = {0: 0}  # the default stream
        self._next_stream = 1
        self._broken = ""
        self._closed = threading.Event()
        self._thread = threading.Thread(target=self._run, name="simulated-gpu", daemon=True)
        if runs:
            self._thread.start()

    def close(self) -> None:
        """The process ends: its own memory goes, what others have mapped stays with them."""
        self._closed.set()
        if self._thread.ident is not None:
            self._thread.join()
        for memory in [*self._own.values(), *self._imported.values()]:
            memory.unmap()
        for memory in self._own.values():
            if memory.path is not None:
                memory.path.unlink(missing_ok=True)
        self._own.clear()
        self._imported.clear()

    def break_device(self, name: str) -> None:
        """From now on every call fails with this error."""
        self._broken = name

    @property
    def num_bytes(self) -> int:
        """Bytes of this process's own allocations."""
        return sum(memory.size for memory in self._own.values())

    @property
    def num_imports(self) -> int:
        """Mappings of others' allocations."""
        return len(self._imported)

    @property
    def num_registered(self) -> int:
        """Host ranges that are registered."""
        return len(self._registered)

    @property
    def num_streams(self) -> int:
        """Streams that were not destroyed."""
        return len(self._streams) - 1

    def devices(self) -> tuple[bytes, ...]:
        """UUIDs made of the ordinal."""
        self._check("cuDeviceGetUuid", needs_context=False)
        return tuple(b"simulated-gpu-%02d" % ordinal for ordinal in range(self._num_devices))

    def make_current(self, device: int) -> None:
        """Makes a device current in this thread."""
        self._check("cuCtxSetCurrent", needs_context=False)
        if not 0 <= device < self._num_devices:
            raise CudaError("cuCtxSetCurrent", "CUDA_ERROR_INVALID_DEVICE")
        self._current.device = device

    def allocate(self, size: int) -> int:
        """A file of its own, with the lowest number that is free."""
        self._check("cuMemAlloc")
        with self._lock:
            number = 0
            while (path := self._directory / f"{self.pid}-{self._current.device}-{number}").exists():
                number += 1
            memory = _mapped(path, size, os.O_CREAT | os.O_RDWR | os.O_EXCL, self._current.device)
            self._own[memory.address] = memory
        return memory.address

    def allocate_virtual(self, size: int) -> int:
        """Memory that was mapped by the virtual memory interface, as expandable segments are."""
        self._check("cuMemMap")
        mapping = mmap.mmap(-1, size)
        view = (ctypes.c_char * size).from_buffer(mapping)
        memory = _Memory(mapping, view, ctypes.addressof(view), size, None, self._current.device)
        self._own[memory.address] = memory
        return memory.address

    def free(self, pointer: int) -> None:
        """Frees; its name, and with it its handle, may be used again."""
        self._check("cuMemFree")
        self._block("cuMemFree")
        memory = self._own.pop(pointer, None)
        if memory is None:
            raise CudaError("cuMemFree", "CUDA_ERROR_INVALID_VALUE")
        memory.unmap()
        if memory.path is not None:
            memory.path.unlink()

    def export_handle(self, pointer: int) -> bytes:
        """The file's name."""
        self._check("cuIpcGetMemHandle")
        memory = self._own.get(pointer)
        if memory is None or memory.path is None:
            raise CudaError("cuIpcGetMemHandle", "CUDA_ERROR_INVALID_VALUE")
        return memory.path.name.encode().ljust(IPC_HANDLE_SIZE_BYTES, b"\0")

    def open_handle(self, handle: bytes) -> int:
        """Maps the file that has this name now."""
        self._check("cuIpcOpenMemHandle")
        try:
            pid, device, _ = (int(part) for part in handle.rstrip(b"\0").decode().split("-"))
            if pid == self.pid:
                raise CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_CONTEXT")
            path = self._directory / handle.rstrip(b"\0").decode()
            memory = _mapped(path, path.stat().st_size, os.O_RDWR, device)
        except (ValueError, OSError) as error:
            raise CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_HANDLE") from error
        self.num_opens += 1
        self._imported[memory.address] = memory
        return memory.address

    def close_handle(self, pointer: int) -> None:
        """Unmaps."""
        self._check("cuIpcCloseMemHandle")
        self._block("cuIpcCloseMemHandle")
        memory = self._imported.pop(pointer, None)
        if memory is None:
            raise CudaError("cuIpcCloseMemHandle", "CUDA_ERROR_INVALID_VALUE")
        memory.unmap()

    def address_range(self, pointer: int) -> tuple[int, int]:
        """Of the allocation, or of the whole mapping of somebody else's."""
        self._check("cuMemGetAddressRange")
        for memory in [*self._own.values(), *self._imported.values()]:
            if memory.address <= pointer < memory.address + memory.size:
                return memory.address, memory.size
        raise CudaError("cuMemGetAddressRange", "CUDA_ERROR_NOT_FOUND")

    def register_host(self, address: int, size: int) -> int:
        """The device sees host memory where the host does."""
        self._check("cuMemHostRegister")
        if address in self._registered:
            raise CudaError("cuMemHostRegister", "CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED")
        self._registered[address] = size
        return address

    def unregister_host(self, address: int) -> None:
        """Ends that."""
        self._check("cuMemHostUnregister")
        self._block("cuMemHostUnregister")
        if self._registered.pop(address, None) is None:
            raise CudaError("cuMemHostUnregister", "CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED")

    def create_stream(self) -> int:
        """A stream; its hardware queue is one that few others use."""
        self._check("cuStreamCreate")
        with self._lock:
            stream = self._next_stream
            self._next_stream += 1
            used = list(self._streams.values())
            self._streams[stream] = min(range(len(self._queues)), key=used.count)
        return stream

    def destroy_stream(self, stream: int) -> None:
        """What is in it is still done."""
        self._check("cuStreamDestroy")
        if self._streams.pop(stream, None) is None:
            raise CudaError("cuStreamDestroy", "CUDA_ERROR_INVALID_HANDLE")

    def is_done(self, stream: int) -> bool:
        """Whether nothing of the stream is left."""
        self._check("cuStreamQuery")
        with self._lock:
            return not any(command.stream == stream for queue in self._queues for command in queue)

    def synchronize(self, stream: int) -> None:
        """Waits until nothing of the stream is left."""
        self._check("cuStreamSynchronize")
        with self._lock:
            if not self._lock.wait_for(lambda: self._is_empty(stream), self._block_s):
                raise TimeoutError("a stream was waited for that does not get on")

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        """Enqueues a store."""

        def run() -> bool:
            ctypes.c_int64.from_address(pointer).value = value
            return True

        self._enqueue("cuStreamWriteValue64", _Command(stream, run), pointer, _WORD_BYTES)

    def wait_value(self, stream: int, pointer: int, value: int) -> None:
        """Enqueues a wait; it holds its hardware queue."""

        def run() -> bool:
            return bool(ctypes.c_int64.from_address(pointer).value >= value)

        self._enqueue("cuStreamWaitValue64", _Command(stream, run, is_wait=True), pointer, _WORD_BYTES)

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Enqueues a copy."""

        def run() -> bool:
            ctypes.memmove(target, source, size)
            return True

        self._enqueue("cuMemcpyAsync", _Command(stream, run), 0, 0)

    def fill(self, stream: int, pointer: int, value: int, size: int) -> None:
        """Enqueues a fill."""

        def run() -> bool:
            ctypes.memset(pointer, value, size)
            return True

        self._enqueue("cuMemsetD8Async", _Command(stream, run), pointer, size)

    def launch(self, stream: int, work: Callable[[], object]) -> None:
        """Enqueues work of the host's that plays a kernel. No part of `CudaDriver`."""

        def run() -> bool:
            work()
            return True

        self._enqueue("cuLaunchKernel", _Command(stream, run), 0, 0)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """As the machine was made."""
        self._check("cuDeviceCanAccessPeer", needs_context=False)
        return device != peer and self._has_peers

    def step(self) -> bool:
        """Does what every hardware queue can do next; False if nothing could be done."""
        with self._lock:
            heads = [(queue, queue[0]) for queue in self._queues if queue]
        has_worked = False
        for queue, command in heads:
            if command.run():
                with self._lock:
                    queue.popleft()
                    self._lock.notify_all()
                has_worked = True
        return has_worked

    def drain(self) -> None:
        """Steps until nothing more can be done."""
        while self.step():
            pass

    @property
    def num_open_waits(self) -> int:
        """Hardware queues that a wait holds."""
        with self._lock:
            return sum(bool(queue) and queue[0].is_wait for queue in self._queues)

    def _run(self) -> None:
        while not self._closed.is_set():
            if not self.step():
                with self._lock:
                    if not any(self._queues):
                        self._lock.wait(_EMPTY_S)
                        continue
                time.sleep(_IDLE_S)

    def _enqueue(self, call: str, command: _Command, pointer: int, size: int) -> None:
        self._check(call)
        if size and not self._reaches(pointer, size):
            self._broken = "CUDA_ERROR_ILLEGAL_ADDRESS"
            raise CudaError(call, self._broken)
        if command.stream not in self._streams:
            raise CudaError(call, "CUDA_ERROR_INVALID_HANDLE")
        with self._lock:
            self._queues[self._streams[command.stream]].append(command)
            self._lock.notify_all()

    def _reaches(self, pointer: int, size: int) -> bool:
        ranges = [(m.address, m.size) for m in [*self._own.values(), *self._imported.values()]]
        ranges += self._registered.items()
        return any(base <= pointer and pointer + size <= base + length for base, length in ranges)

    def _is_empty(self, stream: int) -> bool:
        return not any(command.stream == stream for queue in self._queues for command in queue)

    def _block(self, call: str) -> None:
        with self._lock:
            if not self._lock.wait_for(lambda: not any(c.is_wait for q in self._queues for c in q), self._block_s):
                raise TimeoutError(f"{call} blocked: a wait is open")

    def _check(self, call: str, *, needs_context: bool = True) -> None:
        if not self._broken and self._death.exists():
            self._broken = self._death.read_text(encoding="ascii")
        if self._broken:
            raise CudaError(call, self._broken)
        if needs_context and getattr(self._current, "device", None) is None:
            raise CudaError(call, "CUDA_ERROR_INVALID_CONTEXT")


def _mapped(path: Path, size: int, flags: int, device: int) -> _Memory:
    descriptor = os.open(path, flags, 0o600)
    try:
        if flags & os.O_CREAT:
            os.ftruncate(descriptor, size)
        mapping = mmap.mmap(descriptor, size)
    finally:
        os.close(descriptor)
    view = (ctypes.c_char * size).from_buffer(mapping)
    return _Memory(mapping, view, ctypes.addressof(view), size, path, device)
