"""The sizes of the two models, and the Qwen3.5 configurations that state them."""

from dataclasses import asdict, dataclass, replace
from typing import Any

__all__ = [
    "END_OF_TEXT",
    "Shape",
    "as_record",
    "head_config",
    "head_shape",
    "shape_of",
    "target_config",
    "target_shape",
]

END_OF_TEXT = "<|endoftext|>"


@dataclass(frozen=True)
class Shape:
    """Every number that the arithmetic needs; rotary_dims and head_dim count elements of one attention head."""

    vocab_size: int = 4096
    hidden_size: int = 160
    num_layers: int = 14
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 32
    intermediate_size: int = 448
    rotary_dims: int = 16
    rope_theta: float = 10000.0
    norm_eps: float = 1e-6
    max_positions: int = 1024


def target_shape(*, num_layers: int | None = None) -> Shape:
    """The target: deep and narrow, so that one verify costs several draft forwards."""
    shape = Shape()
    return shape if num_layers is None else replace(shape, num_layers=num_layers)


def head_shape(target: Shape) -> Shape:
    """The head: one layer of the target's kind with a wider MLP, which acceptance gains most from."""
    return replace(target, num_layers=1, intermediate_size=1536)


def _text_config(shape: Shape) -> dict[str, Any]:
    """The keys that both configurations share. mrope_section splits the rotary pairs; text makes all three equal."""
    pairs = shape.rotary_dims // 2
    return {
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_hidden_layers": shape.num_layers,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "attention_bias": False,
        "rms_norm_eps": shape.norm_eps,
        "max_position_embeddings": shape.max_positions,
        "layer_types": ["full_attention"] * shape.num_layers,
        "tie_word_embeddings": True,
        # Transformers writes this older key as well; unless told, with a default that contradicts the one below.
        "partial_rotary_factor": shape.rotary_dims / shape.head_dim,
        "rope_parameters": {
            "rope_type": "default",
            "rope_theta": shape.rope_theta,
            "partial_rotary_factor": shape.rotary_dims / shape.head_dim,
            "mrope_section": [pairs - 2 * (pairs // 3), pairs // 3, pairs // 3],
            "mrope_interleaved": True,
        },
    }


def target_config(shape: Shape, end_id: int) -> dict[str, Any]:
    """Keyword arguments of transformers' Qwen3_5TextConfig."""
    return {**_text_config(shape), "bos_token_id": None, "eos_token_id": end_id, "pad_token_id": end_id}


def head_config(shape: Shape, end_id: int) -> dict[str, Any]:
    """The head's config.json: a Qwen3.5 text configuration of its own."""
    return {
        "architectures": ["Qwen3_5ForCausalLM"],
        "model_type": "qwen3_5_text",
        "dtype": "bfloat16",
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        **target_config(shape, end_id),
    }


def shape_of(config: dict[str, Any]) -> Shape:
    """Read a Shape back from a configuration that this module wrote."""
    rope = config["rope_parameters"]
    return Shape(
        vocab_size=config["vocab_size"],
        hidden_size=config["hidden_size"],
        num_layers=config["num_hidden_layers"],
        num_heads=config["num_attention_heads"],
        num_kv_heads=config["num_key_value_heads"],
        head_dim=config["head_dim"],
        intermediate_size=config["intermediate_size"],
        rotary_dims=int(config["head_dim"] * rope["partial_rotary_factor"]),
        rope_theta=float(rope["rope_theta"]),
        norm_eps=config["rms_norm_eps"],
        max_positions=config["max_position_embeddings"],
    )


def as_record(shape: Shape) -> dict[str, Any]:
    """A plain dictionary, for the training record."""
    return asdict(shape)
