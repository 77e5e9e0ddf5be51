"""Timing calls: the things compared take turns, and what is quoted is the median over the rounds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

BLOCK_CALLS = 25
"""Calls of one case in a row: enough to be warm, and few enough that the others have their turn soon."""


def _nothing() -> None:
    """What most cases have to prepare."""


@dataclass(frozen=True, slots=True)
class Case:
    """Something to be timed.

    Attributes:
        call: is timed.
        prepare: runs before each call and is not.
    """

    call: Callable[[], object]
    prepare: Callable[[], object] = _nothing


@dataclass(frozen=True, slots=True)
class Plan:
    """How much is measured.

    Attributes:
        num_rounds: each gives a p50 and a p99.
        num_calls: timed calls of each case in a round, at least; in blocks of `BLOCK_CALLS`.
        num_warm_up: calls at the beginning of a block that do not count.
    """

    num_rounds: int = 7
    num_calls: int = 300
    num_warm_up: int = 5


@dataclass(frozen=True, slots=True)
class Latency:
    """Microseconds: one p50 and one p99 a round."""

    p50s_us: tuple[float, ...]
    p99s_us: tuple[float, ...]

    @property
    def p50_us(self) -> float:
        """Median of the rounds' p50."""
        return statistics.median(self.p50s_us)

    @property
    def p99_us(self) -> float:
        """Median of the rounds' p99."""
        return statistics.median(self.p99s_us)


def measure(
    cases: Mapping[str, Case], plan: Plan, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, Latency]:
    """Times all cases, block by block in turns, so that whatever else the machine does meets all of them alike."""
    rounds = []
    for number in range(plan.num_rounds):
        tell(f"round {number + 1}/{plan.num_rounds}")
        rounds.append(_round(cases, plan))
    return {
        name: Latency(tuple(one[name][0] for one in rounds), tuple(one[name][1] for one in rounds)) for name in cases
    }


def joined(rounds: Sequence[Mapping[str, Latency]]) -> dict[str, Latency]:
    """Rounds that were measured one by one, as one measurement."""
    return {
        name: Latency(
            tuple(p50 for one in rounds for p50 in one[name].p50s_us),
            tuple(p99 for one in rounds for p99 in one[name].p99s_us),
        )
        for name in rounds[0]
    }


def median_of(figures: Sequence[float]) -> float:
    """The median, to a tenth of a microsecond."""
    return round(statistics.median(figures), 1)


def _round(cases: Mapping[str, Case], plan: Plan) -> dict[str, tuple[float, float]]:
    """p50 and p99 of each case. Every turn begins with another case, so that none always follows the same."""
    samples: dict[str, list[float]] = {name: [] for name in cases}
    names = list(cases)
    for turn in range(-(-plan.num_calls // BLOCK_CALLS)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            block = [_time(cases[name]) for _ in range(plan.num_warm_up + BLOCK_CALLS)]
            samples[name] += block[plan.num_warm_up :]
    return {name: _percentiles(times_us) for name, times_us in samples.items()}


def _time(case: Case) -> float:
    case.prepare()
    began = time.perf_counter_ns()
    case.call()
    return (time.perf_counter_ns() - began) / 1000


def _percentiles(times_us: Sequence[float]) -> tuple[float, float]:
    ordered = sorted(times_us)
    return ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]
