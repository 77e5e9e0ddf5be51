"""Write and read the two model folders: transformers' layout for the target, the MTP checkpoint layout for the head."""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from transformers import GenerationConfig, Qwen3_5ForCausalLM, Qwen3_5TextConfig

from .head import Head
from .shapes import Shape, head_config, shape_of, target_config
from .target import Target

__all__ = ["load_head", "load_target", "save_head", "save_target", "write_json"]


def save_target(target: Target, folder: Path, *, end_id: int) -> None:
    """Round to bfloat16 and save through transformers' own class, so that its loader needs nothing of ours."""
    config = Qwen3_5TextConfig(**target_config(target.shape, end_id))
    model = Qwen3_5ForCausalLM(config)
    tensors = {f"model.{name}": value.detach().cpu() for name, value in target.state_dict().items()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]
    model.load_state_dict(tensors)
    model = model.to(torch.bfloat16)
    model.generation_config = GenerationConfig(eos_token_id=end_id, pad_token_id=end_id, do_sample=False)
    model.save_pretrained(folder)
    _open_to_readers(folder)


def save_head(head: Head, folder: Path, *, end_id: int) -> None:
    """Round to bfloat16 and save the `mtp.*` tensors beside a config.json."""
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {f"mtp.{name}": value.detach().cpu().to(torch.bfloat16) for name, value in head.state_dict().items()}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    _open_to_readers(folder)
    write_json(folder / "config.json", head_config(head.shape, end_id))


def load_target(folder: Path, *, compiled: bool = False) -> Target:
    """The stored target in float32."""
    target = Target(_shape_in(folder), compiled=compiled)
    tensors = load_file(folder / "model.safetensors")
    names = target.state_dict()
    target.load_state_dict({name: tensors[f"model.{name}"].float() for name in names})
    return target


def load_head(folder: Path) -> Head:
    """The stored head in float32."""
    head = Head(_shape_in(folder))
    tensors = load_file(folder / "model.safetensors")
    head.load_state_dict({name.removeprefix("mtp."): value.float() for name, value in tensors.items()})
    return head


def write_json(path: Path, content: dict[str, Any]) -> None:
    """Indented, in the order given, newline at the end."""
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _open_to_readers(folder: Path) -> None:
    """Safetensors files are born readable by their owner alone."""
    (folder / "model.safetensors").chmod(0o644)


def _shape_in(folder: Path) -> Shape:
    return shape_of(json.loads((folder / "config.json").read_text(encoding="utf-8")))
