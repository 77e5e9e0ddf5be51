"""A tiny random head with a long position limit, written on the fly, for benchmarks whose weights do not matter."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from safetensors.torch import save_file

VOCAB_SIZE = 64
HIDDEN = 32
HEADS = 2
HEAD_DIM = 16
INTERMEDIATE = 32
ROW_BYTES = 2 * HEADS * HEAD_DIM * 4
"""Keys and values of one row, float32."""


def write_tiny_head(folder: Path, max_position: int) -> Path:
    """Writes config.json and model.safetensors in the Qwen3.5 layout, tables included; returns the folder."""
    generator = torch.Generator().manual_seed(0)
    tensors = {name: torch.randn(shape, generator=generator) * shape[-1] ** -0.5 for name, shape in _shapes().items()}
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": VOCAB_SIZE,
        "hidden_size": HIDDEN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "head_dim": HEAD_DIM,
        "intermediate_size": INTERMEDIATE,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": "float32",
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _shapes() -> dict[str, tuple[int, ...]]:
    width = HEADS * HEAD_DIM
    layer = {
        "input_layernorm.weight": (HIDDEN,),
        "post_attention_layernorm.weight": (HIDDEN,),
        "self_attn.q_proj.weight": (2 * width, HIDDEN),
        "self_attn.k_proj.weight": (width, HIDDEN),
        "self_attn.v_proj.weight": (width, HIDDEN),
        "self_attn.o_proj.weight": (HIDDEN, width),
        "self_attn.q_norm.weight": (HEAD_DIM,),
        "self_attn.k_norm.weight": (HEAD_DIM,),
        "mlp.gate_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.up_proj.weight": (INTERMEDIATE, HIDDEN),
        "mlp.down_proj.weight": (HIDDEN, INTERMEDIATE),
    }
    own: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (VOCAB_SIZE, HIDDEN),
        "mtp.fc.weight": (HIDDEN, 2 * HIDDEN),
        "mtp.pre_fc_norm_embedding.weight": (HIDDEN,),
        "mtp.pre_fc_norm_hidden.weight": (HIDDEN,),
        "mtp.norm.weight": (HIDDEN,),
    }
    return own | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
