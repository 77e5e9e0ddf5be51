"""`model.generate` through the Python client: whatever is drafted, the target's own tokens come out."""

import random
import threading
import time

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, StoppingCriteria, StoppingCriteriaList

from fake_service import FakeService
from specdraft import Client, HiddenSource, Reason
from specdraft.errors import make_error
from specdraft.integrations.transformers import DecodeReport, speculative_generate
from transformers_targets import NEW_TOKENS, PROMPT, Recorder, generate, oracle, refusal, scattered, tiny_model

WIDTH, VOCAB = 48, 97


@pytest.fixture(scope="module")
def model():
    return tiny_model()


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path, hidden_width=WIDTH, vocab_size=VOCAB, max_drafts=4) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.target, hidden_width=WIDTH) as client:
        yield client


@pytest.mark.parametrize("num_drafts", [1, 2, 3, 4])
@pytest.mark.parametrize("kind", ["random", "perfect", "scattered"])
def test_greedy_tokens_are_those_of_generate(model, service, client, num_drafts, kind):
    expected = generate(model)
    rng = random.Random(num_drafts)
    service.draft = {
        "random": lambda sequence, entry: [rng.randrange(VOCAB) for _ in range(entry.draft_count)],
        "perfect": oracle(model),
        "scattered": scattered(num_drafts)(oracle(model)),
    }[kind]
    report = DecodeReport()
    actual = generate(model, custom_generate=speculative_generate(client, num_drafts, on_round=report.add))
    assert actual.tolist() == expected.tolist()
    assert [token for one in report.rounds for token in one.tokens] == expected[0, PROMPT.shape[1] :].tolist()
    assert report.num_tokens == NEW_TOKENS
    assert report.num_errors == 0
    if kind == "perfect":
        assert report.num_accepted == report.num_drafts > 0
        assert len(report.rounds) - 1 == -(-(NEW_TOKENS - 1) // (num_drafts + 1))
    if kind == "scattered" and num_drafts > 1:
        assert 0 < report.num_accepted < report.num_drafts


def test_every_pair_reaches_the_service_with_its_own_hidden_state(model, service, client):
    service.draft = scattered(3)(oracle(model))
    written = {}
    original = service.write

    def write(sequence, pairs):
        original(sequence, pairs)
        written.update(tokens=dict(sequence.tokens), rows=dict(sequence.rows))

    service.write = write
    ids = generate(model, custom_generate=speculative_generate(client, 3))
    with torch.no_grad():
        hiddens = model.base_model(ids).last_hidden_state[0]
    keys = sorted(written["tokens"])
    assert keys == list(range(keys[-1] + 1))
    assert keys[-1] > ids.shape[1] - 8
    for key in keys:
        assert written["tokens"][key] == ids[0, key + 1]
        row = torch.frombuffer(bytearray(written["rows"][key]), dtype=torch.float32)
        torch.testing.assert_close(row, hiddens[key], rtol=1e-4, atol=1e-4)  # one forward against many


def test_pre_norm_hiddens_are_the_input_of_the_final_norm(model, service):
    written = {}
    original = service.write
    service.write = lambda sequence, pairs: (original(sequence, pairs), written.update(sequence.rows))
    with Client(service.target, hidden_width=WIDTH, hidden_source=HiddenSource.PRE_NORM) as client:
        expected = generate(model)
        ids = generate(model, custom_generate=speculative_generate(client, 2))
    assert ids.tolist() == expected.tolist()
    with torch.no_grad():
        normed = model.base_model(ids).last_hidden_state[0]
    rows = torch.stack([torch.frombuffer(bytearray(written[key]), dtype=torch.float32) for key in range(10)])
    torch.testing.assert_close(model.base_model.norm(rows), normed[:10], rtol=1e-4, atol=1e-4)


def test_layer_outputs_are_concatenated_in_the_order_asked(model, tmp_path):
    with (
        FakeService(tmp_path, hidden_width=2 * WIDTH, vocab_size=VOCAB) as service,
        Client(service.target, hidden_width=2 * WIDTH, hidden_source=HiddenSource.LAYERS, layer_ids=(2, 0)) as client,
    ):
        rows = {}
        original = service.write
        service.write = lambda sequence, pairs: (original(sequence, pairs), rows.update(sequence.rows))
        ids = generate(model, custom_generate=speculative_generate(client, 2))
        with torch.no_grad():
            states = model(ids, output_hidden_states=True).hidden_states
        row = torch.frombuffer(bytearray(rows[4]), dtype=torch.float32)
        torch.testing.assert_close(row[WIDTH:], states[1][0, 4], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("seed", range(4))
def test_sampling_with_a_seed_gives_the_tokens_of_generate(model, service, client, seed):
    settings = {"do_sample": True, "temperature": 1.3, "top_k": 20, "top_p": 0.9, "repetition_penalty": 1.2}
    torch.manual_seed(seed)
    expected = generate(model, **settings)
    whole = expected[0].tolist()
    rng = random.Random(seed)

    def draft(sequence, entry):
        begin = entry.pairs.first_key + len(entry.pairs.tokens) + 1
        right = whole[begin : begin + entry.draft_count]
        return [token if rng.random() < 0.6 else rng.randrange(VOCAB) for token in right]

    service.draft = draft
    report = DecodeReport()
    torch.manual_seed(seed)
    actual = generate(model, **settings, custom_generate=speculative_generate(client, 3, on_round=report.add))
    assert actual.tolist() == expected.tolist()
    assert report.num_accepted > 0


def test_the_loop_without_drafts_needs_no_client(model):
    report = DecodeReport()
    actual = generate(model, custom_generate=speculative_generate(None, 0, on_round=report.add))
    assert actual.tolist() == generate(model).tolist()
    assert len(report.rounds) == NEW_TOKENS


@pytest.mark.parametrize("length", [1, 2])
def test_short_prompts(model, service, client, length):
    prompt = PROMPT[:, :length]
    expected = generate(model, prompt)
    service.draft = lambda sequence, entry: [7] * entry.draft_count
    assert generate(model, prompt, custom_generate=speculative_generate(client, 3)).tolist() == expected.tolist()
    assert len(service.requests("Catchup")) == length - 1


@pytest.mark.parametrize("new_tokens", [1, 2, 3])
def test_no_more_drafts_are_asked_for_than_fit(model, service, client, new_tokens):
    service.draft = oracle(model)
    actual = generate(model, max_new_tokens=new_tokens, custom_generate=speculative_generate(client, 4))
    assert actual.tolist() == generate(model, max_new_tokens=new_tokens).tolist()
    assert all(one.entries[0].draft_count < new_tokens for one in service.requests("Propose"))


def test_the_end_token_inside_accepted_drafts_ends_the_generation(model, service, client):
    plain = generate(model)[0, PROMPT.shape[1] :].tolist()
    end = next(token for index, token in enumerate(plain) if index >= 5 and token not in plain[:index])
    service.draft = oracle(model)  # drafts on past the end token
    report = DecodeReport()
    decode = speculative_generate(client, 4, on_round=report.add)
    actual = generate(model, eos_token_id=end, custom_generate=decode)
    assert actual.tolist() == generate(model, eos_token_id=end).tolist()
    assert actual[0, -1] == end
    closing = service.requests("CloseSequence")[-1]
    assert closing.accepted_drafts == report.rounds[-1].num_accepted


def test_processors_and_criteria_see_every_token_in_turn(model, service, client):
    class Ban(LogitsProcessor):
        """Bans a token that depends on the whole prefix."""

        def __init__(self):
            self.lengths = []

        def __call__(self, input_ids, scores):
            self.lengths.append(input_ids.shape[1])
            scores = scores.clone()
            scores[:, int(input_ids.sum()) % VOCAB :: 3] = -float("inf")
            return scores

    class Stop(StoppingCriteria):
        def __call__(self, input_ids, scores, **kwargs):
            return torch.tensor([int(input_ids[0].sum()) % 13 == 0 and input_ids.shape[1] > PROMPT.shape[1] + 6])

    def settings():
        return {
            "logits_processor": LogitsProcessorList([Ban()]),
            "stopping_criteria": StoppingCriteriaList([Stop()]),
            "min_new_tokens": 3,
            "no_repeat_ngram_size": 2,
        }

    expected = generate(model, **settings())
    service.draft = scattered(5, 0.8)(oracle(model, **settings()))
    used = settings()
    actual = generate(model, **used, custom_generate=speculative_generate(client, 3))
    assert actual.tolist() == expected.tolist()
    lengths = used["logits_processor"][0].lengths
    assert lengths == list(range(PROMPT.shape[1], PROMPT.shape[1] + len(lengths)))


class AsksTheModel(LogitsProcessor):
    """Runs the model for itself, as guidance does."""

    def __init__(self, model):
        self.model = model

    def __call__(self, input_ids, scores):
        with torch.no_grad():
            return scores + 0.5 * self.model(input_ids[:, -3:]).logits[:, -1]


def test_a_processor_that_runs_the_model_changes_nothing_about_the_hidden_states(model, service, client):
    written = {}
    original = service.write
    service.write = lambda sequence, pairs: (original(sequence, pairs), written.update(sequence.rows))
    for asked in ({"guidance_scale": 1.5}, {"logits_processor": LogitsProcessorList([AsksTheModel(model)])}):
        expected = generate(model, **asked)
        service.draft = scattered(6, 0.8)(oracle(model, **asked))
        report = DecodeReport()
        ids = generate(model, **asked, custom_generate=speculative_generate(client, 3, on_round=report.add))
        assert ids.tolist() == expected.tolist()
        assert report.num_errors == 0
        assert report.num_accepted > NEW_TOKENS // 3
        with torch.no_grad():
            hiddens = model.base_model(ids).last_hidden_state[0]
        for key in range(ids.shape[1] - 5):
            row = torch.frombuffer(bytearray(written[key]), dtype=torch.float32)
            torch.testing.assert_close(row, hiddens[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("place", ["open_sequence", "propose", "rows", "close"])
def test_a_bug_of_the_client_never_ends_a_generation(model, service, monkeypatch, caplog, place):
    from specdraft import Sequence
    from specdraft.integrations.transformers.hidden_states import HiddenTap

    calls = []
    owner = {"open_sequence": Client, "rows": HiddenTap}.get(place, Sequence)
    original = getattr(owner, place)

    def fail(*args, **kwargs):
        calls.append(args)
        if place == "rows" and len(calls) == 1:
            return original(*args, **kwargs)  # before anything is generated
        raise IndexError("a bug")

    monkeypatch.setattr(owner, place, fail)
    service.draft = oracle(model)
    report = DecodeReport()
    with Client(service.target, hidden_width=WIDTH) as client:
        decode = speculative_generate(client, 2, on_round=report.add, pause_rounds=1)
        assert generate(model, custom_generate=decode).tolist() == generate(model).tolist()
    assert [one.message for one in caplog.records].count(
        "drafting failed by an error of the client: this generation goes on without drafts"
    ) == 1
    assert report.num_errors == (place != "close")
    assert len(calls) == (2 if place == "rows" else 1)


def test_the_streamer_gets_the_prompt_and_every_token(model, service, client):
    plain, drafted = Recorder(), Recorder()
    generate(model, streamer=plain)
    service.draft = scattered(1)(oracle(model))
    generate(model, custom_generate=speculative_generate(client, 3, streamer=drafted))
    assert drafted.tokens == plain.tokens
    assert drafted.ended


def test_a_dict_is_returned_with_scores_and_logits(model, service, client):
    wanted = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True, "temperature": 1.0}
    expected = generate(model, **wanted)
    service.draft = scattered(2)(oracle(model))
    actual = generate(model, **wanted, custom_generate=speculative_generate(client, 3))
    assert actual.sequences.tolist() == expected.sequences.tolist()
    for name in ("scores", "logits"):
        torch.testing.assert_close(torch.cat(getattr(actual, name)), torch.cat(getattr(expected, name)))
    assert actual.past_key_values.get_seq_length() == expected.past_key_values.get_seq_length()


def test_a_generation_can_be_continued_on_its_own_cache(model, service, client):
    service.draft = oracle(model)
    first = generate(
        model, return_dict_in_generate=True, max_new_tokens=8, custom_generate=speculative_generate(client, 3)
    )
    report = DecodeReport()
    second = generate(
        model,
        first.sequences,
        max_new_tokens=NEW_TOKENS - 8,
        past_key_values=first.past_key_values,
        custom_generate=speculative_generate(client, 3, on_round=report.add),
    )
    assert second.tolist() == generate(model).tolist()
    assert report.num_accepted > 0
    assert service.requests("Propose")[-1].entries[0].pairs.first_key > PROMPT.shape[1] + 8


ERRORS = {
    "pages": make_error(Reason.PAGES_EXHAUSTED, "no pages", retry_delay_ms=5),
    "unknown": make_error(Reason.SEQUENCE_UNKNOWN, "gone"),
    "draining": make_error(Reason.DRAINING, "going"),
    "bug": make_error(Reason.INTERNAL, "bug"),
    "limit": make_error(Reason.POSITION_LIMIT, "too long", key=1, limit=1),
}


@pytest.mark.parametrize("kind", ERRORS)
@pytest.mark.parametrize("rpc", ["OpenSequence", "Catchup", "Propose"])
def test_errors_of_the_service_never_end_a_generation(model, service, client, kind, rpc):
    service.draft = oracle(model)
    service.faults[rpc] = [ERRORS[kind]]
    report = DecodeReport()
    decode = speculative_generate(client, 2, on_round=report.add, pause_rounds=3)
    assert generate(model, custom_generate=decode).tolist() == generate(model).tolist()
    if kind == "draining" and rpc == "OpenSequence":
        return  # a second try with the same open_id went through
    assert report.num_errors == 1
    assert (report.num_accepted > 0) == (kind != "limit")  # it drafts again, unless that cannot help


def test_drafting_starts_again_with_a_declared_gap(model, service, client):
    service.draft = oracle(model)
    service.faults["Propose"] = [None, ERRORS["unknown"]]
    report = DecodeReport()
    generate(model, custom_generate=speculative_generate(client, 2, on_round=report.add, pause_rounds=2))
    assert [len(one.drafts) for one in report.rounds][:7] == [0, 2, 0, 0, 0, 2, 2]
    again = service.requests("Propose")[2].entries[0]
    assert again.op == 1
    assert again.pairs.allow_gap
    assert again.pairs.first_key > PROMPT.shape[1]


def test_a_service_that_vanishes_never_ends_a_generation(model, tmp_path):
    service = FakeService(tmp_path, hidden_width=WIDTH, vocab_size=VOCAB, grace_ms=200)
    try:
        with Client(service.target, hidden_width=WIDTH, timeout_s=1.0) as client:
            service.draft = oracle(model)
            service.faults["Propose"] = [None, None, lambda: service.server.stop(None)]
            report = DecodeReport()
            decode = speculative_generate(client, 2, on_round=report.add, pause_rounds=100)
            assert generate(model, custom_generate=decode).tolist() == generate(model).tolist()
            assert report.num_errors == 1
            assert report.num_accepted == 4
    finally:
        service.stop()


def test_generations_with_rounds_that_timed_out_leave_no_sequence_and_no_place_behind(model, tmp_path):
    with FakeService(tmp_path, hidden_width=WIDTH, vocab_size=VOCAB) as service:
        service.draft = oracle(model)
        with Client(service.target, hidden_width=WIDTH, timeout_s=0.3) as client:
            for _ in range(3):
                go_on = threading.Event()
                service.faults["Propose"] = [lambda go_on=go_on: go_on.wait(1)]
                report = DecodeReport()
                generate(model, custom_generate=speculative_generate(client, 2, on_round=report.add, pause_rounds=100))
                go_on.set()
                assert report.num_errors == 1
            generate(model, custom_generate=speculative_generate(client, 2))
            assert (len(service.sequences), client.session.placement.in_use_count) == (0, 0)


def test_a_service_that_is_gone_costs_no_deadline(model, tmp_path):
    expected = generate(model, max_new_tokens=40)
    service = FakeService(tmp_path, hidden_width=WIDTH, vocab_size=VOCAB, grace_ms=60_000)
    with Client(service.target, hidden_width=WIDTH, timeout_s=30.0) as client:
        service.stop()
        report = DecodeReport()
        decode = speculative_generate(client, 2, on_round=report.add)
        started = time.monotonic()
        actual = generate(model, max_new_tokens=40, custom_generate=decode)
        assert time.monotonic() - started < 10  # far from one deadline
        assert actual.tolist() == expected.tolist()
        assert 1 <= report.num_errors <= 3


def test_what_it_cannot_do_is_refused_by_name(model, client):
    assert "batch of 1, not 2" in refusal(model, client, PROMPT.expand(2, -1))
    assert "StaticLayer" in refusal(model, client, cache_implementation="static")
    assert "past_key_values" in refusal(model, client, use_cache=False)
    assert "output_attentions" in refusal(model, client, return_dict_in_generate=True, output_attentions=True)
    assert "num_beams" in refusal(model, client, num_beams=2)
    assert "contrastive_search" in refusal(model, client, penalty_alpha=0.6, top_k=4)
    assert "inputs_embeds" in refusal(model, client, inputs_embeds=model.get_input_embeddings()(PROMPT))
    mask = torch.ones_like(PROMPT)
    mask[0, 0] = 0
    assert "padding" in refusal(model, client, attention_mask=mask)


def test_a_target_with_linear_attention_is_refused_by_the_layer_that_cannot_be_cropped(client, service):
    hybrid = tiny_model(("linear_attention", "full_attention"))
    assert "LinearAttention" in refusal(hybrid, client)
    assert not service.requests("OpenSequence")


def test_hidden_states_of_another_width_are_refused(model, tmp_path):
    with FakeService(tmp_path, hidden_width=WIDTH + 8) as service, Client(service.target) as client:
        assert f"[rows, {WIDTH + 8}]" in refusal(model, client)


def test_bfloat16_hiddens_travel_as_raw_bits(model, service):
    with Client(service.target, hidden_width=WIDTH, hidden_dtype="bfloat16") as client:
        written = {}
        original = service.write
        service.write = lambda sequence, pairs: (original(sequence, pairs), written.update(sequence.rows))
        expected = generate(model)
        ids = generate(model, custom_generate=speculative_generate(client, 2))
        assert ids.tolist() == expected.tolist()
        with torch.no_grad():
            hidden = model.base_model(ids).last_hidden_state[0, 2]
        row = torch.frombuffer(bytearray(written[2]), dtype=torch.bfloat16)
        torch.testing.assert_close(row.float(), hidden, rtol=1e-2, atol=1e-2)  # bfloat16 keeps 8 bits


def test_an_adaptive_generation_asks_for_what_is_recommended(model, service, client):
    advice = [3, 1, 0, 2]
    service.recommend = lambda entry: advice[len(service.requests("Propose")) % 4] if entry.recommend else None
    report = DecodeReport()
    expected = generate(model)
    actual = generate(model, custom_generate=speculative_generate(client, 2, on_round=report.add, adaptive=True))
    assert actual.tolist() == expected.tolist()
    asked = [one.entries[0].draft_count for one in service.requests("Propose")]
    told = [None, *(min(2, advice[number % 4]) for number in range(1, len(asked)))]
    assert asked[0] == 2
    assert asked[1:-2] == told[1:-2]
    assert {0, 1, 2} <= set(asked)


def test_an_adaptive_generation_that_is_told_not_to_draft_tries_again_now_and_then(model, service, client):
    service.recommend = lambda entry: 0
    generate(model, custom_generate=speculative_generate(client, 3, adaptive=True), max_new_tokens=80)
    asked = [one.entries[0].draft_count for one in service.requests("Propose")]
    assert asked[0] == 3
    assert [index for index, count in enumerate(asked) if count][:3] == [0, 32, 64]
    assert asked[32] == 1


def test_without_adaptive_nothing_is_asked(model, service, client):
    generate(model, custom_generate=speculative_generate(client, 2))
    assert not any(one.entries[0].recommend for one in service.requests("Propose"))


def test_hidden_states_that_are_nan_are_named(model, service, client):
    broken = tiny_model()
    with torch.no_grad():
        broken.base_model.norm.weight.fill_(float("nan"))
    with pytest.raises(ValueError, match="hold NaN"):
        generate(broken, custom_generate=speculative_generate(client, 2))
