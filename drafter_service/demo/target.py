"""The demo's target model, its tokenizer, and where the trained pair and the held-out texts lie."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

HERE = Path(__file__).resolve().parent
HEAD = HERE / "models" / "head"
TARGET = HERE / "models" / "target"
TEXTS = HERE / "texts"


@dataclass(frozen=True, slots=True)
class Target:
    """The model that is generated with.

    Attributes:
        model: transformers' causal LM, float32: lossless is judged without rounding to bfloat16 or TF32.
        tokenizer: its tokenizer.
        device: where it runs.
    """

    model: Any
    tokenizer: Any
    device: torch.device

    @property
    def memory(self) -> Literal["cuda", "auto"]:
        """How its hidden states reach the service: on a GPU they stay on it."""
        return "cuda" if self.device.type == "cuda" else "auto"

    def generate(self, prompt: tuple[int, ...], num_new: int, decoding: Any = None) -> tuple[int, ...]:
        """Greedily generates after a prompt.

        Args:
            prompt: token ids.
            num_new: most tokens generated.
            decoding: a decoding method; None is transformers' own loop.
        """
        ids = torch.tensor([prompt], device=self.device)
        extra = {} if decoding is None else {"custom_generate": decoding}
        grown: Tensor = self.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_new,
            do_sample=False,
            **extra,
        )
        return tuple(grown[0, len(prompt) :].tolist())


def load_target(folder: Path = TARGET) -> Target:
    """Loads the target in float32, on a GPU if there is one."""
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    transformers_logging.set_verbosity_error()
    transformers_logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(device).eval()
    return Target(model, Tokenizer.from_file(str(folder / "tokenizer.json")), device)
