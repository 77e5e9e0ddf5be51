"""AdamW with a clipped gradient and one schedule by elapsed time; a step whose loss is no number is no update."""

import math
from collections.abc import Iterable

import torch
from torch import Tensor, nn

__all__ = ["Optimizer", "share_of_rate"]

_MOST_SKIPPED_IN_A_ROW = 20


def share_of_rate(progress: float, *, warmup: float = 0.04) -> float:
    """The learning rate at `progress` in [0, 1] of the time, as a share of its peak: rise, then cosine to 0."""
    if progress < warmup:
        return max(progress / warmup, 0.01)
    return 0.5 * (1.0 + math.cos(math.pi * min(1.0, (progress - warmup) / (1.0 - warmup))))


class Optimizer:
    """AdamW over some modules; only matrices decay.

    rate: at the peak; decay: of the matrices, per unit of rate; largest_norm: of the whole gradient.
    """

    def __init__(self, modules: Iterable[nn.Module], *, rate: float, decay: float, largest_norm: float = 1.0) -> None:
        self._parameters = [p for module in modules for p in module.parameters() if p.requires_grad]
        groups = [
            {"params": [p for p in self._parameters if p.ndim == 2], "weight_decay": decay},
            {"params": [p for p in self._parameters if p.ndim != 2], "weight_decay": 0.0},
        ]
        self._adam = torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95))
        self._rate = rate
        self._largest_norm = largest_norm
        self._num_skipped_in_a_row = 0
        self.num_skipped = 0

    @torch.no_grad()
    def step(self, losses: Tensor, progress: float) -> None:
        """Update at `progress` in [0, 1] of the schedule, and clear the gradients.

        Raises FloatingPointError after too many steps in a row whose losses or gradients were no numbers.
        """
        norm = nn.utils.clip_grad_norm_(self._parameters, self._largest_norm)
        if bool(losses.isfinite().all() & norm.isfinite()):
            self._num_skipped_in_a_row = 0
            for group in self._adam.param_groups:
                group["lr"] = self._rate * share_of_rate(progress)
            self._adam.step()
        else:
            self.num_skipped += 1
            self._num_skipped_in_a_row += 1
            if self._num_skipped_in_a_row >= _MOST_SKIPPED_IN_A_ROW:
                raise FloatingPointError(f"{self._num_skipped_in_a_row} steps in a row gave no numbers")
        self._adam.zero_grad(set_to_none=True)
