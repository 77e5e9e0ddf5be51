"""What a drafted run's rounds add up to. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from specdraft.integrations.transformers import RoundRecord


@dataclass(frozen=True, slots=True)
class Tally:
    """Counts over the verify rounds of a run: every forward of the target but those of the prompts.

    Attributes:
        num_rounds: verify rounds.
        num_tokens: tokens that they gave.
        offered: rounds that brought a draft with this index, by index.
        accepted: rounds in which that draft was accepted, by index.
        num_failed: rounds in which the service was asked and failed.
    """

    num_rounds: int
    num_tokens: int
    offered: tuple[int, ...]
    accepted: tuple[int, ...]
    num_failed: int

    @property
    def accept_length(self) -> float:
        """Mean tokens of a verify round: 1 without drafts. Rounds cut short by the end of a generation count too."""
        return self.num_tokens / self.num_rounds if self.num_rounds else 0.0

    @property
    def acceptance(self) -> tuple[float, ...]:
        """Share of the offered drafts that were accepted, by index."""
        return tuple(yes / asked if asked else 0.0 for yes, asked in zip(self.accepted, self.offered, strict=True))

    @property
    def first(self) -> float:
        """Acceptance of the first draft."""
        return self.acceptance[0] if self.acceptance else 0.0


def tally(generations: Iterable[list[RoundRecord]], num_drafts: int) -> Tally:
    """Adds up generations; the first record of each is its prompt."""
    rounds = [record for records in generations for record in records[1:]]
    indices = range(num_drafts)
    return Tally(
        num_rounds=len(rounds),
        num_tokens=sum(len(record.tokens) for record in rounds),
        offered=tuple(sum(len(record.drafts) > index for record in rounds) for index in indices),
        accepted=tuple(sum(record.num_accepted > index for record in rounds) for index in indices),
        num_failed=sum(record.error is not None for record in rounds),
    )
