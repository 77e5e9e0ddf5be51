"""What happened in each round of a generation. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

from specdraft.errors import SpecdraftError

__all__ = ["DecodeReport", "RoundRecord"]


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One forward of the target and what it gave.

    Attributes:
        position: P, tokens that had been fed to the target before; for the first record, those of the prompt.
        drafts: what the service proposed; empty in the first record and in rounds without drafts.
        num_accepted: how many of them, from the first on, the target chose too.
        tokens: what was generated: the accepted drafts and, unless one of them ended the generation, the target's own
            next token.
        error: why there were no drafts, if the service was asked and failed.
    """

    position: int
    drafts: tuple[int, ...]
    num_accepted: int
    tokens: tuple[int, ...]
    error: SpecdraftError | None = None

    @property
    def bonus_token(self) -> int | None:
        """The target's own token at the end; None if an accepted draft ended the generation."""
        return self.tokens[-1] if len(self.tokens) > self.num_accepted else None


@dataclass(slots=True)
class DecodeReport:
    """Collects records: pass `on_round=report.add`."""

    rounds: list[RoundRecord] = field(default_factory=list)

    def add(self, record: RoundRecord) -> None:
        """Takes one record."""
        self.rounds.append(record)

    @property
    def num_tokens(self) -> int:
        """Tokens generated."""
        return sum(len(one.tokens) for one in self.rounds)

    @property
    def num_drafts(self) -> int:
        """Drafts proposed."""
        return sum(len(one.drafts) for one in self.rounds)

    @property
    def num_accepted(self) -> int:
        """Drafts accepted."""
        return sum(one.num_accepted for one in self.rounds)

    @property
    def num_errors(self) -> int:
        """Rounds in which the service was asked and failed."""
        return sum(one.error is not None for one in self.rounds)
