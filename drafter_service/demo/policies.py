"""Rows policies side by side: rounds that follow one another, where what a verify leaves in the KV decides the next.

* exact: the pairs of all verified tokens are written from the target's hidden states.
* approximate: the target hands over one hidden state a round; accepted drafts keep the rows that drafting made.
* trim: the rule of an engine that only cuts its KV back: of the rows that a round wrote (its pair's and its drafts')
  as many stay as drafts were accepted, so that every verify loses one verified row. A mode of this benchmark only.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from drafter_service.demo.acceptance import common_prefix, summary
from drafter_service.demo.prompts import pick_prompts
from drafter_service.demo.target import HEAD, TARGET, TEXTS, Target, load_target
from drafter_service.engine.batch import RunEntry
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import MtpHead, load_head
from drafter_service.state.pool import KvPool, PoolShape

PAGE_ROWS = 16
POLICIES = ("exact", "approximate", "trim")


@dataclass(frozen=True, slots=True)
class PolicyPlan:
    """How much is measured.

    Attributes:
        num_prompts: prompts from held-out code.
        num_prompt_tokens: tokens of each.
        num_new_tokens: tokens that the target generates after each, greedily.
        num_drafts: K.
        seed: chooses the prompts.
    """

    num_prompts: int = 16
    num_prompt_tokens: int = 128
    num_new_tokens: int = 160
    num_drafts: int = 3
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Story:
    """A prompt and what the target said after it.

    Attributes:
        tokens: t_0 .. t_{n-1}.
        num_prompt: how many of them are the prompt.
        hiddens: h_0 .. h_{n-1}, after the target's final norm, [n, H].
    """

    tokens: tuple[int, ...]
    num_prompt: int
    hiddens: Tensor


def measure_policies(plan: PolicyPlan, tell: Callable[[str], None] = lambda _text: None) -> dict[str, Any]:
    """Acceptance of each policy on the same stories, and the share of the verified rows that the head could see."""
    torch.set_num_threads(1)
    target = load_target()
    prompts = pick_prompts(TEXTS, target.tokenizer, plan.num_prompts, plan.num_prompt_tokens, plan.seed)
    stories = []
    for number, prompt in enumerate(prompts):
        tell(f"rows policies: generation {number + 1}/{plan.num_prompts}")
        stories.append(_tell(target, prompt.tokens, plan.num_new_tokens))
    head = load_head(HEAD, TARGET, dtype=torch.float32)
    figures = {}
    for policy in POLICIES:
        tell(f"rows policies: rounds of {policy}")
        rounds = [one for story in stories for one in _rounds(head, story, plan.num_drafts, policy)]
        seen = sum(num_rows for _, num_rows, _ in rounds) / sum(num_verified for _, _, num_verified in rounds)
        figures[policy] = summary([accepted for accepted, _, _ in rounds], plan.num_drafts) | {
            "rounds": len(rounds),
            "share_of_decoded_rows_seen": round(seen, 3),
        }
    return figures


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = ["rows policies, rounds in the target's own greedy text:"]
    lines.append(f"{'':<13}{'by draft index':<21}{'length':>7}{'rounds':>8}{'decoded rows seen':>19}")
    for policy, row in figures.items():
        shares = " ".join(format(share, ".1%") for share in row["accepted_by_draft_index"])
        lines.append(
            f"{policy:<13}{shares:<21}{row['mean_accept_length']:>7.3f}{row['rounds']:>8}"
            f"{row['share_of_decoded_rows_seen']:>19.0%}"
        )
    return "\n".join(lines)


@torch.inference_mode()
def _tell(target: Target, prompt: tuple[int, ...], num_new: int) -> Story:
    tokens = prompt + target.generate(prompt, num_new)
    read = target.model.model(torch.tensor([tokens], device=target.device))
    return Story(tokens, len(prompt), read.last_hidden_state[0].float().cpu())


def _rounds(head: MtpHead, story: Story, num_drafts: int, policy: str) -> list[tuple[int, int, int]]:
    """Of each round: drafts accepted, rows of the decoded span that the head saw, and rows that were verified."""
    layout = head.kv_layout()
    shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
    num_pages = -(-(len(story.tokens) + num_drafts + 1) // PAGE_ROWS)
    runner = EagerRunner(head, KvPool(shape, num_pages, head.device))
    pages = array("i", range(num_pages))
    first_key, row_begin, position = 0, 0, story.num_prompt
    rounds = []
    while position + num_drafts < len(story.tokens):
        entry = _entry(story, pages, first_key=first_key, row_begin=row_begin, position=position, num_drafts=num_drafts)
        (result,) = runner.run([entry])
        accepted = common_prefix(result.drafts, story.tokens[position + 1 :])
        rounds.append((accepted, entry.num_rows - story.num_prompt, position - story.num_prompt))
        row_begin, first_key = _next_rows(policy, entry, position, accepted)
        position += accepted + 1
    return rounds[1:]  # before the first there is nothing decoded


def _next_rows(policy: str, entry: RunEntry, position: int, accepted: int) -> tuple[int, int]:
    """Rows that stay after a verify, and the key of the next pair."""
    if policy == "exact":
        return entry.num_rows, position
    stay = accepted if policy == "approximate" else accepted - 1
    return entry.num_rows + stay, position + accepted


def _entry(
    story: Story, pages: array[int], *, first_key: int, row_begin: int, position: int, num_drafts: int
) -> RunEntry:
    """The pairs from first_key to the newest, key position - 1, whose token is the target's t_position."""
    tokens: Sequence[int] = story.tokens[first_key + 1 : position + 1]
    return RunEntry(
        pages=pages,
        row_begin=row_begin,
        num_live_rows=row_begin,
        first_key=first_key,
        tokens=tuple(tokens),
        hiddens=story.hiddens[first_key:position],
        num_drafts=num_drafts,
        min_logprob=None,
        masks=None,
        keeps_drafts=True,
    )
