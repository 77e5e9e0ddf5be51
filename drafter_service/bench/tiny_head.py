"""Random heads written on the fly, for benchmarks whose weights do not matter: a tiny one, or one of a real size."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save_file


@dataclass(frozen=True, slots=True)
class HeadSize:
    """Sizes of a dense one-layer head."""

    vocab_size: int
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int


TINY = HeadSize(vocab_size=64, hidden=32, heads=2, kv_heads=2, head_dim=16, intermediate=32)
DENSE_4096 = HeadSize(vocab_size=151_936, hidden=4096, heads=32, kv_heads=8, head_dim=128, intermediate=12_288)
"""The widths of a dense target of some 8 billion parameters."""

VOCAB_SIZE, HIDDEN = TINY.vocab_size, TINY.hidden
ROW_BYTES = 2 * TINY.kv_heads * TINY.head_dim * 4
"""Keys and values of one row of the tiny head, float32."""


def write_tiny_head(folder: Path, max_position: int) -> Path:
    """Writes the tiny head in float32; returns the folder."""
    return write_head(folder, max_position, TINY, torch.float32)


def write_head(folder: Path, max_position: int, size: HeadSize, dtype: torch.dtype, device: str = "cpu") -> Path:
    """Writes config.json and model.safetensors in the Qwen3.5 layout, tables included; returns the folder."""
    generator = torch.Generator(device).manual_seed(0)
    tensors = {
        name: (torch.randn(shape, generator=generator, device=device) * shape[-1] ** -0.5).to(dtype).cpu()
        for name, shape in _shapes(size).items()
    }
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    config = {
        "model_type": "qwen3_5_text",
        "vocab_size": size.vocab_size,
        "hidden_size": size.hidden,
        "num_attention_heads": size.heads,
        "num_key_value_heads": size.kv_heads,
        "head_dim": size.head_dim,
        "intermediate_size": size.intermediate,
        "max_position_embeddings": max_position,
        "rms_norm_eps": 1e-6,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6, "partial_rotary_factor": 0.5},
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": True,
        "dtype": str(dtype).removeprefix("torch."),
    }
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    return folder


def _shapes(size: HeadSize) -> dict[str, tuple[int, ...]]:
    hidden, wide, narrow = size.hidden, size.heads * size.head_dim, size.kv_heads * size.head_dim
    layer = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (2 * wide, hidden),
        "self_attn.k_proj.weight": (narrow, hidden),
        "self_attn.v_proj.weight": (narrow, hidden),
        "self_attn.o_proj.weight": (hidden, wide),
        "self_attn.q_norm.weight": (size.head_dim,),
        "self_attn.k_norm.weight": (size.head_dim,),
        "mlp.gate_proj.weight": (size.intermediate, hidden),
        "mlp.up_proj.weight": (size.intermediate, hidden),
        "mlp.down_proj.weight": (hidden, size.intermediate),
    }
    own: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (size.vocab_size, hidden),
        "mtp.fc.weight": (hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": (hidden,),
        "mtp.pre_fc_norm_hidden.weight": (hidden,),
        "mtp.norm.weight": (hidden,),
    }
    return own | {f"mtp.layers.0.{name}": shape for name, shape in layer.items()}
