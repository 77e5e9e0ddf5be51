"""Whom a batch that is about to run waits for."""

import pytest

from drafter_service.engine.arrivals import is_one_missing

WINDOW_S = 0.01


@pytest.mark.parametrize(
    ("seen_at", "here", "is_missing"),
    [
        ({}, {"a"}, False),
        ({"a": 1.0}, {"a"}, False),
        ({"a": 1.0, "b": 1.005}, {"a"}, True),
        ({"a": 1.005, "b": 1.0}, {"a"}, True),
        ({"a": 1.0, "b": 1.005}, {"a", "b"}, False),
        ({"a": 1.0, "b": 1.02}, {"a"}, False),
        ({"a": 1.0, "b": 1.02, "c": 1.025}, {"b"}, True),
        ({"b": 1.0, "c": 1.005}, {"a"}, False),
    ],
    ids=[
        "nobody has come before",
        "one alone",
        "one that came a little later",
        "one that came a little earlier",
        "all are here",
        "the other came at another time",
        "not the one that came at another time but the third",
        "a newcomer waits for nobody",
    ],
)
def test_a_batch_waits_for_sessions_that_came_together_with_those_that_are_here(seen_at, here, is_missing):
    assert is_one_missing(seen_at, here.__contains__, WINDOW_S) == is_missing
