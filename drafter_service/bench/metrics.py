"""What counting costs: everything that the service notes down for one Propose, beside the head's own forward.

A round is longer than that forward: it has the call and the target's verify besides. So the share that is told is
more than the true one.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

from drafter_service.bench.forward import NUM_DRAFTS, NUM_ROWS, load_cpu_head, make_forward
from drafter_service.bench.samples import Case, Plan, measure
from drafter_service.telemetry import Metrics
from specdraft.errors import Code

REPEATS = 20
"""Counted together, so that the clock's own time is small beside it."""

SHARE_GOAL = 0.02
MODELS = Path(__file__).resolve().parent.parent / "demo" / "models"


def measure_metrics(
    plan: Plan, models: Path = MODELS, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, Any]:
    """Figures: both times, the share of each round, its median, and whether the goal is met."""
    metrics = Metrics(CollectorRegistry(), 8)

    def count() -> None:
        for _ in range(REPEATS):
            count_round(metrics)
        metrics.notes.enter_all()  # as a scrape does

    forward = make_forward(load_cpu_head(models / "head", models / "target"))
    cases = {"counting": Case(count), "forward": Case(forward)}
    latencies = measure(cases, plan, tell)
    counted = [p50 / REPEATS for p50 in latencies["counting"].p50s_us]
    shares = [us / forward for us, forward in zip(counted, latencies["forward"].p50s_us, strict=True)]
    share = statistics.median(shares)
    return {
        "plan": asdict(plan) | {"num_drafts": NUM_DRAFTS, "num_rows": NUM_ROWS, "repeats": REPEATS},
        "counting_us": round(statistics.median(counted), 2),
        "forward_us": round(latencies["forward"].p50_us, 1),
        "share": {"median": round(share, 5), "most": round(max(shares), 5)},
        "goals": {f"counting at most {SHARE_GOAL:.0%} of a forward": share <= SHARE_GOAL},
    }


def count_round(metrics: Metrics) -> None:
    """What one Propose of one entry makes engine, books and stream tell."""
    metrics.queued(1e-4)
    metrics.batch_run(1, NUM_DRAFTS, 5e-3)
    metrics.round_judged(NUM_DRAFTS, 2)
    metrics.draft_rows_kept(0)
    metrics.write_done(NUM_DRAFTS, "COMPLETE")
    metrics.stage("reply", 1e-4)
    metrics.rpc_done("Propose", Code.OK, 6e-3)


def describe(figures: dict[str, Any]) -> str:
    """The figures as lines."""
    share = figures["share"]
    times = f"counting a round {figures['counting_us']:.1f} us, the head's forward {figures['forward_us']:.0f} us"
    lines = [f"{times}: {share['median']:.2%} (at most {share['most']:.2%})"]
    lines += [f"goal {'met   ' if met else 'missed'} {goal}" for goal, met in figures["goals"].items()]
    return "\n".join(lines)
