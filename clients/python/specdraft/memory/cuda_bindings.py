"""The interface `CudaDriver` over NVIDIA's cuda-bindings. The package and the driver are looked for when it is made."""

from __future__ import annotations

import ctypes
from typing import Any

from specdraft.memory.cuda import IPC_HANDLE_SIZE_BYTES, CudaError

__all__ = ["CudaBindingsDriver"]


class CudaBindingsDriver:
    """Driver calls through `cuda.bindings.driver`.

    Args:
        bindings: the module; None = import it. Tests give another.

    Raises:
        ImportError: cuda-bindings is not installed.
        CudaError: there is no driver, or it does not start.
    """

    def __init__(self, bindings: Any = None) -> None:
        self._cuda: Any = _import_bindings() if bindings is None else bindings
        self._contexts: dict[int, Any] = {}
        try:
            self._call("cuInit", 0)
        except CudaError:
            raise
        except Exception as error:  # the package raises an error of its own where there is no driver library
            raise CudaError("cuInit", type(error).__name__) from error

    def devices(self) -> tuple[bytes, ...]:
        """UUIDs of the GPUs that this process sees."""
        return tuple(
            bytes(self._call("cuDeviceGetUuid", self._call("cuDeviceGet", ordinal)).bytes)
            for ordinal in range(self._call("cuDeviceGetCount"))
        )

    def make_current(self, device: int) -> None:
        """Makes the primary context current; retained once, until the process ends."""
        if device not in self._contexts:
            self._contexts[device] = self._call("cuDevicePrimaryCtxRetain", self._call("cuDeviceGet", device))
        self._call("cuCtxSetCurrent", self._contexts[device])

    def allocate(self, size: int) -> int:
        """cuMemAlloc."""
        return int(self._call("cuMemAlloc", size))

    def free(self, pointer: int) -> None:
        """cuMemFree."""
        self._call("cuMemFree", pointer)

    def export_handle(self, pointer: int) -> bytes:
        """cuIpcGetMemHandle."""
        # Not every version of the package shows the handle's bytes as an attribute.
        handle = self._call("cuIpcGetMemHandle", pointer)
        return ctypes.string_at(handle.getPtr(), IPC_HANDLE_SIZE_BYTES)

    def open_handle(self, handle: bytes) -> int:
        """cuIpcOpenMemHandle, with access to a peer GPU's memory where that is what it is."""
        if len(handle) != IPC_HANDLE_SIZE_BYTES:
            raise CudaError("cuIpcOpenMemHandle", "CUDA_ERROR_INVALID_VALUE")
        opened = self._cuda.CUipcMemHandle()
        ctypes.memmove(opened.getPtr(), handle, IPC_HANDLE_SIZE_BYTES)
        flags = self._cuda.CUipcMem_flags.CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS
        return int(self._call("cuIpcOpenMemHandle", opened, int(flags)))

    def close_handle(self, pointer: int) -> None:
        """cuIpcCloseMemHandle."""
        self._call("cuIpcCloseMemHandle", pointer)

    def address_range(self, pointer: int) -> tuple[int, int]:
        """cuMemGetAddressRange."""
        base, size = self._call("cuMemGetAddressRange", pointer)
        return int(base), int(size)

    def register_host(self, address: int, size: int) -> int:
        """cuMemHostRegister, for every context and mapped for the device."""
        flags = self._cuda.CU_MEMHOSTREGISTER_PORTABLE | self._cuda.CU_MEMHOSTREGISTER_DEVICEMAP
        self._call("cuMemHostRegister", address, size, flags)
        return int(self._call("cuMemHostGetDevicePointer", address, 0))

    def unregister_host(self, address: int) -> None:
        """cuMemHostUnregister."""
        self._call("cuMemHostUnregister", address)

    def create_stream(self) -> int:
        """cuStreamCreate, non-blocking."""
        return int(self._call("cuStreamCreate", int(self._cuda.CUstream_flags.CU_STREAM_NON_BLOCKING)))

    def destroy_stream(self, stream: int) -> None:
        """cuStreamDestroy."""
        self._call("cuStreamDestroy", stream)

    def is_done(self, stream: int) -> bool:
        """cuStreamQuery."""
        try:
            self._call("cuStreamQuery", stream)
        except CudaError as error:
            if error.name == "CUDA_ERROR_NOT_READY":
                return False
            raise
        return True

    def synchronize(self, stream: int) -> None:
        """cuStreamSynchronize."""
        self._call("cuStreamSynchronize", stream)

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        """cuStreamWriteValue64 with the default flags: they keep the memory barrier."""
        self._call("cuStreamWriteValue64", stream, pointer, value, 0)

    def wait_value(self, stream: int, pointer: int, value: int) -> None:
        """cuStreamWaitValue64, >=."""
        flags = self._cuda.CUstreamWaitValue_flags.CU_STREAM_WAIT_VALUE_GEQ
        self._call("cuStreamWaitValue64", stream, pointer, value, int(flags))

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """cuMemcpyAsync."""
        self._call("cuMemcpyAsync", target, source, size, stream)

    def fill(self, stream: int, pointer: int, value: int, size: int) -> None:
        """cuMemsetD8Async."""
        self._call("cuMemsetD8Async", pointer, value, size, stream)

    def can_access_peer(self, device: int, peer: int) -> bool:
        """cuDeviceCanAccessPeer."""
        first, second = (self._call("cuDeviceGet", ordinal) for ordinal in (device, peer))
        return bool(self._call("cuDeviceCanAccessPeer", first, second))

    def _call(self, name: str, *arguments: Any) -> Any:
        """Calls a function of the driver; returns what it returned behind its error code.

        Raises:
            CudaError: by the driver's own name of the error.
        """
        code, *values = getattr(self._cuda, name)(*arguments)
        if int(code):
            raise CudaError(name, getattr(code, "name", str(int(code))))
        return values[0] if len(values) == 1 else tuple(values)


def _import_bindings() -> Any:
    from cuda.bindings import driver

    return driver
