"""ForkSequence over the wire: shared prefixes, whole retries, and refusals that change nothing."""

import secrets

import pytest

from specdraft.v1 import drafter_pb2 as pb
from wire import Sequence, Story, refusal, refused_entry

STORY = Story(3)


def fork_request(sequence, keep, **changes):
    fields = {"sequence_id": sequence.sequence_id, "open_id": secrets.token_bytes(16), "keep_keys_below": keep}
    return pb.ForkSequenceRequest(**fields | changes)


def fork(sequence, keep, **changes):
    answer = sequence.session.call("ForkSequence", fork_request(sequence, keep, **changes))
    return Sequence(sequence.session, answer, sequence.story)


@pytest.mark.parametrize("keep", [0, 3, 4, 7, 8, 9, 100])
def test_a_fork_holds_the_rows_below_its_bound_and_drafts_as_if_it_had_been_filled_by_itself(scene, keep):
    source, by_itself = scene.session.sequence(STORY), scene.session.sequence(STORY)
    source.catchup(0, 9)
    forked = fork(source, keep)
    num_rows = min(keep, 9)
    assert (forked.state().row_count, forked.state().last_pair_key, forked.op) == (num_rows, num_rows - 1, 0)
    by_itself.catchup(0, num_rows) if num_rows else None
    assert forked.propose(num_rows, 2).drafts == by_itself.propose(num_rows, 2).drafts


def test_an_open_id_that_another_request_has_used_is_refused_until_its_sequence_is_closed(scene):
    session, open_id = scene.session, secrets.token_bytes(16)
    opened = session.sequence(STORY, open_id=open_id, budget_tokens=20)
    opened.catchup(0, 5)
    others = (
        ("OpenSequence", pb.OpenSequenceRequest(open_id=open_id, budget_tokens=21)),
        ("OpenSequence", pb.OpenSequenceRequest(open_id=open_id, budget_tokens=20, reserve=True)),
        ("ForkSequence", fork_request(opened, 3, open_id=open_id, budget_tokens=20)),
    )
    num_sequences = scene.server.metric("sequences")
    for rpc, request in others:
        said = refusal(session.call, rpc, request)
        assert said.kind == ("INVALID_ARGUMENT", "INVALID_FIELD")
        assert said.details["field"] == "open_id"
    assert (opened.state().row_count, scene.server.metric("sequences")) == (5, num_sequences)
    opened.close()
    assert fork(session.sequence(STORY), 0, open_id=open_id).state().row_count == 0


def test_a_fork_costs_its_last_page_alone_and_the_metrics_say_so(start):
    server = start(num_pages=16)
    source = server.client().open().sequence(STORY)
    source.catchup(0, 10)
    assert server.metric("kv_pages", state="live") == 3
    forks = [fork(source, 10) for _ in range(5)]
    assert server.metric("kv_pages", state="live") == 3 + 5
    assert server.metric("kv_pages", state="free") == 16 - 8
    assert fork(source, 8).state().row_count == 8
    assert server.pages() == 8
    source.close()
    assert server.pages() == 2 + 5
    for forked in forks:
        forked.close()
    assert server.pages() == 2


def test_writing_into_a_shared_page_changes_nobody_else(scene):
    server, source = scene.server, scene.session.sequence(STORY)
    source.catchup(0, 8)
    forked, digest = fork(source, 8), server.digest(source.sequence_id)
    other = Story(4)
    forked.propose(2, 3, pairs=other.pairs(2, 3))
    assert server.digest(source.sequence_id) == digest
    forked_digest = server.digest(forked.sequence_id)
    source.propose(1, 2, pairs=other.pairs(1, 2))
    assert server.digest(forked.sequence_id) == forked_digest


def test_a_fork_sent_again_is_the_same_sequence(scene):
    request = fork_request(scene.sequence, 6)
    first = scene.session.call("ForkSequence", request)
    pages = scene.server.pages()
    assert scene.session.call("ForkSequence", request) == first
    with scene.session.drive() as drive:
        assert drive.ask(fork_sequence=request).fork_sequence == first
    assert scene.server.pages() == pages


ARGUMENTS = {
    "a bound below zero": ({"keep_keys_below": -1}, ("INVALID_ARGUMENT", "INVALID_FIELD")),
    "an open_id that is too short": ({"open_id": bytes(15)}, ("INVALID_ARGUMENT", "INVALID_FIELD")),
    "a budget beyond the longest sequence": ({"budget_tokens": 201}, ("INVALID_ARGUMENT", "INVALID_FIELD")),
    "a budget below the rows kept": ({"budget_tokens": 5}, ("OUT_OF_RANGE", "POSITION_LIMIT")),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_a_fork_that_cannot_be_is_refused_and_nothing_happens(scene, name):
    changes, kind = ARGUMENTS[name]
    request = fork_request(scene.sequence, 6, **changes)
    with scene.undisturbed():
        said = refusal(scene.session.call, "ForkSequence", request)
        with scene.session.drive() as drive:
            assert refused_entry(drive.ask(fork_sequence=request).status) == said
    assert said.kind == kind


def test_unknown_and_foreign_sources_are_answered_alike(scene):
    foreign = refusal(scene.session.call, "ForkSequence", fork_request(scene.bystander, 3))
    unknown = refusal(scene.session.call, "ForkSequence", fork_request(scene.sequence, 3, sequence_id=bytes(16)))
    assert foreign == unknown
    assert foreign.kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")


def test_forks_count_as_sequences_and_need_a_page_for_what_they_copy(start):
    server = start(num_pages=3, max_sequences=3)
    session = server.client().open()
    source = session.sequence(STORY)
    source.catchup(0, 10)
    said = refusal(session.call, "ForkSequence", fork_request(source, 10))
    assert (said.kind, said.details) == (("RESOURCE_EXHAUSTED", "PAGES_EXHAUSTED"), {"needed": "1", "free": "0"})
    for _ in range(2):
        fork(source, 8)
    said = refusal(session.call, "ForkSequence", fork_request(source, 8))
    assert (said.kind, said.details) == (("RESOURCE_EXHAUSTED", "SEQUENCES_EXHAUSTED"), {"limit": "3"})
    assert server.pages() == 3


def test_a_fork_is_answered_again_after_its_source_has_been_closed(scene):
    source = scene.session.sequence(STORY)
    source.catchup(0, 6)
    request = fork_request(source, 5)
    forked = scene.session.call("ForkSequence", request)
    source.close()
    assert scene.session.call("ForkSequence", request) == forked
    assert refusal(fork, source, 5).kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
