"""What the device is worth: its faults are told from bugs and counted, and one that stays is noticed."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from drafter_service.engine.batch import RunEntry, Runner, RunResult
from drafter_service.memory.device_view import on_device

SIGNS = ("CUDA error", "Triton Error [CUDA]")
"""What faults say of themselves where PyTorch is older than 2.8, or where Triton met them."""


def is_fault(error: RuntimeError) -> bool:
    """Whether the device reported it. Memory that does not suffice is no fault of the device."""
    kind = getattr(torch, "AcceleratorError", ())
    return isinstance(error, kind) or str(error).startswith(SIGNS)


class DeviceWatch:
    """Around what runs batches.

    Args:
        runner: what runs them.
        device: where.
        on_fault: told of every fault that the device reports, but for the one by which it was lost.
        on_lost: told when the device answers nothing any more; whether that is news.
        clock: monotonic seconds.

    Attributes:
        last_run: when the last batch began and ended.
    """

    def __init__(
        self,
        runner: Runner,
        device: torch.device,
        on_fault: Callable[[], None],
        on_lost: Callable[[BaseException], bool],
        clock: Callable[[], float],
    ) -> None:
        self.last_run = (0.0, 0.0)
        self._clock = clock
        self._runner = runner
        self._device = device
        self._is_cpu = device.type == "cpu"
        self._on_fault = on_fault
        self._on_lost = on_lost

    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """As the runner's own."""
        began = self._clock()
        try:
            if self._is_cpu:
                return self._runner.run(entries)
            with on_device(self._device):
                return self._runner.run(entries)
        except RuntimeError as error:
            if is_fault(error) and not self._was_lost_now():
                self._on_fault()
            raise
        finally:
            self.last_run = began, self._clock()

    def probe(self) -> None:
        """Asks the device for a sign of life. Raises what it says."""
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()  # the whole device would wait for every lane's verify

    def _was_lost_now(self) -> bool:
        """Asks the device: after some faults (an illegal address, for example) every later call fails as well."""
        try:
            self.probe()
        except RuntimeError as error:
            return self._on_lost(error)
        return False
