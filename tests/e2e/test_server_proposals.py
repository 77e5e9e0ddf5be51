"""What a proposal brings: drafts, why there are not more, masks, probabilities, and independence of what others do."""

import math

import pytest

from specdraft.v1 import drafter_pb2 as pb
from wire import VOCAB, Story, mask_of

STORY = Story(11)


@pytest.fixture
def session(shared_server):
    opened = shared_server.client().open()
    yield opened
    opened.close()


def test_no_drafts_asked_for_only_writes(session):
    sequence = session.sequence(STORY)
    result = sequence.propose(0, 3, 0)
    assert (list(result.drafts), list(result.logprobs), result.stop_reason) == ([], [], pb.STOP_REASON_NOT_ASKED)
    assert result.state.row_count == 3
    caught_up = session.sequence(STORY)
    caught_up.catchup(0, 3)
    assert sequence.propose(3, 1).drafts == caught_up.propose(3, 1).drafts


def test_all_drafts_asked_for_are_complete(session):
    for draft_count in range(1, 5):
        result = session.sequence(STORY).propose(0, 3, draft_count)
        assert len(result.drafts) == len(result.logprobs) == draft_count
        assert result.stop_reason == pb.STOP_REASON_COMPLETE
        assert all(logprob <= 0 for logprob in result.logprobs)
        assert all(0 <= draft < VOCAB for draft in result.drafts)


def test_drafts_leave_no_rows(session, shared_server):
    with_drafts, without = session.sequence(STORY), session.sequence(STORY)
    with_drafts.propose(0, 5, 4)
    without.propose(0, 5, 0)
    assert with_drafts.state().row_count == without.state().row_count == 5
    assert shared_server.digest(with_drafts.sequence_id) == shared_server.digest(without.sequence_id)


def test_low_confidence_ends_the_chain_after_the_draft_that_shows_it(session):
    free = session.sequence(STORY).propose(0, 5, 4)
    lowest = min(range(4), key=lambda index: free.logprobs[index])
    bound = free.logprobs[lowest] + 1e-4
    first_below = next(index for index in range(4) if free.logprobs[index] < bound)
    result = session.sequence(STORY).propose(0, 5, 4, min_logprob=bound)
    assert list(result.drafts) == list(free.drafts)[: first_below + 1]
    assert result.stop_reason == pb.STOP_REASON_CONFIDENCE
    certain = session.sequence(STORY).propose(0, 5, 4, min_logprob=0.1)
    assert (len(certain.drafts), certain.stop_reason) == (1, pb.STOP_REASON_CONFIDENCE)
    never = session.sequence(STORY).propose(0, 5, 4, min_logprob=-math.inf)
    assert (list(never.drafts), never.stop_reason) == (list(free.drafts), pb.STOP_REASON_COMPLETE)


def test_one_mask_holds_for_every_draft(session):
    allowed = (3, 40, 77, 127)
    result = session.sequence(STORY).propose(0, 5, 4, mask=pb.GrammarMask(words=mask_of(*allowed)))
    assert len(result.drafts) == 4
    assert set(result.drafts) <= set(allowed)


def test_masks_of_each_draft_hold_for_it_alone(session):
    words = [word for token in (5, 64, 127, 0) for word in mask_of(token)]
    result = session.sequence(STORY).propose(0, 5, 4, mask=pb.GrammarMask(words=words))
    assert list(result.drafts) == [5, 64, 127, 0]
    assert list(result.logprobs) == [0.0] * 4  # nothing else has any probability


def test_a_mask_that_allows_everything_changes_nothing_and_bits_beyond_the_vocabulary_are_nothing(session):
    free = session.sequence(STORY).propose(0, 5, 4)
    full = pb.GrammarMask(words=[0xFFFFFFFF] * 4)
    result = session.sequence(STORY).propose(0, 5, 4, mask=full)
    assert (list(result.drafts), list(result.logprobs)) == (list(free.drafts), list(free.logprobs))


def test_probabilities_are_over_what_the_mask_allows(session):
    def logprob(*allowed):
        result = session.sequence(STORY).propose(0, 5, 1, mask=pb.GrammarMask(words=mask_of(*allowed)))
        return result.drafts[0], result.logprobs[0]

    pair = [logprob(token)[1] for token in (9, 10)]
    assert pair == [0.0, 0.0]
    best, with_both = logprob(9, 10)
    rest = 10 if best == 9 else 9
    assert -math.log(2) <= with_both < 0
    # Adding a third id takes probability from the best, or takes its place.
    third = logprob(best, rest, 11)
    assert third[0] != best or third[1] < with_both


def test_a_mask_that_allows_nothing_ends_the_chain_there(session):
    free = session.sequence(STORY).propose(0, 5, 4)
    everything, nothing = [0xFFFFFFFF] * 4, [0] * 4
    second = pb.GrammarMask(words=everything + nothing + everything + everything)
    result = session.sequence(STORY).propose(0, 5, 4, mask=second)
    assert (list(result.drafts), result.stop_reason) == (list(free.drafts)[:1], pb.STOP_REASON_GRAMMAR)
    sequence = session.sequence(STORY)
    result = sequence.propose(0, 5, 4, mask=pb.GrammarMask(words=nothing))
    assert (list(result.drafts), list(result.logprobs), result.stop_reason) == ([], [], pb.STOP_REASON_GRAMMAR)
    assert sequence.propose(4, 1, 4).drafts == free.drafts


def test_a_mask_of_one_batch_neighbour_is_not_the_others(session):
    free = session.sequence(STORY).propose(0, 5, 4)
    masked, plain = session.sequence(STORY), session.sequence(STORY)
    mask = pb.GrammarMask(words=mask_of(1))
    request = pb.ProposeRequest(entries=[masked.propose_entry(0, 5, 4, mask=mask), plain.propose_entry(0, 5, 4)])
    first, second = session.call("Propose", request).results
    assert list(first.drafts) == [1] * 4
    assert list(second.drafts) == list(free.drafts)


def test_the_position_limit_ends_the_chain(session):
    sequence = session.sequence(STORY, budget_tokens=8)
    sequence.catchup(0, 5)
    result = sequence.propose(5, 1, 4)  # drafts come from the keys 5, 6 and 7
    assert (len(result.drafts), result.stop_reason) == (3, pb.STOP_REASON_POSITION_LIMIT)
    result = sequence.propose(6, 2, 4)
    assert (len(result.drafts), result.stop_reason) == (1, pb.STOP_REASON_POSITION_LIMIT)


def test_missing_pages_end_the_chain_and_not_the_write(start):
    server = start(num_pages=2)
    session = server.client().open()
    whole = session.sequence(STORY)
    expected = whole.propose(0, 5, 4)
    whole.close()
    sequence = session.sequence(STORY)
    sequence.catchup(0, 5)
    result = sequence.propose(5, 2, 4)  # row 7 takes the last place: one draft row fits beside it
    assert (len(result.drafts), result.stop_reason) == (2, pb.STOP_REASON_PAGES)
    assert result.state.row_count == 7
    result = sequence.propose(7, 1, 4)
    assert (len(result.drafts), result.stop_reason) == (1, pb.STOP_REASON_PAGES)
    result = sequence.propose(4, 1, 4)
    assert (list(result.drafts), result.stop_reason) == (list(expected.drafts), pb.STOP_REASON_COMPLETE)


def test_drafts_depend_neither_on_the_batch_nor_on_chunks_nor_on_what_free_pages_hold(start):
    server = start()
    session = server.client().open()
    alone = [session.sequence(Story(seed)).propose(0, 5, 4) for seed in range(4)]
    server.poison_free_pages()
    sequences = [session.sequence(Story(seed)) for seed in range(4)]
    for first_key in range(4):
        entries = [sequence.catchup_entry(first_key, 1) for sequence in reversed(sequences)]
        results = session.call("Catchup", pb.CatchupRequest(entries=entries)).results
        assert all(result.status.code == 0 for result in results)
        for sequence in sequences:
            sequence.op += 1
    request = pb.ProposeRequest(entries=[sequence.propose_entry(4, 1, 4) for sequence in sequences])
    for result, expected in zip(session.call("Propose", request).results, alone, strict=True):
        assert list(result.drafts) == list(expected.drafts)
        assert list(result.logprobs) == pytest.approx(list(expected.logprobs), rel=1e-4)


def test_a_gap_is_refused_until_it_is_declared_and_the_drafts_use_the_rows_that_are_there(start):
    server = start()
    session = server.client().open()
    refused_before = server.metric("gaps_total", outcome="refused")
    drafts = []
    for poison in (float("nan"), 1e30):
        server.service.assembly.pool.poison(server.allocator.free_pages(), poison)
        sequence = session.sequence(STORY)
        entry = sequence.propose_entry(8, 4, 4)
        (result,) = session.call("Propose", pb.ProposeRequest(entries=[entry])).results
        assert (result.status.code, list(result.drafts)) == (9, [])
        assert dict(result.status.details) == {"gap_begin": "0", "gap_end": "8", "last_pair_key": "-1"}
        result = sequence.propose(8, 4, 4, pairs=STORY.pairs(8, 4, allow_gap=True))
        assert [(r.begin, r.end) for r in result.state.ranges] == [(8, 12)]
        assert result.state.row_count == 4
        drafts.append(list(result.drafts))
        sequence.close()
    assert drafts[0] == drafts[1]
    assert len(drafts[0]) == 4
    assert server.metric("gaps_total", outcome="refused") == refused_before + 2
    assert server.metric("gaps_total", outcome="declared") == 2


def test_a_carry_drafts_as_if_nothing_had_happened(session):
    straight = session.sequence(STORY)
    straight.catchup(0, 7)
    carried = session.sequence(STORY)
    carried.catchup(0, 7)
    kv_id = carried.take().carry.kv_id
    assert carried.state().row_count == 0
    heir = session.sequence(STORY)
    heir.install(kv_id, keep_keys_below=6)
    assert list(heir.propose(6, 2, 4).drafts) == list(straight.propose(6, 2, 4).drafts)
    assert carried.propose(0, 5, 4).state.last_op == 3
