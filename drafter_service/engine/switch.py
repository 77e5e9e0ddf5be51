"""Which runner runs a batch: eager or graph, changed while serving; and what becomes of a device that is lost."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from enum import Enum

from drafter_service.engine.batch import RunEntry, Runner, RunResult
from drafter_service.memory.device_loss import DeviceLoss, device_lost


class RunnerKind(Enum):
    """What runs a round."""

    EAGER = "eager"
    GRAPH = "graph"


class RunnerSwitch:
    """Runs batches with the chosen runner. Drafts are the same.

    Args:
        runners: those that there are.
        kind: the first one to be used.
        loss: told of every failure.
    """

    def __init__(self, runners: Mapping[RunnerKind, Runner], kind: RunnerKind, loss: DeviceLoss) -> None:
        self._runners = runners
        self._loss = loss
        self._choosing = threading.Lock()
        self.kind = kind
        self._runner = runners[kind]

    @property
    def kinds(self) -> frozenset[RunnerKind]:
        """What can be chosen."""
        return frozenset(self._runners)

    def use(self, kind: RunnerKind) -> RunnerKind:
        """Chooses the runner from the next batch on; returns the one before."""
        runner = self._runners[kind]
        with self._choosing:  # of two operators one is the last, with both
            before, self.kind, self._runner = self.kind, kind, runner
        return before

    def run(self, entries: Sequence[RunEntry]) -> list[RunResult]:
        """As `Runner.run`. Raises DEVICE_LOST once the device is lost."""
        if self._loss.is_lost:
            raise device_lost()
        try:
            return self._runner.run(entries)
        except Exception as error:
            if self._loss.seen(error):
                raise device_lost() from error
            raise
