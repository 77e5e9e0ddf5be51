"""The approximate rows policy over the wire: a target that hands over one hidden a round."""

import pytest

from specdraft.v1 import drafter_pb2 as pb
from wire import Story, refused_entry

STORY = Story(9)


@pytest.fixture
def session(shared_server):
    opened = shared_server.client().open()
    yield opened
    opened.close()


def opened(session):
    return session.sequence(STORY, rows_policy=pb.ROWS_POLICY_APPROXIMATE)


def begin(sequence):
    """Six pairs, then three drafts."""
    sequence.catchup(0, 2)
    return sequence.propose(2, 4)


def refused(sequence, *where, **changes):
    pairs = STORY.pairs(*where, **changes)
    request = pb.ProposeRequest(entries=[sequence.propose_entry(*where, pairs=pairs)])
    (result,) = sequence.session.call("Propose", request).results
    assert result.state == sequence.state()
    return refused_entry(result.status)


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_accepted_drafts_become_approximate_rows(session, accepted):
    sequence = opened(session)
    first = begin(sequence)
    assert (first.state.last_pair_key, first.state.row_count, first.state.first_approximate_key) == (5, 6, -1)
    key = 6 + accepted
    second = sequence.propose(key, 1, pairs=STORY.pairs(key, 1, verified_tokens=first.drafts[:accepted]))
    assert (second.state.last_pair_key, second.state.row_count) == (key, key + 1)
    assert second.state.first_approximate_key == (6 if accepted else -1)


def test_verified_tokens_that_are_not_the_drafts_are_refused_with_the_key(session):
    sequence = opened(session)
    drafts = list(begin(sequence).drafts)
    wrong = [drafts[0], (drafts[1] + 1) % 128]
    said = refused(sequence, 8, 1, verified_tokens=wrong)
    assert said.kind == ("ABORTED", "DRAFT_MISMATCH")
    assert said.details == {"key": "7", "stored": str(drafts[1]), "given": str(wrong[1])}
    assert sequence.propose(8, 1, pairs=STORY.pairs(8, 1, verified_tokens=drafts[:2])).state.row_count == 9


def test_draft_rows_that_nobody_verified_are_a_gap(session):
    sequence = opened(session)
    begin(sequence)
    said = refused(sequence, 7, 1)
    assert (said.kind, said.details["gap_begin"]) == (("FAILED_PRECONDITION", "MISSING_ROWS"), "6")


def test_verified_tokens_are_nothing_for_exact_rows(session):
    sequence = session.sequence(STORY)
    drafts = begin(sequence).drafts
    assert refused(sequence, 7, 1, verified_tokens=drafts[:1]).kind == ("INVALID_ARGUMENT", "INVALID_FIELD")


def test_repair_makes_every_row_exact(session):
    sequence, exact = opened(session), session.sequence(STORY)
    drafts = list(begin(sequence).drafts)
    sequence.propose(8, 1, pairs=STORY.pairs(8, 1, verified_tokens=drafts[:2]))
    repaired = sequence.propose(6, 3)
    exact.catchup(0, 6)
    expected = exact.propose(6, 3)
    assert list(repaired.drafts) == list(expected.drafts)
    assert list(repaired.logprobs) == pytest.approx(list(expected.logprobs), abs=1e-4)
    assert repaired.state.first_approximate_key == -1


def test_a_truncate_keeps_the_draft_rows_below_it(session):
    sequence = opened(session)
    drafts = list(begin(sequence).drafts)
    assert sequence.truncate(8, accepted_drafts=2).state.row_count == 6
    said = refused(sequence, 9, 1, verified_tokens=drafts)
    assert said.reason == "INVALID_FIELD"
    second = sequence.propose(8, 1, pairs=STORY.pairs(8, 1, verified_tokens=drafts[:2]))
    assert (second.state.row_count, second.state.first_approximate_key) == (9, 6)


def test_a_carry_keeps_approximate_rows_and_not_the_drafts_that_wait(session):
    sequence = opened(session)
    drafts = list(begin(sequence).drafts)
    sequence.propose(8, 1, pairs=STORY.pairs(8, 1, verified_tokens=drafts[:2]))
    taken = sequence.take()
    assert [(span.begin, span.end) for span in taken.carry.ranges] == [(0, 9)]
    assert (taken.state.row_count, taken.state.first_approximate_key) == (0, -1)
    installed = opened(session).install(taken.carry.kv_id)
    assert (installed.state.row_count, installed.state.first_approximate_key) == (9, 6)


def test_a_full_accept_leaves_no_gap_and_the_drafts_take_pages(start):
    server = start(num_pages=16)
    sequence = server.client().open().sequence(STORY, rows_policy=pb.ROWS_POLICY_APPROXIMATE)
    drafts = list(begin(sequence).drafts)
    assert server.pages() == 3
    result = sequence.propose(9, 1, 0, pairs=STORY.pairs(9, 1, verified_tokens=drafts))
    assert [(span.begin, span.end) for span in result.state.ranges] == [(0, 10)]
    assert server.pages() == 3
