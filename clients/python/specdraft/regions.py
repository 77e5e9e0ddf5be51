"""Regions: the target's own GPU buffers, opened by the service, so that hidden rows in them are not copied."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import TYPE_CHECKING

from specdraft.errors import SpecdraftError
from specdraft.exchanges import Exchange
from specdraft.memory import DeviceRange
from specdraft.v1 import session_pb2, tensor_pb2

if TYPE_CHECKING:
    from collections.abc import Callable

    from specdraft.memory import ClientGpu

__all__ = ["Region", "Regions"]


class Region:
    """A registered buffer. Rows that lie in it are passed by reference: keep them until the answer is there."""

    def __init__(self, region_id: bytes, memory: DeviceRange, close: Callable[[Region], None]) -> None:
        self.region_id = region_id
        self.memory = memory
        self._close = close

    def close(self) -> None:
        """Unregisters it, once the service no longer reads it: to be done before the buffer is freed."""
        self._close(self)


class Regions:
    """The regions of one session. Used by several threads."""

    def __init__(self, gpu: ClientGpu, call: Callable[[Exchange], object], timeout_s: float) -> None:
        self._gpu = gpu
        self._call = call
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._open: list[Region] = []

    def register(self, buffer: object) -> Region:
        """Has the service open a buffer.

        Raises:
            ValueError: it is no dense array in GPU memory.
            SpecdraftError: `MEMORY_NOT_SHAREABLE`, `TRANSPORT_UNAVAILABLE` (the service allows none), ...
        """
        memory = DeviceRange.of(buffer)
        handle, size, offset = self._gpu.export(memory)
        request = session_pb2.RegisterRegionRequest(
            cuda_ipc_handle=handle,
            device_uuid=self._gpu.uuid,
            allocation_size_bytes=size,
            offset_bytes=offset,
            length_bytes=memory.nbytes,
        )
        answer = self._call(Exchange("RegisterRegion", request, self._timeout_s))
        assert isinstance(answer, session_pb2.RegisterRegionResponse), "it is the call's answer"
        region = Region(answer.region_id, memory, self._unregister)
        with self._lock:
            self._open.append(region)
        return region

    def find(self, rows: DeviceRange) -> tensor_pb2.RegionRange | None:
        """How a request names rows that lie in a region; None = they lie in none."""
        with self._lock:
            for region in self._open:
                offset = rows.pointer - region.memory.pointer
                if offset >= 0 and offset + rows.nbytes <= region.memory.nbytes:
                    return tensor_pb2.RegionRange(region_id=region.region_id, offset_bytes=offset)
        return None

    def close(self) -> None:
        """Forgets all of them: they end with the session."""
        with self._lock:
            self._open.clear()

    def _unregister(self, region: Region) -> None:
        with self._lock:
            if region not in self._open:
                return
            self._open.remove(region)
        request = session_pb2.UnregisterRegionRequest(region_id=region.region_id)
        with suppress(SpecdraftError):  # it ends with the session at the latest
            self._call(Exchange("UnregisterRegion", request, self._timeout_s))
