"""Tiny random checkpoints in the Qwen3.5 layout, and pairs to feed them. Written without transformers.

The weights are random but not shapeless: attention moves the output as much as the pair itself does, so that a
wrong row shows in the drafted ids, and the output tables have rows of very different lengths, so that the best
logit stands clear of the second: in bf16 about one draft in fifty is a tie (best two within 2 % of the largest
|logit|), in float32 none. About one bf16 draft in a thousand is rounded further than that, where every logit happens
to be small: a bf16 test that compares drafts has fixed seeds.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors.torch import save_file
from torch import Tensor

LAYOUTS = ("single", "sharded", "sharded_index_omits_mtp")
WRAPPER_EMBEDDING = "model.language_model.embed_tokens.weight"
EMBEDDING = "model.embed_tokens.weight"
LM_HEAD = "lm_head.weight"
_INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class TinyShape:
    """The sizes of a tiny head."""

    vocab_size: int = 128
    hidden_size: int = 64
    num_heads: int = 4
    num_kv_heads: int = 2
    head_dim: int = 16
    intermediate_size: int = 96
    partial_rotary_factor: float = 0.5
    rope_theta: float = 10000.0
    max_position: int = 4096
    rope_extra: dict[str, object] = field(default_factory=dict)


class Sized(Protocol):
    """What `random_pairs` needs of a head's configuration."""

    @property
    def vocab_size(self) -> int: ...
    @property
    def hidden_size(self) -> int: ...


def write_tiny_checkpoint(
    directory: Path,
    *,
    seed: int = 0,
    dtype: str = "float32",
    padded_vocab: int | None = None,
    padding_value: float = 0.0,
    layout: str = "single",
    nested_text_config: bool = False,
    own_embedding: bool = True,
    lm_head: bool = True,
    mtp: bool = True,
    config_changes: dict[str, object] | None = None,
    **sizes: Any,
) -> Path:
    """Writes config.json and safetensors files, and returns the directory. `sizes` are fields of `TinyShape`.

    `own_embedding=False, lm_head=False` leaves the `mtp.*` tensors alone: the tables are then the target's, which
    `mtp=False` with the same seed writes. `own_embedding=True, lm_head=False` ties. `nested_text_config` writes the
    multimodal wrapper's layout. `config_changes` goes into the text model's part of config.json; None deletes a key.
    """
    shape = TinyShape(**sizes)
    directory.mkdir(parents=True, exist_ok=True)
    tensors = tiny_mtp_tensors(shape, seed) if mtp else {}
    tables = tiny_tables(shape, seed, padded_vocab or shape.vocab_size, padding_value)
    if own_embedding:
        tensors[WRAPPER_EMBEDDING if nested_text_config else EMBEDDING] = tables[EMBEDDING]
    if lm_head:
        tensors[LM_HEAD] = tables[LM_HEAD]
    stored = {name: tensor.to(getattr(torch, dtype)).contiguous() for name, tensor in tensors.items()}
    write_tensors(directory, stored, layout)
    config = tiny_config(shape, tied=not lm_head, nested=nested_text_config, changes=config_changes or {})
    (directory / "config.json").write_text(json.dumps(config, indent=1))
    return directory


def tiny_config(shape: TinyShape, *, tied: bool, nested: bool, changes: dict[str, object]) -> dict[str, object]:
    """A config.json document of the family."""
    rope = {
        "rope_type": "default",
        "rope_theta": shape.rope_theta,
        "partial_rotary_factor": shape.partial_rotary_factor,
    }
    text: dict[str, object] = {
        "model_type": "qwen3_5_text",
        "vocab_size": shape.vocab_size,
        "hidden_size": shape.hidden_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "intermediate_size": shape.intermediate_size,
        "max_position_embeddings": shape.max_position,
        "rms_norm_eps": 1e-6,
        "rope_parameters": rope | shape.rope_extra,
        "hidden_act": "silu",
        "attention_bias": False,
        "attn_output_gate": True,
        "mtp_num_hidden_layers": 1,
        "mtp_use_dedicated_embeddings": False,
        "tie_word_embeddings": tied,
    }
    text = {key: value for key, value in (text | changes).items() if value is not None}
    if not nested:
        return text
    return {"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": text}


def tiny_mtp_tensors(shape: TinyShape, seed: int) -> dict[str, Tensor]:
    """The family's `mtp.*` tensors, float32."""
    generator = torch.Generator().manual_seed(seed)
    hidden, inner = shape.hidden_size, shape.intermediate_size
    query, key_value = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim

    def projection(rows: int, columns: int, gain: float = 1.0) -> Tensor:
        return torch.randn(rows, columns, generator=generator) * gain * columns**-0.5

    def norm(width: int, mean: float = 0.0) -> Tensor:
        # Stored as w of 1 + w: a reader that forgets the 1 is far off.
        return mean + 0.2 * torch.randn(width, generator=generator)

    layer = {
        "input_layernorm.weight": norm(hidden),
        "post_attention_layernorm.weight": norm(hidden),
        "self_attn.q_proj.weight": projection(2 * query, hidden),
        "self_attn.k_proj.weight": projection(key_value, hidden),
        "self_attn.v_proj.weight": projection(key_value, hidden),
        "self_attn.o_proj.weight": projection(hidden, query, gain=2.0),
        "self_attn.q_norm.weight": norm(shape.head_dim, mean=-0.3),
        "self_attn.k_norm.weight": norm(shape.head_dim, mean=-0.3),
        "mlp.gate_proj.weight": projection(inner, hidden),
        "mlp.up_proj.weight": projection(inner, hidden),
        "mlp.down_proj.weight": projection(hidden, inner),
    }
    own = {
        "mtp.fc.weight": projection(hidden, 2 * hidden),
        "mtp.pre_fc_norm_embedding.weight": norm(hidden),
        "mtp.pre_fc_norm_hidden.weight": norm(hidden),
        "mtp.norm.weight": norm(hidden),
    }
    return own | {f"mtp.layers.0.{name}": tensor for name, tensor in layer.items()}


def tiny_tables(shape: TinyShape, seed: int, rows: int, padding_value: float) -> dict[str, Tensor]:
    """Embedding and LM head of `rows` rows, those beyond the vocabulary filled with one value."""
    generator = torch.Generator().manual_seed(seed + 7919)
    tables = {}
    for name in (EMBEDDING, LM_HEAD):
        lengths = torch.exp(1.4 * torch.randn(shape.vocab_size, 1, generator=generator))
        lengths *= 6.0 / lengths.max()
        table = torch.randn(shape.vocab_size, shape.hidden_size, generator=generator) * lengths
        # Opposite pairs: the largest |logit|, which tolerances are relative to, is then the best logit.
        table[1::2] = -table[: shape.vocab_size - 1 : 2]
        padding = torch.full((rows - shape.vocab_size, shape.hidden_size), padding_value)
        tables[name] = torch.cat((table * shape.hidden_size**-0.5, padding))
    return tables


def write_tensors(directory: Path, tensors: dict[str, Tensor], layout: str = "single") -> None:
    """Writes the tensors as one file, as two shards with an index, or with an index that omits `mtp.*`."""
    assert layout in LAYOUTS
    if layout == "single":
        save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
        return
    files = dict(_shards(tensors))
    for file, part in files.items():
        save_file(part, directory / file, metadata={"format": "pt"})
    omitted = "mtp." if layout == "sharded_index_omits_mtp" else "nothing"
    weight_map = {name: file for file, part in files.items() for name in part if not name.startswith(omitted)}
    (directory / _INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def random_pairs(config: Sized, num_pairs: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    """Random tokens int64 [num_pairs] and post-norm-sized hiddens float32 [num_pairs, hidden_size]."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(config.vocab_size, (num_pairs,), generator=generator)
    return tokens, torch.randn(num_pairs, config.hidden_size, generator=generator)


def _shards(tensors: dict[str, Tensor]) -> Iterator[tuple[str, dict[str, Tensor]]]:
    names = sorted(tensors)
    for number, part in enumerate((names[::2], names[1::2]), start=1):
        yield f"model-{number:05d}-of-00002.safetensors", {name: tensors[name] for name in part}
