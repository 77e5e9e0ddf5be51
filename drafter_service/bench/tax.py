"""What it costs a target that its drafts come from another process: rounds early and late, with MPS and without.

Every run is a process of its own, started here with the environment that it is about. This process makes no CUDA call.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from drafter_service.bench.flags import DEFAULT_MODES
from drafter_service.bench.tax_measure import NO_GPU, TaxRun
from drafter_service.server.child import Child

MPS_CONTROL = "nvidia-cuda-mps-control"
RUN_TIMEOUT_S = 540.0

GOALS = (
    ("added_us_p50_mps", 10.0, "early, verify >= 5 ms, MPS: <= 10 us"),
    ("added_us_p50_timesliced", 250.0, "early, verify >= 5 ms, time-sliced: <= 250 us"),
    ("added_us_p50_mps_verify_2ms", 30.0, "early, verify 2 ms, MPS: <= 30 us"),
    ("added_us_p50_peer", 0.0, "early, verify >= 5 ms, second GPU: <= 0 us"),
    ("added_us_p99_peer", 50.0, "early, verify >= 5 ms, second GPU, p99: <= 50 us"),
)
HOST_GOAL_US = 200.0
SHORT_VERIFY_MS = 2.5
LONG_VERIFY_MS = 5.0


class TaxError(RuntimeError):
    """There is nothing to run on, or a run did not come to an end; what it printed stands on standard error."""


@dataclass(frozen=True, slots=True)
class TaxPlan:
    """What is measured.

    Attributes:
        modes: of `flags.MODES`; "peer" needs a second GPU.
        run: each of them.
        drafter_device: ordinal of the service's GPU in the mode "peer"; the target's is 0.
    """

    modes: tuple[str, ...] = DEFAULT_MODES
    run: TaxRun = field(default_factory=TaxRun)
    drafter_device: int = 1


def measure_tax(plan: TaxPlan, tell: Callable[[str], None] = lambda _text: None) -> dict[str, Any]:
    """The figures of every mode, and those that goals are about. Raises TaxError."""
    runs = {}
    for mode in plan.modes:
        tell(f"{mode}:")
        with _environment(mode, dry=plan.run.dry) as environment:
            run = replace(plan.run, service_device=f"cuda:{plan.drafter_device}") if mode == "peer" else plan.run
            runs[mode] = _measured(run, environment) | {"service_device": run.service_device}
    return _summary(runs, dry=plan.run.dry) | {"plan": _written(plan), "runs": runs}


def _written(plan: TaxPlan) -> dict[str, Any]:
    """The plan as it is recorded. Which GPU the drafter had is a run's: it differs by mode."""
    written = asdict(plan)
    del written["run"]["service_device"]
    if "peer" not in plan.modes:
        del written["drafter_device"]
    return written


def describe(figures: Mapping[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'':<12}{'verify ms':>10}{'single us':>11}{'early +us':>11}{'late +us':>11}   p50s; p99s: single, early"]
    for mode, run in figures["runs"].items():
        lines += [
            f"{mode:<12}{one['verify_ms']:>10.2f}{one['single_us_p50']:>11.0f}"
            f"{one['early_added_us_p50']:>11.0f}{one['late_added_us_p50']:>11.0f}"
            f"   {one['single_us_p99']:.0f}, {one['early_us_p99']:.0f}"
            for one in run["verifies"]
        ]
        lines.append(
            f"{'':<12}host result {run['host_result_us_p50']:.0f} us, echo {run['echo_us_p50']:.0f} us, round on the "
            f"device {run['gpu_us_p50']:.0f} us, both in a row {run['echo_then_gpu_us_p50']:.0f} us"
        )
        lines.append(
            f"{'':<12}early call {run['early_host_us_p50']:.0f} us of the client's thread, {run['rounds_wrong']} of "
            f"{run['rounds_checked']} early rounds drafted from other hidden states"
        )
    lines += [f"goal {'met   ' if met else 'missed'} {goal}" for goal, met in figures["goals"].items()]
    return "\n".join(lines)


def _summary(runs: Mapping[str, Any], *, dry: bool) -> dict[str, Any]:
    """The figures that goals are about, and the goals: none of what was not measured, or not on a GPU."""
    figures: dict[str, Any] = {}
    too_short = set()
    for mode in ("mps", "timesliced", "peer"):
        if mode not in runs:
            continue
        # The shortest verify that a goal for long ones is about; where all are shorter, the longest, and no goal.
        verifies = sorted(runs[mode]["verifies"], key=lambda one: float(one["verify_ms"]))
        long_one = next((one for one in verifies if one["verify_ms"] >= LONG_VERIFY_MS), verifies[-1])
        if long_one["verify_ms"] < LONG_VERIFY_MS:
            too_short |= {f"added_us_p50_{mode}", f"added_us_p99_{mode}"}
        figures.setdefault("verify_ms", long_one["verify_ms"])
        figures.setdefault("single_process_us_p50", long_one["single_us_p50"])
        figures.setdefault("single_process_us_p99", long_one["single_us_p99"])
        figures[f"added_us_p50_{mode}"] = long_one["early_added_us_p50"]
        figures[f"added_us_p99_{mode}"] = round(long_one["early_us_p99"] - long_one["single_us_p99"], 1)
        short = next((one for one in verifies if one["wanted_ms"] <= SHORT_VERIFY_MS), None)
        if mode == "mps" and short is not None:
            figures["added_us_p50_mps_verify_2ms"] = short["early_added_us_p50"]
        figures[f"late_added_us_p50_{mode}"] = long_one["late_added_us_p50"]
        figures[f"rounds_checked_{mode}"], figures[f"rounds_wrong_{mode}"] = (
            runs[mode][name] for name in ("rounds_checked", "rounds_wrong")
        )
        for name in ("host_result_us_p50", "echo_us_p50", "gpu_us_p50", "echo_then_gpu_us_p50", "early_host_us_p50"):
            figures.setdefault(name, runs[mode][name])
    return figures | {"goals": {} if dry else _goals(figures, runs, too_short)}


def _goals(figures: Mapping[str, Any], runs: Mapping[str, Any], too_short: AbstractSet[str]) -> dict[str, bool]:
    judged = figures.keys() - too_short
    goals = {text: figures[name] <= limit for name, limit, text in GOALS if name in judged}
    goals["every early round read its own hidden states"] = not any(run["rounds_wrong"] for run in runs.values())
    if "host_result_us_p50" in figures:
        floor = figures["echo_us_p50"] + figures["gpu_us_p50"] + HOST_GOAL_US
        goals["host result: <= echo + device + 200 us"] = figures["host_result_us_p50"] <= floor
    return goals


def _measured(run: TaxRun, environment: Mapping[str, str]) -> dict[str, Any]:
    with Child("drafter_service.bench.tax_measure", (json.dumps(asdict(run)),), environment) as child:
        try:
            said, _ = child.process.communicate(timeout=RUN_TIMEOUT_S)
        except subprocess.TimeoutExpired as error:
            raise TaxError(f"a run did not end within {RUN_TIMEOUT_S:g} s") from error
        code = child.process.returncode
    if code == NO_GPU:
        raise TaxError(said.strip())
    if code:
        raise TaxError(f"a run ended with {code}")
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])
    return figures


@contextmanager
def _environment(mode: str, *, dry: bool) -> Iterator[dict[str, str]]:
    """The environment of a run; under MPS with a daemon of its own, which ends with it."""
    environment = os.environ | {"CUDA_DEVICE_MAX_CONNECTIONS": "32"}
    if mode != "mps" or dry:
        yield environment
        return
    with mps_environment(environment) as under_mps:
        yield under_mps


@contextmanager
def mps_environment(environment: Mapping[str, str]) -> Iterator[dict[str, str]]:
    """The environment with an MPS daemon of its own, which ends with the block. Raises TaxError."""
    if shutil.which(MPS_CONTROL) is None:
        raise TaxError(f"{MPS_CONTROL} is not there: leave out the mode mps")
    with tempfile.TemporaryDirectory(prefix="specdraft-mps-", ignore_cleanup_errors=True) as name:
        places = {
            "CUDA_MPS_PIPE_DIRECTORY": str(Path(name) / "pipe"),
            "CUDA_MPS_LOG_DIRECTORY": str(Path(name) / "log"),
        }
        for place in places.values():
            Path(place).mkdir()
        under_mps = {**environment, **places}
        subprocess.run([MPS_CONTROL, "-d"], env=under_mps, check=True)
        try:
            yield under_mps
        finally:
            subprocess.run([MPS_CONTROL], input="quit\n", env=under_mps, text=True, check=False, timeout=60)
