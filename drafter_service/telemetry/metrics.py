"""Everything that Prometheus scrapes. Labels are bound beforehand; no label is an id."""

from __future__ import annotations

import logging
import platform
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, Info, Metric, ProcessCollector
from prometheus_client.registry import Collector

from specdraft.errors import Code, Reason

_log = logging.getLogger(__name__)

BUCKETS_S = (50e-6, 100e-6, 200e-6, 500e-6, 1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1.0)
BATCH_BUCKETS = (1, 2, 4, 8, 16, 32, 64, 128)
STAGES = ("queue", "device", "reply")
"""Of every write. Early rounds have `ready_wait` besides, whose series begins with the first of them."""
STOPS = ("COMPLETE", "NOT_ASKED", "CONFIDENCE", "GRAMMAR", "POSITION_LIMIT", "PAGES")
MEMORY_KINDS = ("inline", "host", "cuda")
SESSION_ENDS = ("closed", "expired", "shutdown")
ROW_KINDS = ("exact", "approximate")
CARRY_ENDS = ("taken", "installed", "freed", "lost", "expired", "evicted")


_T = TypeVar("_T")

MAX_NOTED = 4096
"""Events that may wait for the next scrape before somebody has to enter them."""


class Notes(Collector):
    """What the hot path saw, entered when somebody looks: to note costs a tenth of what it costs to count.

    The first collector of the registry, so that all others are up to date when they are asked.

    Attributes:
        note_more: as `note`, of a pair, for what another `note` goes with: it never enters.
    """

    def __init__(self) -> None:
        self._noted: deque[tuple[Callable[[Any], None], object]] = deque()
        self.note_more = self._noted.append

    def note(self, enter: Callable[[_T], None], value: _T) -> None:
        """Will call enter(value). From any thread."""
        self._noted.append((enter, value))
        if len(self._noted) > MAX_NOTED:
            self.enter_all()

    def enter_all(self) -> None:
        """Enters what was noted. From any thread."""
        try:
            while True:
                enter, value = self._noted.popleft()
                enter(value)
        except IndexError:
            return

    def collect(self) -> Iterable[Metric]:
        """Nothing of its own."""
        self.enter_all()
        return ()

    def describe(self) -> Iterable[Metric]:
        """Nothing of its own."""
        return ()


class Metrics:
    """The service's instruments. Implements what engine and books tell (`Observer`, `StepObserver`).

    Args:
        registry: where they are scraped from.
        max_drafts: K_max; bounds the label `draft_index`.

    Attributes:
        notes: what has been told and not entered yet.
    """

    def __init__(self, registry: CollectorRegistry, max_drafts: int) -> None:
        self.registry = registry
        self.notes = Notes()
        registry.register(self.notes)
        self._note = self.notes.note
        # Without looking how many wait: of every call the last note does, and of every write the first.
        self._note_more = self.notes.note_more
        self._rpc_seconds = self._histogram(
            "rpc_duration_seconds", "Time from a call's arrival to its answer.", ("method", "code")
        )
        self._rpc_bound: dict[tuple[str, int], Histogram] = {}
        self._stage_seconds = stages = self._histogram("propose_stage_seconds", "Time of a write's stages.", ("stage",))
        self._stages = {stage: stages.labels(stage) for stage in STAGES}
        opened = self._counter("sessions_opened", "Sessions by how their hidden rows travel.", ("memory",))
        self._sessions_opened = {kind: opened.labels(kind) for kind in MEMORY_KINDS}
        ends = self._counter("sessions_ended", "Sessions that ended.", ("end_reason",))
        self._session_ends = {reason: ends.labels(reason) for reason in SESSION_ENDS}
        carries = self._counter("carries", "Carries by what became of them.", ("outcome",))
        self._carries = {name: carries.labels(name) for name in CARRY_ENDS}
        gaps = self._counter("gaps", "Writes that would leave a gap.", ("outcome",))
        self._gaps = {name: gaps.labels(name) for name in ("refused", "declared")}
        stops = self._counter("stops", "Proposals by why drafting ended.", ("reason",))
        self._stops = {name: stops.labels(name) for name in STOPS}
        errors = self._counter("errors", "Refused calls and entries by reason.", ("reason",))
        self._errors = {reason: errors.labels(reason.value) for reason in Reason}
        self._bind_drafting(max_drafts)

    def _bind_drafting(self, max_drafts: int) -> None:
        self._batch = Histogram(
            "specdraft_batch_size", "Entries in one forward.", buckets=BATCH_BUCKETS, registry=self.registry
        )
        self._busy = self._counter("device_busy_seconds", "Time spent in forwards, as the engine's thread sees it.")
        self._faults = self._counter("device_faults", "Errors that the device reported.")
        self._ready_timeouts = self._counter("ready_timeouts", "Lanes released because a verify did not end in time.")
        self._compiles = self._counter("jit_compiles", "Kernels that Triton compiled or loaded after the start.")
        self._captures = self._counter("graph_captures", "CUDA graphs captured.")
        rows = self._counter("rows_written", "Rows that sequences took, by what they come from.", ("kind",))
        self._rows = {kind: rows.labels(kind) for kind in ROW_KINDS}
        self._proposals = self._counter("proposals", "Proposals that brought drafts.")
        self._drafts = self._counter("draft_tokens", "Drafts given.")
        self._accepted = self._counter("accepted_tokens", "Drafts that the target accepted.")
        per_index = self._counter(
            "accepted_tokens_per_index", "Accepted drafts by place in the chain, from 0.", ("draft_index",)
        )
        self._accepted_at = [per_index.labels(str(index)) for index in range(max_drafts)]
        self._unjudged = self._counter("unjudged_proposals", "Proposals whose acceptance nobody told.")

    def watch(
        self,
        gauges: Mapping[str, Callable[[], float]],
        pages: Mapping[str, Callable[[], float]],
        memory: Mapping[str, Callable[[], float]],
    ) -> None:
        """Binds gauges to what they show: `gauges` by name (without prefix), `pages` by state, `memory` by use."""
        for name, read in gauges.items():
            Gauge(f"specdraft_{name}", f"Open {name.removesuffix('_open')}.", registry=self.registry).set_function(read)
        states = Gauge("specdraft_kv_pages", "Pages of the KV pool by state.", ("state",), registry=self.registry)
        for state, read in pages.items():
            states.labels(state).set_function(read)
        uses = Gauge("specdraft_device_memory_bytes", "The service's memory.", ("use",), registry=self.registry)
        for use, read in memory.items():
            uses.labels(use).set_function(read)

    def describe_process(self, version: str) -> None:
        """Tells the version and what the kernel knows of the process. Before the load, so that restarts in it count."""
        ProcessCollector(registry=self.registry)
        build = {"version": version, "python": platform.python_version()}
        Info("specdraft_build", "The service.", registry=self.registry).info(build)

    def describe_head(self, head: Mapping[str, str]) -> None:
        """Tells which head is loaded."""
        Info("specdraft_head", "The loaded head.", registry=self.registry).info(dict(head))

    def rpc_done(self, method: str, code: Code, seconds: float) -> None:
        """One call was answered. `method` is one of the service's RPCs."""
        key = method, int(code)
        bound = self._rpc_bound.get(key)
        if bound is None:
            bound = self._rpc_bound[key] = self._rpc_seconds.labels(method, code.name)
        self._note(bound.observe, seconds)

    def error(self, reason: Reason) -> None:
        """One call or entry was refused."""
        self._errors[reason].inc()

    def stage(self, stage: str, seconds: float) -> None:
        """A stage of a write took this long."""
        self._note_more((self._stages[stage].observe, seconds))

    def session_opened(self, memory: str) -> None:
        """A session was opened; `memory` is "inline", "host" or "cuda"."""
        self._sessions_opened[memory].inc()

    def session_ended(self, reason: str) -> None:
        """A session was closed, expired, or ended by a shutdown."""
        self._session_ends[reason].inc()

    def round_judged(self, num_drafts: int, num_accepted: int) -> None:
        """The target accepted num_accepted of num_drafts drafts."""
        assert num_accepted <= num_drafts, "more accepted than given"
        self._note_more((self._enter_judged, num_accepted))

    def round_unjudged(self) -> None:
        """A round ended without saying what was accepted."""
        self._note(self._unjudged.inc, 1)

    def gap(self, outcome: str) -> None:
        """A write left a gap: "refused", or "declared" and carried out."""
        self._gaps[outcome].inc()

    def draft_rows_kept(self, num_rows: int) -> None:
        """So many draft rows were verified and count as approximate rows."""
        if num_rows:
            self._rows["approximate"].inc(num_rows)

    def device_fault(self) -> None:
        """The device reported an error."""
        self._faults.inc()

    def ready_timed_out(self) -> None:
        """A verify did not end in time, and its lane was released."""
        self._ready_timeouts.inc()

    def ready_waited(self, seconds: float) -> None:
        """A verify ended this long after its ticket had come."""
        if "ready_wait" not in self._stages:
            self._stages["ready_wait"] = self._stage_seconds.labels("ready_wait")
        self.stage("ready_wait", seconds)

    def jit_compiled(self, kernel: str) -> None:
        """Triton compiled (or loaded) a kernel while serving."""
        _log.warning("compiled %s while serving", kernel)
        self._compiles.inc()

    def graph_captured(self) -> None:
        """A CUDA graph was captured."""
        self._captures.inc()

    def carry(self, outcome: str) -> None:
        """A carry was "taken", "installed", "freed", "lost" with its session, "expired" or "evicted"."""
        self._carries[outcome].inc()

    def batch_run(self, num_entries: int, num_rows: int, seconds: float) -> None:
        """One forward."""
        self._note_more((self._enter_batch, (num_entries, num_rows, seconds)))

    def queued(self, seconds: float) -> None:
        """A write waited this long for its forward."""
        self._note(self._stages["queue"].observe, seconds)

    def write_done(self, num_drafts: int, stop: str | None) -> None:
        """One write went through; `stop` is None for a catch-up."""
        self._note_more((self._enter_write, (num_drafts, stop)))

    def _enter_batch(self, batch: tuple[int, int, float]) -> None:
        num_entries, num_rows, seconds = batch
        self._batch.observe(num_entries)
        self._rows["exact"].inc(num_rows)
        self._busy.inc(seconds)
        self._stages["device"].observe(seconds)

    def _enter_write(self, write: tuple[int, str | None]) -> None:
        num_drafts, stop = write
        if stop is not None:
            self._stops[stop].inc()
        if num_drafts:
            self._proposals.inc()
            self._drafts.inc(num_drafts)

    def _enter_judged(self, num_accepted: float) -> None:
        self._accepted.inc(num_accepted)
        for index in range(int(num_accepted)):
            self._accepted_at[index].inc()

    def _counter(self, name: str, text: str, labels: tuple[str, ...] = ()) -> Counter:
        return Counter(f"specdraft_{name}", text, labels, registry=self.registry)

    def _histogram(self, name: str, text: str, labels: tuple[str, ...]) -> Histogram:
        return Histogram(f"specdraft_{name}", text, labels, buckets=BUCKETS_S, registry=self.registry)
