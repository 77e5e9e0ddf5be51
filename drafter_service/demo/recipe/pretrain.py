"""First stage: the target learns the text, and the head learns beside it so that the target's states serve both."""

import json
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from .head import Head
from .optimizer import Optimizer
from .target import Target

__all__ = ["Clock", "PretrainPlan", "pretrain", "windows"]

_UNTIMED_STEPS = 5
Losses = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class PretrainPlan:
    """Sizes in tokens and windows; head_weight scales the head's loss against the target's."""

    seconds: float = 140.0
    batch: int = 64
    length: int = 1024
    head_length: int = 512
    head_weight: float = 0.5
    depths: int = 3
    rate: float = 3e-3
    decay: float = 0.1
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True


class Clock:
    """Progress by elapsed time, counted from the end of the first steps, whose compilation is not training."""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._start = time.monotonic()
        self.step = 0

    def tick(self) -> float:
        """Count a step and answer the progress in [0, 1]."""
        if self.step == _UNTIMED_STEPS:
            self._start = time.monotonic()
        self.step += 1
        return 0.0 if self.step <= _UNTIMED_STEPS else min(1.0, self.elapsed / self._seconds)

    @property
    def elapsed(self) -> float:
        """Seconds since the start of training proper."""
        return time.monotonic() - self._start


def windows(stream: Tensor, count: int, length: int) -> Tensor:
    """`count` random windows [count, length] of a token stream, across file borders as well."""
    starts = torch.randint(0, stream.numel() - length, (count,), device=stream.device)
    return stream[starts[:, None] + torch.arange(length, device=stream.device)]


def pretrain(
    target: Target, head: Head, streams: dict[str, Tensor], plan: PretrainPlan, log: Path
) -> dict[str, float | int]:
    """Train both for plan.seconds; appends a line of JSON to `log` now and then. Answers the last figures."""
    target.train()
    optimizer = Optimizer((target, head), rate=plan.rate, decay=plan.decay)
    losses: Losses = torch.compile(_losses, dynamic=False) if plan.compiled else _losses
    step = _Step(target, head, plan, losses)
    clock = Clock(plan.seconds)
    figures: dict[str, float | int] = {}
    progress = 0.0
    while progress < 1.0:
        progress = clock.tick()
        parts = step(windows(streams["training"], plan.batch, plan.length + 1))
        optimizer.step(parts, progress)
        if clock.step % 250 == 0 or progress >= 1.0:
            figures = _figures(target, streams["held_out"], plan, clock, parts)
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"stage": "pretrain", **figures}) + "\n")
            print(figures, "skipped", optimizer.num_skipped, flush=True)
    return figures


class _Step:
    """Forward and backward of one batch."""

    def __init__(self, target: Target, head: Head, plan: PretrainPlan, losses: Losses) -> None:
        self._target, self._head, self._plan, self._losses = target, head, plan, losses
        self._unroll = torch.compile(head.unroll, dynamic=False) if plan.compiled else head.unroll

    def __call__(self, ids: Tensor) -> Tensor:
        """Losses [1 + depths] of ids [B, S + 1], detached: the target's, then the head's by depth."""
        plan = self._plan
        table = self._target.embed_tokens.weight
        with torch.autocast(ids.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
            hidden = self._target(ids[:, :-1], dtype=plan.dtype)
            parts = [self._losses(hidden, table, ids[:, 1:])]
            span = plan.head_length - plan.depths
            first = (plan.length - plan.head_length) // 2  # positions with a usual amount of context
            shifted = [ids[:, first + 1 + d : first + 1 + d + span] for d in range(plan.depths + 1)]
            states = self._unroll(
                table, shifted[0], hidden[:, first : first + span], [part.contiguous() for part in shifted[:-1]]
            )
            parts += [self._losses(y, table, shifted[d + 1]) for d, y in enumerate(states)]
        loss = torch.stack(parts)
        (loss[0] + plan.head_weight * loss[1:].mean()).backward()
        return loss.detach()


def _losses(hidden: Tensor, table: Tensor, labels: Tensor) -> Tensor:
    """Mean cross entropy in nats of hidden states [B, S, H] against labels [B, S]."""
    logits = F.linear(hidden, table.to(hidden.dtype)).float()
    return F.cross_entropy(logits.flatten(0, 1), labels.flatten())


@torch.no_grad()
def _held_out_loss(target: Target, stream: Tensor, plan: PretrainPlan) -> float:
    """Nats a token over consecutive windows of the held-out stream."""
    count = stream.numel() // (plan.length + 1)
    ids = stream[: count * (plan.length + 1)].view(count, plan.length + 1)
    with torch.autocast(ids.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
        return float(_losses(target(ids[:, :-1], dtype=plan.dtype), target.embed_tokens.weight, ids[:, 1:]))


def _figures(
    target: Target, held_out: Tensor, plan: PretrainPlan, clock: Clock, parts: Tensor
) -> dict[str, float | int]:
    figures: dict[str, float | int] = {
        "step": clock.step,
        "seconds": round(clock.elapsed, 1),
        "tokens": clock.step * plan.batch * plan.length,
        "loss": round(float(parts[0]), 4),
        "held_out_loss": round(_held_out_loss(target, held_out, plan), 4),
    }
    return figures | {f"head_loss_{depth}": round(float(part), 4) for depth, part in enumerate(parts[1:], start=1)}
