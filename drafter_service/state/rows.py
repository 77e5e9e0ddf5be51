"""Which keys of a sequence have a row: pure bookkeeping, no memory behind it."""

from __future__ import annotations

from drafter_service.state.values import value


@value
class KeySpan:
    """Keys begin <= key < end."""

    begin: int
    end: int


@value
class Rows:
    """The stored rows of one sequence, in key order.

    Rows are compacted: row index i belongs to the i-th smallest stored key. The value never changes; a write makes a
    new one, so that a write that fails leaves nothing to undo here.

    Attributes:
        spans: ascending, disjoint, neighbours merged.
        row_count: number of stored keys.
        last_key: the largest stored key, -1 if there is none.
    """

    spans: tuple[KeySpan, ...] = ()
    row_count: int = 0
    last_key: int = -1

    def below(self, first_key: int) -> Rows:
        """These rows without the keys >= first_key."""
        if first_key > self.last_key:
            return self
        kept = []
        row_count = 0
        for span in self.spans:
            if span.begin >= first_key:
                break
            end = min(span.end, first_key)
            kept.append(KeySpan(span.begin, end))
            row_count += end - span.begin
        return Rows(tuple(kept), row_count, kept[-1].end - 1 if kept else -1)

    def gap_before(self, first_key: int) -> KeySpan | None:
        """The keys that would stay without a row if first_key were written next."""
        begin = self.below(first_key).last_key + 1
        return KeySpan(begin, first_key) if first_key > begin else None

    def written(self, first_key: int, num_pairs: int) -> Rows:
        """These rows after writing num_pairs pairs from first_key on (keys >= first_key are dropped first)."""
        kept = self if first_key > self.last_key else self.below(first_key)
        end = first_key + num_pairs
        if kept.spans and kept.spans[-1].end == first_key:
            spans = (*kept.spans[:-1], KeySpan(kept.spans[-1].begin, end))
        else:
            spans = (*kept.spans, KeySpan(first_key, end))
        return Rows(spans, kept.row_count + num_pairs, end - 1)
