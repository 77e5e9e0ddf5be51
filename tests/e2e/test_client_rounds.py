"""Forks, stored drafts, approximate rows, advice and masks, from the Python client to the service itself."""

import pytest
import torch

from specdraft import (
    AbortedError,
    AsyncClient,
    Client,
    InvalidArgumentError,
    MemoryKind,
    ProposeItem,
    Reason,
    RowsPolicy,
    StopReason,
    UnavailableError,
)

WIDTH, VOCAB = 64, 128
WORDS = VOCAB // 32


def story(length, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=made).tolist(), torch.randn(length, WIDTH, generator=made)


def target_of(server):
    return f"unix://{server.config.socket}"


@pytest.fixture(params=["drive-host", "drive-inline", "unary-host", "unary-inline"])
def client(request, shared_server):
    drive, memory = request.param.split("-")
    options = {"use_drive": drive == "drive", "memory": memory, "slot_count": 2, "timeout_s": 20.0, "with_masks": True}
    with Client(target_of(shared_server), hidden_width=WIDTH, **options) as client:
        yield client
        assert client.session.placement.in_use_count == 0


@pytest.fixture
def sequence(client):
    tokens, hiddens = story(30)
    with client.open_sequence() as sequence:
        sequence.prefill(tokens, hiddens)
        yield sequence


# --- forks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1, 4, 17, 29])
def test_a_fork_drafts_like_a_sequence_of_its_own(client, sequence, keep):
    tokens, hiddens = story(30)
    fork = sequence.fork(keep, budget_tokens=60)
    assert (fork.known_state.row_count, fork.known_state.last_pair_key) == (keep, keep - 1)
    own = client.open_sequence()
    own.prefill(tokens[: keep + 1], hiddens[: keep + 1])
    other = torch.randn(1, WIDTH, generator=torch.Generator().manual_seed(9))
    actual, expected = (one.propose(keep, [3], other, 4) for one in (fork, own))
    assert actual.drafts == expected.drafts
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert sequence.state().row_count == 29
    fork.close()
    own.close()


def test_a_fork_whose_answer_was_lost_is_not_made_twice(client, sequence, shared_server):
    call, lost = client.session._transport.call, []

    def lose_first(exchange):
        answer = call(exchange)
        if not lost:
            lost.append(answer.sequence_id)
            raise UnavailableError(None, "the answer was lost")
        return answer

    client.session._transport.call = lose_first
    fork = sequence.fork(20)
    client.session._transport.call = call
    assert lost == [fork.sequence_id]
    assert fork.state().row_count == 20
    fork.close()


# --- stored drafts ----------------------------------------------------------------------------------------------------


def test_drafts_can_be_read_again(client, sequence, shared_server):
    _, hiddens = story(30)
    proposal = sequence.propose(29, [5], hiddens[29:], 3)
    stored = sequence.read_drafts(with_last_embedding=True)
    assert (stored.drafts, stored.stop_reason) == (proposal.drafts, StopReason.COMPLETE)
    assert stored.logprobs == pytest.approx(proposal.logprobs)
    embedding = torch.frombuffer(bytearray(stored.last_embedding), dtype=torch.float32)
    assert embedding.shape == (client.server_info().head.head_width,)
    assert embedding.abs().sum() > 0
    assert sequence.read_drafts(proposal.state.last_op).last_embedding == b""
    sequence.truncate(10)
    with pytest.raises(AbortedError) as caught:
        sequence.read_drafts()
    assert caught.value.reason is Reason.OP_OUT_OF_ORDER


# --- approximate rows -------------------------------------------------------------------------------------------------


def test_accepted_drafts_become_approximate_rows(client):
    tokens, hiddens = story(30)
    with client.open_sequence(rows_policy=RowsPolicy.APPROXIMATE) as sequence:
        sequence.prefill(tokens, hiddens)
        first = sequence.propose(29, [5], hiddens[29:], 3)
        assert (first.state.last_pair_key, first.state.row_count) == (29, 30)
        wrong = (first.drafts[0] + 1) % VOCAB
        with pytest.raises(AbortedError) as caught:
            sequence.propose(31, [5], hiddens[:1], 3, verified_tokens=[wrong])
        assert caught.value.reason is Reason.DRAFT_MISMATCH
        # The target accepted one draft and hands over the hidden state of the next token alone.
        second = sequence.propose(31, [5], hiddens[:1], 3, verified_tokens=first.drafts[:1])
        assert (second.state.last_pair_key, second.state.first_approximate_key) == (31, 30)
        state = sequence.catchup(33, [4], hiddens[1:2], verified_tokens=second.drafts[:1])
        assert (state.last_pair_key, state.first_approximate_key, state.row_count) == (33, 30, 34)
        repaired = sequence.catchup(30, [5, 4, 3, 2], hiddens[:4])
        assert (repaired.last_pair_key, repaired.first_approximate_key) == (33, -1)


# --- advice -----------------------------------------------------------------------------------------------------------


def test_a_recommendation_comes_when_it_is_asked_for(client, sequence):
    _, hiddens = story(30)
    assert sequence.propose(29, [5], hiddens[29:], 2).recommended_drafts is None
    slow = sequence.propose(29, [5], hiddens[29:], 2, recommend=True, verify_us=60_000_000)
    assert slow.recommended_drafts == 4  # a verify of a minute is worth every draft
    for _ in range(30):
        fast = sequence.propose(29, [5], hiddens[29:], 2, accepted_drafts=0, recommend=True, verify_us=1)
    assert fast.recommended_drafts == 0


# --- masks ------------------------------------------------------------------------------------------------------------


def mask_of(*rows):
    words = []
    for allowed in rows:
        bits = sum(1 << token for token in allowed)
        words += [bits >> 32 * word & 0xFFFFFFFF for word in range(WORDS)]
    return words


def test_masks_rule_the_drafts_wherever_they_lie(client, sequence):
    _, hiddens = story(30)
    rows = [{31, 64}, {127}, {0, 32}]
    proposal = sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of(*rows))
    assert all(draft in row for draft, row in zip(proposal.drafts, rows, strict=True))
    again = sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of({96, 31}))
    assert set(again.drafts) <= {96, 31}
    none = sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of({1}, set(), {1}))
    assert (none.drafts, none.stop_reason) == ((1,), StopReason.GRAMMAR)
    with pytest.raises(InvalidArgumentError) as caught:
        sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of({1}, {1}))
    assert caught.value.reason is Reason.MASK_SIZE_MISMATCH
    with pytest.raises(InvalidArgumentError) as caught:
        sequence.propose(29, [5], hiddens[29:], 3, mask=[1])
    assert caught.value.reason is Reason.MASK_SIZE_MISMATCH


def requests_of(client):
    """The requests that a client sends from now on."""
    call, seen = client.session._transport.call, []

    def note(exchange):
        seen.append(exchange.request)
        return call(exchange)

    client.session._transport.call = note
    return seen


def test_masks_lie_in_the_arena_where_there_is_room(client, sequence):
    _, hiddens = story(30)
    seen = requests_of(client)
    sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of({1}, {2}, {3}))
    mask = seen[0].entries[0].mask
    if client.memory_kind is MemoryKind.HOST:
        assert (len(mask.words), mask.HasField("arena_slot"), mask.arena_row_count) == (0, True, 3)
    else:
        assert (len(mask.words), mask.HasField("arena_slot")) == (3 * WORDS, False)


def test_without_room_masks_travel_in_the_message(shared_server):
    tokens, hiddens = story(30)
    with Client(target_of(shared_server), hidden_width=WIDTH, timeout_s=20.0) as client:
        sequence = client.open_sequence()
        sequence.prefill(tokens, hiddens)
        seen = requests_of(client)
        assert sequence.propose(29, [5], hiddens[29:], 3, mask=mask_of({7})).drafts == (7, 7, 7)
        assert list(seen[0].entries[0].mask.words) == mask_of({7})


def test_each_entry_of_a_batch_has_its_own_mask(client):
    tokens, hiddens = story(30)
    sequences = [client.open_sequence() for _ in range(4)]  # two have slots
    items = []
    for index, sequence in enumerate(sequences):
        sequence.prefill(tokens, hiddens)
        items.append(ProposeItem(sequence, 29, [5], hiddens[29:], 2, mask=mask_of({index}, {index + 50})))
    drafts = [one.drafts for one in client.propose_batch(items)]
    assert drafts == [(index, index + 50) for index in range(4)]


@pytest.mark.parametrize("bad", [-1, 1 << 32])
def test_words_that_are_none_are_refused_and_nothing_stays_taken(client, sequence, bad):
    _, hiddens = story(30)
    with pytest.raises(ValueError):
        sequence.propose(29, [5], hiddens[29:], 3, mask=[bad, 0, 0, 0])
    assert client.session.placement.in_use_count == 0
    assert sequence.propose(29, [5], hiddens[29:], 1).drafts


async def test_asyncio_has_the_same_words(shared_server):
    tokens, hiddens = story(30)
    options = {"timeout_s": 20.0, "with_masks": True}
    async with AsyncClient(target_of(shared_server), hidden_width=WIDTH, **options) as client:
        sequence = await client.open_sequence(rows_policy=RowsPolicy.APPROXIMATE)
        await sequence.prefill(tokens, hiddens)
        first = await sequence.propose(
            29, [5], hiddens[29:], 2, mask=mask_of({7}), recommend=True, verify_us=60_000_000
        )
        assert (first.drafts, first.recommended_drafts) == ((7, 7), 4)
        assert (await sequence.read_drafts()).drafts == (7, 7)
        fork = await sequence.fork(10)
        assert fork.known_state.row_count == 10
        state = await sequence.catchup(31, [4], hiddens[1:2], verified_tokens=[7])
        assert state.first_approximate_key == 30
