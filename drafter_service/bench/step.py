"""How long one Propose takes on the device: the eager runner beside captured rounds, by batch and number of drafts."""

from __future__ import annotations

import statistics
import tempfile
import time
from array import array
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.bench.report import missing_gpus
from drafter_service.bench.tiny_head import DENSE_4096, TINY, HeadSize, write_head
from drafter_service.engine.batch import RunEntry, Runner
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import load_head
from drafter_service.state.pool import KvPool, PoolShape

PAGE_ROWS = 16
NUM_PAIRS = 2


class StepError(RuntimeError):
    """There is no GPU to measure on."""


@dataclass(frozen=True, slots=True)
class StepPlan:
    """What is measured.

    Attributes:
        batches: entries of a Propose.
        drafts: K.
        rows: rows of every sequence before.
        num_steps: timed runs of each, after a few that warm up.
        vocab_size: of the head; 0 = its size's own.
        dry: a tiny head on the CPU, where a captured round runs operation by operation.
    """

    batches: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    drafts: tuple[int, ...] = (1, 4, 8)
    rows: int = 512
    num_steps: int = 50
    vocab_size: int = 0
    dry: bool = False


def measure_step(plan: StepPlan, tell: Callable[[str], None] = lambda _text: None) -> dict[str, Any]:
    """Microseconds a Propose, from the call to the drafts on the host. Raises StepError."""
    missing = "" if plan.dry else missing_gpus("bench step", 1)
    if missing:
        raise StepError(missing)
    with tempfile.TemporaryDirectory(prefix="specdraft-step-") as name:
        size = TINY if plan.dry else DENSE_4096
        if plan.vocab_size:
            size = HeadSize(**asdict(size) | {"vocab_size": plan.vocab_size})
        device = torch.device("cpu" if plan.dry else "cuda")
        dtype = torch.float32 if plan.dry else torch.bfloat16
        checkpoint = write_head(Path(name) / "head", 4 * plan.rows, size, dtype, device.type)
        head = load_head(checkpoint, device=device)
        layout = head.kv_layout()
        shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
        num_pages = -(-(plan.rows + NUM_PAIRS + max(plan.drafts)) // PAGE_ROWS)
        pool = KvPool(shape, num_pages * max(plan.batches), device)
        eager = EagerRunner(head, pool)
        limits = GraphLimits(max(plan.batches), max(plan.drafts), num_pages)
        runners: Mapping[str, Runner] = {"eager": eager, "graph": GraphRunner(eager, head, pool, limits)}
        cases = []
        for batch in plan.batches:
            for drafts in plan.drafts:
                entries = _entries(plan, batch, drafts, num_pages, head.config.hidden_width, dtype, device)
                times = {f"{kind}_us_p50": _p50(runner, entries, plan) for kind, runner in runners.items()}
                launches = {} if plan.dry else {"graph_launches": _graph_launches(runners["graph"], entries)}
                cases.append({"batch": batch, "drafts": drafts} | times | launches)
                tell(f"batch {batch}, K {drafts}: " + ", ".join(f"{k} {v:.0f}" for k, v in times.items()))
    return {"plan": asdict(plan), "cases": cases}


def describe(figures: Mapping[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'batch':>6}{'K':>4}{'eager us':>10}{'graph us':>10}{'launches':>10}   p50s"]
    lines += [
        f"{one['batch']:>6}{one['drafts']:>4}{one['eager_us_p50']:>10.0f}{one['graph_us_p50']:>10.0f}"
        f"{one.get('graph_launches', '-'):>10}"
        for one in figures["cases"]
    ]
    return "\n".join(lines)


def _entries(  # noqa: PLR0917  # what an entry is made of
    plan: StepPlan, batch: int, drafts: int, num_pages: int, width: int, dtype: torch.dtype, device: torch.device
) -> list[RunEntry]:
    generator = torch.Generator().manual_seed(0)
    return [
        RunEntry(
            pages=array("i", range(index * num_pages, (index + 1) * num_pages)),
            row_begin=plan.rows,
            num_live_rows=plan.rows,
            first_key=plan.rows,
            tokens=tuple(range(1, NUM_PAIRS + 1)),
            hiddens=torch.randn(NUM_PAIRS, width, generator=generator).to(dtype).to(device),
            num_drafts=drafts,
            min_logprob=None,
            masks=None,
        )
        for index in range(batch)
    ]


def _p50(runner: Runner, entries: Sequence[RunEntry], plan: StepPlan) -> float:
    times = []
    for step in range(plan.num_steps + 3):
        began = time.perf_counter()
        runner.run(entries)  # ends with the drafts on the host: nothing is left on the device
        if step >= 3:
            times.append((time.perf_counter() - began) * 1e6)
    return round(statistics.median(times), 1)


def _graph_launches(runner: Runner, entries: Sequence[RunEntry]) -> int:
    """Graph launches of one Propose, from a profiler's trace."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as trace:
        runner.run(entries)
        torch.cuda.synchronize()
    return sum(event.count for event in trace.key_averages() if event.key == "cudaGraphLaunch")
