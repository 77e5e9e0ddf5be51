"""TakeKV and InstallKV of few and of many rows: they move ownership, not bytes, so the time must be the same."""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from drafter_service.bench.samples import Plan, median_of
from drafter_service.bench.tiny_head import HIDDEN, ROW_BYTES, VOCAB_SIZE, write_tiny_head
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from specdraft import Client, Sequence

RATIO_GOAL = 1.5
CHUNK_ROWS = 1024


def measure_carry(
    num_few: int, num_many: int, plan: Plan, tell: Callable[[str], None] = lambda _text: None
) -> dict[str, Any]:
    """Figures: p50 of taking and of installing for both sizes, the ratios, and whether the goal is met."""
    with tempfile.TemporaryDirectory(prefix="specdraft-") as folder:
        head = write_tiny_head(Path(folder) / "head", 2 * num_many)
        config = ServiceConfig(
            checkpoint=head, kv_bytes=2 * ROW_BYTES * num_many + MIB, torch_threads=1, log_level="warning"
        )
        with ServiceProcess(config) as reached, Client(reached.target, timeout_s=60) as client:
            sequences = {num_rows: client.open_sequence() for num_rows in (num_few, num_many)}
            for num_rows, sequence in sequences.items():
                tell(f"filling {num_rows:,} rows")
                _fill(sequence, num_rows)
            rounds = _measure(sequences, plan, tell)
    ratios = {
        step: round(statistics.median(many / few for few, many in zip(turns[num_few], turns[num_many], strict=True)), 2)
        for step, turns in rounds.items()
    }
    return {
        "plan": asdict(plan),
        "p50_us": {
            step: {str(num_rows): median_of(p50s) for num_rows, p50s in turns.items()} for step, turns in rounds.items()
        },
        "ratio": ratios,
        "goals": {
            f"{step}: within {RATIO_GOAL} x": 1 / RATIO_GOAL <= ratio <= RATIO_GOAL for step, ratio in ratios.items()
        },
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = []
    for step, by_size in figures["p50_us"].items():
        parts = [f"{p50:.0f} us for {int(num_rows):,} rows" for num_rows, p50 in by_size.items()]
        lines.append(f"{step:<10} p50 {', '.join(parts)}: {figures['ratio'][step]:.2f} x")
    lines += [f"goal {'met   ' if met else 'missed'} {goal}" for goal, met in figures["goals"].items()]
    return "\n".join(lines)


def _fill(sequence: Sequence, num_rows: int) -> None:
    generator = torch.Generator().manual_seed(num_rows)
    for begin in range(0, num_rows, CHUNK_ROWS):
        count = min(CHUNK_ROWS, num_rows - begin)
        tokens = torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()
        sequence.catchup(begin, tokens, torch.randn(count, HIDDEN, generator=generator))


def _measure(
    sequences: Mapping[int, Sequence], plan: Plan, tell: Callable[[str], None]
) -> dict[str, dict[int, list[float]]]:
    """p50s by step, size and round; the sizes take turns call by call."""
    p50s: dict[str, dict[int, list[float]]] = {
        step: {size: [] for size in sequences} for step in ("TakeKV", "InstallKV")
    }
    for number in range(plan.num_rounds):
        tell(f"round {number + 1}/{plan.num_rounds}")
        samples: dict[tuple[str, int], list[float]] = {(step, size): [] for step in p50s for size in sequences}
        for call in range(plan.num_warm_up + plan.num_calls):
            for size, sequence in sequences.items():
                times = _take_and_install(sequence)
                if call >= plan.num_warm_up:
                    for step, time_us in zip(p50s, times, strict=True):
                        samples[step, size].append(time_us)
        for (step, size), times_us in samples.items():
            p50s[step][size].append(statistics.median(times_us))
    return p50s


def _take_and_install(sequence: Sequence) -> tuple[float, float]:
    began = time.perf_counter_ns()
    carry = sequence.take_kv()
    taken = time.perf_counter_ns()
    sequence.install_kv(carry)
    return (taken - began) / 1000, (time.perf_counter_ns() - taken) / 1000
