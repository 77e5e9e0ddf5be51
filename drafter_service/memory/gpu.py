"""What a service with a GPU shares with its clients: the GPU's identity, arenas, mappings of theirs, the reaper."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch

from drafter_service.memory.cuda_arena import ArenaPool, CudaArena, device_error
from drafter_service.memory.layout import ArenaLayout
from drafter_service.memory.reaper import Reaper
from drafter_service.memory.regions import RegionTable
from specdraft.errors import Reason, make_error
from specdraft.memory.cuda import UUID_SIZE_BYTES, CudaDriver, CudaError, format_uuid
from specdraft.memory.mappings import Mappings


@dataclass(frozen=True, slots=True)
class GpuLimits:
    """Limits of shared GPU memory.

    Attributes:
        arena_bytes: most bytes of all arenas.
        max_regions: most regions of a session; 0 = clients' memory is not opened.
    """

    arena_bytes: int
    max_regions: int


class GpuMemory:
    """Shared GPU memory of one service.

    Args:
        driver: the driver calls.
        device: the GPU's ordinal, as the driver counts.
        torch_device: the same GPU for torch; a CPU where the GPU is simulated.
        limits: how much may be shared.
        pid: of this process; 0 = the real one.
    """

    def __init__(
        self, driver: CudaDriver, device: int, torch_device: torch.device, limits: GpuLimits, pid: int = 0
    ) -> None:
        self.driver = driver
        self.device = device
        self.torch_device = torch_device
        self.limits = limits
        self.uuids = driver.devices()
        self.reaper = Reaper(lambda: driver.make_current(device))
        self.pool = ArenaPool(driver, device, limits.arena_bytes, self.reaper)
        self.mappings = Mappings(driver, device, self.reaper.later)
        self._pid = pid or os.getpid()

    @property
    def uuid(self) -> bytes:
        """The drafting GPU's."""
        return self.uuids[self.device]

    def check_client(self, pid: int, uuid: bytes) -> None:
        """Whether CUDA memory can be shared with this client.

        Args:
            pid: the client's, as it sees itself.
            uuid: of the target's GPU.

        Raises:
            SAME_PID, GPU_UUID_NOT_VISIBLE.
        """
        if pid == self._pid:
            text = f"client and service both have the pid {pid}, with which CUDA IPC cannot work: give one an init"
            raise make_error(Reason.SAME_PID, text, pid=pid)
        self.check_visible(uuid)

    def check_visible(self, uuid: bytes) -> None:
        """Whether memory of this GPU can be used by the drafting one. Raises GPU_UUID_NOT_VISIBLE."""
        visible = ", ".join(format_uuid(one) for one in self.uuids)
        asked = format_uuid(uuid) if len(uuid) == UUID_SIZE_BYTES else "none"
        if uuid not in self.uuids:
            raise make_error(
                Reason.GPU_UUID_NOT_VISIBLE,
                f"the client's GPU {asked} is not visible here; visible are {visible}",
                asked=asked,
                visible=visible,
            )
        peer = self.uuids.index(uuid)
        if peer != self.device and not self.driver.can_access_peer(self.device, peer):
            raise make_error(
                Reason.GPU_UUID_NOT_VISIBLE,
                f"the client's GPU {asked} is visible, but out of reach of the drafting one, {format_uuid(self.uuid)}",
                asked=asked,
                visible=visible,
            )

    def make_arena(self, layout: ArenaLayout) -> CudaArena:
        """A session's arena. Raises ARENA_EXHAUSTED, MEMORY_NOT_SHAREABLE, DEVICE_LOST."""
        try:
            self.driver.make_current(self.device)
        except CudaError as error:
            raise device_error(error, layout.size, self.limits.arena_bytes) from None
        return CudaArena(layout, self.pool, self.driver, self.torch_device)

    def make_regions(self) -> RegionTable | None:
        """A session's regions; None where they are not allowed."""
        if not self.limits.max_regions:
            return None
        return RegionTable(self.mappings, self.torch_device, self.limits.max_regions)

    def close(self) -> None:
        """Frees what is left."""
        self.pool.close()
        self.reaper.close()
