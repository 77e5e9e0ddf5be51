"""`recommended_drafts`: how many drafts are worth asking for, from acceptance, cost of a draft and time of a verify."""

import pytest

from specdraft.v1 import drafter_pb2 as pb
from wire import VOCAB, Story

MAX_DRAFTS = 4
DEAR_US, CHEAP_US = 1_000_000, 1


@pytest.fixture
def session(start):
    return start().client().open()


def play(sequence, num_rounds, num_accepted, **changes):
    """Rounds whose drafts the target accepts up to a place; the last answer."""
    result = sequence.propose(0, 2, MAX_DRAFTS, **changes)
    key = 2
    for _ in range(num_rounds):
        accepted = list(result.drafts)[:num_accepted]
        bonus = (result.drafts[num_accepted] + 1) % VOCAB if num_accepted < len(result.drafts) else 7
        tokens = [*accepted, bonus]
        pairs = sequence.story.pairs(key, len(tokens), tokens=tokens)
        result = sequence.propose(key, len(tokens), MAX_DRAFTS, pairs=pairs, **changes)
        key += len(tokens)
    return result


def test_what_is_not_asked_for_is_absent(session):
    assert not session.sequence(Story(1)).propose(0, 2).HasField("recommended_drafts")
    result = session.sequence(Story(1)).propose(0, 2, verify_us=DEAR_US)
    assert not result.HasField("recommended_drafts")
    assert session.sequence(Story(1)).propose(0, 2, recommend=True).HasField("recommended_drafts")


def test_a_dear_verify_makes_drafts_worth_their_while_and_a_cheap_one_does_not(session):
    dear = play(session.sequence(Story(1)), 12, 2, recommend=True, verify_us=DEAR_US)
    cheap = play(session.sequence(Story(1)), 12, 2, recommend=True, verify_us=CHEAP_US)
    assert dear.recommended_drafts > cheap.recommended_drafts
    assert cheap.recommended_drafts == 0


def test_drafts_that_are_never_accepted_are_advised_against(session):
    sequence = session.sequence(Story(1))
    good = play(session.sequence(Story(2)), 1, MAX_DRAFTS, recommend=True, verify_us=DEAR_US)
    assert good.recommended_drafts == MAX_DRAFTS
    bad = play(sequence, 60, 0, recommend=True, verify_us=20_000)
    assert bad.recommended_drafts < MAX_DRAFTS


def test_advice_is_within_the_sessions_limit(start):
    session = start().client().open(max_drafts=2)
    result = session.sequence(Story(1)).propose(0, 2, 2, recommend=True, verify_us=DEAR_US)
    assert result.recommended_drafts == 2


def test_a_retry_gets_the_advice_of_the_first_time(session):
    sequence = session.sequence(Story(1))
    entry = sequence.propose_entry(0, 2, recommend=True, verify_us=DEAR_US)
    first = session.call("Propose", pb.ProposeRequest(entries=[entry]))
    assert session.call("Propose", pb.ProposeRequest(entries=[entry])) == first
    assert first.results[0].HasField("recommended_drafts")


def test_advice_is_given_without_drafts_too(session):
    result = session.sequence(Story(1)).propose(0, 2, 0, recommend=True, verify_us=DEAR_US)
    assert (result.stop_reason, result.recommended_drafts) == (pb.STOP_REASON_NOT_ASKED, MAX_DRAFTS)
