"""The Python client against the service itself: same drafts over every transport, and after every kind of trouble."""

import asyncio
import threading

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from serving import running
from specdraft import (
    AsyncClient,
    Client,
    DeadlineError,
    FailedPreconditionError,
    InvalidArgumentError,
    MemoryKind,
    NotFoundError,
    ProposeItem,
    Reason,
    SpecdraftError,
    UnavailableError,
)
from specdraft.integrations.transformers import DecodeReport, speculative_generate

WIDTH, VOCAB = 64, 128


def story(length, seed=0):
    made = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCAB, (length,), generator=made).tolist()
    return tokens, torch.randn(length, WIDTH, generator=made)


def target_of(server):
    return f"unix://{server.config.socket}"


@pytest.fixture(params=["drive-host", "drive-inline", "unary-host", "unary-inline"])
def client(request, shared_server):
    drive, memory = request.param.split("-")
    options = {"use_drive": drive == "drive", "memory": memory, "slot_count": 2, "timeout_s": 20.0}
    with Client(target_of(shared_server), hidden_width=WIDTH, **options) as client:
        yield client
        assert client.is_driving == (drive == "drive")
        assert client.memory_kind is MemoryKind[memory.upper()]
        assert client.session.placement.in_use_count == 0


@pytest.fixture(scope="module")
def expected(shared_server):
    """Drafts after 90 pairs, by the simplest way there is: inline, unary, short catch-ups."""
    tokens, hiddens = story(100)
    options = {"use_drive": False, "memory": "inline", "timeout_s": 20.0}
    with Client(target_of(shared_server), hidden_width=WIDTH, **options) as client:
        sequence = client.open_sequence()
        for key in range(0, 89, 10):
            end = min(key + 10, 89)
            sequence.catchup(key, tokens[key + 1 : end + 1], hiddens[key:end])
        return sequence.propose(89, [tokens[90]], hiddens[89:90], 4)


def close_to(actual, expected):
    """Same ids; probabilities as near as float32 in another order of sums allows."""
    assert actual.drafts == expected.drafts
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-3)
    assert (actual.state.row_count, actual.state.last_pair_key) == (90, 89)


def test_a_long_prompt_gives_the_drafts_of_small_steps(client, expected):
    tokens, hiddens = story(100)
    sequence = client.open_sequence()
    state = sequence.prefill(tokens[:90], hiddens[:90])
    assert state.last_pair_key == 88
    close_to(sequence.propose(89, [tokens[90]], hiddens[89:90], 4), expected)


def test_rounds_with_rejected_drafts_give_the_drafts_of_one_prefill(client, expected):
    tokens, hiddens = story(100)
    sequence, position, accepted = client.open_sequence(), 40, 2
    sequence.prefill(tokens[:40], hiddens[:40])
    sequence.propose(39, [tokens[40]], hiddens[39:40], 3)
    while position + accepted + 1 < 90:
        sequence.propose(
            position,
            tokens[position + 1 : position + accepted + 2],
            hiddens[position : position + accepted + 1],
            3,
            accepted_drafts=accepted,
        )
        position, accepted = position + accepted + 1, (accepted + 1) % 4
    pairs = slice(position, 90)
    close_to(sequence.propose(position, tokens[position + 1 : 91], hiddens[pairs], 4), expected)


def test_batches_give_the_drafts_of_single_calls(client, expected):
    sequences = [client.open_sequence() for _ in range(6)]
    tokens, hiddens = story(100)
    for sequence in sequences:
        sequence.prefill(tokens[:90], hiddens[:90])
    items = [ProposeItem(one, 89, [tokens[90]], hiddens[89:90], 4) for one in sequences]
    items[2] = ProposeItem(sequences[2], 95, [tokens[90]], hiddens[89:90], 4)
    items[4] = ProposeItem(sequences[4], 89, [VOCAB], hiddens[89:90], 4)
    results = client.propose_batch(items)
    assert (type(results[2]), results[2].reason) == (FailedPreconditionError, Reason.MISSING_ROWS)
    assert (type(results[4]), results[4].reason) == (InvalidArgumentError, Reason.TOKEN_OUT_OF_RANGE)
    for index in (0, 1, 3, 5):
        close_to(results[index], expected)
    for index in (2, 4):
        close_to(sequences[index].propose(89, [tokens[90]], hiddens[89:90], 4), expected)


def test_truncating_and_rewriting_gives_the_same_drafts(client, expected):
    tokens, hiddens = story(100)
    sequence = client.open_sequence()
    sequence.prefill(tokens[:60], torch.randn(60, WIDTH))
    sequence.truncate(0)
    sequence.prefill(tokens[:90], hiddens[:90])
    sequence.propose(89, [3], torch.randn(1, WIDTH), 4)
    sequence.truncate(50)
    close_to(sequence.propose(50, tokens[51:91], hiddens[50:90], 4), expected)


def test_asyncio_gives_the_same_drafts(shared_server, expected):
    tokens, hiddens = story(100)

    async def one(client):
        async with await client.open_sequence() as sequence:
            await sequence.prefill(tokens[:90], hiddens[:90])
            return await sequence.propose(89, [tokens[90]], hiddens[89:90], 4)

    async def main():
        async with AsyncClient(target_of(shared_server), hidden_width=WIDTH, slot_count=2, timeout_s=20.0) as client:
            return await asyncio.gather(*(one(client) for _ in range(5)))

    for proposal in asyncio.run(main()):
        close_to(proposal, expected)


def test_hiddens_that_are_not_finite_leave_the_sequence_as_it_was(client):
    tokens, hiddens = story(10)
    sequence = client.open_sequence()
    sequence.prefill(tokens, hiddens)
    bad = hiddens[:1].clone()
    bad[0, 5] = float("nan")
    with pytest.raises(InvalidArgumentError) as caught:
        sequence.propose(9, [1], bad, 2)
    assert caught.value.reason is Reason.HIDDEN_NOT_FINITE
    assert sequence.propose(9, [1], hiddens[:1], 2).state.last_op == sequence.state().last_op


def test_a_wrong_handshake_names_the_field(shared_server):
    with pytest.raises(FailedPreconditionError) as caught:
        Client(target_of(shared_server), hidden_width=WIDTH + 1)
    assert caught.value.reason is Reason.HANDSHAKE_MISMATCH
    assert caught.value.details["field"] == "hidden_width"


@pytest.mark.parametrize("use_drive", [True, False])
def test_a_timeout_is_survived(start, use_drive):
    server = start()
    tokens, hiddens = story(20)
    with Client(target_of(server), hidden_width=WIDTH, use_drive=use_drive, timeout_s=0.5) as client:
        sequence = client.open_sequence()
        sequence.prefill(tokens[:10], hiddens[:10])
        with server.runner.held(), pytest.raises(DeadlineError):
            sequence.propose(9, [tokens[10]], hiddens[9:10], 2)
        after = sequence.propose(9, [tokens[10]], hiddens[9:10], 2, allow_gap=True)
        fresh = client.open_sequence()
        fresh.prefill(tokens[:10], hiddens[:10])
        assert after.drafts == fresh.propose(9, [tokens[10]], hiddens[9:10], 2).drafts
        assert client.session.placement.in_use_count == 0


def test_a_restart_is_survived(tiny_checkpoint):
    with running(tiny_checkpoint) as server:
        client = Client(target_of(server), hidden_width=WIDTH, timeout_s=2.0)
        sequence = client.open_sequence()
        sequence.propose(0, [1], torch.zeros(1, WIDTH), 2)
    with pytest.raises((UnavailableError, NotFoundError)):
        sequence.state()
    client.close()


def test_threads_draft_at_the_same_time(client, expected):
    tokens, hiddens = story(100)
    outcomes = {}

    def work(index):
        with client.open_sequence() as sequence:
            sequence.prefill(tokens[:90], hiddens[:90])
            outcomes[index] = sequence.propose(89, [tokens[90]], hiddens[89:90], 4)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(5)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(outcomes) == 5
    for proposal in outcomes.values():
        close_to(proposal, expected)


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(3)
    config = Qwen3_5TextConfig(
        vocab_size=VOCAB,
        hidden_size=WIDTH,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        layer_types=["full_attention"] * 2,
        max_position_embeddings=512,
        initializer_range=0.3,
        eos_token_id=None,
        pad_token_id=0,
    )
    return Qwen3_5ForCausalLM(config).eval()


def test_generation_is_lossless_and_drafts_as_from_scratch(client, model):
    prompt = torch.tensor([story(12, seed=5)[0]])
    report = DecodeReport()
    plain = model.generate(prompt, max_new_tokens=40, do_sample=False)
    decode = speculative_generate(client, 3, on_round=report.add)
    ids = model.generate(prompt, max_new_tokens=40, do_sample=False, custom_generate=decode)
    assert ids.tolist() == plain.tolist()
    assert report.num_errors == 0
    drafted = [one for one in report.rounds if one.drafts]
    assert len(drafted) > 5
    with torch.no_grad():
        hiddens = model.base_model(ids).last_hidden_state[0]
    tokens = ids[0].tolist()
    same = 0
    for one in drafted:
        with client.open_sequence() as sequence:
            key = one.position - 1
            sequence.prefill(tokens[: key + 1], hiddens[: key + 1])
            again = sequence.propose(key, [tokens[key + 1]], hiddens[key : key + 1], len(one.drafts))
        same += again.drafts == one.drafts
    assert same >= len(drafted) - 1  # hidden states of one forward and of many differ in the last bits


def test_a_service_that_stops_in_the_middle_does_not_end_the_generation(tiny_checkpoint, model):
    prompt = torch.tensor([story(12, seed=5)[0]])
    plain = model.generate(prompt, max_new_tokens=40, do_sample=False)
    report, rounds = DecodeReport(), 0
    with running(tiny_checkpoint) as server:
        client = Client(target_of(server), hidden_width=WIDTH, timeout_s=1.0)

        def on_round(record):
            nonlocal rounds
            rounds += 1
            report.add(record)
            if rounds == 6:
                server.service.close()

        decode = speculative_generate(client, 2, on_round=on_round, pause_rounds=100)
        ids = model.generate(prompt, max_new_tokens=40, do_sample=False, custom_generate=decode)
        client.close()
    assert ids.tolist() == plain.tolist()
    assert report.num_errors == 1
    assert isinstance(next(one.error for one in report.rounds if one.error), SpecdraftError)
