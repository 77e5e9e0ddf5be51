"""The settings that change what a head drafts, and never what a target answers. No torch."""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final

from drafter_service.heads.config import HeadConfig
from drafter_service.heads.draft_vocab import DraftVocabulary
from drafter_service.heads.safetensors_header import CheckpointError

_BLOCK_SIZE: Final = 16


class LmHeadPrecision(StrEnum):
    """What the LM head is rounded to before it is used."""

    # The checkpoint's numbers in the type that the head computes in.
    AS_STORED = "as-stored"
    # ... in float32, the logits too: what the head's own type costs.
    FLOAT32 = "float32"
    BF16 = "bf16"
    FP8 = "fp8"
    NVFP4 = "nvfp4"


def check_lm_head(precision: LmHeadPrecision | None, hidden_size: int) -> None:
    """Raises CheckpointError if this LM head cannot have that precision. None, for auto, always fits."""
    if precision is LmHeadPrecision.NVFP4 and hidden_size % _BLOCK_SIZE:
        raise CheckpointError(
            f"--lm-head {precision}: hidden_size {hidden_size} is not a multiple of {_BLOCK_SIZE}, the block of NVFP4"
        )


def resolve_lm_head(precision: LmHeadPrecision | None, device_type: str, hidden_size: int) -> LmHeadPrecision:
    """None (auto) becomes NVFP4 on a GPU, where bytes are time, if its blocks fit; else as stored."""
    if precision is not None:
        return precision
    fits = device_type == "cuda" and hidden_size % _BLOCK_SIZE == 0
    return LmHeadPrecision.NVFP4 if fits else LmHeadPrecision.AS_STORED


def describe_levers(
    config: HeadConfig, precision: LmHeadPrecision, lm_head_error: float, draft_vocab: DraftVocabulary | None
) -> Mapping[str, str]:
    """Every lever of a loaded head by name, resolved. `lm_head_error` is relative to the LM head as it is stored."""
    return {
        "hidden_source": config.hidden_source.value,
        "recycle": config.recycle.value,
        "dtype": config.dtype,
        "lm_head": precision.value,
        "lm_head_error": f"{lm_head_error:.2g}",
        "draft_vocab": "all" if draft_vocab is None else draft_vocab.name,
    }
