"""Parking and resuming when something goes wrong between the steps; for threads and for asyncio."""

import asyncio

import numpy as np
import pytest

from fake_service import FakeService
from specdraft import AsyncClient, Client, DeadlineError, InvalidArgumentError, Reason, SpecdraftError, UnavailableError
from specdraft.errors import make_error


def rows(count, width=8):
    return np.zeros((count, width), dtype=np.float32)


class Blocking:
    """An `AsyncClient` and its conversations with the face of a `Client`."""

    def __init__(self, target, **options):
        self.loop = asyncio.new_event_loop()
        self.client = self.loop.run_until_complete(self._open(target, options))

    @staticmethod
    async def _open(target, options):
        client = AsyncClient(target, **options)
        await client.open()
        return client

    def run(self, awaitable):
        return self.loop.run_until_complete(awaitable)

    @property
    def conversations(self):
        return _Conversations(self)

    def parked(self, tokens, conversation=""):
        sequence = self.run(self.client.open_sequence())
        self.run(sequence.prefill(tokens, rows(len(tokens))))
        return self.conversations.park(sequence, tokens, conversation)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.run(self.client.close())
        self.loop.close()


class _Conversations:
    def __init__(self, blocking):
        self.blocking, self.inner = blocking, blocking.client.conversations

    def __len__(self):
        return len(self.inner)

    def __getattr__(self, name):
        given = getattr(self.inner, name)
        if not asyncio.iscoroutinefunction(given):
            return given
        return lambda *args, **kwargs: self.blocking.run(given(*args, **kwargs))


class Threaded(Client):
    def parked(self, tokens, conversation=""):
        sequence = self.open_sequence()
        sequence.prefill(tokens, rows(len(tokens)))
        return self.conversations.park(sequence, tokens, conversation)


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path) as service:
        yield service


@pytest.fixture(params=[Threaded, Blocking])
def open_client(request, service):
    return lambda **options: request.param(service.target, timeout_s=2.0, **options)


@pytest.fixture
def client(open_client):
    with open_client() as client:
        yield client


def test_a_turn_parks_and_resumes(service, client):
    carry = client.parked(range(10), "chat")
    assert (carry.label, carry.last_key, len(service.sequences)) == ("chat", 8, 0)
    resumed = client.conversations.resume(range(12), "chat")
    assert (resumed.num_keys_kept, resumed.next_key, len(client.conversations)) == (9, 9, 0)
    assert service.requests("InstallKV")[0].keep_keys_below == 9
    assert service.requests("InstallKV")[0].head_fingerprint == "00"


@pytest.mark.parametrize("reason", [Reason.CARRY_UNKNOWN, Reason.KV_MISMATCH])
def test_a_lost_carry_gives_way_to_the_next_best_and_at_last_to_nothing(service, client, reason):
    for length in (10, 8):
        client.parked(range(length))
    service.faults["InstallKV"] = [make_error(reason, "gone")]
    assert client.conversations.resume(range(12)).num_keys_kept == 7
    assert len(client.conversations) == 0
    client.parked(range(10))
    service.carries.clear()
    assert client.conversations.resume(range(12)).num_keys_kept == 0
    assert len(service.sequences) == 2  # what was opened for nothing is closed


def test_after_a_refusal_the_carry_is_known_as_before(service, client):
    client.parked(range(10))
    service.faults["InstallKV"] = [make_error(Reason.POSITION_LIMIT, "too long")]
    with pytest.raises(SpecdraftError) as caught:
        client.conversations.resume(range(12))
    assert caught.value.reason is Reason.POSITION_LIMIT
    assert not service.sequences
    assert client.conversations.resume(range(12)).num_keys_kept == 9


def test_when_no_sequence_can_be_opened_the_carry_is_known_as_before(service, client):
    client.parked(range(10))
    service.faults["OpenSequence"] = [make_error(Reason.SEQUENCES_EXHAUSTED, "full")]
    with pytest.raises(SpecdraftError):
        client.conversations.resume(range(12))
    assert client.conversations.resume(range(12)).num_keys_kept == 9


def test_after_an_error_that_may_have_installed_it_the_carry_is_forgotten(service, client):
    client.parked(range(10))
    service.faults["InstallKV"] = [make_error(Reason.TIMEOUT, "late")]
    with pytest.raises(DeadlineError):
        client.conversations.resume(range(12))
    assert (len(client.conversations), len(service.sequences)) == (0, 0)


def test_a_carry_that_is_shared_stays(service, client):
    first = client.parked(range(10), "one")
    resumed = client.conversations.resume([*range(6), 99, 98], "two")
    assert (resumed.num_keys_kept, len(service.sequences)) == (5, 1)
    (again,) = client.conversations.carries
    assert (again.kv_id != first.kv_id, again.label, again.last_key) == (True, "one", 8)
    assert client.conversations.resume(range(12), "one").num_keys_kept == 9


def test_without_room_for_a_fork_the_rows_go_to_whoever_asks(service, client):
    client.parked(range(10), "one")
    service.faults["ForkSequence"] = [make_error(Reason.PAGES_EXHAUSTED, "full")]
    resumed = client.conversations.resume([*range(6), 99], "two")
    assert (resumed.num_keys_kept, resumed.next_key, len(client.conversations)) == (5, 5, 0)


def test_when_a_fork_fails_the_carry_is_parked_again(service, client):
    client.parked(range(10), "one")
    service.faults["ForkSequence"] = [make_error(Reason.INVALID_FIELD, "no")]
    with pytest.raises(InvalidArgumentError):
        client.conversations.resume([*range(6), 99], "two")
    assert (len(client.conversations), len(service.sequences)) == (1, 0)


def test_when_the_carry_cannot_be_parked_again_the_new_sequence_stands(service, client):
    client.parked(range(10), "one")
    service.faults["TakeKV"] = [make_error(Reason.DEVICE_LOST, "gone")]
    assert client.conversations.resume([*range(6), 99], "two").num_keys_kept == 5
    assert (len(client.conversations), len(service.sequences)) == (0, 1)


def test_what_is_forgotten_is_given_up_at_the_service(service, open_client):
    with open_client(carries_max=2) as client:
        carries = [client.parked(range(length)) for length in (4, 5, 6)]
        assert [one.kv_id for one in service.requests("FreeKV")] == [carries[0].kv_id]
        service.faults["FreeKV"] = [make_error(Reason.CARRY_UNKNOWN, "expired")]
        client.parked(range(7))
        assert len(client.conversations) == 2
    with open_client(carry_tokens_max=9) as client:
        client.parked(range(20))
        assert len(client.conversations) == 0


def test_an_empty_sequence_leaves_nothing(service, client):
    client.parked([5])
    assert (len(client.conversations), len(service.carries)) == (0, 0)


def test_an_adopted_carry_is_used_like_a_parked_one(service, client):
    carry = client.parked(range(10), "chat")
    client.conversations.forget(carry)
    assert client.conversations.resume(range(12), "chat").num_keys_kept == 0
    client.conversations.adopt(carry, range(10))
    assert client.conversations.resume(range(12), "chat").num_keys_kept == 9


def test_parking_that_fails_leaves_the_sequence_open(service, open_client):
    with open_client() as client:
        service.faults["TakeKV"] = [make_error(Reason.INVALID_FIELD, "label")]
        with pytest.raises(InvalidArgumentError):
            client.parked(range(10))
        assert (len(client.conversations), len(service.sequences)) == (0, 1)


def test_after_a_lost_session_resuming_opens_another(service, client):
    client.parked(range(10))
    service.token = b"another"
    service.carries.clear()
    assert client.conversations.resume(range(12)).num_keys_kept == 0


def test_a_closed_client_neither_resumes_nor_adopts(service, open_client):
    with open_client() as client:
        conversations, carry = client.conversations, client.parked(range(10))
        (client.close if isinstance(client, Client) else lambda: client.run(client.client.close()))()
        with pytest.raises(UnavailableError):
            conversations.resume(range(12))
        with pytest.raises(UnavailableError):
            conversations.adopt(carry, range(10))


@pytest.mark.parametrize("name", ["carries_max", "carry_tokens_max"])
def test_bounds_are_not_negative(service, name):
    with pytest.raises(ValueError, match=name):
        Client(service.target, **{name: -1})


def test_of_many_lost_carries_each_costs_one_call(service, client):
    for number in range(5):
        client.parked([1, 2, 3, 4, 50 + number], f"conversation {number}")
    service.carries.clear()
    service.calls.clear()
    resumed = client.conversations.resume([1, 2, 3, 4, 50, 6], "conversation 0")
    assert (resumed.num_keys_kept, len(client.conversations)) == (0, 0)
    assert [call.rpc for call in service.calls] == ["OpenSequence"] + 5 * ["InstallKV"]
    assert list(service.sequences)[-1] == resumed.sequence.sequence_id


def test_a_lost_carry_of_another_budget_leaves_no_sequence_behind(service, client):
    client.parked([1, 2, 3, 4, 5], "own")
    service.carries.clear()
    num_before = len(service.sequences)
    resumed = client.conversations.resume([1, 2, 3, 9, 9], "another", budget_tokens=40)
    assert (resumed.num_keys_kept, len(service.sequences)) == (0, num_before + 1)
    assert service.requests("OpenSequence")[-1].budget_tokens == 40


@pytest.mark.parametrize(
    ("options", "is_another", "num_known"),
    [({}, False, 0), ({"carry_key": b"k" * 16}, False, 1), ({"carry_key": b"k" * 16}, True, 0)],
    ids=["without a key", "with a key", "with a key, another service"],
)
def test_carries_that_went_with_a_session_are_forgotten_with_it(service, open_client, options, is_another, num_known):
    with open_client(**options) as client:
        client.parked([1, 2, 3, 4])
        service.token = b"lost"
        if is_another:
            service.incarnation = bytes(16)
        service.cut()
        client.conversations.resume([8, 9])
        assert len(client.conversations) == num_known
