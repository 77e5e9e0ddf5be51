"""Which runner runs a batch: the one that the switch names."""

import threading

import pytest

from drafter_service.engine.switch import RunnerKind, RunnerSwitch
from drafter_service.memory.device_loss import DeviceLoss


class Named:
    """A runner that answers with its kind."""

    def __init__(self, kind):
        self.kind = kind

    def run(self, _entries):
        return self.kind


class Slow(dict):
    """Runners, of which one is found only once somebody else has chosen another."""

    def __init__(self, runners):
        super().__init__(runners)
        self.is_asked = threading.Event()
        self.others_have_chosen = threading.Event()

    def __getitem__(self, kind):
        if kind is RunnerKind.GRAPH:
            self.is_asked.set()
            self.others_have_chosen.wait(10)
        return super().__getitem__(kind)


RUNNERS = {kind: Named(kind) for kind in RunnerKind}


def test_of_two_who_choose_at_once_one_is_the_last_by_name_and_by_deed():
    runners = Slow(RUNNERS)
    switch = RunnerSwitch(runners, RunnerKind.EAGER, DeviceLoss())
    first = threading.Thread(target=switch.use, args=(RunnerKind.GRAPH,))
    first.start()
    assert runners.is_asked.wait(10)
    switch.use(RunnerKind.EAGER)
    runners.others_have_chosen.set()
    first.join(10)
    assert switch.run([]) is switch.kind


def test_a_runner_that_is_not_there_changes_nothing():
    switch = RunnerSwitch({RunnerKind.EAGER: RUNNERS[RunnerKind.EAGER]}, RunnerKind.EAGER, DeviceLoss())
    with pytest.raises(KeyError):
        switch.use(RunnerKind.GRAPH)
    assert switch.run([]) is switch.kind is RunnerKind.EAGER
