"""The conformance cases: enough of them, each with a name of its own, and every reason of the enum among them."""

from collections import Counter

from conformance.reading import expected_reasons, load_cases, load_unreachable
from specdraft.errors import Reason

CASES = load_cases()


def test_every_reason_stands_in_a_case_or_is_said_to_be_unreachable():
    reached = set().union(*(expected_reasons(case["steps"]) for case in CASES)) & set(Reason)
    unreachable = load_unreachable()
    assert not set(Reason) - reached - set(unreachable), "no case expects these"
    assert not reached & set(unreachable), "cases expect these: take them out of unreachable.yaml"
    assert set(unreachable) <= set(Reason)
    assert all(unreachable.values()), "each has its reason"


def test_cases_have_names_of_their_own_and_steps():
    assert len(CASES) >= 60
    assert not [name for name, count in Counter(case["name"] for case in CASES).items() if count > 1]
    assert all(case["steps"] for case in CASES)
    assert all(set(case) <= {"name", "steps", "server", "proxy"} for case in CASES)
