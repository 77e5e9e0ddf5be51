"""How many drafts are worth asking for: acceptance seen, cost of a draft, time of a verify. Pure."""

from __future__ import annotations

from dataclasses import dataclass, field

MEMORY = 64.0
"""Rounds after which an older round counts 1/e of a new one."""

PRIOR_ACCEPTANCE = 0.7
"""What is assumed of a draft, given that those before it were accepted, until rounds have been seen."""

PRIOR_WEIGHT = 2.0
"""Rounds that the assumption is worth."""


@dataclass(slots=True)
class Advice:
    """Acceptance of a session's rounds by place in the chain, fading with every further round.

    Attributes:
        offered: by place, rounds in which a draft there was given and all before it accepted.
        accepted: by place, those of them in which it was accepted too.
    """

    offered: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)

    def judged(self, num_drafts: int, num_accepted: int) -> None:
        """Learns from a round."""
        while len(self.offered) < num_drafts:
            self.offered.append(0.0)
            self.accepted.append(0.0)
        fade = 1.0 - 1.0 / MEMORY
        for place in range(min(num_accepted + 1, num_drafts)):
            self.offered[place] = self.offered[place] * fade + 1.0
            self.accepted[place] = self.accepted[place] * fade + (place < num_accepted)

    def acceptance(self, place: int) -> float:
        """Chance that the draft at `place` is accepted, given that those before it were."""
        prior = PRIOR_ACCEPTANCE if place == 0 else self.acceptance(place - 1)
        if place >= len(self.offered):
            return prior
        return (self.accepted[place] + PRIOR_WEIGHT * prior) / (self.offered[place] + PRIOR_WEIGHT)

    def best_count(self, max_drafts: int, draft_s: float, verify_s: float) -> int:
        """Number of drafts with the most tokens a second to be expected.

        Args:
            max_drafts: most drafts.
            draft_s: seconds that one more draft takes.
            verify_s: seconds of a round without drafting.
        """
        best, best_rate = 0, 1.0 / verify_s
        tokens, chance = 1.0, 1.0
        for count in range(1, max_drafts + 1):
            chance *= self.acceptance(count - 1)
            tokens += chance
            rate = tokens / (verify_s + count * draft_s)
            if rate > best_rate:
                best, best_rate = count, rate
        return best
