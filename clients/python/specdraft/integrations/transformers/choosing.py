"""Choosing tokens: exactly as the target alone would, one after the other."""

from __future__ import annotations

from typing import Any

import torch

__all__ = ["Chooser"]


class Chooser:
    """The sequence so far, and how its next token is chosen from logits.

    One token is chosen at a time, from the target's logits at its position, with every logits processor applied to the
    true prefix, so drafts can change nothing but the number of forwards. Sampling draws once a token, as `generate`
    does: the same seed gives the same tokens.
    """

    def __init__(self, prompt: torch.Tensor, processors: Any, criteria: Any, config: Any, streamer: Any) -> None:
        self.ids = prompt
        self.is_done = False
        self._processors = processors
        self._criteria = criteria
        self._do_sample = bool(config.do_sample)
        self._max_length = config.max_length
        self._streamer = streamer
        wants = config.return_dict_in_generate
        self.scores: tuple[torch.Tensor, ...] | None = () if wants and config.output_scores else None
        self.logits: tuple[torch.Tensor, ...] | None = () if wants and config.output_logits else None

    @property
    def num_left(self) -> int:
        """Tokens that still fit under max_length."""
        return int(self._max_length) - self.ids.shape[1]

    def choose(self, logits: torch.Tensor) -> int:
        """Appends the next token, chosen from the target's logits [1, V] after `ids`."""
        scores = self._processors(self.ids, logits.clone() if self.logits is not None else logits)
        if self._do_sample:
            token = torch.multinomial(torch.nn.functional.softmax(scores, dim=-1), num_samples=1)
        else:
            token = torch.argmax(scores, dim=-1, keepdim=True)
        if self.scores is not None:
            self.scores += (scores,)
        if self.logits is not None:
            self.logits += (logits,)
        self.ids = torch.cat([self.ids, token], dim=-1)
        if self._streamer is not None:
            self._streamer.put(token[0].cpu())
        self.is_done = bool(self._criteria(self.ids, self.scores).all())
        return int(token)
