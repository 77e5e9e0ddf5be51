"""Tiny targets of transformers, and drafts that are partly right for them."""

import random

import pytest
import torch
from transformers.models.qwen3_5 import Qwen3_5ForCausalLM, Qwen3_5TextConfig

from specdraft.integrations.transformers import speculative_generate

WIDTH, VOCAB = 48, 97
PROMPT = torch.tensor([[5, 17, 3, 88, 41, 9, 23]])
NEW_TOKENS = 24


def tiny_model(layer_types=("full_attention",) * 3, **config):
    torch.manual_seed(7)
    settings = {
        "vocab_size": VOCAB,
        "hidden_size": WIDTH,
        "intermediate_size": 64,
        "num_hidden_layers": len(layer_types),
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "layer_types": list(layer_types),
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "max_position_embeddings": 512,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 0,
        "tie_word_embeddings": False,
        "initializer_range": 0.3,  # large enough that a random model does not repeat one token
    }
    return Qwen3_5ForCausalLM(Qwen3_5TextConfig(**settings | config)).eval()


def generate(model, prompt=PROMPT, **kwargs):
    settings = {"max_new_tokens": NEW_TOKENS, "do_sample": False} | kwargs
    return model.generate(prompt, **settings)


def oracle(model, **kwargs):
    """Drafts that the target will accept: what it generates from here by itself."""
    whole = generate(model, **kwargs)[0].tolist()

    def draft(sequence, entry):
        last_key = entry.pairs.first_key + len(entry.pairs.tokens) - 1
        begin = last_key + 2
        return whole[begin : begin + entry.draft_count]

    return draft


def scattered(seed=0, share=0.5):
    """Drafts that are sometimes right: made from an oracle by spoiling some of them."""
    rng = random.Random(seed)

    def spoil(draft):
        def spoiled(sequence, entry):
            return [token if rng.random() < share else rng.randrange(VOCAB) for token in draft(sequence, entry)]

        return spoiled

    return spoil


def refusal(model, client, prompt=PROMPT, **kwargs):
    with pytest.raises(ValueError) as caught:
        generate(model, prompt, custom_generate=speculative_generate(client, 2), **kwargs)
    return str(caught.value)


class Recorder:
    def __init__(self):
        self.tokens, self.ended = [], False

    def put(self, value):
        self.tokens += value.flatten().tolist()

    def end(self):
        self.ended = True
