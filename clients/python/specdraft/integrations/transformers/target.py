"""The target model: one forward at a time, over a cache that can be cut back."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any, Final

import torch
from transformers.generation.utils import GenerationMixin

from specdraft.integrations.transformers import caches

__all__ = ["Target"]

# Classes that override the method hand most arguments on as **kwargs, so their own signatures say nothing.
_SLICES_BY_LENGTH: Final = (
    "next_sequence_length" in inspect.signature(GenerationMixin.prepare_inputs_for_generation).parameters
)
_TRIED_TOKENS: Final = 2


class Target:
    """A causal LM with its cache in the middle of a generation; batch size 1."""

    def __init__(self, model: Any, prompt: torch.Tensor, model_kwargs: Mapping[str, Any]) -> None:
        """Looks at the model before anything is generated.

        Raises:
            ValueError: what this kind of decoding cannot do, by name.
        """
        if model.config.is_encoder_decoder:
            raise ValueError(f"{type(model).__name__} is an encoder-decoder; a causal LM is needed")
        if prompt.shape[0] != 1:
            raise ValueError(f"speculative decoding takes a batch of 1, not {prompt.shape[0]}")
        if prompt.shape[1] == 0:
            raise ValueError("speculative decoding needs the prompt's input_ids, not inputs_embeds alone")
        if model_kwargs.get("inputs_embeds") is not None:
            raise ValueError("speculative decoding does not take inputs_embeds: the prompt's input_ids are what is fed")
        mask = model_kwargs.get("attention_mask")
        if mask is not None and not bool(mask.bool().all()):
            raise ValueError("speculative decoding takes no padding: attention_mask has zeros")
        self.cache = caches.check_cache(model_kwargs)
        self._model = model
        self._kwargs = dict(model_kwargs)
        self._prompt_length = prompt.shape[1]

    @property
    def position(self) -> int:
        """P: tokens that the cache holds."""
        return int(self.cache.get_seq_length())

    def prefill(self, prompt: torch.Tensor) -> torch.Tensor:
        """Feeds the prompt, less what the cache holds already.

        Returns:
            Logits after its last token: [1, 1, V], float32.

        Raises:
            ValueError: the model does not feed what it is asked to, now or (as far as can be told) in a later verify.
        """
        mask, held = self._kwargs.get("attention_mask"), self.position
        # As in `generate`: where the mask covers more than the ids, these are the new tokens alone.
        is_whole = mask is None or mask.shape[1] == prompt.shape[1]
        count = prompt.shape[1] - held if is_whole else prompt.shape[1]
        if count <= 0:
            raise ValueError(f"the cache holds {held} tokens, and the prompt of {prompt.shape[1]} adds none")
        logits = self._forward(prompt, count, logits_to_keep=1, is_first=True)
        caches.prepare_to_crop(self.cache)
        caches.crop(self.cache, self.position)
        # A verify is prepared here, before any token comes out, and not run.
        self._inputs(torch.cat([prompt, prompt[:, -1:].expand(-1, _TRIED_TOKENS)], dim=-1), _TRIED_TOKENS)
        return logits[:, -1:]

    def verify(self, ids: torch.Tensor, count: int) -> torch.Tensor:
        """Feeds the last `count` of `ids` in one forward.

        Args:
            ids: the whole sequence with the drafts at its end, [1, T].
            count: 1 + number of drafts.

        Returns:
            Logits after each of them: [1, count, V], float32.
        """
        return self._forward(ids, count, logits_to_keep=count, is_first=False)[:, -count:]

    def forget(self, length: int) -> None:
        """Cuts the cache down to its first `length` tokens."""
        caches.crop(self.cache, length)

    def _forward(self, ids: torch.Tensor, count: int, *, logits_to_keep: int, is_first: bool) -> torch.Tensor:
        inputs = self._inputs(ids, count, logits_to_keep=logits_to_keep, is_first=is_first)
        expected = self.position + count
        outputs = self._model(**inputs, return_dict=True)
        self._kwargs["past_key_values"] = self.cache = outputs.past_key_values
        held = None if self.cache is None else self.position
        if held != expected:
            raise self._refusal(f"its cache holds {held} tokens after a forward that should have made them {expected}")
        logits: torch.Tensor = outputs.logits
        if logits.shape[1] < logits_to_keep:
            raise self._refusal(f"it gives logits of {logits.shape[1]} tokens where {logits_to_keep} were asked for")
        return logits.to(device=ids.device, dtype=torch.float32, copy=True)

    def _inputs(
        self, ids: torch.Tensor, count: int, *, logits_to_keep: int | None = None, is_first: bool = False
    ) -> dict[str, Any]:
        """What the model makes of the last `count` of `ids`: exactly these, on top of the cache.

        Raises:
            ValueError: it would feed something else, and its tokens would be wrong ones.
        """
        kwargs = self._lengthened(ids.shape[1] - self._prompt_length)
        if "logits_to_keep" in kwargs:
            kwargs["logits_to_keep"] = count if logits_to_keep is None else logits_to_keep
        if _SLICES_BY_LENGTH:
            kwargs |= {"next_sequence_length": count, "is_first_iteration": is_first}
        else:
            held = self.position
            kwargs["cache_position"] = torch.arange(held, held + count, device=ids.device)
        inputs: dict[str, Any] = self._model.prepare_inputs_for_generation(ids, **kwargs)
        fed = inputs.get("input_ids")
        if fed is None or not torch.equal(fed.to(ids.device), ids[:, -count:]):
            shape = None if fed is None else list(fed.shape)
            raise self._refusal(f"it feeds input_ids of shape {shape} where the last {count} tokens are due")
        if inputs.get("past_key_values") is not self.cache:
            raise self._refusal(f"it drops its cache at {ids.shape[1]} tokens")
        return inputs

    def _refusal(self, what: str) -> ValueError:
        name = type(self._model).__name__
        return ValueError(f"speculative decoding cannot drive {name}.prepare_inputs_for_generation: {what}")

    def _lengthened(self, extra: int) -> dict[str, Any]:
        """The model's arguments for `extra` tokens after the prompt."""
        kwargs = dict(self._kwargs)
        if extra == 0:
            return kwargs
        for name in ("attention_mask", "token_type_ids", "mm_token_type_ids"):
            given = kwargs.get(name)
            if given is not None:
                last = given.new_zeros((1, 1)) if name == "mm_token_type_ids" else given[:, -1:]
                kwargs[name] = torch.cat([given, last.expand(-1, extra)], dim=-1)
        positions = kwargs.get("position_ids")
        if positions is not None:
            steps = torch.arange(1, extra + 1, dtype=positions.dtype, device=positions.device)
            kwargs["position_ids"] = torch.cat([positions, positions[..., -1:] + steps], dim=-1)
        return kwargs
