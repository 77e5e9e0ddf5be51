"""Pair arithmetic: which tokens go with which hidden states. Pair k is (t_{k+1}, h_k)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from specdraft.hiddens import HiddenRows
from specdraft.values import value

__all__ = ["NextPairs", "PairRun", "next_pairs", "prompt_pairs"]


@value
class PairRun:
    """Consecutive pairs of one sequence.

    Attributes:
        first_key: key f of the first pair.
        tokens: n ids, tokens[j] = t_{f+j+1}.
        hiddens: n rows, row j = h_{f+j}.
        allow_gap: whether keys between the stored rows and f may stay without rows.
        accepted_drafts: accepted drafts of the last round; None = the service counts.
        verified_tokens: rows policy APPROXIMATE: t_{P+1}.. of the keys from P up to f, P = last_pair_key + 1.
    """

    first_key: int
    tokens: Sequence[int]
    hiddens: HiddenRows
    allow_gap: bool = False
    accepted_drafts: int | None = None
    verified_tokens: Sequence[int] = ()

    def __post_init__(self) -> None:
        """Checks that tokens and rows pair up.

        Raises:
            ValueError: their numbers differ, or there are none.
        """
        if len(self.tokens) != self.hiddens.row_count or not self.tokens:
            message = f"{len(self.tokens)} tokens and {self.hiddens.row_count} hidden rows do not make pairs"
            raise ValueError(message)

    def first(self, count: int) -> PairRun:
        """The first `count` pairs. The tokens are already those *after* each hidden, so a cut needs no care."""
        if count >= len(self.tokens):
            return self
        return replace(self, tokens=self.tokens[:count], hiddens=self.hiddens.rows(0, count))

    def after(self, count: int) -> PairRun | None:
        """What follows the first `count` pairs, once they are written: no gap, nothing to judge or to verify."""
        if count >= len(self.tokens):
            return None
        rows = self.hiddens.rows(count, self.hiddens.row_count)
        return PairRun(self.first_key + count, self.tokens[count:], rows)


@dataclass(frozen=True, slots=True)
class NextPairs:
    """Arguments of the next `propose` (contract 2.1), and where the target then stands.

    Attributes:
        first_key: P of the round that was verified.
        tokens: [d_1 .. d_a, b].
        hiddens: h_P .. h_{P+a}: the first a+1 rows of what the caller gave, in the caller's own type.
        position: P' = P + a + 1: tokens fed to the target that count.
    """

    first_key: int
    tokens: list[int]
    hiddens: Any
    position: int


def next_pairs(position: int, drafts: Sequence[int], num_accepted: int, bonus_token: int, hiddens: Any) -> NextPairs:
    """Turns the outcome of a verify into the pairs of the next round.

    The target had been fed `position` = P tokens, was then fed [t_P, d_1..d_K] in one forward, accepted the first
    `num_accepted` = a drafts and chose `bonus_token` = b itself.

    Args:
        position: P, the key of the next pair.
        drafts: d_1..d_K, K >= 0.
        num_accepted: a, 0..K.
        bonus_token: b.
        hiddens: h_P..h_{P+K}: anything that slices by rows (a tensor, an array) with a + 1 rows or more.

    Raises:
        ValueError: `num_accepted` is outside 0..K.
    """
    if not 0 <= num_accepted <= len(drafts):
        message = f"{num_accepted} accepted drafts of {len(drafts)}"
        raise ValueError(message)
    taken = num_accepted + 1
    kept = hiddens.rows(0, taken) if isinstance(hiddens, HiddenRows) else hiddens[:taken]
    return NextPairs(position, [*drafts[:num_accepted], bonus_token], kept, position + taken)


def prompt_pairs(prompt_tokens: Sequence[int], hiddens: HiddenRows) -> PairRun | None:
    """The pairs of a prompt: `prompt[1:]` with `hiddens[:-1]` from key 0. None for a prompt of one token.

    Raises:
        ValueError: `hiddens` does not have one row a prompt token, or there is no token.
    """
    if len(prompt_tokens) != hiddens.row_count or not prompt_tokens:
        message = f"a prompt of {len(prompt_tokens)} tokens needs as many hidden rows, not {hiddens.row_count}"
        raise ValueError(message)
    if len(prompt_tokens) == 1:
        return None
    return PairRun(0, prompt_tokens[1:], hiddens.rows(0, hiddens.row_count - 1))
