"""Which keys of which carry a prompt can use: the arithmetic at every boundary, the choice, and the bounds."""

from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from specdraft import Carry, KeyRange
from specdraft.carry_book import CarryBook, Claim, KnownCarry, Wanted, common_prefix, compact

tokens_of_few = st.lists(st.integers(0, 2), max_size=40)


def carry(name, *spans, label=""):
    return Carry(name.encode().ljust(16), tuple(KeyRange(begin, end) for begin, end in spans), label, 0)


def known(name, tokens, *spans, label="", layers=1):
    return KnownCarry.make(carry(name, *spans, label=label), compact(tokens), layers)


def wanted(tokens, conversation="", layers=1, page_rows=1, keep_carry=False):
    return Wanted(compact(tokens), conversation, layers, page_rows, keep_carry)


@given(tokens_of_few, tokens_of_few)
def test_the_common_prefix_is_that_of_a_loop(left, right):
    expected = 0
    while expected < min(len(left), len(right)) and left[expected] == right[expected]:
        expected += 1
    assert common_prefix(compact(left), compact(right)) == expected


def test_a_long_common_prefix_is_found_to_the_token():
    left = compact(range(100_000))
    for place in (0, 1, 49_999, 99_998, 99_999):
        right = array("I", left)
        right[place] ^= 1
        assert common_prefix(left, right) == place
    assert common_prefix(left, left[:1234]) == 1234


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_a_token_that_is_none_is_refused(bad):
    with pytest.raises(ValueError, match="32 bits"):
        compact([1, bad])


@pytest.mark.parametrize("layers", [1, 2, 3])
@pytest.mark.parametrize("common", range(12))
def test_kept_are_the_keys_whose_tokens_are_common(layers, common):
    """The last layer's row of key k depends on t_0 .. t_{k + L}."""
    held = list(range(100, 110))  # rows 0 .. 9 - L
    asked = held[:common] + [7] * 3 if common <= 10 else held
    claim = Claim.weigh(known("a", held, (0, 10 - layers), layers=layers), wanted(asked, layers=layers))
    right = [key for key in range(10 - layers) if held[: key + layers + 1] == asked[: key + layers + 1]]
    assert claim.num_keys == len(right)
    assert claim.keep_keys_below == min(common, 10) - layers
    assert right == list(range(max(0, min(claim.keep_keys_below, 10 - layers))))


@pytest.mark.parametrize(("length", "num_keys"), [(0, 0), (1, 0), (2, 1), (9, 8), (10, 9), (11, 9), (30, 9)])
def test_a_shorter_an_equal_and_a_longer_prompt(length, num_keys):
    book = CarryBook(4, 100)
    book.add(known("a", range(10), (0, 9)))
    claim = book.claim(wanted(range(length)))
    assert (claim.num_keys if claim else 0) == num_keys
    assert len(book) == (0 if claim else 1)


def test_tokens_on_which_no_row_depends_are_not_kept():
    assert list(known("a", range(100), (0, 5)).tokens) == list(range(6))
    assert list(known("a", range(100), (0, 5), layers=3).tokens) == list(range(8))
    assert list(known("a", range(4), (0, 9)).tokens) == [0, 1, 2, 3]


def test_tokens_that_are_not_known_count_as_different():
    claim = Claim.weigh(known("a", range(4), (0, 9)), wanted(range(10)))
    assert (claim.num_keys, claim.is_shared) == (3, True)


def test_gaps_do_not_count():
    book = CarryBook(4, 100)
    book.add(known("holes", range(10), (0, 2), (7, 9)))
    book.add(known("short", range(6), (0, 5)))
    assert book.claim(wanted(range(10))).num_keys == 5
    assert book.claim(wanted(range(10))).num_keys == 4


def test_the_longest_usable_prefix_wins_then_the_own_conversation_then_the_smallest_loss():
    book = CarryBook(9, 1000)
    for name, tokens, label in (
        ("stranger", [1, 2, 3, 4, 5, 6, 9, 9], "other"),
        ("own", [1, 2, 3, 4, 5, 6], "mine"),
        ("longest", [1, 2, 3, 4, 5, 6, 7], "other"),
        ("nothing", [8, 8, 8], "mine"),
    ):
        book.add(known(name, tokens, (0, len(tokens) - 1), label=label))
    names, prompt = [], wanted([1, 2, 3, 4, 5, 6, 7, 8], "mine")
    while (claim := book.claim(prompt)) is not None:
        names.append((claim.known.carry.kv_id.strip().decode(), claim.num_keys, claim.is_shared))
    assert names == [("longest", 6, False), ("own", 5, False), ("stranger", 5, True)]
    assert len(book) == 1


def test_a_carry_loses_keys_only_within_its_own_conversation():
    held = known("a", range(10), (0, 9), label="mine")
    assert not Claim.weigh(held, wanted(range(5), "mine")).is_shared
    assert Claim.weigh(held, wanted(range(5), "other")).is_shared
    assert Claim.weigh(held, wanted(range(5))).is_shared
    assert not Claim.weigh(held, wanted(range(20), "other")).is_shared
    assert Claim.weigh(held, wanted(range(20), "mine", keep_carry=True)).is_shared
    unnamed = known("b", range(10), (0, 9))
    assert Claim.weigh(unnamed, wanted(range(5))).is_shared


def test_less_than_a_page_is_not_worth_sharing():
    book = CarryBook(4, 100)
    book.add(known("a", range(40), (0, 39)))
    assert book.claim(wanted(range(16), page_rows=16)) is None
    assert book.claim(wanted(range(17), page_rows=16)).num_keys == 16


def test_the_book_is_bounded_by_count_and_by_tokens():
    book = CarryBook(3, 25)
    a, b, c = (known(name, range(10), (0, 9)) for name in "abc")
    assert book.add(a) == []
    assert book.add(b) == []
    assert book.add(c) == [a.carry]
    assert (len(book), book.num_tokens) == (2, 20)
    small = [known(name, range(3), (0, 2)) for name in "xyz"]
    assert [book.add(one) for one in small] == [[], [b.carry], [c.carry]]
    huge = known("huge", range(30), (0, 29))
    assert book.add(huge) == [huge.carry]
    assert (len(book), book.num_tokens) == (3, 9)


def test_a_carry_that_is_added_again_counts_once_and_is_young_again():
    book = CarryBook(2, 100)
    a, b, c = (known(name, range(10), (0, 9)) for name in "abc")
    for one in (a, b, a):
        assert book.add(one) == []
    assert book.num_tokens == 20
    assert book.add(c) == [b.carry]
    book.forget(a.carry)
    book.forget(a.carry)
    assert [one.carry for one in book.known] == [c.carry]


def test_a_carry_without_keys_is_not_kept():
    book = CarryBook(2, 100)
    empty = known("a", [])
    assert book.add(empty) == [empty.carry]
    assert CarryBook(0, 100).add(known("b", range(3), (0, 2))) != []
