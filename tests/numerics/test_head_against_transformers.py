"""The head against transformers' own modules, joined as the family's record says."""

import pytest
import torch
from safetensors.torch import load_file
from transformers.models.qwen3_5 import modeling_qwen3_5 as modeling
from transformers.models.qwen3_5.configuration_qwen3_5 import Qwen3_5TextConfig

from checkpoints import TinyShape, random_pairs, write_tiny_checkpoint
from drafter_service.heads import load_head, oracle_draft, read_config
from plain_kv import draft_steps

# Relative to the largest |logit|: float32 on both sides, and transformers forms angles in float32,
# which is off by up to 4e-6 radians at position 100.
TOLERANCE = 5e-5
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256, "beta_fast": 4.0}
ROPES = {
    "partial": {},
    "whole": {"partial_rotary_factor": 1.0},
    "large base": {"rope_theta": 5e6},
    "yarn": {"max_position": 1024, "rope_extra": YARN},
    "yarn untruncated": {"max_position": 1024, "rope_extra": YARN | {"truncate": False, "attention_factor": 0.9}},
}


def reference_config(shape):
    return Qwen3_5TextConfig(
        vocab_size=shape.vocab_size,
        hidden_size=shape.hidden_size,
        num_attention_heads=shape.num_heads,
        num_key_value_heads=shape.num_kv_heads,
        head_dim=shape.head_dim,
        intermediate_size=shape.intermediate_size,
        num_hidden_layers=1,
        layer_types=["full_attention"],
        max_position_embeddings=shape.max_position,
        rope_parameters={
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.partial_rotary_factor,
            "mrope_section": [11, 11, 10],
        }
        | shape.rope_extra,
        attn_implementation="eager",
    )


class ReferenceHead:
    """embed, norms, joining projection, decoder layer, final norm and LM head, from transformers' modules."""

    def __init__(self, directory, shape):
        self.config = reference_config(shape)
        stored = load_file(directory / "model.safetensors")
        self.embedding, self.lm_head = stored["model.embed_tokens.weight"], stored["lm_head.weight"]
        self.join_proj = stored["mtp.fc.weight"]
        self.norms = {}
        for name in ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm"):
            self.norms[name] = modeling.Qwen3_5RMSNorm(shape.hidden_size, eps=1e-6)
            self.norms[name].load_state_dict({"weight": stored[f"mtp.{name}.weight"]})
        self.layer = modeling.Qwen3_5DecoderLayer(self.config, 0)
        prefix = "mtp.layers.0."
        self.layer.load_state_dict(
            {name.removeprefix(prefix): tensor for name, tensor in stored.items() if name.startswith(prefix)}
        )
        self.rope = modeling.Qwen3_5TextRotaryEmbedding(self.config)

    def __call__(self, tokens, hiddens, keys):
        """(logits, recycled) of the last pair."""
        embedding = self.norms["pre_fc_norm_embedding"](self.embedding[tokens])
        hidden = self.norms["pre_fc_norm_hidden"](hiddens)
        x = torch.nn.functional.linear(torch.cat((embedding, hidden), dim=-1), self.join_proj)[None]
        mask = torch.full((len(keys), len(keys)), -torch.inf).triu(1)[None, None]
        positions = keys[None, None].expand(3, 1, -1)
        y = self.norms["norm"](self.layer(x, self.rope(x, positions), attention_mask=mask))[0, -1]
        return self.lm_head @ y, y


def reference_chain(reference, tokens, hiddens, keys, num_drafts):
    for _ in range(num_drafts):
        logits, recycled = reference(tokens, hiddens, keys)
        yield logits
        tokens = torch.cat((tokens, logits.argmax()[None]))
        hiddens = torch.cat((hiddens, recycled[None]))
        keys = torch.cat((keys, keys[-1:] + 1))


def assert_close(actual, expected):
    assert (actual - expected).abs().max() < TOLERANCE * expected.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("rope", ROPES)
@pytest.mark.parametrize("first_key", [0, 93])
def test_head_and_oracle_equal_transformers(tmp_path, rope, first_key):
    sizes = {"vocab_size": 131, "hidden_size": 60, "head_dim": 24, "num_heads": 6, "intermediate_size": 90} | ROPES[
        rope
    ]
    write_tiny_checkpoint(tmp_path, seed=6, **sizes)
    head, reference = load_head(tmp_path), ReferenceHead(tmp_path, TinyShape(**sizes))
    tokens, hiddens = random_pairs(head.config, 8, seed=2)
    keys = torch.arange(first_key, first_key + 8)
    expected = list(reference_chain(reference, tokens, hiddens, keys, 3))
    oracle = oracle_draft(head, tokens, hiddens, keys, 3)
    steps = draft_steps(head, tokens, hiddens, keys, 3)
    for of_oracle, of_head, of_reference in zip(oracle.logits, steps, expected, strict=True):
        assert_close(of_oracle, of_reference)
        assert_close(of_head, of_reference)


@torch.inference_mode()
@pytest.mark.parametrize("rope", ROPES)
def test_frequencies_and_amplitude_equal_transformers(tmp_path, rope):
    shape = TinyShape(head_dim=64, **ROPES[rope])
    write_tiny_checkpoint(tmp_path, head_dim=64, **ROPES[rope])
    settings = read_config(tmp_path).config.rope
    reference = modeling.Qwen3_5TextRotaryEmbedding(reference_config(shape))
    # Theirs are float32.
    torch.testing.assert_close(torch.tensor(settings.inverse_frequencies()), reference.inv_freq, rtol=1e-6, atol=0)
    assert settings.amplitude() == pytest.approx(reference.attention_scaling, rel=1e-12)


@torch.inference_mode()
def test_cosine_and_sine_at_position_100_follow_the_formula(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path, head_dim=16, rope_theta=5e6, partial_rotary_factor=0.5))
    x = torch.zeros(1, 1, 16)
    x[..., :4] = 1.0
    x[..., 8:] = 7.0
    turned = head._rotate(x, torch.tensor([100]))[0, 0]
    angles = 100.0 * 5e6 ** (-torch.arange(4, dtype=torch.float64) / 4)
    torch.testing.assert_close(turned[:4].double(), angles.cos(), rtol=0, atol=1e-6)
    torch.testing.assert_close(turned[4:8].double(), angles.sin(), rtol=0, atol=1e-6)
    assert bool((turned[8:] == 7.0).all())
