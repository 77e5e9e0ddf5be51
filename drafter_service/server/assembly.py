"""Head, pool, books and engine put together. Imports torch; `app` imports this late."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from prometheus_client import CollectorRegistry
from safetensors import SafetensorError

from drafter_kernels import CompileWatch
from drafter_service.config import MIB, ConfigError, ServiceConfig
from drafter_service.engine import Engine, HeadIdentity, Ledger, Scheduler
from drafter_service.engine.batch import Runner
from drafter_service.engine.device_watch import DeviceWatch
from drafter_service.engine.graph_runner import GraphLimits, GraphRunner
from drafter_service.engine.in_flight import InFlight
from drafter_service.engine.lane_rounds import LaneDesk
from drafter_service.engine.runner import EagerRunner
from drafter_service.engine.slot_round import warm_up_slots
from drafter_service.engine.switch import RunnerKind, RunnerSwitch
from drafter_service.engine.vault import CarryLimits, Vault
from drafter_service.heads import HeadPlan, MtpHead, load_planned_head
from drafter_service.memory import DescriptorServer
from drafter_service.memory.device_loss import DeviceLoss
from drafter_service.memory.device_view import on_device
from drafter_service.memory.gpu import GpuMemory
from drafter_service.memory.hiddens import embedding_bytes
from drafter_service.server.calls import Calls
from drafter_service.server.facts import ServiceFacts
from drafter_service.server.gpu import open_gpu
from drafter_service.server.handshake import Handshake
from drafter_service.server.lanes import NUMBERS, REASONS, LaneCalls
from drafter_service.server.self_test import SelfTestError, self_test
from drafter_service.server.servicer import Parts
from drafter_service.state import PageAllocator, SessionTable
from drafter_service.state.pool import KvPool, PoolShape
from drafter_service.telemetry import Metrics, Tracing
from specdraft.memory import CudaError

_log = logging.getLogger(__name__)

CPU_KV_BYTES = 256 * MIB
STOP_S = 1.0
"""How long the self-test's engine is waited for."""


class Assembly:
    """The parts that compute and remember.

    Args:
        config: the settings.
        head: the loaded head.
        pool: the KV.
        engine: not started yet.
        device: what the runner's device is known to be worth.
        switch: the runners.
        loss: knows whether the device is lost.
        metrics: counts.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: ServiceConfig,
        head: MtpHead,
        pool: KvPool,
        engine: Engine,
        device: DeviceWatch,
        *,
        switch: RunnerSwitch,
        loss: DeviceLoss,
        metrics: Metrics,
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.device = device
        self.head = head
        self.pool = pool
        self.engine = engine
        self.switch = switch
        self.loss = loss
        self.sessions = SessionTable(config.lease_s, config.grace_s, config.max_sessions, clock)
        self._metrics = metrics
        self._clock = clock
        self.gpu: GpuMemory | None = open_gpu(config, head.device)
        self._lanes: LaneCalls | None = None
        self._descriptors: DescriptorServer | None = None
        self.tracing: Tracing | None = None
        self._compiles: CompileWatch | None = None

    @property
    def num_pages(self) -> int:
        """Pages of the pool."""
        return self.pool.num_pages

    @property
    def max_seq_len(self) -> int:
        """Longest sequence, in tokens."""
        longest = self.head.config.max_position
        return min(self.config.max_seq_len or longest, longest)

    @property
    def memory_bytes(self) -> Mapping[str, Callable[[], float]]:
        """What the service holds on its device, by use; "other" is what PyTorch has allocated besides."""
        weights, kv = self.head.weight_bytes(), self.pool.num_pages * self.pool.shape.page_bytes
        uses: dict[str, Callable[[], float]] = {"weights": lambda: weights, "kv": lambda: kv}
        device = self.head.device
        if device.type == "cuda":
            uses["other"] = lambda: max(torch.cuda.memory_allocated(device) - weights - kv, 0)
        return uses

    def parts(self, facts: ServiceFacts, socket_mode: int, tracing: Tracing | None) -> Parts:
        """What the RPCs need."""
        if facts.descriptor_socket is not None:
            self._descriptors = DescriptorServer(facts.descriptor_socket, socket_mode)
        self.tracing = tracing
        if tracing is not None:
            tracing.follow(lambda: self.device.last_run, self._clock)
        calls = Calls(self.engine, facts, self._metrics, self._embed, self._clock, tracing=tracing)
        if self.gpu is not None and self._descriptors is not None:
            desk = LaneDesk(
                self.engine,
                self.head,
                self.pool,
                reasons=REASONS,
                loss=self.loss,
                max_batch=self.config.max_batch,
                max_pages=-(-self.max_seq_len // self.config.page_rows) + 1,
                observer=self._metrics,
            )
            self._lanes = calls.lanes = LaneCalls(desk, facts, self.gpu, self._descriptors, self._clock)
            if self.head.device.type == "cuda":
                self._lanes.warm_up()
        handshake = Handshake(facts, self._descriptors, self.gpu, lambda: self.switch.kind)
        return Parts(self.engine, calls, self.sessions, handshake, self._metrics, tracing)

    def check_device(self) -> None:
        """Finds out whether the device is lost although nobody asks it for anything."""
        if self.gpu is not None:
            try:
                self.gpu.driver.make_current(self.gpu.device)
                self.gpu.driver.is_done(0)
            except CudaError as error:
                self.loss.seen(error)

    def watch_compiles(self) -> None:
        """From now on, a kernel that is compiled is one that somebody waits for. On a CPU none is."""
        if self.head.device.type == "cuda":
            self._compiles = CompileWatch(self._metrics.jit_compiled).open()

    def close(self) -> None:
        """Ends the engine and the side socket. Whoever wants what was accepted to be done has drained before."""
        self.engine.stop(timeout_s=0)
        if self._lanes is not None:
            self._lanes.close()
        if self._descriptors is not None:
            self._descriptors.close()
        if self.gpu is not None:
            self.gpu.close()
        if self._compiles is not None:
            self._compiles.close()

    def _embed(self, token: int, dtype: str) -> bytes:
        return embedding_bytes(self.head.embed(torch.tensor([token], device=self.head.device))[0].cpu(), dtype)


def assemble(
    config: ServiceConfig,
    plan: HeadPlan,
    wrap_runner: Callable[[Runner], Runner],
    metrics: Metrics,
    clock: Callable[[], float],
) -> Assembly:
    """Loads the head, makes the pool, starts the engine and has it pass the self-test. Raises ConfigError."""
    if config.torch_threads:
        torch.set_num_threads(config.torch_threads)
    device = _device(config)
    began = clock()
    with on_device(device):
        head = _load(plan, device)
        pool = _pool(config, head, device)
        loss = DeviceLoss()
        switch = _runners(config, head, pool, loss, metrics)
    loss.when_lost(metrics.device_fault)
    runner = DeviceWatch(wrap_runner(switch), device, metrics.device_fault, loss.mark, clock)
    _test(config, head, pool, runner, clock)
    _give_back(device)
    engine = _engine(config, head, pool, runner, metrics=metrics, clock=clock)
    engine.start()
    assembly = Assembly(config, head, pool, engine, runner, switch=switch, loss=loss, metrics=metrics, clock=clock)
    assembly.watch_compiles()
    _log_start(assembly, clock() - began)
    return assembly


def _runners(config: ServiceConfig, head: MtpHead, pool: KvPool, loss: DeviceLoss, metrics: Metrics) -> RunnerSwitch:
    """The runners of the device: graphs where there is a GPU, a simulated one included."""
    eager = EagerRunner(head, pool, config.max_batch)
    runners: dict[RunnerKind, Runner] = {RunnerKind.EAGER: eager}
    wanted = RunnerKind.EAGER if config.runner in {"auto", "eager"} else RunnerKind.GRAPH
    if head.device.type == "cuda" or config.simulated_gpu is not None:
        longest = min(config.max_seq_len or head.config.max_position, head.config.max_position)
        limits = GraphLimits(config.max_batch, config.max_drafts, -(-longest // config.page_rows) + 1)
        graphs = GraphRunner(eager, head, pool, limits, observer=metrics)
        runners[RunnerKind.GRAPH] = graphs
        if head.device.type == "cuda":
            eager.warm_up()
            graphs.warm_up()
            warm_up_slots(head, pool, NUMBERS)
            wanted = RunnerKind.EAGER if config.runner == "eager" else RunnerKind.GRAPH
    elif wanted is RunnerKind.GRAPH:
        raise ConfigError("--runner graph needs a GPU")
    return RunnerSwitch(runners, wanted, loss)


def _log_start(assembly: Assembly, seconds: float) -> None:
    config, head = assembly.config, assembly.head
    _log.info(
        "%s from %s on %s: %.1f MiB of weights, %d pages of %d rows, ready after %.1f s",
        head.config.model_type,
        Path(config.checkpoint).name,
        head.device,
        head.weight_bytes() / MIB,
        assembly.num_pages,
        config.page_rows,
        seconds,
    )
    _log.info(
        "levers: %s; %d of %d ids can be drafted",
        ", ".join(f"{name} {value}" for name, value in head.levers.items()),
        head.draft_vocab_size,
        head.config.vocab_size,
    )


def _engine(
    config: ServiceConfig,
    head: MtpHead,
    pool: KvPool,
    runner: Runner,
    *,
    metrics: Metrics,
    clock: Callable[[], float],
) -> Engine:
    """An engine with empty books over the whole pool, not started yet."""
    allocator = PageAllocator(pool.num_pages)
    limits = CarryLimits(config.carry_ttl_s, int(config.carry_share * pool.num_pages))
    vault = Vault(allocator, limits, metrics, clock)
    identity = HeadIdentity(head.fingerprint, config.page_rows)
    ledger = Ledger(allocator, identity, vault, metrics, pool.copy_page)
    scheduler = Scheduler(config.max_batch, config.prefill_rows)
    in_flight = InFlight(config.max_in_flight)
    # With several threads an operation, every thread that ever ran a step would keep a team of its own.
    borrows = head.device.type != "cpu" or torch.get_num_threads() == 1
    return Engine(ledger, scheduler, runner, in_flight=in_flight, observer=metrics, clock=clock, borrows=borrows)


def _test(config: ServiceConfig, head: MtpHead, pool: KvPool, runner: Runner, clock: Callable[[], float]) -> None:
    """The self-test, on books and metrics of its own: what it drafts is nobody's. Raises ConfigError."""
    engine = _engine(config, head, pool, runner, metrics=Metrics(CollectorRegistry(), config.max_drafts), clock=clock)
    engine.start()
    try:
        self_test(engine, head)
    except SelfTestError as error:
        raise ConfigError(str(error)) from error
    finally:
        engine.stop(timeout_s=STOP_S)


def _load(plan: HeadPlan, device: torch.device) -> MtpHead:
    try:
        head = load_planned_head(plan, device)
    except SafetensorError as error:
        raise ConfigError(f"{plan.checkpoint}: the tensors cannot be read: {error}") from error
    _give_back(device)
    return head


def _give_back(device: torch.device) -> None:
    """Returns to the driver what PyTorch keeps of memory that only loading and testing needed."""
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _device(config: ServiceConfig) -> torch.device:
    name = config.device
    if name == "auto":
        name = "cuda:0" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError as error:
        raise ConfigError(f"--device {name!r} is no device") from error
    if device.type == "cuda" and (device.index or 0) >= torch.cuda.device_count():
        raise ConfigError(f"--device {name}: {torch.cuda.device_count()} GPUs are visible")
    if device.type not in {"cpu", "cuda"}:
        raise ConfigError(f"--device {name}: neither cpu nor cuda")
    return device


def _pool(config: ServiceConfig, head: MtpHead, device: torch.device) -> KvPool:
    layout = head.kv_layout()
    shape = PoolShape(layout.num_layers, config.page_rows, layout.num_kv_heads, layout.head_dim, layout.dtype)
    budget = config.kv_bytes
    if not budget:
        if device.type == "cuda":
            raise ConfigError("--kv-bytes is required on a GPU: the target's memory is not ours to guess from")
        budget = CPU_KV_BYTES
    num_pages = budget // shape.page_bytes
    if num_pages == 0:
        raise ConfigError(f"--kv-bytes {budget} holds no page: one has {shape.page_bytes} bytes")
    try:
        return KvPool(shape, num_pages, device)
    except RuntimeError as error:  # torch.OutOfMemoryError on a GPU
        free = f": {torch.cuda.mem_get_info(device)[0]} bytes are free" if device.type == "cuda" else ""
        raise ConfigError(f"--kv-bytes {budget} does not fit on {device}{free}") from error
