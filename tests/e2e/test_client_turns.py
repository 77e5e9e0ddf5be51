"""Turns of conversations against the service itself: what is resumed drafts like what was never parked."""

import asyncio
import os
import subprocess
import sys
import threading
import time
from dataclasses import dataclass

import pytest
import torch

from drafter_service.demo.prompts import pick_prompts
from drafter_service.demo.target import HEAD, TARGET, TEXTS, load_target
from serving import PAGE_BYTES, PAGE_ROWS, running
from specdraft import AsyncClient, Client, NotFoundError, Reason, next_pairs

WIDTH, VOCAB = 64, 128
NUM_TURNS, NUM_PROMPT, NUM_USER, NUM_ANSWER, K = 10, 64, 14, 20, 3
KEY = b"k" * 32


def story(length, seed=0):
    made = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB, (length,), generator=made).tolist(), torch.randn(length, WIDTH, generator=made)


def target_of(server):
    return f"unix://{server.config.socket}"


def client_of(server, **options):
    return Client(target_of(server), hidden_width=WIDTH, timeout_s=20.0, **options)


@dataclass
class Turn:
    """What one answer of the target was drafted like."""

    drafts: list
    accepted: list


def answer(sequence, next_key, story, begin, end):
    """Drafts for t_begin .. t_{end-1}, the target's answer to t_0 .. t_{begin-1}; then everything is written."""
    tokens, hiddens = story
    if next_key < begin - 1:
        sequence.catchup(next_key, tokens[next_key + 1 : begin], hiddens[next_key : begin - 1])
    turn, position = Turn([], []), begin
    first_key, pairs, rows, accepted = begin - 1, [tokens[begin]], hiddens[begin - 1 : begin], None
    while position < end - 1:
        drafts = sequence.propose(first_key, pairs, rows, min(K, end - 1 - position)).drafts
        true = tokens[position + 1 : position + 1 + len(drafts)]
        accepted = next((i for i, (left, right) in enumerate(zip(drafts, true, strict=True)) if left != right), None)
        accepted = min(len(drafts) if accepted is None else accepted, end - 2 - position)
        turn.drafts.append(drafts)
        turn.accepted.append(accepted)
        bonus = tokens[position + accepted + 1]
        step = next_pairs(position, drafts, accepted, bonus, hiddens[position : position + len(drafts) + 1])
        first_key, pairs, rows, position = step.first_key, step.tokens, step.hiddens, step.position
    sequence.catchup(first_key, pairs, rows, accepted_drafts=accepted)
    return turn


def check_same(actual, expected):
    assert actual.drafts == expected.drafts
    assert actual.logprobs == pytest.approx(expected.logprobs, abs=1e-3)


# --- the trained pair -------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def conversation():
    """Ten turns: (tokens, their hidden states, begin and end of each answer). The answers are the target's own."""
    target = load_target()
    text = pick_prompts(TEXTS, target.tokenizer, 1, NUM_PROMPT + NUM_TURNS * NUM_USER, seed=4)[0].tokens
    tokens, answers = list(text[:NUM_PROMPT]), []
    for turn in range(NUM_TURNS):
        said = text[NUM_PROMPT + turn * NUM_USER :][:NUM_USER]
        tokens += said
        answers.append((len(tokens), len(tokens) + NUM_ANSWER))
        ids = torch.tensor([tokens], device=target.device)
        grown = target.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=NUM_ANSWER,
            min_new_tokens=NUM_ANSWER,
            do_sample=False,
        )
        tokens = grown[0].tolist()
    with torch.no_grad():
        ids = torch.tensor([tokens], device=target.device)
        hiddens = target.model.base_model(ids).last_hidden_state[0].float().cpu()
    return tokens, hiddens, answers


@pytest.fixture(scope="module")
def trained():
    settings = {"kv_bytes": 32 << 20, "max_seq_len": 1024, "page_rows": 16, "prefill_rows": 256}
    with running(HEAD, target_checkpoint=TARGET, **settings) as server:
        yield server


def rows_written(server):
    return server.metric("rows_written_total", kind="exact")


def refilled(client, conversation):
    """Every turn in a fresh sequence that is given all pairs again."""
    tokens, hiddens, answers = conversation
    turns = []
    for begin, end in answers:
        with client.open_sequence() as sequence:
            turns.append(answer(sequence, 0, (tokens, hiddens), begin, end))
    return turns


def test_ten_turns_draft_as_if_refilled_and_write_only_what_is_new(trained, conversation):
    tokens, hiddens, answers = conversation
    with Client(target_of(trained), max_drafts=K, timeout_s=20.0) as client:
        before = rows_written(trained)
        expected = refilled(client, conversation)
        refill_rows = rows_written(trained) - before
        actual, kept = [], []
        for begin, end in answers:
            before = rows_written(trained)
            resumed = client.conversations.resume(tokens[:begin], "chat")
            kept.append((resumed.num_keys_kept, resumed.next_key))
            actual.append(answer(resumed.sequence, resumed.next_key, (tokens, hiddens), begin, end))
            assert rows_written(trained) - before == end - 1 - resumed.num_keys_kept
            client.conversations.park(resumed.sequence, tokens[:end], "chat")
        assert [one.drafts for one in actual] == [one.drafts for one in expected]
        assert sum(sum(one.accepted) for one in expected) > 40, "the trained head is expected to be of use"
        # All of the last turn but the row of its last token, which needs the token that follows.
        assert kept == [(0, 0), *((end - 1, end - 1) for _, end in answers[:-1])]
        assert refill_rows > 4 * (len(tokens) - 1)
        assert len(client.conversations) == 1
    assert trained.pages() == 0


def test_an_edited_turn_goes_on_from_the_common_prefix(trained, conversation):
    tokens, hiddens, answers = conversation
    begin, end = answers[5]
    with Client(target_of(trained), max_drafts=K, timeout_s=20.0) as client:
        with client.open_sequence() as sequence:
            expected = answer(sequence, 0, (tokens, hiddens), begin, end)
        for edited in (1, 2, answers[2][0], begin - 1, begin):
            other, noise = list(tokens), hiddens.clone()
            other[edited] = (other[edited] + 1) % 100
            noise[edited:] = 0.5
            with client.open_sequence() as sequence:
                sequence.prefill(other[: begin + 5], noise[: begin + 5])
                client.conversations.park(sequence, other[: begin + 5], "chat")
            resumed = client.conversations.resume(tokens[:begin], "chat")
            assert resumed.num_keys_kept == resumed.next_key == max(0, min(edited, begin) - 1)
            turn = answer(resumed.sequence, resumed.next_key, (tokens, hiddens), begin, end)
            assert turn.drafts == expected.drafts
            resumed.sequence.close()


# --- carries ----------------------------------------------------------------------------------------------------------

PARKS = """
import sys, torch
from specdraft import Client
target, key = sys.argv[1], sys.argv[2].encode()
with Client(target, hidden_width=64, carry_key=key, timeout_s=20.0) as client:
    for seed in (1, 2):
        made = torch.Generator().manual_seed(seed)
        tokens = torch.randint(128, (60,), generator=made).tolist()
        hiddens = torch.randn(60, 64, generator=made)
        sequence = client.open_sequence()
        sequence.prefill(tokens, hiddens)
        client.conversations.park(sequence, tokens, f"chat-{seed}")
"""


def test_another_process_resumes_what_is_kept_under_the_carry_key(start):
    server = start()
    before = rows_written(server)
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run(
        [sys.executable, "-c", PARKS, target_of(server), KEY.decode()], check=True, timeout=60, env=environment
    )
    with client_of(server, carry_key=b"another secret that knows nothing") as stranger:
        assert stranger.carries == ()
    with client_of(server, carry_key=KEY) as client:
        histories = {f"chat-{seed}": story(60, seed) for seed in (1, 2)}
        assert sorted(one.label for one in client.carries) == sorted(histories)
        for carry in client.carries:
            client.conversations.adopt(carry, histories[carry.label][0])
        for name in ("chat-2", "chat-1"):
            tokens, hiddens = histories[name]
            resumed = client.conversations.resume([*tokens, 5], name)
            assert resumed.num_keys_kept == 59
            fresh = client.open_sequence()
            fresh.prefill(tokens, hiddens)
            check_same(resumed.sequence.propose(59, [5], hiddens[59:], 4), fresh.propose(59, [5], hiddens[59:], 4))
    assert rows_written(server) - before == 4 * 59 + 4  # two there, two fresh ones here, one for each proposal


def test_a_carry_that_expired_falls_back_to_a_fresh_sequence(start):
    server = start(carry_ttl_s=0.2)
    tokens, hiddens = story(40)
    with client_of(server) as client:
        sequence = client.open_sequence()
        sequence.prefill(tokens, hiddens)
        carry = client.conversations.park(sequence, tokens, "chat")
        time.sleep(0.4)
        resumed = client.conversations.resume(tokens, "chat")
        assert (resumed.num_keys_kept, resumed.next_key, len(client.conversations)) == (0, 0, 0)
        resumed.sequence.prefill(tokens, hiddens)
        with pytest.raises(NotFoundError) as caught:
            client.free_kv(carry)
        assert caught.value.reason is Reason.CARRY_UNKNOWN


def test_an_evicted_carry_gives_way_to_the_next_best(start):
    server = start(num_pages=40, carry_share=0.5)  # 20 pages of 4 rows for carries
    tokens, hiddens = story(60)
    with client_of(server) as client:
        for length in (60, 30):  # 15 and 8 pages: the second drives the first out
            sequence = client.open_sequence()
            sequence.prefill(tokens[:length], hiddens[:length])
            client.conversations.park(sequence, tokens[:length])
        assert len(client.conversations) == 2
        resumed = client.conversations.resume(tokens)
        assert (resumed.num_keys_kept, len(client.conversations)) == (29, 0)


def test_two_conversations_with_one_beginning_do_not_take_each_others_rows(start):
    server = start()
    system, hiddens = story(40)
    with client_of(server) as client:
        first = client.open_sequence()
        ours, our_rows = [*system, *story(20, 1)[0]], torch.cat([hiddens, story(20, 1)[1]])
        first.prefill(ours, our_rows)
        client.conversations.park(first, ours, "first")
        theirs, their_rows = [*system, 127, *story(20, 2)[0]], torch.cat([hiddens, story(21, 2)[1]])
        theirs[40] = (ours[40] + 1) % VOCAB
        second = client.conversations.resume(theirs, "second")
        assert (second.num_keys_kept, len(client.conversations)) == (39, 1)
        again = client.conversations.resume([*ours, 3], "first")
        assert (again.num_keys_kept, len(client.conversations)) == (59, 0)
        for resumed, tokens, rows in ((second, theirs, their_rows), (again, ours, our_rows)):
            key, last = resumed.next_key, len(tokens) - 1
            if key < last:
                resumed.sequence.catchup(key, tokens[key + 1 :], rows[key:last])
            fresh = client.open_sequence()
            fresh.prefill(tokens, rows)
            check_same(
                resumed.sequence.propose(last, [3], rows[last : last + 1], 4),
                fresh.propose(last, [3], rows[last : last + 1], 4),
            )
            fresh.close()
            resumed.sequence.close()
    assert server.pages() == 0


def test_threads_that_want_one_carry_all_get_a_sequence(start):
    server = start()
    tokens, hiddens = story(60)
    with client_of(server, slot_count=4) as client:
        sequence = client.open_sequence()
        sequence.prefill(tokens, hiddens)
        expected = sequence.propose(59, [5], hiddens[59:], 4)
        sequence.truncate(59)
        client.conversations.park(sequence, tokens)
        kept, failures = [], []

        def work(index):
            try:
                for _ in range(5):
                    resumed = client.conversations.resume([*tokens, index], keep_carry=True)
                    kept.append(resumed.num_keys_kept)
                    key = resumed.next_key
                    if key < 59:
                        resumed.sequence.catchup(key, tokens[key + 1 :], hiddens[key:59])
                    check_same(resumed.sequence.propose(59, [5], hiddens[59:], 4), expected)
                    resumed.sequence.close()
            except Exception as error:  # noqa: BLE001 - told below
                failures.append(error)

        threads = [threading.Thread(target=work, args=(index,)) for index in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not failures
        assert set(kept) <= {0, 59}  # 0: the carry was in another thread's hands
        assert 59 in kept
        assert len(client.conversations) == 1
    assert server.pages() == 0


def test_the_same_for_asyncio(start):
    server = start()
    tokens, hiddens = story(60)

    async def main():
        async with AsyncClient(target_of(server), hidden_width=WIDTH, timeout_s=20.0, carry_key=KEY) as client:
            sequence = await client.open_sequence()
            await sequence.prefill(tokens, hiddens)
            expected = await sequence.propose(59, [5], hiddens[59:], 4)
            await sequence.truncate(59)
            carry = await client.conversations.park(sequence, tokens, "chat")
            assert client.conversations.carries == (carry,)
            client.conversations.forget(carry)
            assert (await client.conversations.resume(tokens)).num_keys_kept == 0
            await client.conversations.adopt(carry, tokens)
            shared = await client.conversations.resume([*tokens, 5], keep_carry=True)
            moved = await client.conversations.resume([*tokens, 5], "chat")
            assert len(client.conversations) == 0
            for resumed in (shared, moved):
                assert resumed.num_keys_kept == 59
                check_same(await resumed.sequence.propose(59, [5], hiddens[59:], 4), expected)

    asyncio.run(main())


# --- one prompt, many requests ----------------------------------------------------------------------------------------

NUM_REQUESTS, NUM_SHARED, LONG_PAGE = 50, 2000, 16


@pytest.mark.parametrize("way", ["fork", "resume"])
def test_fifty_requests_share_one_copy_of_a_long_prompt(start, way):
    num_full = (NUM_SHARED - 1) // LONG_PAGE
    pages = 2 * (num_full + 4) + 3 * NUM_REQUESTS
    changes = {"page_rows": LONG_PAGE, "max_seq_len": 2100, "prefill_rows": 512, "max_drafts": 4}
    server = start(kv_bytes=pages * PAGE_BYTES * LONG_PAGE // PAGE_ROWS, **changes)
    tokens, hiddens = story(NUM_SHARED)
    tails = [story(3, seed) for seed in range(1, NUM_REQUESTS + 1)]
    with client_of(server) as client:
        prompt = client.open_sequence()
        prompt.prefill(tokens, hiddens)
        used = server.pages()
        assert used == num_full + 1
        if way == "fork":
            requests = [prompt.fork(NUM_SHARED - 1) for _ in tails]
        else:
            client.conversations.park(prompt, tokens)
            requests = [client.conversations.resume([*tokens, *one], keep_carry=True).sequence for one, _ in tails]
        # The full pages once; for each request a copy of the last one, in which it goes on.
        assert server.pages() == used + NUM_REQUESTS
        assert {one.known_state.row_count for one in requests} == {NUM_SHARED - 1}
        rows = [torch.cat([hiddens[-1:], tail_rows[:2]]) for _, tail_rows in tails]
        drafted = [
            one.propose(NUM_SHARED - 1, tail, row, 3) for one, (tail, _), row in zip(requests, tails, rows, strict=True)
        ]
        assert server.pages() <= used + 2 * NUM_REQUESTS
        own = client.open_sequence()
        own.prefill(tokens, hiddens)
        for proposal, (tail, _), row in zip(drafted, tails, rows, strict=True):
            check_same(proposal, own.propose(NUM_SHARED - 1, tail, row, 3))
        assert len({one.drafts for one in drafted}) > NUM_REQUESTS // 4
