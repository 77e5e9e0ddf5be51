"""Second stage: the target stands still and the head learns to say what the target would say greedily."""

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from .head import Head
from .optimizer import Optimizer
from .pretrain import Clock, windows
from .target import Target

__all__ = ["DistilPlan", "distil", "generate_text"]

Losses = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DistilPlan:
    """Half of every batch is real text, half is the target's own continuations, which is what it drafts in service."""

    seconds: float = 75.0
    batch: int = 64
    length: int = 448
    depths: int = 3
    prompts: int = 8192
    prompt_length: int = 256
    rate: float = 2e-3
    decay: float = 0.05
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = True


@torch.no_grad()
def generate_text(folder: Path, stream: Tensor, plan: DistilPlan) -> Tensor:
    """Greedy continuations [prompts, length] of random training windows by the stored target, prompts included."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=plan.dtype).to(stream.device)
    rows = []
    for first in range(0, plan.prompts, 8192):
        prompt = windows(stream, min(8192, plan.prompts - first), plan.prompt_length)
        grown = model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            min_new_tokens=plan.length - plan.prompt_length,
            max_new_tokens=plan.length - plan.prompt_length,
            do_sample=False,
        )
        rows.append(grown)
    return torch.cat(rows)


def distil(
    target: Target, head: Head, streams: dict[str, Tensor], generated: Tensor, *, plan: DistilPlan, log: Path
) -> dict[str, float | int]:
    """Train the head for plan.seconds; appends to `log`. Answers the last figures."""
    target.requires_grad_(False)
    optimizer = Optimizer((head,), rate=plan.rate, decay=plan.decay)
    step = _Step(target, head, plan, generated.device)
    clock = Clock(plan.seconds)
    figures: dict[str, float | int] = {}
    progress = 0.0
    while progress < 1.0:
        progress = clock.tick()
        picked = torch.randint(0, generated.shape[0], (plan.batch // 2,), device=generated.device)
        real = windows(streams["training"], plan.batch - plan.batch // 2, plan.length)
        parts, hits = step(torch.cat((real, generated[picked])))  # [2, depths]
        optimizer.step(parts, progress)
        if clock.step % 250 == 0 or progress >= 1.0:
            seen = {"step": clock.step, "seconds": round(clock.elapsed, 1)}
            figures = {**seen, **_by_depth("loss", parts), **_by_depth("accepted", hits)}
            with log.open("a", encoding="utf-8") as lines:
                lines.write(json.dumps({"stage": "distil", **figures}) + "\n")
            print(figures, "skipped", optimizer.num_skipped, flush=True)
    return figures


class _Step:
    """Forward and backward of one batch."""

    def __init__(self, target: Target, head: Head, plan: DistilPlan, device: torch.device) -> None:
        self._target, self._plan = target, plan
        # Earlier drafts count for more: a later one is worth something only when those before it were right.
        self._weights = torch.tensor([0.8**depth for depth in range(plan.depths)], device=device)
        self._unroll = torch.compile(head.unroll, dynamic=False) if plan.compiled else head.unroll
        self._losses: Losses = torch.compile(_losses, dynamic=False) if plan.compiled else _losses

    def __call__(self, ids: Tensor) -> Tensor:
        """Losses and shares accepted [2, depths], detached, of ids [B, S]."""
        plan = self._plan
        table = self._target.embed_tokens.weight
        with torch.autocast(ids.device.type, plan.dtype, enabled=plan.dtype != torch.float32):
            hidden, greedy, after = self._target.greedy_branches(ids, plan.depths, dtype=plan.dtype)
            # Row i is written from t_{i+1}, so the last position has none; its branch leaves before that row.
            following = torch.cat((ids[:, 1:], ids[:, :1]), dim=1)
            states = self._unroll(table, following, hidden, greedy)
            pairs = [self._losses(state, after[depth], table) for depth, state in enumerate(states)]
        losses = torch.stack([loss for loss, _ in pairs])
        (losses * self._weights).sum().backward()
        return torch.stack((losses.detach(), torch.stack([hit for _, hit in pairs])))


def _losses(state: Tensor, after: Tensor, table: Tensor) -> tuple[Tensor, Tensor]:
    """Half distillation to the target's distribution, half cross entropy to its greedy id; and how often they agree."""
    weight = table.to(state.dtype)
    said = F.log_softmax(F.linear(state, weight).float(), dim=-1).flatten(0, 1)
    wanted = F.linear(after, weight).float().flatten(0, 1)
    best = wanted.argmax(-1)
    soft = -(F.softmax(wanted, dim=-1) * said).sum(-1).mean()
    hard = F.nll_loss(said, best)
    return 0.5 * (soft + hard), (said.argmax(-1) == best).float().mean()


def _by_depth(name: str, values: Tensor) -> dict[str, float]:
    return {f"{name}_{depth}": round(float(value), 4) for depth, value in enumerate(values, start=1)}
