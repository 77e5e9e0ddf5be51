"""The same prompts with and without drafts, in turns, and whether the tokens are the target's own every time."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from drafter_service.demo.prompts import Prompt
from drafter_service.demo.target import Target
from specdraft.client import Client
from specdraft.integrations.transformers import RoundRecord

GENERATE = "model.generate"
LOOP = "same loop, no drafts"
DRAFTED = "with drafts"

Decoding = Callable[..., Any]
"""Makes a decoding method for `custom_generate`; called like `speculative_generate`: (client, num_drafts, on_round)."""


@dataclass(frozen=True, slots=True)
class Run:
    """All prompts, once.

    Attributes:
        seconds: wall time.
        outputs: generated ids, one a prompt.
        records: rounds, one list a prompt; empty lists for `GENERATE`.
    """

    seconds: float
    outputs: tuple[tuple[int, ...], ...]
    records: tuple[list[RoundRecord], ...]

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(map(len, self.outputs))


@dataclass(frozen=True, slots=True)
class WarmUp:
    """Each way once, not timed.

    Attributes:
        expected: generated ids of `model.generate`, one a prompt.
        plain: the run of the same loop without drafts.
        drafted: the run with drafts: the one that is shown and counted.
    """

    expected: tuple[tuple[int, ...], ...]
    plain: Run
    drafted: Run


@dataclass(frozen=True, slots=True)
class Outcome:
    """What the race showed.

    Attributes:
        shown: the run with drafts that is shown and counted.
        seconds: wall times of the timed runs, by kind.
        num_plain_forwards: forwards of the target without drafts, prompts not counted.
        num_compared: generations compared with the target's own.
        num_different: those that differ.
    """

    shown: Run
    seconds: dict[str, tuple[float, ...]]
    num_plain_forwards: int
    num_compared: int
    num_different: int

    @property
    def is_lossless(self) -> bool:
        """Whether every generation was the target's own."""
        return self.num_different == 0

    @property
    def speedups(self) -> tuple[float, ...]:
        """Of each turn: time of the faster way without drafts / time with drafts."""
        turns = zip(*(self.seconds[kind] for kind in (GENERATE, LOOP, DRAFTED)), strict=True)
        return tuple(min(generate, loop) / drafted for generate, loop, drafted in turns)

    @property
    def median_turn(self) -> int:
        """The turn with the median speedup, from 0; of an even number of turns the lower of the middle two.

        What is quoted comes from this one turn, times and speedup: medians of each would not fit together.
        """
        return self.speedups.index(statistics.median_low(self.speedups))

    @property
    def speedup(self) -> float:
        """The median turn's."""
        return self.speedups[self.median_turn]

    @property
    def baseline(self) -> str:
        """The faster way without drafts in the median turn."""
        return min((GENERATE, LOOP), key=lambda kind: self.seconds[kind][self.median_turn])


class Race:
    """Runs prompts in the three ways.

    Args:
        target: generates.
        client: drafts.
        prompts: what is generated after.
        num_new: most tokens of a generation.
        num_drafts: K.
        decoding: makes the decoding method; tests put a wrong one here.
    """

    def __init__(
        self,
        target: Target,
        client: Client,
        prompts: Sequence[Prompt],
        *,
        num_new: int,
        num_drafts: int,
        decoding: Decoding,
    ) -> None:
        self._target = target
        self._prompts = prompts
        self._num_new = num_new
        self._kinds: dict[str, Callable[[Callable[[RoundRecord], None]], Any]] = {
            LOOP: lambda on_round: decoding(None, 0, on_round=on_round),
            GENERATE: lambda _on_round: None,
            DRAFTED: lambda on_round: decoding(client, num_drafts, on_round=on_round),
        }

    def run(self, kind: str) -> Run:
        """All prompts in one way."""
        outputs, records = [], []
        began = time.perf_counter()
        for prompt in self._prompts:
            rounds: list[RoundRecord] = []
            decoding = self._kinds[kind](rounds.append)
            outputs.append(self._target.generate(prompt.tokens, self._num_new, decoding))
            records.append(rounds)
        return Run(time.perf_counter() - began, tuple(outputs), tuple(records))

    def warm_up(self, tell: Callable[[str], None]) -> WarmUp:
        """Each way once."""
        runs = {}
        for kind in (GENERATE, LOOP, DRAFTED):
            tell(f"warming up: {kind}")
            runs[kind] = self.run(kind)
        return WarmUp(runs[GENERATE].outputs, runs[LOOP], runs[DRAFTED])

    def hold(self, warm_up: WarmUp, num_turns: int, tell: Callable[[str], None]) -> Outcome:
        """Times the ways in turns; the order turns round every time."""
        expected = warm_up.expected
        outputs = [*warm_up.plain.outputs, *warm_up.drafted.outputs]
        wanted = [*expected, *expected]
        seconds: dict[str, list[float]] = {kind: [] for kind in self._kinds}
        for turn in range(num_turns):
            tell(f"turn {turn + 1}/{num_turns}")
            for kind in list(self._kinds)[:: -1 if turn % 2 else 1]:
                run = self.run(kind)
                seconds[kind].append(run.seconds)
                outputs += run.outputs
                wanted += expected
        return Outcome(
            shown=warm_up.drafted,
            seconds={kind: tuple(times) for kind, times in seconds.items()},
            num_plain_forwards=sum(len(rounds) - 1 for rounds in warm_up.plain.records),
            num_compared=len(outputs),
            num_different=sum(ours != theirs for ours, theirs in zip(outputs, wanted, strict=True)),
        )
