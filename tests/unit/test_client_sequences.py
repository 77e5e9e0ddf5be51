"""Sequences of the Python client: chunks, operation numbers, uncertainty, batches, carries."""

import threading

import numpy as np
import pytest

from fake_service import FakeService
from specdraft import (
    AbortedError,
    CatchupItem,
    Client,
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    NotFoundError,
    ProposeItem,
    Reason,
    ResourceExhaustedError,
    StopReason,
    UnavailableError,
)
from specdraft.errors import make_error


def rows(count, width=8, start=0):
    return np.arange(start, start + count * width, dtype=np.float32).reshape(count, width)


@pytest.fixture(params=["drive-host", "drive-inline", "unary-host", "unary-inline"])
def service_and_client(request, tmp_path):
    drive, memory = request.param.split("-")
    with (
        FakeService(tmp_path) as service,
        Client(service.target, use_drive=drive == "drive", memory=memory, slot_count=2, timeout_s=2.0) as client,
    ):
        yield service, client
        assert client.session.placement.in_use_count == 0


@pytest.mark.parametrize("length", [2, 3, 16, 17, 18, 33, 50])
def test_a_prompt_arrives_pair_by_pair_whatever_its_length(service_and_client, length):
    service, client = service_and_client
    prompt, hiddens = list(range(100, 100 + length)), rows(length)
    sequence = client.open_sequence()
    state = sequence.prefill(prompt, hiddens)
    stored = service.sequences[sequence.sequence_id]
    assert stored.tokens == {key: prompt[key + 1] for key in range(length - 1)}
    assert stored.rows == {key: hiddens[key].tobytes() for key in range(length - 1)}
    chunks = [len(one.entries[0].pairs.tokens) for one in service.requests("Catchup")]
    assert max(chunks) <= 16
    assert len(chunks) == -(-(length - 1) // 16)
    assert (state.last_pair_key, state.row_count, state.last_op) == (length - 2, length - 1, len(chunks))


def test_a_prompt_of_one_token_writes_nothing(service_and_client):
    service, client = service_and_client
    state = client.open_sequence().prefill([5], rows(1))
    assert (state.last_op, state.last_pair_key) == (0, -1)
    assert not service.requests("Catchup")


def test_inline_chunks_fit_the_message_limit(tmp_path):
    width, limit = 1024, 64 * 1024
    with (
        FakeService(tmp_path, hidden_width=width, message_bytes=limit, prefill_rows=1000) as service,
        Client(service.target, memory="inline") as client,
    ):
        sequence = client.open_sequence()
        hiddens = rows(100, width)
        sequence.prefill(list(range(100)), hiddens)
        sizes = [one.ByteSize() for one in service.requests("Catchup")]
        assert max(sizes) <= limit
        assert len(sizes) == -(-99 // 15)
        assert service.sequences[sequence.sequence_id].rows[98] == hiddens[98].tobytes()


def test_a_proposal_brings_drafts_and_the_state(service_and_client):
    service, client = service_and_client
    service.draft = lambda sequence, entry: [3, 1, 2][: entry.draft_count]
    proposal = client.open_sequence().propose(0, [9, 8], rows(2), 3, min_logprob=-2.5, mask=[1, 2], accepted_drafts=1)
    assert proposal.drafts == (3, 1, 2)
    assert proposal.logprobs == (-0.5, -0.5, -0.5)
    assert proposal.stop_reason is StopReason.COMPLETE
    assert proposal.state.last_pair_key == 1
    (request,) = service.requests("Propose")
    (entry,) = request.entries
    assert (entry.op, entry.draft_count, entry.min_logprob, entry.accepted_drafts) == (1, 3, -2.5, 1)
    assert list(entry.mask.words) == [1, 2]
    assert not entry.pairs.allow_gap


def test_what_is_not_said_is_not_sent(service_and_client):
    service, client = service_and_client
    client.open_sequence().propose(0, [9], rows(1), 0)
    (entry,) = service.requests("Propose")[0].entries
    assert not any(entry.HasField(name) for name in ("accepted_drafts", "min_logprob", "mask", "output_slot"))


def test_more_pairs_than_a_propose_takes_go_ahead_in_a_catchup(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    hiddens = rows(30)
    proposal = sequence.propose(0, list(range(30)), hiddens, 2, accepted_drafts=0)
    assert proposal.drafts == (7, 7)
    stored = service.sequences[sequence.sequence_id]
    assert stored.rows == {key: hiddens[key].tobytes() for key in range(30)}
    assert len(service.requests("Propose")[0].entries[0].pairs.tokens) == 5
    assert service.requests("Catchup")[0].entries[0].accepted_drafts == 0
    assert not service.requests("Propose")[0].entries[0].HasField("accepted_drafts")


def test_operations_are_numbered_without_gaps(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    sequence.catchup(0, [1, 2], rows(2))
    sequence.propose(2, [3], rows(1), 1)
    sequence.truncate(2)
    carry = sequence.take_kv("label")
    assert (carry.label, [(one.begin, one.end) for one in carry.ranges]) == ("label", [(0, 2)])
    assert sequence.install_kv(carry, keep_keys_below=1).row_count == 1
    sequence.catchup(1, [5], rows(1))
    assert sequence.state().last_op == 6
    sequence.close(accepted_drafts=0)
    assert service.requests("CloseSequence")[0].op == 7


def test_a_refused_operation_does_not_take_a_number(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    with pytest.raises(FailedPreconditionError) as caught:
        sequence.propose(5, [1], rows(1), 1)
    assert caught.value.reason is Reason.MISSING_ROWS
    assert (caught.value.details["gap_begin"], caught.value.details["gap_end"]) == ("0", "5")
    assert sequence.propose(5, [1], rows(1), 1, allow_gap=True).state.last_op == 1
    assert not service.requests("GetSequence")


@pytest.mark.parametrize("was_done", [True, False])
def test_after_a_timeout_the_next_use_asks_where_the_sequence_stands(service_and_client, was_done):
    service, client = service_and_client
    sequence = client.open_sequence()
    sequence.catchup(0, [1, 2], rows(2))
    release = threading.Event()
    if was_done:
        service.after["Propose"] = [lambda: release.wait(5)]
    else:
        service.faults["Propose"] = [lambda: (release.wait(5), fail())]

    def fail():
        raise make_error(Reason.PAGES_EXHAUSTED, "late")

    with pytest.raises(DeadlineError) as caught:
        sequence.propose(2, [3], rows(1), 1)
    assert caught.value.code == 4
    release.set()
    proposal = sequence.propose(2, [4], rows(1), 2, allow_gap=True)
    assert proposal.state.last_op == (3 if was_done else 2)
    assert len(service.requests("GetSequence")) == 1
    assert service.sequences[sequence.sequence_id].tokens[2] == 4


def test_places_of_a_lost_request_are_kept_until_the_service_is_done_with_them(tmp_path):
    with FakeService(tmp_path) as service, Client(service.target, slot_count=1, timeout_s=0.3) as client:
        sequence, other = client.open_sequence(), client.open_sequence()
        release = threading.Event()
        service.faults["Propose"] = [lambda: release.wait(5)]
        with pytest.raises(DeadlineError):
            sequence.propose(0, [3], rows(1), 1)
        assert client.session.placement.in_use_count == 1
        release.set()
        other.propose(0, [4], rows(1), 1)
        assert service.requests("Propose")[1].entries[0].pairs.hiddens.WhichOneof("memory") == "arena_staging"
        sequence.state()
        assert client.session.placement.in_use_count == 0


def test_a_wrong_number_is_corrected_once(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    sequence.catchup(0, [1, 2], rows(2))
    service.sequences[sequence.sequence_id].last_op = 7  # operations that nobody told this client of
    assert sequence.propose(2, [3], rows(1), 1).state.last_op == 8
    service.sequences[sequence.sequence_id].last_op = 11
    assert sequence.truncate(1).last_op == 12
    error = make_error(Reason.OP_OUT_OF_ORDER, "order", last_op=12)
    service.entry_faults += [(None, error)] * 2
    with pytest.raises(AbortedError):
        sequence.propose(1, [3], rows(1), 1)
    assert sequence.propose(1, [3], rows(1), 1).state.last_op == 13


def test_a_number_that_a_lost_request_took_is_stepped_over(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    stored = service.sequences[sequence.sequence_id]
    stored.last_op, stored.last_digest = 1, b"a request that arrived late"
    assert sequence.propose(0, [3], rows(1), 1).state.last_op == 2
    stored.last_op, stored.last_digest = 3, b"another"
    assert sequence.truncate(0).last_op == 4


def test_an_internal_error_makes_the_state_uncertain(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    service.faults["Truncate"] = [make_error(Reason.INTERNAL, "bug")]
    with pytest.raises(Exception, match="bug"):
        sequence.truncate(0)
    assert sequence.truncate(0).last_op == 1
    assert len(service.requests("GetSequence")) == 1


def test_one_bad_entry_does_not_disturb_the_others(service_and_client):
    service, client = service_and_client
    good, gap, gone, other = (client.open_sequence() for _ in range(4))
    gone.close()
    service.draft = lambda sequence, entry: [entry.pairs.tokens[-1]] * entry.draft_count
    items = [
        ProposeItem(good, 0, [1], rows(1), 2),
        ProposeItem(gap, 3, [2], rows(1), 2),
        ProposeItem(gone, 0, [3], rows(1), 2),
        ProposeItem(other, 0, [4, 5], rows(2), 1),
    ]
    results = client.propose_batch(items)
    assert results[0].drafts == (1, 1)
    assert isinstance(results[1], FailedPreconditionError)
    assert isinstance(results[2], NotFoundError)
    assert results[3].drafts == (5,)
    assert len(service.requests("Propose")) == 1
    assert [result.last_op for result in (good.state(), gap.state(), other.state())] == [1, 0, 1]


def test_a_sequence_twice_in_one_call_fails_both_and_nobody_else(service_and_client):
    _, client = service_and_client
    twice, once = client.open_sequence(), client.open_sequence()
    results = client.propose_batch(
        [
            ProposeItem(twice, 0, [1] * 9, rows(9), 1),
            ProposeItem(once, 0, [1], rows(1), 1),
            ProposeItem(twice, 0, [1], rows(1), 1),
        ]
    )
    assert [getattr(one, "reason", None) for one in results] == [
        Reason.DUPLICATE_SEQUENCE,
        None,
        Reason.DUPLICATE_SEQUENCE,
    ]
    assert isinstance(results[0], InvalidArgumentError)
    assert twice.state().last_op == 0


def test_batches_larger_than_a_call_takes_are_cut(service_and_client):
    service, client = service_and_client
    sequences = [client.open_sequence() for _ in range(11)]
    results = client.propose_batch([ProposeItem(one, 0, [1], rows(1), 1) for one in sequences])
    assert [one.drafts for one in results] == [(7,)] * 11
    assert [len(one.entries) for one in service.requests("Propose")] == [8, 3]


def test_long_catchups_in_one_batch_go_on_in_chunks(service_and_client):
    service, client = service_and_client
    lengths = [3, 40, 17]
    sequences = [client.open_sequence() for _ in lengths]
    items = [
        CatchupItem(one, 0, list(range(length)), rows(length)) for one, length in zip(sequences, lengths, strict=True)
    ]
    states = client.catchup_batch(items)
    assert [one.row_count for one in states] == lengths
    for sequence, length in zip(sequences, lengths, strict=True):
        assert service.sequences[sequence.sequence_id].rows == {
            key: rows(length)[key].tobytes() for key in range(length)
        }


def test_an_error_of_the_whole_call_is_every_items(service_and_client):
    service, client = service_and_client
    sequences = [client.open_sequence() for _ in range(3)]
    service.faults["Catchup"] = [make_error(Reason.DRAINING, "soon gone", retry_delay_ms=70)]
    results = client.catchup_batch([CatchupItem(one, 0, [1], rows(1)) for one in sequences])
    assert all(isinstance(one, UnavailableError) and one.retry_delay_ms == 70 for one in results)
    assert [one.catchup(0, [1], rows(1)).last_op for one in sequences] == [1, 1, 1]


def test_hiddens_that_do_not_fit_are_refused_before_anything_is_sent(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    for use in (
        lambda: sequence.prefill([1, 2], rows(2, 9)),
        lambda: sequence.catchup(0, [1], rows(2)),
        lambda: sequence.propose(0, [1], rows(1).astype(np.float64), 1),
        lambda: client.propose_batch([ProposeItem(sequence, 0, [1, 2], rows(1), 1)]),
    ):
        with pytest.raises(ValueError):
            use()
    assert {call.rpc for call in service.calls} == {"GetServerInfo", "OpenSession", "KeepAlive", "OpenSequence"}


def test_opening_is_tried_again_with_the_same_id(tmp_path):
    with FakeService(tmp_path) as service, Client(service.target, use_drive=False, timeout_s=0.4) as client:
        release = threading.Event()
        service.after["OpenSequence"] = [lambda: release.wait(2)]
        sequence = client.open_sequence()
        release.set()
        first, second = service.requests("OpenSequence")
        assert first.open_id == second.open_id
        assert list(service.sequences) == [sequence.sequence_id]


def test_carries_are_freed_and_unknown_ones_are_said_to_be(service_and_client):
    _service, client = service_and_client
    sequence = client.open_sequence()
    sequence.catchup(0, [1], rows(1))
    carry = sequence.take_kv()
    client.free_kv(carry)
    with pytest.raises(NotFoundError):
        client.free_kv(carry)
    with pytest.raises(NotFoundError) as caught:
        sequence.install_kv(carry)
    assert caught.value.reason is Reason.CARRY_UNKNOWN


def test_a_fork_is_a_sequence_of_its_own(service_and_client):
    _service, client = service_and_client
    sequence = client.open_sequence()
    sequence.catchup(0, [1, 2, 3], rows(3))
    fork = sequence.fork(2)
    assert fork.known_state.row_count == 2
    assert fork.propose(2, [9], rows(1), 1).state.last_op == 1
    assert sequence.state().row_count == 3


def test_closing_never_raises(service_and_client):
    service, client = service_and_client
    for reason in (Reason.SEQUENCE_UNKNOWN, Reason.INTERNAL, Reason.DRAINING):
        sequence = client.open_sequence()
        service.faults["CloseSequence"] = [make_error(reason, "no")]
        sequence.close()
        sequence.close()


def test_threads_share_a_client_and_a_sequence(service_and_client):
    service, client = service_and_client
    shared, failures = client.open_sequence(), []
    service.draft = lambda sequence, entry: [entry.pairs.tokens[-1]] * entry.draft_count

    def work(index):
        try:
            with client.open_sequence() as own:
                for step in range(30):
                    hidden = rows(1, start=1000 * index + step)
                    assert own.propose(step, [index], hidden, 3).drafts == (index,) * 3
                    assert service.sequences[own.sequence_id].rows[step] == hidden.tobytes()
                    shared.propose(0, [index], rows(1), 1)
        except Exception as error:  # noqa: BLE001 - shown below
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures
    assert shared.state().last_op == 180


def test_errors_with_a_delay_carry_it(service_and_client):
    service, client = service_and_client
    sequence = client.open_sequence()
    service.entry_faults.append((sequence.sequence_id, make_error(Reason.PAGES_EXHAUSTED, "full", retry_delay_ms=40)))
    with pytest.raises(ResourceExhaustedError) as caught:
        sequence.propose(0, [1], rows(1), 1)
    assert caught.value.retry_delay_ms == 40


@pytest.mark.parametrize("is_left", [False, True], ids=["closed", "left"])
def test_a_sequence_that_cannot_be_closed_now_is_closed_before_the_next_is_opened(tmp_path, is_left):
    with FakeService(tmp_path) as service, Client(service.target, timeout_s=0.3) as client:
        for _ in range(3):
            go_on, sequence = threading.Event(), client.open_sequence()
            service.after["Propose"] = [lambda go_on=go_on: go_on.wait(1)]
            with pytest.raises(DeadlineError):
                sequence.propose(0, [1], rows(1), 1)
            assert client.session.placement.in_use_count == 1
            (sequence.leave if is_left else sequence.close)()
            go_on.set()
        service.after.clear()
        client.open_sequence()
        assert (len(service.sequences), client.session.placement.in_use_count) == (1, 0)


def test_sequences_that_were_left_are_forgotten_with_their_session(tmp_path):
    with FakeService(tmp_path) as service, Client(service.target) as client:
        for sequence in [client.open_sequence() for _ in range(3)]:
            sequence.leave()
        service.token = b"restarted"
        service.cut()
        client.open_sequence()
        assert len(service.requests("CloseSequence")) <= 1
        service.calls.clear()
        client.open_sequence()
        assert [call.rpc for call in service.calls] == ["OpenSequence"]
