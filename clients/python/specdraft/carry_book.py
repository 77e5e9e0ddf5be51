"""The carries that a client knows, and which of their keys a new prompt can use. Pure; threads may share a book."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Iterable
from dataclasses import dataclass

from specdraft.answers import Carry

__all__ = ["CarryBook", "Claim", "KnownCarry", "Wanted", "common_prefix", "compact"]


def compact(tokens: Iterable[int]) -> array[int]:
    """Token ids, four bytes each.

    Raises:
        ValueError: one of them is negative, or needs more than 32 bits.
    """
    try:
        return array("I", tokens)
    except OverflowError as error:
        raise ValueError(f"token ids are 0 or more and fit into 32 bits: {error}") from None


def common_prefix(left: array[int], right: array[int]) -> int:
    """Number of tokens with which both begin."""
    low, high = 0, min(len(left), len(right))
    if left[:high] == right[:high]:
        return high
    # Arrays of one type compare as memory: halving looks at every token about once, at the speed of a copy.
    while high - low > 1:
        middle = (low + high) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle
    return low


@dataclass(frozen=True, slots=True)
class KnownCarry:
    """A carry with what its keys were made from.

    Attributes:
        carry: as the service named it; its label is the conversation.
        tokens: t_0 .. of the sequence that it was taken from, as far as its keys depend on them.
    """

    carry: Carry
    tokens: array[int]

    @classmethod
    def make(cls, carry: Carry, tokens: array[int], layer_count: int) -> KnownCarry:
        """Keeps the tokens that matter: the last layer's row of key k depends on t_0 .. t_{k + layer_count}."""
        return cls(carry, tokens[: carry.last_key + 1 + layer_count])

    def keys_below(self, bound: int) -> int:
        """Number of its keys that lie below `bound`."""
        return sum(max(0, min(one.end, bound) - one.begin) for one in self.carry.ranges)


@dataclass(frozen=True, slots=True)
class Wanted:
    """What a sequence to be resumed looks like.

    Attributes:
        tokens: t_0 .. t_{n-1}.
        conversation: its conversation; "" = none.
        layer_count: L, layers of the head.
        page_rows: rows of a page of the service.
        keep_carry: the carry stays even if the sequence takes every key of it.
    """

    tokens: array[int]
    conversation: str
    layer_count: int
    page_rows: int
    keep_carry: bool = False


@dataclass(frozen=True, slots=True)
class Claim:
    """A carry that was chosen, and is in nobody else's reach until it is put back.

    Attributes:
        known: the carry.
        keep_keys_below: c - L, for c common tokens.
        num_keys: keys of it that are used.
        is_shared: whether the carry has to stay: other turns would miss what this one drops.
    """

    known: KnownCarry
    keep_keys_below: int
    num_keys: int
    is_shared: bool

    @classmethod
    def weigh(cls, known: KnownCarry, wanted: Wanted) -> Claim:
        """What `wanted` could use of a carry.

        A carry that would lose keys moves only within its own conversation, where what follows the common prefix has
        been overtaken. Anywhere else it is a prefix that two conversations have in common, and both go on.
        """
        keep = common_prefix(known.tokens, wanted.tokens) - wanted.layer_count
        num_keys = known.keys_below(keep)
        loses_keys = num_keys < known.keys_below(known.carry.last_key + 1)
        is_own = bool(wanted.conversation) and known.carry.label == wanted.conversation
        return cls(known, keep, num_keys, wanted.keep_carry or (loses_keys and not is_own))


class CarryBook:
    """Known carries, the longest unused first, within bounds.

    Args:
        carries_max: most carries.
        tokens_max: most tokens of all of them together, at four bytes each.
    """

    def __init__(self, carries_max: int, tokens_max: int) -> None:
        self._carries_max = carries_max
        self._tokens_max = tokens_max
        self._by_id: dict[bytes, KnownCarry] = {}
        self._num_tokens = 0
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._by_id)

    @property
    def num_tokens(self) -> int:
        """Tokens remembered, over all carries."""
        return self._num_tokens

    @property
    def known(self) -> tuple[KnownCarry, ...]:
        """The carries, the longest unused first."""
        with self._lock:
            return tuple(self._by_id.values())

    def add(self, known: KnownCarry) -> list[Carry]:
        """Remembers a carry as the youngest.

        Returns:
            The carries that had to be forgotten for it: nobody will ask for them again. A carry without keys, and one
            with more tokens than the book holds, is itself among them.
        """
        with self._lock:
            self._remove(known.carry.kv_id)
            if len(known.tokens) > self._tokens_max or not self._carries_max or known.carry.last_key < 0:
                return [known.carry]
            self._by_id[known.carry.kv_id] = known
            self._num_tokens += len(known.tokens)
            forgotten = []
            while len(self._by_id) > self._carries_max or self._num_tokens > self._tokens_max:
                oldest = next(iter(self._by_id.values()))
                self._remove(oldest.carry.kv_id)
                forgotten.append(oldest.carry)
            return forgotten

    def claim(self, wanted: Wanted) -> Claim | None:
        """Takes the carry with the most usable keys out of the book; None if no carry has any.

        Of equally good ones: the conversation's own, then the one that loses the fewest keys, then the youngest.
        """
        with self._lock:
            best: tuple[tuple[int, bool, int], Claim] | None = None
            for known in self._by_id.values():
                claim = Claim.weigh(known, wanted)
                # Whole pages are shared, a part of one is copied: below a page there is nothing to win by sharing.
                if claim.num_keys < (max(1, wanted.page_rows) if claim.is_shared else 1):
                    continue
                is_own = known.carry.label == wanted.conversation
                rank = claim.num_keys, is_own, -known.keys_below(known.carry.last_key + 1)
                if best is None or rank >= best[0]:
                    best = rank, claim
            if best is None:
                return None
            self._remove(best[1].known.carry.kv_id)
            return best[1]

    def forget(self, carry: Carry) -> None:
        """Forgets a carry, if it is known."""
        with self._lock:
            self._remove(carry.kv_id)

    def clear(self) -> None:
        """Forgets all of them."""
        with self._lock:
            self._by_id.clear()
            self._num_tokens = 0

    def _remove(self, kv_id: bytes) -> None:
        known = self._by_id.pop(kv_id, None)
        if known is not None:
            self._num_tokens -= len(known.tokens)
