"""The service put together: what is started in which order, and ended in which."""

from __future__ import annotations

import logging
import secrets
import threading
import time
from collections.abc import Callable
from concurrent import futures
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

import grpc
from prometheus_client import CollectorRegistry, start_http_server

from drafter_service.config import ADMIN_SUFFIX, DESCRIPTOR_SUFFIX, ConfigError, ServiceConfig
from drafter_service.heads import (
    BodyPrecision,
    CheckpointError,
    HeadPlan,
    HiddenSource,
    LmHeadPrecision,
    RecycleSource,
    plan_head,
)
from drafter_service.server.admin import AdminServicer
from drafter_service.server.facts import HeadFacts, ServiceFacts, read_boot_id
from drafter_service.server.health import Health, start_probe_server
from drafter_service.server.listeners import (
    BIND_TEXT,
    SOCKET_MODE,
    SocketOwnership,
    bind_tcp,
    bind_unix,
    why_unbindable,
)
from drafter_service.server.servicer import DrafterServicer
from drafter_service.server.statuses import Handlers
from drafter_service.telemetry import Metrics, Tracing
from specdraft.v1 import admin_pb2_grpc, drafter_pb2_grpc

if TYPE_CHECKING:
    from drafter_service.engine.batch import Runner
    from drafter_service.server.assembly import Assembly

_log = logging.getLogger(__name__)

REAP_S = 0.25
MIN_PING_INTERVAL_S = 10
STUCK_S = 30.0
"""An engine whose heart has not beaten for so long is dead."""

STOP_GRACE_S = 2.0

PROMPT_THREADS = 2
"""Threads for calls that wait for nobody: KeepAlive above all."""

SPARE_CALLS = 256
"""Calls beyond threads and streams that may wait, health watchers among them; more are RESOURCE_EXHAUSTED."""


@dataclass(frozen=True, slots=True)
class Addresses:
    """Where the service is reached; a port is None where there is no listener."""

    socket: Path | None
    listen_port: int | None
    metrics_port: int | None
    health_port: int | None


class Service:
    """One running service.

    Args:
        config: its settings.
        wrap_runner: put around what runs batches; tests hold, fail or count there.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        config: ServiceConfig,
        wrap_runner: Callable[[Runner], Runner] = lambda runner: runner,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.config = config
        self.registry = CollectorRegistry()
        self.metrics = Metrics(self.registry, config.max_drafts)
        self.assembly: Assembly | None = None
        self._clock = clock
        self._wrap_runner = wrap_runner
        self._servicer = DrafterServicer(config.workers, clock)
        self._health = Health(self._is_live)
        self._closers: list[Callable[[], object]] = []
        self._stopping = threading.Event()

    def start(self) -> Addresses:
        """Starts listening, then loads, tests and serves. Raises ConfigError, having released what it took."""
        try:
            return self._start()
        except BaseException:
            self.close()
            raise

    def _start(self) -> Addresses:
        plan = self._plan()
        self.metrics.describe_process(version("drafter-service"))
        addresses, ownership = self._listen()
        descriptor_socket = Path(f"{ownership.path}{DESCRIPTOR_SUFFIX}") if ownership else None
        tracing = self._start_tracing()
        # Imported now: what is wrong with settings or checkpoint has been said before torch is loaded.
        from drafter_service.server.assembly import assemble

        assembly = assemble(self.config, plan, self._wrap_runner, self.metrics, self._clock)
        self.assembly = assembly
        self._closers.append(assembly.close)
        assembly.loss.when_lost(self._lose_device)
        facts = self._facts(plan, assembly, descriptor_socket)
        parts = assembly.parts(facts, SOCKET_MODE, tracing)
        self._servicer.serve(parts)
        self._watch()
        self._health.set_serving(True)
        reaper = threading.Thread(target=self._reap, name="reaper", daemon=True)
        reaper.start()
        self._closers.append(reaper.join)
        return addresses

    def _plan(self) -> HeadPlan:
        config = self.config
        dtype = config.dtype if config.dtype != "auto" else None if config.device.startswith("cuda") else "float32"
        try:
            return plan_head(
                config.checkpoint,
                config.target_checkpoint,
                dtype=dtype,
                hidden_source=None if config.hidden_source == "auto" else HiddenSource(config.hidden_source),
                recycle=None if config.recycle == "auto" else RecycleSource(config.recycle),
                quantization=BodyPrecision(config.quantization),
                lm_head=None if config.lm_head == "auto" else LmHeadPrecision(config.lm_head),
                draft_vocab=config.draft_vocab,
            )
        except CheckpointError as error:
            raise ConfigError(str(error)) from error

    def _listen(self) -> tuple[Addresses, SocketOwnership | None]:
        config = self.config
        ownership = SocketOwnership(config.socket) if config.socket else None
        if ownership:
            self._closers.append(ownership.close)
        server = self._make_server()
        if ownership:
            bind_unix(server, ownership.path)
            self._start_admin(Path(f"{ownership.path}{ADMIN_SUFFIX}"))
        listen_port = bind_tcp(server, config) if config.listen else None
        server.start()
        self._closers.append(lambda: server.stop(STOP_GRACE_S).wait())
        metrics_port = self._start_metrics()
        health_port = self._start_probes()
        return Addresses(config.socket, listen_port, metrics_port, health_port), ownership

    def _make_server(self) -> grpc.Server:
        config = self.config
        # A session's next stream needs a thread before it can take over from the one before.
        streams = futures.ThreadPoolExecutor(2 * config.max_sessions, thread_name_prefix="stream")
        # One client's calls may wait in all threads for the engine; the others' leases must not end over it.
        prompt = futures.ThreadPoolExecutor(PROMPT_THREADS, thread_name_prefix="prompt")
        self._closers.append(prompt.shutdown)
        threads = config.workers + config.max_sessions
        server = grpc.server(
            futures.ThreadPoolExecutor(threads, thread_name_prefix="rpc"),
            options=[
                ("grpc.max_receive_message_length", config.message_bytes),
                ("grpc.max_send_message_length", config.message_bytes),
                ("grpc.http2.min_ping_interval_without_data_ms", MIN_PING_INTERVAL_S * 1000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.so_reuseport", 0),
            ],
            maximum_concurrent_rpcs=threads + 2 * config.max_sessions + SPARE_CALLS,
        )
        handlers = Handlers(server, self.metrics, self._clock, streams, prompt)
        handlers.register(drafter_pb2_grpc.add_DrafterServicer_to_server, self._servicer)
        self._health.add_to(server)
        self._closers.append(self._health.close)
        return server

    def _start_admin(self, path: Path) -> None:
        server = grpc.server(
            futures.ThreadPoolExecutor(2, thread_name_prefix="admin"),
        )
        handlers = Handlers(server, self.metrics, self._clock)
        handlers.register(admin_pb2_grpc.add_DrafterAdminServicer_to_server, AdminServicer(self, self._clock))
        bind_unix(server, path)
        server.start()
        self._closers.append(lambda: server.stop(0).wait())

    def _start_metrics(self) -> int | None:
        port = self.config.metrics_port
        if port is None:
            return None
        try:
            server, thread = start_http_server(port, self.config.probe_host, self.registry)
        except OSError as error:
            raise ConfigError(f"--metrics-port {port} cannot be bound: {error.strerror}") from error
        self._closers += [thread.join, server.server_close, server.shutdown]
        return int(server.server_port)

    def _start_tracing(self) -> Tracing | None:
        if not self.config.tracing:
            return None
        try:
            tracing = Tracing()
        except ImportError as error:
            raise ConfigError(f"--tracing needs OpenTelemetry, the extra tracing: {error}") from error
        self._closers.append(tracing.close)
        return tracing

    def _start_probes(self) -> int | None:
        port = self.config.health_port
        if port is None:
            return None
        try:
            server, bound = start_probe_server(self._health, self.config.probe_host, port)
        except RuntimeError as error:
            why = why_unbindable(self.config.probe_host, port) or BIND_TEXT
            raise ConfigError(f"--health-port {port} cannot be bound: {why}") from error
        self._closers.append(lambda: server.stop(0).wait())
        return bound

    def _facts(self, plan: HeadPlan, assembly: Assembly, descriptor_socket: Path | None) -> ServiceFacts:
        head = plan.config
        facts = HeadFacts(
            model_type=head.model_type,
            fingerprint=assembly.head.fingerprint,
            hidden_width=head.hidden_width,
            head_width=head.hidden_size,
            dtype=head.dtype,
            hidden_source=head.hidden_source.value,
            vocab_size=head.vocab_size,
            draft_vocab_size=assembly.head.draft_vocab_size,
            max_seq_len=assembly.max_seq_len,
            num_layers=head.num_layers,
            num_kv_heads=head.num_kv_heads,
            head_dim=head.head_dim,
            kv_bytes_per_row=head.kv_row_bytes,
        )
        info = {"model_type": head.model_type, "fingerprint": facts.fingerprint, **assembly.head.levers}
        self.metrics.describe_head(info)
        return ServiceFacts(
            config=self.config,
            head=facts,
            num_pages=assembly.num_pages,
            incarnation=secrets.token_bytes(16),
            boot_id=read_boot_id(),
            version=version("drafter-service"),
            descriptor_socket=descriptor_socket,
            levers=assembly.head.levers,
        )

    def _watch(self) -> None:
        assert self.assembly is not None, "called once it is there"
        ledger, sessions = self.assembly.engine.ledger, self.assembly.sessions
        allocator, vault = ledger.allocator, ledger.vault
        self.metrics.watch(
            {
                "sessions": lambda: len(sessions),
                "sequences": lambda: len(ledger.sequences),
                "regions_open": sessions.num_regions,
            },
            {
                "free": lambda: allocator.num_free,
                "carried": lambda: vault.num_own_pages,
                "live": lambda: allocator.num_pages - allocator.num_free - vault.num_own_pages,
            },
            dict(self.assembly.memory_bytes),
        )

    def refuse_sessions(self) -> None:
        """Turns health to NOT_SERVING and refuses new sessions; open ones go on."""
        self._health.set_serving(False)
        self._servicer.refuse_sessions()

    def drain(self) -> None:
        """Turns health to NOT_SERVING, refuses new work, and waits until what was accepted is answered."""
        self._health.set_serving(False)
        self._servicer.drain()
        if self.assembly is not None:
            # What is left of the time is for the answers to get out.
            self.assembly.engine.stop(timeout_s=max(self.config.drain_s - STOP_GRACE_S, 0))

    def _lose_device(self) -> None:
        """Health at once, whoever waits for it; the process ends soon."""
        self._health.set_serving(False)
        self._servicer.lose_device()

    @property
    def failure(self) -> str:
        """What nothing but a new process helps against: "", or one line."""
        if self.assembly is None or self._stopping.is_set():
            return ""
        if self.assembly.loss.is_lost:
            return "the device is lost"
        return "" if self.assembly.engine.is_alive else "the engine has died"

    @property
    def has_failed(self) -> bool:
        """Whether nothing but a new process helps."""
        return bool(self.failure)

    @property
    def is_stuck(self) -> bool:
        """Whether a thread is still inside the device after the end; Python would wait for it forever."""
        return self.assembly is not None and self._stopping.is_set() and self.assembly.engine.is_at_work

    def close(self) -> None:
        """Ends everything that was started, last first. Safe to call twice."""
        self._stopping.set()
        self._servicer.drain()
        while self._closers:
            self._closers.pop()()

    def _is_live(self) -> bool:
        if self.assembly is None:
            return True
        engine = self.assembly.engine
        return engine.is_alive and self._clock() - engine.heartbeat < STUCK_S and not self.assembly.loss.is_lost

    def _reap(self) -> None:
        assert self.assembly is not None, "started once it is there"
        while not self._stopping.wait(REAP_S):
            for session in self.assembly.sessions.pop_expired():
                self._servicer.end_session(session, "expired")
            self._servicer.cut_streams()
            self._servicer.expire_carries()
            self.metrics.notes.enter_all()  # a scrape of some names alone does not
            self._health.check()
            self.assembly.check_device()
        for session in self.assembly.sessions.pop_all():
            self._servicer.end_session(session, "shutdown")
