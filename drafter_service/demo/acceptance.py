"""Acceptance of the trained pair through the running service, at random positions of the held-out files.

At each position the head is given exact rows of real text and drafts; the target's own greedy continuation says which
drafts a verify would have kept.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from drafter_service.demo.demo import service_config
from drafter_service.demo.prompts import EVERYTHING, read_texts
from drafter_service.demo.target import HEAD, TEXTS, Target, load_target
from drafter_service.server.process import ServiceProcess
from specdraft.client import Client

PROGRESS_POSITIONS = 50


@dataclass(frozen=True, slots=True)
class AcceptancePlan:
    """How much is measured.

    Attributes:
        num_positions: positions, at most one round each.
        num_drafts: K.
        num_context_tokens: real tokens before a position.
        seed: chooses the positions.
    """

    num_positions: int = 500
    num_drafts: int = 3
    num_context_tokens: int = 256
    seed: int = 0


def measure_acceptance(
    plan: AcceptancePlan, head: Path = HEAD, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, Any]:
    """Figures: rounds, share accepted by draft index, mean accept length (1 + mean accepted drafts).

    Raises:
        ValueError: the texts have fewer positions.
    """
    torch.set_num_threads(1)
    target = load_target()
    contexts = _contexts(target, plan)
    accepted: list[int] = []
    with (
        ServiceProcess(service_config(head)) as reached,
        Client(reached.target, memory=target.memory, max_drafts=plan.num_drafts, client_name="acceptance") as client,
    ):
        for number, context in enumerate(contexts):
            if number % PROGRESS_POSITIONS == 0:
                tell(f"position {number + 1}/{plan.num_positions}")
            grown, hiddens = _read(target, context, plan.num_drafts + 1)
            # grown[0] is t_P; the drafts are guesses for what follows it.
            with client.open_sequence() as sequence:
                sequence.prefill(context, hiddens)
                proposal = sequence.propose(len(context) - 1, grown[:1], hiddens[-1:], plan.num_drafts)
                accepted.append(common_prefix(proposal.drafts, grown[1:]))
                sequence.close(accepted[-1])
    return {"plan": asdict(plan), **summary(accepted, plan.num_drafts)}


def common_prefix(drafts: Sequence[int], truth: Sequence[int]) -> int:
    """How many drafts a verify would keep."""
    kept = 0
    for draft, token in zip(drafts, truth, strict=False):
        if draft != token:
            break
        kept += 1
    return kept


def summary(accepted: Sequence[int], num_drafts: int) -> dict[str, Any]:
    """What the accepted drafts of rounds add up to."""
    rounds = len(accepted)
    by_index = [round(sum(kept > index for kept in accepted) / rounds, 4) for index in range(num_drafts)]
    return {
        "rounds": rounds,
        "accepted_by_draft_index": by_index,
        "mean_accept_length": round(1 + sum(accepted) / rounds, 4),
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{figures['rounds']} positions of held-out files, exact rows, the target's own greedy continuation"]
    for index, share in enumerate(figures["accepted_by_draft_index"]):
        lines.append(f"draft {index + 1}: accepted at {share:.1%} of the positions")
    lines.append(f"mean accept length {figures['mean_accept_length']:.2f}")
    return "\n".join(lines)


def _contexts(target: Target, plan: AcceptancePlan) -> list[tuple[int, ...]]:
    files = [target.tokenizer.encode(text).ids for text in read_texts(TEXTS, EVERYTHING).values()]
    size = plan.num_context_tokens
    places = [(ids, start) for ids in files for start in range(len(ids) - size)]
    if plan.num_positions > len(places):
        raise ValueError(f"{plan.num_positions} positions: the held-out files have {len(places)}")
    return [
        tuple(ids[start : start + size]) for ids, start in random.Random(plan.seed).sample(places, plan.num_positions)
    ]


@torch.inference_mode()
def _read(target: Target, context: tuple[int, ...], num_next: int) -> tuple[list[int], Tensor]:
    """The target's next `num_next` greedy tokens, whatever they are, and its hidden states of the context, [n, H]."""
    ids = torch.tensor([context], device=target.device)
    read = target.model.model(ids, use_cache=True)
    cache, state = read.past_key_values, read.last_hidden_state
    grown = [int(target.model.lm_head(state[:, -1]).argmax())]
    while len(grown) < num_next:
        newest = torch.tensor([grown[-1:]], device=target.device)
        grown.append(int(target.model(newest, past_key_values=cache).logits[0, -1].argmax()))
    return grown, state[0].float().contiguous()
