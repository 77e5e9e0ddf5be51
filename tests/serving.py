"""Services for tests: started in this process, with a runner that can be held, made to fail, and counted."""

import hashlib
import shutil
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import torch

from drafter_service.config import ServiceConfig
from drafter_service.server import Service
from wire import TIMEOUT_S, Client

PAGE_ROWS = 4
PAGE_BYTES = 2 * PAGE_ROWS * 2 * 16 * 4  # keys and values of the tiny head's one layer, float32


def num_descriptors():
    """Descriptors that this process has open."""
    return sum(1 for _ in Path("/proc/self/fd").iterdir())


def wait_until(condition, timeout=TIMEOUT_S, text="the condition"):
    """Polls until `condition` holds; returns what it returned."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(0.005)
    raise AssertionError(f"{text} did not come true within {timeout} s")


class GatedRunner:
    """Around what runs batches: lets them through, holds them, or fails them."""

    def __init__(self, inner):
        self.inner = inner
        self.gate = threading.Event()
        self.gate.set()
        self.batches = []
        self.fails = lambda entries: False

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def run(self, entries):
        self.batches.append(entries)
        self.gate.wait(60)
        if self.fails(entries):
            raise RuntimeError("broken on purpose")
        return self.inner.run(entries)

    @contextmanager
    def held(self):
        """Nothing runs inside; what was begun goes on afterwards."""
        self.gate.clear()
        try:
            yield
        finally:
            self.gate.set()

    def wait_for_batch(self, num_before):
        wait_until(lambda: len(self.batches) > num_before, text="a batch's beginning")


class Running:
    """A service that runs in this process, seen from outside and from inside."""

    def __init__(self, config, clock=time.monotonic):
        self.config = config
        self.runner = None
        self.service = Service(config, wrap_runner=self._wrap, clock=clock)
        self.addresses = self.service.start()
        self._clients = []

    def _wrap(self, runner):
        self.runner = GatedRunner(runner)
        return self.runner

    def client(self, **options):
        """A connection that is closed with the service."""
        client = Client(f"unix:{self.config.socket}", **options)
        self._clients.append(client)
        return client

    def close(self):
        self.runner.gate.set()
        for client in self._clients:
            client.close()
        self.service.close()

    @property
    def ledger(self):
        return self.service.assembly.engine.ledger

    @property
    def allocator(self):
        return self.ledger.allocator

    def pages(self):
        """Pages that are in use."""
        return self.allocator.num_pages - self.allocator.num_free

    def digest(self, sequence_id):
        """Hash of the rows that a sequence holds."""
        sequence = self.ledger.sequences._by_id[sequence_id]
        rows = torch.arange(sequence.rows.row_count)
        pages = torch.tensor(list(sequence.pages), dtype=torch.int64)
        slots = pages[rows // PAGE_ROWS] * PAGE_ROWS + rows % PAGE_ROWS
        held = self.service.assembly.pool.read(slots)
        return hashlib.sha256(held.contiguous().view(torch.uint8).numpy().tobytes()).hexdigest()

    def poison_free_pages(self):
        self.service.assembly.pool.poison(self.allocator.free_pages())

    def metric(self, name, **labels):
        """Value of a metric, without its prefix; 0 where it was never touched."""
        return self.service.registry.get_sample_value(f"specdraft_{name}", labels) or 0.0

    def metrics(self, *names):
        return {name: self.metric(name) for name in names}


@contextmanager
def temporary_directory():
    """A directory with a path short enough for sockets."""
    directory = Path(tempfile.mkdtemp(prefix="sd-", dir="/tmp"))
    try:
        yield directory
    finally:
        shutil.rmtree(directory)


def tiny_config(checkpoint, directory, num_pages=256, **changes):
    fields = {
        "checkpoint": checkpoint,
        "socket": directory / "s.sock",
        "probe_host": "127.0.0.1",
        "metrics_port": None,
        "health_port": None,
        "device": "cpu",
        "max_drafts": 4,
        "max_batch": 4,
        "prefill_rows": 32,
        "page_rows": PAGE_ROWS,
        "kv_bytes": num_pages * PAGE_BYTES,
        "workers": 4,
        "max_sessions": 16,
        "max_seq_len": 200,
        "torch_threads": 1,
        "drain_s": 5.0,
    }
    return ServiceConfig(**fields | changes)


@contextmanager
def running(checkpoint, num_pages=256, clock=time.monotonic, **changes):
    """Starts a service of its own; what it leaves behind fails the test."""
    with temporary_directory() as directory:
        server = Running(tiny_config(checkpoint, directory, num_pages, **changes), clock)
        try:
            yield server
        finally:
            server.close()
        assert list(directory.iterdir()) == [], "files were left behind"
