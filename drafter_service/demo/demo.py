"""The demo: a service in its own process, a target here, and the same prompts with and without drafts.

All ways generate greedily. So small a target repeats itself, which flatters the drafts; settings against repetition
cost more time a token than the whole model, and would measure themselves.
"""

from __future__ import annotations

import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch

from drafter_service.config import MIB, ServiceConfig
from drafter_service.demo import page
from drafter_service.demo.painting import Painter
from drafter_service.demo.prompts import Prompt, pick_prompts
from drafter_service.demo.race import Decoding, Race, WarmUp
from drafter_service.demo.tally import tally
from drafter_service.demo.target import HEAD, TARGET, TEXTS, Target, load_target
from drafter_service.server.process import ServiceProcess
from specdraft.client import Client
from specdraft.integrations.transformers import speculative_generate

METRICS_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class DemoPlan:
    """What the demo does.

    Attributes:
        head: checkpoint of the head that drafts.
        num_drafts: K.
        num_prompts: generations of a run.
        num_prompt_tokens: tokens of each prompt.
        num_new: most tokens of each generation.
        num_turns: timed turns.
        seed: chooses the prompts.
    """

    head: Path = HEAD
    num_drafts: int = 3
    num_prompts: int = 4
    num_prompt_tokens: int = 160
    num_new: int = 72
    num_turns: int = 5
    seed: int = 0


def say_at_once(text: str) -> None:
    """Prints a piece of text, into a pipe too, before the next one is made."""
    print(text, flush=True)


def run_demo(
    plan: DemoPlan,
    painter: Painter,
    say: Callable[[str], None] = say_at_once,
    decoding: Decoding = speculative_generate,
    tell: Callable[[str], None] = lambda _text: None,
) -> bool:
    """Runs the demo.

    Args:
        plan: what it does.
        painter: how it looks.
        say: prints a piece of text.
        decoding: makes the decoding methods; tests put a wrong one here.
        tell: gets progress.

    Returns:
        Whether every generation was the target's own.
    """
    torch.set_num_threads(1)  # the service has one too: two processes on two cores
    target = load_target()
    prompts = pick_prompts(TEXTS, target.tokenizer, plan.num_prompts, plan.num_prompt_tokens, plan.seed)
    with ServiceProcess(service_config(plan.head)) as reached:
        say(f"the service runs as process {reached.pid}, the target here on {target.device}")
        say(f"metrics while it runs: {reached.metrics}")
        with Client(reached.target, memory=target.memory, max_drafts=plan.num_drafts, client_name="demo") as client:
            say(f"hidden states travel through {page.MEMORY_WORDS[client.memory_kind]}\n")
            race = Race(target, client, prompts, num_new=plan.num_new, num_drafts=plan.num_drafts, decoding=decoding)
            warm_up = race.warm_up(tell)
            _show_text(target, prompts, warm_up, painter, say)
            outcome = race.hold(warm_up, plan.num_turns, tell)
        counted = tally(outcome.shown.records, plan.num_drafts)
        say(page.acceptance(counted) + "\n")
        say(page.side_by_side(outcome, counted) + "\n")
        say(page.losses(outcome))
        say(page.service_counts(_read(reached.metrics), plan.num_drafts))
    say(page.last_line(outcome, counted))
    return outcome.is_lossless


def service_config(head: Path) -> ServiceConfig:
    """Settings of the demo's service: on a GPU if there is one, with the weights as they are stored there too."""
    return ServiceConfig(
        checkpoint=head,
        target_checkpoint=TARGET,
        kv_bytes=64 * MIB,
        max_batch=1,  # one sequence at a time
        lm_head="as-stored",
        torch_threads=1,
        log_level="warning",
    )


def _show_text(
    target: Target, prompts: list[Prompt], warm_up: WarmUp, painter: Painter, say: Callable[[str], None]
) -> None:
    say(page.legend(painter) + "\n")
    for prompt, records in zip(prompts, warm_up.drafted.records, strict=True):
        say(page.generation(prompt, records, target.tokenizer, painter) + "\n")


def _read(url: str) -> str:
    with urllib.request.urlopen(url, timeout=METRICS_TIMEOUT_S) as answer:  # noqa: S310  # our own service's address
        text: str = answer.read().decode()
    return text
