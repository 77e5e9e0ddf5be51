"""How often the head says what the target says, from the stored files, in float32, on any device.

Nothing here shares the training loop's shortcuts: transformers runs the target, and the head recomputes every pair
from scratch for every draft, without a cache.
"""

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM

from .head import Head
from .store import load_head
from .tokenizer import load_tokenizer

__all__ = ["MeasurePlan", "measure"]


@dataclass(frozen=True)
class MeasurePlan:
    """How much to measure. context: tokens before a position; prompt lengths and max_new_tokens in tokens."""

    positions: int = 500
    num_drafts: int = 3
    context: int = 256
    generations: int = 26
    prompt_lengths: tuple[int, int] = (128, 256)
    max_new_tokens: int = 160
    seed: int = 0


class _Pair:
    """The stored target and head, both float32."""

    def __init__(self, models: Path, device: str) -> None:
        self.target = AutoModelForCausalLM.from_pretrained(models / "target", dtype=torch.float32).to(device).eval()
        self.head: Head = load_head(models / "head").to(device).eval()
        self.table: Tensor = self.target.get_input_embeddings().weight
        self.end_id = int(self.target.config.eos_token_id)

    def hidden(self, ids: Tensor) -> Tensor:
        """Hidden states [B, S, H] after the target's final norm."""
        states: Tensor = self.target.model(ids).last_hidden_state
        return states

    def greedy(self, ids: Tensor, count: int) -> Tensor:
        """ids [B, S] and the target's next `count` greedy tokens, whatever they are."""
        grown: Tensor = self.target.generate(
            ids, attention_mask=torch.ones_like(ids), min_new_tokens=count, max_new_tokens=count, do_sample=False
        )
        return grown

    def drafts(self, tokens: Tensor, hidden: Tensor, count: int) -> Tensor:
        """Drafts [B, count] after pairs 0..n-1: tokens t_1..t_n [B, n] beside h_0..h_{n-1} [B, n, H]."""
        drafted: list[Tensor] = []
        for _ in range(count):
            y = self.head(F.embedding(tokens, self.table), hidden)[:, -1:]
            drafted.append(F.linear(y, self.table).argmax(-1))
            tokens, hidden = torch.cat((tokens, drafted[-1]), dim=1), torch.cat((hidden, y), dim=1)
        return torch.cat(drafted, dim=1)


@torch.no_grad()
def measure(models: Path, texts: Path, plan: MeasurePlan, *, device: str = "cpu") -> dict[str, Any]:
    """Acceptance at random positions of the held-out files and in greedy generations that start from them."""
    pair = _Pair(models, device)
    tokenizer = load_tokenizer(models / "target")
    files = {
        path.relative_to(texts).as_posix(): tokenizer.encode(path.read_text(encoding="utf-8")).ids
        for path in sorted(texts.rglob("*"))
        if path.name.endswith((".py", ".rst.txt"))
    }
    chance = random.Random(plan.seed)
    return {
        "plan": asdict(plan),
        "held_out_tokens": sum(len(ids) for ids in files.values()),
        "random_positions": _at_positions(pair, list(files.values()), plan, chance),
        "generations": _in_generations(pair, files, plan, chance),
    }


def _accepted(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """How many drafts a verify would keep: the common prefix."""
    kept = 0
    while kept < min(len(drafts), len(truth)) and drafts[kept] == truth[kept]:
        kept += 1
    return kept


def _summary(accepted: Sequence[int], num_drafts: int) -> dict[str, Any]:
    rounds = len(accepted)
    return {
        "rounds": rounds,
        "first_draft_accepted": round(sum(kept >= 1 for kept in accepted) / rounds, 4),
        "accepted_by_draft": [round(sum(kept > d for kept in accepted) / rounds, 4) for d in range(num_drafts)],
        "mean_accept_length": round(1 + sum(accepted) / rounds, 4),
    }


def _at_positions(pair: _Pair, files: list[list[int]], plan: MeasurePlan, chance: random.Random) -> dict[str, Any]:
    """One round at each position, after `context` real tokens and the target's own next one."""
    starts = [(ids, start) for ids in files for start in range(len(ids) - plan.context)]
    picked = chance.sample(starts, plan.positions)
    accepted: list[int] = []
    for first in range(0, len(picked), 25):
        chunk = [ids[start : start + plan.context] for ids, start in picked[first : first + 25]]
        context = torch.tensor(chunk, device=pair.table.device)
        grown = pair.greedy(context, plan.num_drafts + 1)
        drafts = pair.drafts(grown[:, 1 : plan.context + 1], pair.hidden(context), plan.num_drafts)
        truth = grown[:, plan.context + 1 :]
        accepted += [_accepted(*row) for row in zip(drafts.tolist(), truth.tolist(), strict=True)]
    return _summary(accepted, plan.num_drafts)


def _in_generations(
    pair: _Pair, files: dict[str, list[int]], plan: MeasurePlan, chance: random.Random
) -> dict[str, Any]:
    """Whole speculative generations. Greedy verify keeps the target's own text, so that text is made first."""
    accepted: list[int] = []
    distinct: list[float] = []
    names = sorted(files)
    for number in range(plan.generations):
        ids = files[names[number % len(names)]]
        length = chance.randint(*plan.prompt_lengths)
        start = chance.randint(0, len(ids) - length)
        prompt = torch.tensor([ids[start : start + length]], device=pair.table.device)
        text = pair.greedy(prompt, plan.max_new_tokens)
        accepted += _rounds(pair, text, length, plan.num_drafts)
        distinct.append(_distinct(text[0, length:].tolist()))
    summary = _summary(accepted, plan.num_drafts)
    return {**summary, "generations": plan.generations, "distinct_8_grams": round(sum(distinct) / len(distinct), 4)}


def _rounds(pair: _Pair, text: Tensor, prompt_length: int, num_drafts: int) -> list[int]:
    """Accepted drafts of each round over text [1, N] whose first prompt_length tokens were given."""
    hidden = pair.hidden(text)
    fed = prompt_length  # P: t_P is known but not fed yet
    accepted: list[int] = []
    while fed + num_drafts < text.shape[1]:
        drafts = pair.drafts(text[:, 1 : fed + 1], hidden[:, :fed], num_drafts)
        kept = _accepted(drafts[0].tolist(), text[0, fed + 1 :].tolist())
        accepted.append(kept)
        fed += kept + 1
    return accepted


def _distinct(ids: list[int], size: int = 8) -> float:
    """The share of a text's n-grams that are different ones: 1 for text that never repeats itself."""
    grams = [tuple(ids[first : first + size]) for first in range(len(ids) - size + 1)]
    return len(set(grams)) / len(grams)
