"""How many drafts are worth asking for."""

from __future__ import annotations

import pytest

from drafter_service.state import Advice


def learnt(rounds: list[tuple[int, int]]) -> Advice:
    advice = Advice()
    for num_drafts, num_accepted in rounds:
        advice.judged(num_drafts, num_accepted)
    return advice


def test_drafts_that_are_always_accepted_are_worth_as_many_as_may_be_had() -> None:
    assert learnt([(8, 8)] * 50).best_count(8, draft_s=0.001, verify_s=0.02) == 8


def test_drafts_that_are_never_accepted_are_worth_none() -> None:
    assert learnt([(4, 0)] * 50).best_count(8, draft_s=0.001, verify_s=0.005) == 0


def test_a_dear_draft_or_a_cheap_verify_makes_for_shorter_chains() -> None:
    advice = learnt([(6, accepted) for accepted in (0, 1, 2, 3, 6, 2, 1, 4)] * 20)
    counts = [advice.best_count(6, draft_s, 0.01) for draft_s in (0.0001, 0.001, 0.003, 0.02)]
    assert counts == sorted(counts, reverse=True)
    assert counts[0] > counts[-1]


def test_acceptance_is_that_of_the_rounds_seen_and_recent_ones_count_more() -> None:
    steady = learnt([(1, 1), (1, 0)] * 200)
    assert steady.acceptance(0) == pytest.approx(0.5, abs=0.05)
    turned = learnt([(1, 1)] * 300 + [(1, 0)] * 300)
    assert turned.acceptance(0) < 0.05


def test_the_best_count_is_the_one_with_the_most_expected_tokens_a_second() -> None:
    advice = learnt([(5, accepted) for accepted in (5, 3, 1, 0, 2)] * 30)
    rates = []
    for count in range(6):
        chance, tokens = 1.0, 1.0
        for place in range(count):
            chance *= advice.acceptance(place)
            tokens += chance
        rates.append(tokens / (0.01 + count * 0.0015))
    assert advice.best_count(5, draft_s=0.0015, verify_s=0.01) == rates.index(max(rates))
