"""One run of `bench tax`, in a process of its own: its environment (MPS or not) is the run's.

`python -m drafter_service.bench.tax_measure PLAN` prints the figures as JSON; PLAN is JSON too.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch

from drafter_service.bench.echo import Echo, request_of
from drafter_service.bench.report import missing_gpus
from drafter_service.bench.tax_steps import Parties, Steps
from drafter_service.bench.tax_target import MAX_POSITION, NUM_CONTEXT_ROWS, Device, Verify, make_own_round
from drafter_service.bench.tiny_head import DENSE_4096, TINY, HeadSize, write_head
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.child import end_with_parent, unwind_at_sigterm
from drafter_service.server.process import ServiceProcess, keep_what_was_loaded
from specdraft import Client, ClientGpu
from specdraft.memory.simulated import SimulatedDriver

SETTLING_S = 0.3
"""How long steps of a kind run before they are timed."""

CHECKS_A_VERIFY = 48
"""Early rounds that are checked with each verify of the measurement."""

NO_GPU = 3
"""Exit code where there is no GPU to run on; standard output says so."""

CHECK_VERIFY_MS = 0.2
"""The verify of rounds that are only checked: short, so that a round that reads too early has the best chance to."""


@dataclass(frozen=True, slots=True)
class TaxRun:
    """One run.

    Attributes:
        verify_ms: lengths of the verify.
        num_steps: steps of each kind in a turn that are timed.
        num_turns: single and early steps take so many turns, one after the other.
        num_checks: early rounds that are checked at least, those of the measured verifies included.
        num_drafts: K.
        vocab_size: of the head; 0 = its size's own.
        service_device: torch's name of the drafter's GPU.
        dry: on a simulated GPU, with a tiny head: the figures mean nothing.
    """

    verify_ms: tuple[float, ...] = (2.0, 6.0, 12.0)
    num_steps: int = 200
    num_turns: int = 5
    num_checks: int = 0
    num_drafts: int = 4
    vocab_size: int = 0
    service_device: str = "cuda:0"
    dry: bool = False


class Scene:
    """The service in its process, the target and its own round in this one."""

    def __init__(self, run: TaxRun, stack: ExitStack) -> None:
        self.run = run
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="specdraft-tax-")))
        gpu_folder = folder / "gpu"
        gpu_folder.mkdir()
        driver = SimulatedDriver(gpu_folder) if run.dry else None
        if driver is not None:
            stack.callback(driver.close)
            driver.make_current(0)
        self.gpu = ClientGpu(driver)
        self.device = Device(self.gpu)
        self.dtype = "float32" if run.dry else "bfloat16"
        size = TINY if run.dry else DENSE_4096
        if run.vocab_size:
            size = HeadSize(**asdict(size) | {"vocab_size": run.vocab_size})
        maker = "cpu" if run.dry else "cuda"
        self.checkpoint = write_head(folder / "head", MAX_POSITION, size, getattr(torch, self.dtype), maker)
        self.own = make_own_round(self.checkpoint, self.device, run.num_drafts, self.dtype)
        self._address = stack.enter_context(ServiceProcess(self._config(gpu_folder))).target
        self.echo = stack.enter_context(Echo(folder / "echo.sock"))
        self.client = self._client(stack, memory="cuda", gpu=self.gpu)
        self.parties = Parties(
            device=self.device,
            own=self.own,
            client=self.client,
            witness=self._client(stack, memory="inline"),
            dtype=self.dtype,
            num_drafts=run.num_drafts,
        )

    def _client(self, stack: ExitStack, **options: Any) -> Client:
        options |= {"hidden_dtype": self.dtype, "max_drafts": self.run.num_drafts, "timeout_s": 60.0}
        return stack.enter_context(Client(self._address, prefill_rows=NUM_CONTEXT_ROWS, **options))

    def _config(self, gpu_folder: Path) -> ServiceConfig:
        changes: dict[str, Any] = (
            {"device": "cpu", "simulated_gpu": gpu_folder, "torch_threads": 1}
            if self.run.dry
            else {"device": self.run.service_device}
        )
        return ServiceConfig(
            checkpoint=self.checkpoint,
            kv_bytes=64 * MIB,
            max_batch=1,
            max_drafts=self.run.num_drafts,
            max_seq_len=MAX_POSITION,
            lm_head="as-stored",
            log_level="warning",
            **changes,
        )


def measure(run: TaxRun, tell: Callable[[str], None]) -> dict[str, Any]:
    """The figures of one run: times in microseconds, per length of the verify."""
    with ExitStack() as stack:
        scene = Scene(run, stack)
        slot = scene.client.claim_slot()
        keep_what_was_loaded()  # as the service does: a full collection takes longer than a step
        verifies, all_steps = [], []
        for verify_ms in run.verify_ms:
            verify = Verify(scene.device, verify_ms)
            steps = Steps(scene.parties, verify, slot)
            times = _turns(steps, run, tell, verify_ms)
            verifies.append({"wanted_ms": verify_ms, "verify_ms": round(verify.milliseconds, 3)} | times)
            all_steps.append(steps)
            steps.close()
        early_host_us = [us for one in all_steps for us in one.host_us]
        steps = Steps(scene.parties, Verify(scene.device, CHECK_VERIFY_MS), slot)
        _check(steps, run.num_checks - sum(one.num_checked for one in all_steps))
        all_steps.append(steps)
        figures = {
            "verifies": verifies,
            "inputs_confirmed": min(one.num_confirmed for one in all_steps),
            "rounds_checked": sum(one.num_checked for one in all_steps),
            "rounds_wrong": sum(one.num_wrong for one in all_steps),
            "early_host_us_p50": _p50(early_host_us),
            "vocab_size": scene.client.server_info().head.vocab_size,
        }
        figures |= _host_figures(scene, steps)
        steps.close()
        return figures


def _host_figures(scene: Scene, steps: Steps) -> dict[str, float]:
    """A call without a ticket, and what it is compared with: an echo, a round, and both in a row."""
    echo = scene.echo.stream(request_of(64, 64))

    def run_own() -> None:
        scene.device.enqueue(scene.own.launched.launch)
        scene.device.synchronize()

    def echo_then_run() -> None:
        echo()
        run_own()

    calls: dict[str, Callable[[], object]] = {
        "host_result_us_p50": steps.host_result,
        "echo_us_p50": echo,
        "gpu_us_p50": run_own,
        "echo_then_gpu_us_p50": echo_then_run,
    }
    return {name: _p50(_times(call, count=scene.run.num_steps)) for name, call in calls.items()}


def _turns(steps: Steps, run: TaxRun, tell: Callable[[str], None], verify_ms: float) -> dict[str, float]:
    """Single and early steps take turns; the difference is taken turn by turn, and its median told.

    Who begins changes from turn to turn: a GPU gets warmer all the while. Late steps, in which it rests, come last.
    """
    kinds: list[tuple[str, Callable[[], object]]] = [("single", steps.single), ("early", steps.early)]
    times: dict[str, list[list[float]]] = {"single": [], "early": []}
    for turn in range(run.num_turns):
        tell(f"verify {verify_ms:g} ms, turn {turn + 1}/{run.num_turns}")
        for name, step in kinds:
            times[name].append(_at_work(step, run.num_steps))
        kinds.reverse()
    late = _at_work(steps.late, run.num_steps)
    _check(steps, CHECKS_A_VERIFY)
    single, early = times["single"], times["early"]
    added = [_p50(others) - _p50(ones) for others, ones in zip(early, single, strict=True)]
    single_us = statistics.median(map(_p50, single))
    return {
        "single_us_p50": round(single_us, 1),
        "early_added_us_p50": round(statistics.median(added), 1),
        "early_added_us_spread": round(max(added) - min(added), 1),
        "late_added_us_p50": round(_p50(late) - single_us, 1),
        "single_us_p99": _p99(list(chain.from_iterable(single))),
        "early_us_p99": _p99(list(chain.from_iterable(early))),
    }


def _at_work(step: Callable[[], object], count: int) -> list[float]:
    """Times of steps that follow each other as a busy target's do.

    What a GPU has done in the tenths of a second before decides how fast it is, so a kind's first steps do not count:
    each is measured in the state that it brings the GPU into by itself.
    """
    until = time.perf_counter() + SETTLING_S
    while time.perf_counter() < until:
        step()
    return _times(step, count=count)


def _check(steps: Steps, count: int) -> None:
    """Early rounds for the sake of what they read."""
    for _ in range(count):
        steps.early()
        steps.check()


def _times(call: Callable[[], object], *, count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _p50(times: list[float]) -> float:
    return round(statistics.median(times), 1)


def _p99(times: list[float]) -> float:
    return round(sorted(times)[int(len(times) * 0.99)], 1)


def main(text: str) -> None:
    """Measures a plan and prints what came of it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    plan = json.loads(text)
    run = TaxRun(**plan | {"verify_ms": tuple(plan["verify_ms"])})
    missing = "" if run.dry else missing_gpus("bench tax", 1 + int(run.service_device.rpartition(":")[2]))
    if missing:
        print(missing)
        sys.exit(NO_GPU)
    figures = measure(run, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(figures))


if __name__ == "__main__":
    unwind_at_sigterm()
    end_with_parent()
    main(sys.argv[1])
