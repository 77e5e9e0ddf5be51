"""What the device is worth: its faults are told from bugs and counted, and one that stays is noticed."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence

import torch

from drafter_service.engine.batch import RunEntry, Runner, RunResult

_log = logging.getLogger(__name__)


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
        on_fault: told of every fault that the device reports.
        clock: monotonic seconds.

    Attributes:
        last_run: when the last batch began and ended.
        is_lost: whether the device answers nothing any more. Only a new process gets it back.
    """

    def __init__(
        self, runner: Runner, device: torch.device, on_fault: Callable[[], None], clock: Callable[[], float]
    ) -> None:
        self.is_lost = False
        self.last_run = (0.0, 0.0)
        self._clock = clock
        self._runner = runner
        self._device = device
        self._on_fault = on_fault

    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """As the runner's own."""
        began = self._clock()
        try:
            return self._runner.run(entries)
        except RuntimeError as error:
            if is_fault(error):
                self._on_fault()
                self._look()
            raise
        finally:
            self.last_run = began, self._clock()

    def give_up(self) -> None:
        """Somebody else found the device lost."""
        self._on_fault()
        self.is_lost = True

    def probe(self) -> None:
        """Asks the device for a sign of life. Raises what it says."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def _look(self) -> None:
        """After some faults (an illegal address, for example) every later call of the process fails as well."""
        try:
            self.probe()
        except RuntimeError:
            if not self.is_lost:
                _log.exception("the device is lost")
            self.is_lost = True
