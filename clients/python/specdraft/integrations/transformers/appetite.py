"""How many drafts an adaptive generation asks for. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

__all__ = ["Appetite"]

_TRY_AGAIN_ROUNDS: Final = 32


@dataclass(slots=True)
class Appetite:
    """Follows the service's recommendation.

    Advised not to draft, it still asks for one draft now and then: without drafts nothing new is learnt of acceptance,
    and the advice could never change.
    """

    _recommended: int | None = None
    _rounds_without: int = 0

    def at_most(self, num_drafts: int) -> int:
        """Drafts to ask for in this round, 0..num_drafts."""
        if self._recommended is None:
            return num_drafts
        if self._recommended:
            self._rounds_without = 0
            return min(num_drafts, self._recommended)
        self._rounds_without += 1
        if self._rounds_without < _TRY_AGAIN_ROUNDS:
            return 0
        self._rounds_without = 0
        return min(num_drafts, 1)

    def advised(self, recommended: int | None) -> None:
        """Takes an answer's recommendation; None = it has none."""
        self._recommended = recommended
