"""The service as a process of its own, on a socket of its own: for the demo and for benchmarks."""

from __future__ import annotations

import os
import select
import subprocess
import sys
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType

from drafter_service.config import WATCH_STDIN_FLAG, ServiceConfig, flags_for

START_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 30.0
LOOPBACK = "127.0.0.1"


class ProcessError(RuntimeError):
    """The service did not come up; its own line about why stands on standard error."""


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
        self._process: subprocess.Popen[str] | None = None

    def __enter__(self) -> Reached:
        command = [sys.executable, "-m", "drafter_service.cli", "serve", WATCH_STDIN_FLAG, *flags_for(self._config)]
        # It imports what we import, wherever that was found.
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        self._process = subprocess.Popen(  # noqa: S603  # our own interpreter and flags
            command,
            stdin=subprocess.PIPE,  # never written to: it breaks however we end, and the service ends with it
            stdout=subprocess.PIPE,
            text=True,
            env=environment,
            process_group=0,  # Ctrl-C is ours: we still have sessions to close there
        )
        try:
            return self._read_addresses(self._process)
        except BaseException:
            self.close()
            raise

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Drains and ends the process, and removes its directory."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe is not None:
                    pipe.close()
            self._process = None
        self._directory.cleanup()

    def _read_addresses(self, process: subprocess.Popen[str]) -> Reached:
        assert process.stdout is not None, "it was asked for"
        readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
        line = process.stdout.readline() if readable else ""
        if not readable:
            raise ProcessError(f"the service did not come up within {START_TIMEOUT_S:.0f} s")
        if not line.startswith("serving "):
            raise ProcessError(f"the service did not come up: it ended with exit code {process.wait(STOP_TIMEOUT_S)}")
        places = dict(part.split("=", 1) for part in line.split()[1:])
        return Reached(f"unix://{places['socket']}", f"http://{LOOPBACK}:{places['metrics']}/metrics", process.pid)
