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


class BodyPrecision(StrEnum):
    """What the projections are rounded to before they are used."""

    AS_STORED = "as-stored"
    # All of them, with a scale a row.
    FP8 = "fp8"
    # Not the joining projection, k and v: rows of K/V are made by these alone, and acceptance feels them most.
    NVFP4 = "nvfp4"


_NVFP4_ROLES: Final = frozenset({"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"})
_FP8_ROLES: Final = _NVFP4_ROLES | {"join_proj", "k_proj", "v_proj"}


def is_rounded(role: str, precision: BodyPrecision) -> bool:
    """Whether a tensor of that role is rounded."""
    match precision:
        case BodyPrecision.FP8:
            return role in _FP8_ROLES
        case BodyPrecision.NVFP4:
            return role in _NVFP4_ROLES
        case _:
            return False


def check_body(precision: BodyPrecision, config: HeadConfig) -> None:
    """Raises CheckpointError if the projections cannot have that precision."""
    widths = (config.hidden_size, config.num_heads * config.head_dim, config.intermediate_size)
    for width in widths if precision is BodyPrecision.NVFP4 else ():
        if width % _BLOCK_SIZE:
            raise CheckpointError(
                f"--quantization {precision}: a projection's {width} inputs are not a multiple of {_BLOCK_SIZE},"
                " the block of NVFP4"
            )


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
    config: HeadConfig,
    precision: LmHeadPrecision,
    lm_head_error: float,
    draft_vocab: DraftVocabulary | None,
    quantization: BodyPrecision = BodyPrecision.AS_STORED,
) -> Mapping[str, str]:
    """Every lever of a loaded head by name, resolved. `lm_head_error` is relative to the LM head as it is stored."""
    return {
        "hidden_source": config.hidden_source.value,
        "recycle": config.recycle.value,
        "dtype": config.dtype,
        "quantization": quantization.value,
        "lm_head": precision.value,
        "lm_head_error": f"{lm_head_error:.2g}",
        "draft_vocab": "all" if draft_vocab is None else draft_vocab.name,
    }
