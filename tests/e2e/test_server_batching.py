"""Calls of several clients: they share forwards, nobody is waited for, and nobody is starved."""

from serving import wait_until
from specdraft.v1 import drafter_pb2 as pb
from wire import Story, refused_entry


def sides(server, count, num_rows=3):
    """Sequences of as many clients, each with its rows."""
    sequences = [server.client().open().sequence(Story(seed)) for seed in range(count)]
    for sequence in sequences:
        sequence.catchup(0, num_rows)
    return sequences


def begin(sequence, first_key=3, count=1, **changes):
    entry = sequence.propose_entry(first_key, count, **changes)
    return sequence.session.begin("Propose", pb.ProposeRequest(entries=[entry]))


def wait_for_inbox(server, count):
    """Until as many calls wait for the engine behind the batch that is held."""
    wait_until(lambda: server.service.assembly.engine._inbox.qsize() >= count, text=f"{count} calls that wait")


def test_proposals_of_eight_clients_that_wait_together_share_one_forward(start):
    server = start(max_batch=8, workers=12)
    first, *others = sides(server, 9)
    alone = [sequence.session.sequence(sequence.story) for sequence in others]
    expected = []
    for sequence in alone:
        sequence.catchup(0, 3)
        expected.append(list(sequence.propose(3, 1).drafts))
    before = len(server.runner.batches)
    with server.runner.held():
        held = begin(first)
        server.runner.wait_for_batch(before)
        calls = [begin(sequence) for sequence in others]
        wait_for_inbox(server, 8)
    assert [list(call.result().results[0].drafts) for call in calls] == expected
    assert held.result().results[0].status.code == 0
    assert [len(batch) for batch in server.runner.batches[before:]] == [1, 8]


def test_more_than_a_batch_goes_in_the_next_one(start):
    server = start(max_batch=4, workers=16)
    first, *others = sides(server, 11)
    before = len(server.runner.batches)
    with server.runner.held():
        calls = [begin(first)]
        server.runner.wait_for_batch(before)
        calls += [begin(sequence) for sequence in others]
        wait_for_inbox(server, 10)
    assert all(call.result().results[0].status.code == 0 for call in calls)
    assert [len(batch) for batch in server.runner.batches[before:]] == [1, 4, 4, 2]


def test_nobody_waits_for_a_client_that_is_not_ready(start):
    server = start(max_batch=8)
    ready, _not_ready = sides(server, 2)
    before = len(server.runner.batches)
    for key in range(3, 13):
        begin(ready, key).result()
        ready.op += 1
    assert [len(batch) for batch in server.runner.batches[before:]] == [1] * 10


def test_a_client_that_floods_delays_another_by_no_more_than_a_step(start):
    server = start(max_batch=4, workers=40, max_in_flight=2)
    flooder, quiet = (server.client().open() for _ in range(2))
    many = [flooder.sequence(Story(seed)) for seed in range(30)]
    (one,) = [quiet.sequence(Story(99))]
    before = len(server.runner.batches)
    with server.runner.held():
        calls = [begin(many[0], 0, 3)]
        server.runner.wait_for_batch(before)
        calls += [begin(sequence, 0, 3) for sequence in many[1:]]
        wait_for_inbox(server, 29)
        call = begin(one, 0, 2)
        wait_for_inbox(server, 30)
    assert call.result().results[0].status.code == 0
    assert all(call.result().results[0].status.code == 0 for call in calls)
    sizes = [[len(entry.tokens) for entry in batch] for batch in server.runner.batches[before:]]
    (place,) = [index for index, batch in enumerate(sizes) if 2 in batch]
    assert place == 1, sizes


def test_carries_go_before_any_entry_is_refused(start):
    server = start(num_pages=6, carry_share=1.0, max_batch=4)
    session = server.client().open()
    carrier = session.sequence(Story(0))
    carrier.catchup(0, 12)
    carrier.take()
    sequences = [session.sequence(Story(seed)) for seed in range(1, 5)]
    entries = [sequence.propose_entry(0, 4, 0) for sequence in sequences]
    results = session.call("Propose", pb.ProposeRequest(entries=entries)).results
    assert [result.status.code for result in results] == [0, 0, 0, 0]
    assert server.metric("carries_total", outcome="evicted") == 1
    late = [session.sequence(Story(seed)) for seed in (5, 6, 7)]
    entries = [seq.catchup_entry(0, count) for seq, count in zip(late, (9, 5, 1), strict=True)]
    results = session.call("Catchup", pb.CatchupRequest(entries=entries)).results
    assert [refused_entry(result.status).reason for result in results[:1]] == ["PAGES_EXHAUSTED"]
    assert [result.status.code for result in results] == [8, 0, 8]
    assert server.pages() == 6


def test_in_the_middle_of_a_batch_those_that_fit_go_on(start):
    server = start(num_pages=5, carry_share=1.0, max_batch=4)
    session = server.client().open()
    carrier, sequences = session.sequence(Story(0)), [session.sequence(Story(seed)) for seed in range(1, 5)]
    sequences[1].catchup(0, 4)
    carrier.catchup(0, 4)
    carrier.take()
    state, digest = sequences[1].state(), server.digest(sequences[1].sequence_id)
    wishes = ((0, 12), (4, 5), (0, 3), (0, 1))  # three pages with the carry's; two of one; one; none
    entries = [seq.catchup_entry(*wish) for seq, wish in zip(sequences, wishes, strict=True)]
    results = session.call("Catchup", pb.CatchupRequest(entries=entries)).results
    assert [result.status.code for result in results] == [0, 8, 0, 8]
    assert (sequences[1].state(), server.digest(sequences[1].sequence_id)) == (state, digest)
    assert sequences[3].state().last_op == 0
    assert server.metric("carries_total", outcome="evicted") == 1
