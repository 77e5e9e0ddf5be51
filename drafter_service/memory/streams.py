"""Torch's work on a stream that the driver made."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Protocol

import torch

from specdraft.memory.cuda import CudaDriver
from specdraft.memory.simulated import SimulatedDriver


class StreamWork(Protocol):
    """Puts work onto streams. `run` is called within `on`, which is entered once for several pieces of work."""

    def on(self, stream: int) -> AbstractContextManager[object]:
        """While it is open, torch's current stream is this one."""

    def run(self, stream: int, work: Callable[[], None]) -> None:
        """Enqueues what the work does."""


class TorchWork:
    """On a GPU.

    Args:
        device: whose streams they are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams: dict[int, torch.cuda.ExternalStream] = {}

    def on(self, stream: int) -> AbstractContextManager[object]:
        """As the protocol's."""
        if stream not in self._streams:
            self._streams[stream] = torch.cuda.ExternalStream(stream, device=self._device)
        context: AbstractContextManager[object] = torch.cuda.stream(self._streams[stream])
        return context

    def run(self, _stream: int, work: Callable[[], None]) -> None:
        """As the protocol's."""
        work()


class SimulatedWork:
    """On a simulated GPU: work is done when its turn comes."""

    def __init__(self, driver: SimulatedDriver) -> None:
        self.run = driver.launch

    def on(self, _stream: int) -> AbstractContextManager[object]:
        """As the protocol's."""
        return nullcontext()


def stream_work(driver: CudaDriver, device: torch.device) -> StreamWork:
    """For this driver."""
    return SimulatedWork(driver) if isinstance(driver, SimulatedDriver) else TorchWork(device)
