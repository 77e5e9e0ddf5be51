"""The service as a process of its own, on a socket of its own: for the demo and for benchmarks."""

from __future__ import annotations

import gc
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from drafter_service.config import WATCH_STDIN_FLAG, ServiceConfig, flags_for
from drafter_service.server.child import Child, ProcessError

LOOPBACK = "127.0.0.1"


def keep_what_was_loaded() -> None:
    """A full collection of garbage stops every thread while it looks at all that was loaded: from now on at none."""
    gc.collect()
    gc.freeze()


@dataclass(frozen=True, slots=True)
class Reached:
    """Where a service process is reached.

    Attributes:
        target: gRPC address of its Unix socket.
        metrics: URL of its metrics.
        pid: its process id.
    """

    target: str
    metrics: str
    pid: int


class ServiceProcess:
    """Runs `drafter-service serve` while the `with` block lasts; entering waits until it is ready.

    Args:
        config: its settings; socket, ports and their host are chosen here.
    """

    def __init__(self, config: ServiceConfig) -> None:
        self._directory = tempfile.TemporaryDirectory(prefix="specdraft-")
        socket = Path(self._directory.name) / "s.sock"
        self._config = replace(config, socket=socket, probe_host=LOOPBACK, metrics_port=0, health_port=None)
        self._child: Child | None = None

    def __enter__(self) -> Reached:
        flags = ("serve", WATCH_STDIN_FLAG, *flags_for(self._config))
        try:
            self._child = Child("drafter_service.cli", flags)
            return _reached(self._child)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drains and ends the process, and removes its directory."""
        if self._child is not None:
            self._child.close()
            self._child = None
        self._directory.cleanup()


def _reached(child: Child) -> Reached:
    """Where the service says that it is. Raises ProcessError."""
    line = child.first_line("the service")
    if not line.startswith("serving "):
        raise ProcessError(f"the service did not come up: it said {line.strip()!r}")
    places = dict(part.split("=", 1) for part in line.split()[1:])
    return Reached(f"unix://{places['socket']}", f"http://{LOOPBACK}:{places['metrics']}/metrics", child.process.pid)
