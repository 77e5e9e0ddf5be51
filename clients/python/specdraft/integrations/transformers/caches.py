"""Whether and how a target's cache forgets rejected drafts."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

__all__ = ["check_cache", "crop", "prepare_to_crop"]

_KEEPS_EVERYTHING: Final = frozenset({"DynamicLayer", "DynamicIndexedLayer"})
_FIXED: Final = ("Static", "Quant", "LinearAttention", "HQQ")


def check_cache(model_kwargs: Mapping[str, Any]) -> Any:
    """The cache that this generation uses, if rejected drafts can be taken out of it again.

    Raises:
        ValueError: there is none, or it (or one of its layers, named) cannot be cropped.
    """
    cache = model_kwargs.get("past_key_values")
    if cache is None:
        others = [name for name in ("cache_params", "state", "mems", "past_buckets_states") if model_kwargs.get(name)]
        raise ValueError(f"speculative decoding needs a past_key_values cache; this target has {others or 'none'}")
    if not hasattr(cache, "crop"):
        raise ValueError(f"speculative decoding needs a cache that can be cropped, and {type(cache).__name__} cannot")
    for index, layer in enumerate(getattr(cache, "layers", ())):
        kind = type(layer).__name__
        if not _is_croppable(layer, kind, records_past=hasattr(cache, "activate_past_recording")):
            raise ValueError(
                f"speculative decoding needs a cache that can be cropped, and layer {index} of this "
                f"{type(cache).__name__} is a {kind}"
            )
    return cache


def _is_croppable(layer: Any, kind: str, *, records_past: bool) -> bool:
    # Linear attention keeps a running state, static caches a fixed size, quantized ones blocks: none of them can give
    # single tokens up. A sliding window forgets, unless it is told to record the past.
    if any(word in kind for word in _FIXED) or not hasattr(layer, "crop"):
        return False
    if getattr(layer, "is_sliding", False):
        return records_past
    return kind in _KEEPS_EVERYTHING or bool(getattr(layer, "is_croppable", False))


def prepare_to_crop(cache: Any) -> None:
    """Tells the cache, after the prompt, that its newest tokens may be taken back."""
    if hasattr(cache, "activate_past_recording"):
        cache.activate_past_recording()


def crop(cache: Any, length: int) -> None:
    """Cuts the cache down to its first `length` tokens.

    Raises:
        RuntimeError: the cache did not do it.
    """
    excess = cache.get_seq_length() - length
    # A negative number of tokens to remove is what newer versions take. 0 lets sliding layers shrink back to their
    # window there, and would empty the cache of older versions.
    if excess or hasattr(cache, "activate_past_recording"):
        cache.crop(-excess)
    if cache.get_seq_length() != length:
        cache.crop(length)
    if cache.get_seq_length() != length:
        raise RuntimeError(f"the cache holds {cache.get_seq_length()} tokens after it was cropped to {length}")
