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
from pathlib import Path
from typing import Any

import torch

from drafter_service.bench.echo import Echo, request_of
from drafter_service.bench.tax_target import (
    NUM_CONTEXT_ROWS,
    NUM_PAIRS,
    Device,
    OwnRound,
    Verify,
    make_own_round,
    pairs_bytes,
    range_bytes,
)
from drafter_service.bench.tiny_head import DENSE_4096, TINY, HeadSize, write_head
from drafter_service.config import MIB, ServiceConfig
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.server.process import ServiceProcess
from specdraft import Client, ClientGpu, EarlyItem, Lane, Sequence, SpecdraftError
from specdraft.memory.simulated import SimulatedDriver

MAX_POSITION = 512


@dataclass(frozen=True, slots=True)
class TaxRun:
    """One run.

    Attributes:
        verify_ms: lengths of the verify.
        num_steps: steps of each kind in a turn.
        num_turns: each kind takes so many turns, one after the other.
        num_drafts: K.
        vocab_size: of the head; 0 = its size's own.
        service_device: torch's name of the drafter's GPU.
        dry: on a simulated GPU, with a tiny head: the figures mean nothing.
    """

    verify_ms: tuple[float, ...] = (2.0, 6.0, 12.0)
    num_steps: int = 200
    num_turns: int = 5
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
        address = stack.enter_context(ServiceProcess(self._config(gpu_folder))).target
        self.echo = stack.enter_context(Echo(folder / "echo.sock"))
        self.client: Client = stack.enter_context(
            Client(
                address,
                memory="cuda",
                gpu=self.gpu,
                hidden_dtype=self.dtype,  # type: ignore[arg-type]  # one of the two
                max_drafts=run.num_drafts,
                prefill_rows=NUM_CONTEXT_ROWS,
                timeout_s=60.0,
            )
        )
        self.width = self.client.hidden_width

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

    def context(self) -> Sequence:
        """A sequence that holds the rows before the rounds."""
        sequence = self.client.open_sequence()
        generator = torch.Generator().manual_seed(0)
        rows = torch.randn(NUM_CONTEXT_ROWS, self.width, generator=generator).to(getattr(torch, self.dtype))
        sequence.catchup(0, list(range(NUM_CONTEXT_ROWS)) if not self.run.dry else [1] * NUM_CONTEXT_ROWS, rows)
        return sequence


class Steps:
    """The kinds of step that are compared, for one length of the verify."""

    def __init__(self, scene: Scene, verify: Verify, slot: int) -> None:
        self._scene = scene
        self._verify = verify
        self._slot = slot
        self._sequence = scene.context()
        self._lane: Lane = scene.client.open_lane(scene.device.stream)
        self.host_us: list[float] = []
        arena, device = self._lane.arena, scene.device
        row_bytes = scene.width * getattr(torch, scene.dtype).itemsize
        wish = ArenaWish(1, scene.run.num_drafts, row_bytes, row_bytes, 64, 0, False)
        prepared = pairs_bytes(lay_out(wish), NUM_CONTEXT_ROWS, scene.width, getattr(torch, scene.dtype))
        self._prepared = prepared.to(device.torch_device)
        self._inputs = range_bytes(arena.slot_field(slot, "first_key", len(prepared)), device.torch_device)
        rows = torch.randn(NUM_PAIRS, scene.width, generator=torch.Generator().manual_seed(1))
        self._rows = rows.to(getattr(torch, scene.dtype)).to(device.torch_device)

    def single(self) -> None:
        """Everything in one process."""
        own, device = self._scene.own, self._scene.device
        device.enqueue(self._verify.launch)
        device.enqueue(lambda: own.inputs.copy_(self._prepared))
        device.enqueue(own.launched.launch)
        device.enqueue(self._verify.next_work)
        device.synchronize()

    def early(self) -> None:
        """The round is sent while the verify runs."""
        device = self._scene.device
        device.enqueue(self._verify.launch)
        device.enqueue(lambda: self._inputs.copy_(self._prepared))
        began = time.perf_counter()
        early = self._lane.propose_early([EarlyItem(self._sequence, self._slot, self._scene.run.num_drafts)])
        self.host_us.append((time.perf_counter() - began) * 1e6)
        device.enqueue(self._verify.next_work)
        device.synchronize()
        (outputs,) = early.outputs(5.0)
        if isinstance(outputs, SpecdraftError):
            raise outputs

    def late(self) -> None:
        """The call is sent after the verify, and its answer waited for."""
        device = self._scene.device
        device.enqueue(self._verify.launch)
        device.synchronize()
        self.host_result()
        device.enqueue(self._verify.next_work)
        device.synchronize()

    def host_result(self) -> None:
        """A host-synchronised Propose over Drive, with rows in GPU memory."""
        tokens = list(range(1, NUM_PAIRS + 1))
        self._sequence.propose(NUM_CONTEXT_ROWS, tokens, self._rows, self._scene.run.num_drafts)

    def close(self) -> None:
        """Gives lane and sequence back."""
        self._lane.close()
        self._sequence.close()


def measure(run: TaxRun, tell: Callable[[str], None]) -> dict[str, Any]:
    """The figures of one run: times in microseconds, per length of the verify."""
    with ExitStack() as stack:
        scene = Scene(run, stack)
        slot = scene.client.claim_slot()
        verifies = []
        host_us: list[float] = []
        for verify_ms in run.verify_ms:
            verify = Verify(scene.device, verify_ms)
            steps = Steps(scene, verify, slot)
            verifies.append({"verify_ms": round(verify.milliseconds, 3)} | _turns(steps, run, tell, verify_ms))
            host_us += steps.host_us
            steps.close()
        steps = Steps(scene, Verify(scene.device, run.verify_ms[0]), slot)
        figures = {
            "verifies": verifies,
            "early_host_us_p50": _p50(host_us),
            "host_result_us_p50": _p50(_times(steps.host_result, run.num_steps)),
            "echo_us_p50": _p50(_times(scene.echo.stream(request_of(64, 64)), run.num_steps)),
            "gpu_us_p50": _p50(_round_times(scene.own, scene.device, run.num_steps)),
            "vocab_size": scene.client.server_info().head.vocab_size,
        }
        steps.close()
        return figures


def _turns(steps: Steps, run: TaxRun, tell: Callable[[str], None], verify_ms: float) -> dict[str, float]:
    """The kinds take turns; the difference is taken turn by turn, and its median told."""
    kinds = {"single": steps.single, "early": steps.early, "late": steps.late}
    for kind in kinds.values():
        _times(kind, max(run.num_steps // 10, 3))
    p50s: dict[str, list[float]] = {name: [] for name in kinds}
    for turn in range(run.num_turns):
        tell(f"verify {verify_ms:g} ms, turn {turn + 1}/{run.num_turns}")
        for name, kind in kinds.items():
            p50s[name].append(_p50(_times(kind, run.num_steps)))
    single = p50s["single"]
    added = {name: [two - one for two, one in zip(p50s[name], single, strict=True)] for name in ("early", "late")}
    return {
        "single_us_p50": round(statistics.median(single), 1),
        "early_added_us_p50": round(statistics.median(added["early"]), 1),
        "early_added_us_spread": round(max(added["early"]) - min(added["early"]), 1),
        "late_added_us_p50": round(statistics.median(added["late"]), 1),
    }


def _round_times(own: OwnRound, device: Device, count: int) -> list[float]:
    def one() -> None:
        device.enqueue(own.launched.launch)
        device.synchronize()

    return _times(one, count)


def _times(call: Callable[[], object], count: int) -> list[float]:
    times = []
    for _ in range(count):
        began = time.perf_counter()
        call()
        times.append((time.perf_counter() - began) * 1e6)
    return times


def _p50(times: list[float]) -> float:
    return round(statistics.median(times), 1)


def main(text: str) -> None:
    """Measures a plan and prints what came of it."""
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    plan = json.loads(text)
    run = TaxRun(**plan | {"verify_ms": tuple(plan["verify_ms"])})
    figures = measure(run, lambda line: print(line, file=sys.stderr, flush=True))
    print(json.dumps(figures))


if __name__ == "__main__":
    main(sys.argv[1])
