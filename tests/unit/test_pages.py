"""The page allocator: pages have holders, come back when the last one lets go, and never twice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.state import PageAllocator, PagesExhausted


@given(steps=st.lists(st.tuples(st.sampled_from("ars"), st.integers(0, 9)), max_size=60))
def test_a_page_is_free_exactly_while_nobody_holds_it(steps: list[tuple[str, int]]) -> None:
    allocator, holds = PageAllocator(7), []
    for action, number in steps:
        if action == "a":
            if number > allocator.num_free:
                with pytest.raises(PagesExhausted) as caught:
                    allocator.allocate(number)
                assert (caught.value.num_needed, caught.value.num_free) == (number, allocator.num_free)
            else:
                holds.append(allocator.allocate(number))
        elif holds and action == "r":
            allocator.release(holds.pop(number % len(holds)))
        elif holds:
            shared = holds[number % len(holds)]
            allocator.retain(shared)
            holds.append(list(shared))
        held = {page for hold in holds for page in hold}
        assert sorted([*held, *allocator.free_pages()]) == list(range(7))
        assert allocator.num_shared == sum(allocator.is_shared(page) for page in range(7))


def test_releasing_a_free_page_is_a_bug_that_shows() -> None:
    allocator = PageAllocator(2)
    pages = allocator.allocate(1)
    allocator.release(pages)
    with pytest.raises(AssertionError, match="is free"):
        allocator.release(pages)
