"""Other architectures than ours, and what is refused before any token comes out."""

import pytest
import torch

from fake_service import FakeService
from specdraft import Client, HiddenSource
from specdraft.integrations.transformers import DecodeReport, speculative_generate
from transformers_targets import PROMPT, Recorder, generate, oracle, refusal, scattered, tiny_model

WIDTH, VOCAB = 48, 97


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path, hidden_width=WIDTH, vocab_size=VOCAB, max_drafts=4) as service:
        yield service


@pytest.fixture
def client(service):
    with Client(service.target, hidden_width=WIDTH) as client:
        yield client


def other_models():
    from transformers import (
        GPT2Config,
        GPT2LMHeadModel,
        LlamaConfig,
        LlamaForCausalLM,
        MistralConfig,
        MistralForCausalLM,
        OPTConfig,
        OPTForCausalLM,
    )

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.3, "eos_token_id": None}
    yield (
        "gpt2",
        lambda: GPT2LMHeadModel(
            GPT2Config(vocab_size=VOCAB, n_embd=WIDTH, n_head=4, n_layer=2, initializer_range=0.3, eos_token_id=None)
        ),
    )
    yield "llama", lambda: LlamaForCausalLM(LlamaConfig(**sizes, **more))
    yield (
        "opt",
        lambda: OPTForCausalLM(
            OPTConfig(**sizes, ffn_dim=64, word_embed_proj_dim=WIDTH, init_std=0.3, eos_token_id=None)
        ),
    )
    yield (
        "mistral-sliding",
        lambda: MistralForCausalLM(MistralConfig(**sizes, **more, head_dim=16, sliding_window=5)),
    )


@pytest.mark.parametrize(("name", "make"), [pytest.param(*one, id=one[0]) for one in other_models()])
def test_other_architectures(service, client, name, make):
    torch.manual_seed(11)
    target = make().eval()
    assert len(set(generate(target)[0].tolist())) > 10  # it does not repeat one token
    assert generate(target, custom_generate=speculative_generate(None, 0)).tolist() == generate(target).tolist()
    service.draft = scattered(4)(oracle(target))
    report = DecodeReport()
    actual = generate(target, custom_generate=speculative_generate(client, 3, on_round=report.add))
    assert actual.tolist() == generate(target).tolist()
    assert report.num_accepted > 0
    with Client(service.target, hidden_width=WIDTH, hidden_source=HiddenSource.PRE_NORM) as pre_norm:
        assert generate(target, custom_generate=speculative_generate(pre_norm, 3)).tolist() == actual.tolist()


def overriding_models():
    """Models that override `prepare_inputs_for_generation` without naming what they hand on."""
    from transformers import (
        BloomConfig,
        BloomForCausalLM,
        Gemma3Config,
        Gemma3ForConditionalGeneration,
        Phi3Config,
        Phi3ForCausalLM,
        PhimoeConfig,
        PhimoeForCausalLM,
    )

    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_attention_heads": 4, "num_hidden_layers": 2}
    more = {"intermediate_size": 64, "num_key_value_heads": 2, "initializer_range": 0.3, "max_position_embeddings": 256}
    ends = {"eos_token_id": None, "pad_token_id": 0, "bos_token_id": 1}
    bloom = {"vocab_size": VOCAB, "hidden_size": WIDTH, "n_head": 4, "n_layer": 2, "initializer_range": 0.3}
    vision = {
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = sizes | more | {"head_dim": 16, "sliding_window": 8} | ends
    yield "phi3", lambda: Phi3ForCausalLM(Phi3Config(**sizes, **more, **ends))
    yield "phimoe", lambda: PhimoeForCausalLM(PhimoeConfig(**sizes, **more, **ends, num_local_experts=2))
    yield "bloom", lambda: BloomForCausalLM(BloomConfig(**bloom, **ends))
    yield (
        "gemma3",
        lambda: Gemma3ForConditionalGeneration(
            Gemma3Config(
                text_config=text,
                vision_config=vision,
                mm_tokens_per_image=4,
                image_token_index=VOCAB - 1,
                tie_word_embeddings=False,  # tied, a random one repeats one token
            )
        ),
    )


@pytest.mark.parametrize(("name", "make"), [pytest.param(*one, id=one[0]) for one in overriding_models()])
def test_models_that_override_the_preparation_of_their_inputs(service, client, name, make):
    torch.manual_seed(11)
    target = make().eval()
    expected = generate(target)
    assert len(set(expected[0].tolist())) > 10
    plain = generate(target, custom_generate=speculative_generate(None, 0))
    assert plain.tolist() == expected.tolist()
    service.draft = scattered(4)(oracle(target))
    report = DecodeReport()
    actual = generate(target, custom_generate=speculative_generate(client, 3, on_round=report.add))
    assert actual.tolist() == expected.tolist()
    assert 0 < report.num_accepted < report.num_drafts
    assert report.num_errors == 0


def test_a_model_that_feeds_the_whole_sequence_again_is_refused_before_any_token(client, service):
    target, tokens = tiny_model(), Recorder()
    original = target.prepare_inputs_for_generation

    def feed_everything(input_ids, next_sequence_length=None, **kwargs):
        return original(input_ids, **kwargs)

    target.prepare_inputs_for_generation = feed_everything
    for decode in (speculative_generate(client, 2, streamer=tokens), speculative_generate(None, 0, streamer=tokens)):
        with pytest.raises(ValueError, match="Qwen3_5ForCausalLM"):
            generate(target, custom_generate=decode)
    assert tokens.tokens == 2 * PROMPT[0].tolist()


def test_a_cache_that_grows_otherwise_than_it_is_fed_is_refused(client):
    target = tiny_model()
    attention = target.base_model.layers[0].self_attn
    original = attention.forward

    def attend_twice(*args, **kwargs):
        original(*args, **kwargs)
        return original(*args, **kwargs)

    attention.forward = attend_twice
    assert "its cache holds" in refusal(target, client)


def test_a_model_that_starts_its_cache_anew_is_refused(client):
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(11)
    sizes = {"vocab_size": VOCAB, "hidden_size": WIDTH, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": None, "pad_token_id": 0}
    config = Phi3Config(**sizes, **heads, max_position_embeddings=256, original_max_position_embeddings=12)
    assert "drops its cache at" in refusal(Phi3ForCausalLM(config).eval(), client)
