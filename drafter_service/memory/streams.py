"""Torch's work on a stream that the driver made."""

from __future__ import annotations

from collections.abc import Callable

import torch

from specdraft.memory.cuda import CudaDriver
from specdraft.memory.simulated import SimulatedDriver


def enqueuer(driver: CudaDriver, device: torch.device) -> Callable[[int, Callable[[], None]], None]:
    """A function that enqueues work: (stream, work). On a simulated GPU the work is done when its turn comes."""
    if isinstance(driver, SimulatedDriver):
        return driver.launch

    def enqueue(stream: int, work: Callable[[], None]) -> None:
        with torch.cuda.stream(torch.cuda.ExternalStream(stream, device=device)):
            work()

    return enqueue
