"""The compacted rows of a sequence, against a plain set of keys."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from drafter_service.state import KeySpan, Rows

WRITES = st.lists(st.tuples(st.integers(0, 30), st.integers(1, 6)), max_size=12)


@given(writes=WRITES, cut=st.integers(0, 40))
def test_rows_hold_the_keys_that_were_written_and_not_rewound(writes: list[tuple[int, int]], cut: int) -> None:
    rows, keys = Rows(), set()
    for first_key, count in writes:
        kept = {key for key in keys if key < first_key}
        begin = max(kept, default=-1) + 1
        gap = rows.gap_before(first_key)
        assert gap == (KeySpan(begin, first_key) if begin < first_key else None)
        rows = rows.written(first_key, count)
        keys = kept | set(range(first_key, first_key + count))
        assert _keys(rows) == keys
        assert rows.row_count == len(keys)
        assert rows.last_key == max(keys)
        assert all(a.end < b.begin for a, b in zip(rows.spans, rows.spans[1:], strict=False))
    below = rows.below(cut)
    assert _keys(below) == {key for key in keys if key < cut}
    assert below.row_count == len(_keys(below))


def test_nothing_stored_is_key_minus_one() -> None:
    assert Rows().last_key == -1
    assert Rows().written(0, 3).below(0) == Rows()


def test_a_gap_inside_an_older_gap_is_measured_from_the_last_key_before_it() -> None:
    rows = Rows().written(0, 4).written(8, 4)
    assert rows.gap_before(6) == KeySpan(4, 6)
    assert rows.gap_before(12) is None


def _keys(rows: Rows) -> set[int]:
    return {key for span in rows.spans for key in range(span.begin, span.end)}
