"""Faults that people reported of services like this one, each as the behaviour that keeps it out of ours.

Where each comes from stands in the table of test_reported_faults_list.py.
"""

import time

import pytest
import torch

from drafter_service.heads import oracle_draft
from drafter_service.server.app import MIN_PING_INTERVAL_S
from serving import PAGE_BYTES, PAGE_ROWS
from specdraft.channel import _KEEPALIVE_TIME_MS
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import Client, Sequence, Session, Story, refusal, refused_entry

STORY = Story(21)
MARGIN = 1e-4


def expect_oracle(server, story, keys, drafts):
    """The drafts are the oracle's over the story's pairs of these keys, up to a tie."""
    head = server.service.assembly.head
    tokens, hiddens = torch.tensor([story.tokens[key] for key in keys]), story.rows[list(keys)]
    expected = oracle_draft(head, tokens, hiddens, torch.tensor(list(keys)), len(drafts))
    assert min(expected.margins) >= MARGIN, "choose another seed: a tie decides nothing"
    assert list(drafts) == expected.ids


@pytest.mark.parametrize("poison", [float("nan"), 1e30])
def test_a_context_restored_without_its_pairs_is_refused_or_declared_and_can_be_filled_later(start, poison):
    server = start()
    sequence = server.client().open().sequence(STORY)
    server.service.assembly.pool.poison(server.allocator.free_pages(), poison)
    entry = sequence.propose_entry(8, 4)
    (result,) = sequence.session.call("Propose", pb.ProposeRequest(entries=[entry])).results
    assert refused_entry(result.status).kind == ("FAILED_PRECONDITION", "MISSING_ROWS")
    assert refused_entry(result.status).details == {"gap_begin": "0", "gap_end": "8", "last_pair_key": "-1"}
    assert not result.drafts
    assert server.metric("gaps_total", outcome="refused") == 1
    declared = sequence.propose(8, 4, pairs=STORY.pairs(8, 4, allow_gap=True))
    expect_oracle(server, STORY, range(8, 12), declared.drafts)
    sequence.catchup(0, 8)
    expect_oracle(server, STORY, range(12), sequence.propose(8, 4).drafts)


@pytest.mark.parametrize("token", [128, 2147483653, 4294967295])
@pytest.mark.parametrize("rpc", ["Catchup", "Propose"])
def test_a_token_id_that_is_none_is_named_and_nobody_else_waits(scene, rpc, token):
    pairs = STORY.pairs(6, 3, tokens=[5, token, 7])
    sequence = scene.sequence
    with scene.undisturbed():
        if rpc == "Catchup":
            request = pb.CatchupRequest(entries=[sequence.catchup_entry(6, 3, pairs=pairs)])
        else:
            request = pb.ProposeRequest(entries=[sequence.propose_entry(6, 3, pairs=pairs)])
        said = refused_entry(scene.session.call(rpc, request).results[0].status)
        began = time.monotonic()
        scene.bystander_drafts()
        assert time.monotonic() - began < 1
    assert said.kind == ("INVALID_ARGUMENT", "TOKEN_OUT_OF_RANGE")
    assert said.details == {"index": "1", "token": str(token), "vocab_size": "128"}


def test_a_batch_with_a_row_less_than_before_writes_into_nobodys_last_page(start):
    server = start(num_pages=8)
    session = server.client().open()
    *drafting, leaving, owner = [session.sequence(Story(seed)) for seed in range(5)]
    for sequence in drafting:
        sequence.catchup(0, 3)
    leaving.catchup(0, 3)
    owner.catchup(0, 16)
    assert server.pages() == 8
    entries = [sequence.propose_entry(2, 1, 1) for sequence in (*drafting, leaving)]
    session.call("Propose", pb.ProposeRequest(entries=entries))
    leaving.op += 1
    leaving.close()
    expected = []
    for sequence in drafting:
        sequence.op += 1
        expected.append(list(sequence.propose(2, 1, 2).drafts))
    digest = server.digest(owner.sequence_id)
    for _ in range(100):
        results = session.call(
            "Propose", pb.ProposeRequest(entries=[s.propose_entry(2, 1, 2) for s in drafting])
        ).results
        assert [list(result.drafts) for result in results] == expected
        for sequence in drafting:
            sequence.op += 1
    assert server.digest(owner.sequence_id) == digest


def test_a_catchup_delivered_twice_is_done_once_and_one_that_does_not_follow_says_where_it_stands(start):
    server = start()
    sequence = server.client().open().sequence(STORY)
    sequence.catchup(0, 4)
    request = pb.CatchupRequest(entries=[sequence.catchup_entry(4, 4)])
    first = sequence.session.call("Catchup", request)
    rows, digest = server.metric("rows_written_total"), server.digest(sequence.sequence_id)
    assert sequence.session.call("Catchup", request) == first
    assert (first.results[0].state.row_count, first.results[0].state.last_pair_key) == (8, 7)
    assert (server.metric("rows_written_total"), server.digest(sequence.sequence_id)) == (rows, digest)
    far = pb.CatchupRequest(entries=[sequence.catchup_entry(12, 1, op=3)])
    said = refused_entry(sequence.session.call("Catchup", far).results[0].status)
    assert said.details == {"gap_begin": "8", "gap_end": "12", "last_pair_key": "7"}
    proposal = pb.ProposeRequest(entries=[sequence.propose_entry(8, 1, op=3)])
    drafted = sequence.session.call("Propose", proposal)
    assert sequence.session.call("Propose", proposal) == drafted


def test_two_clients_may_choose_one_id_and_a_late_close_never_hits_its_next_owner(start):
    server = start()
    name = b"r1".ljust(16, b"\0")
    one, other = (server.client().open() for _ in range(2))
    mine, theirs = one.sequence(Story(1), open_id=name), other.sequence(Story(2), open_id=name)
    assert mine.sequence_id != theirs.sequence_id
    mine.catchup(0, 4)
    theirs.catchup(0, 4)
    mine.close()
    expect_oracle(server, Story(2), range(5), theirs.propose(4, 1).drafts)
    theirs.close()
    current = one.sequence(Story(1), open_id=name)
    with one.drive() as drive:
        for _ in range(500):
            current.catchup(0, 4)
            closing = current.close_request()
            asked = [drive.send(close_sequence=closing), drive.send(open_sequence=open_request(name))]
            asked.append(drive.send(close_sequence=closing))  # a retry that arrives late
            closed, opened, again = [drive.answer_to(correlation_id) for correlation_id in asked]
            assert (closed.status.code, opened.status.code, again.status.code) == (0, 0, 0)
            assert opened.open_sequence.sequence_id != current.sequence_id
            current = Sequence(one, opened.open_sequence, Story(1))
            assert current.state().last_op == 0
            assert server.metric("sequences") == 1
            assert server.pages() == 0


def open_request(name):
    return pb.OpenSequenceRequest(open_id=name)


def test_a_shared_prefix_is_nobodys_to_write_and_each_continues_with_its_own_token(start):
    server = start(max_drafts=7, num_pages=32)
    first = server.client().open().sequence(STORY)
    first.catchup(0, 8)
    request = pb.ForkSequenceRequest(sequence_id=first.sequence_id, open_id=bytes(16), keep_keys_below=7)
    second = Sequence(first.session, first.session.call("ForkSequence", request), STORY)
    ways = ((first, 11), (second, 22))
    pool, pages = server.service.assembly.pool, server.ledger.sequences._by_id[first.sequence_id].pages[:1]
    slots = torch.arange(PAGE_ROWS) + pages[0] * PAGE_ROWS
    before = pool.read(slots)
    drafts = {}
    for _ in range(50):
        for sequence, token in ways:
            drafts[token] = sequence.propose(7, 1, 7, pairs=STORY.pairs(7, 1, tokens=[token])).drafts
    assert torch.equal(pool.read(slots), before)
    for token, drafted in drafts.items():
        told = Story(21)
        told.tokens[7] = token
        expect_oracle(server, told, range(8), drafted)
    assert server.pages() == 3
    first.close()
    assert server.pages() == 2
    assert second.propose(7, 1, 7, pairs=STORY.pairs(7, 1, tokens=[22])).drafts == drafts[22]


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_rows_written_while_drafting_are_replaced_by_true_ones(start, accepted):
    server = start()
    sequence = server.client().open().sequence(STORY)
    sequence.catchup(0, 7)
    drafts = list(sequence.propose(7, 1).drafts)
    told = Story(21)
    told.tokens[8 : 8 + accepted + 1] = [*drafts[:accepted], 99]
    pool = server.service.assembly.pool
    pool.poison(server.allocator.free_pages())
    result = sequence.propose(8, accepted + 1, pairs=told.pairs(8, accepted + 1))
    assert (result.state.row_count, result.state.last_pair_key) == (8 + accepted + 1, 8 + accepted)
    expect_oracle(server, told, range(8 + accepted + 1), result.drafts)


def test_the_shipped_client_never_pings_more_often_than_the_service_allows():
    assert _KEEPALIVE_TIME_MS >= MIN_PING_INTERVAL_S * 1000


@pytest.mark.parametrize("spare", [0, 1, PAGE_BYTES - 1])
def test_the_pool_is_a_budget_in_bytes_and_nothing_is_guessed(start, spare):
    for _ in range(2):
        server = start(kv_bytes=37 * PAGE_BYTES + spare)
        assert server.client().info().limits.kv_page_count == 37
        server.close()


def test_a_call_that_reaches_another_replica_is_told_that_its_session_is_unknown_there(start):
    here, elsewhere = start(), start()
    session = here.client().open()
    sequence = session.sequence(STORY)
    sequence.catchup(0, 4)
    astray = Session(elsewhere.client(), session.answer)
    request = pb.ProposeRequest(entries=[sequence.propose_entry(4, 1)])
    said = refusal(astray.call, "Propose", request)
    assert said.kind == ("NOT_FOUND", "SESSION_UNKNOWN")
    assert said.domain == "specdraft"
    assert here.client().info().incarnation != elsewhere.client().info().incarnation
    expect_oracle(here, STORY, range(5), sequence.propose(4, 1).drafts)


def test_shared_memory_is_refused_to_a_client_of_another_host(shared_server):
    other_host = "00000000-0000-4000-8000-000000000000"
    with Client(f"unix:{shared_server.config.socket}") as client:
        said = refusal(client.open, memory_kind=tensor_pb2.MEMORY_KIND_HOST, boot_id=other_host)
    assert said.kind == ("FAILED_PRECONDITION", "OTHER_HOST")


def test_a_carry_brings_every_row_bit_for_bit_and_nothing_after_them(start):
    server = start()
    session = server.client().open()
    sequence, by_itself = session.sequence(STORY), session.sequence(STORY)
    sequence.catchup(0, 10)
    by_itself.catchup(0, 10)
    digest = server.digest(sequence.sequence_id)
    last_page = server.ledger.sequences._by_id[sequence.sequence_id].pages[2]
    for store in server.service.assembly.pool.pages(0):
        store[last_page, 2:] = float("nan")
    taken = sequence.take()
    layout = taken.layout
    described = (layout.layer_count, layout.kv_head_count, layout.head_dim, layout.page_row_count, layout.dtype)
    assert described == (1, 2, 16, PAGE_ROWS, tensor_pb2.D_TYPE_FLOAT32)
    heir = session.sequence(STORY)
    refused = refusal(heir.install, taken.carry.kv_id, head_fingerprint="another revision")
    assert (refused.kind, refused.details["field"]) == (("FAILED_PRECONDITION", "KV_MISMATCH"), "head_fingerprint")
    heir.install(taken.carry.kv_id, head_fingerprint=taken.head_fingerprint)
    assert server.digest(heir.sequence_id) == digest
    assert heir.state().row_count == 10
    assert heir.propose(10, 1).drafts == by_itself.propose(10, 1).drafts
