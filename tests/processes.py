"""`drafter-service serve` as a process of its own: what it prints, and how it ends."""

import os
import select
import subprocess
import sys
import time
from contextlib import contextmanager

from repository import ROOT

START_TIMEOUT_S = 60.0
COMMAND = [sys.executable, "-m", "drafter_service.cli", "serve"]


def environment(**variables):
    """Ours, without settings that somebody may have exported."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("SPECDRAFT_")}
    ours = [str(ROOT / part) for part in (".", "kernels", "clients/python")]
    path = os.pathsep.join([*ours, *filter(None, [os.environ.get("PYTHONPATH")])])
    return kept | {"PYTHONPATH": path, "OMP_NUM_THREADS": "1"} | variables


def flags(checkpoint, socket, **changes):
    """A command line for a tiny service. None leaves a setting out."""
    settings = {
        "checkpoint": checkpoint,
        "socket": socket,
        "metrics_port": "off",
        "health_port": "off",
        "probe_host": "127.0.0.1",
        "device": "cpu",
        "kv_bytes": "64KiB",
        "log_level": "warning",
    }
    return [f"--{name.replace('_', '-')}={value}" for name, value in (settings | changes).items() if value is not None]


def begin(arguments, command=COMMAND, **variables):
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen([*command, *map(str, arguments)], env=environment(**variables), cwd="/", **pipes)


def places(process):
    """Waits until it serves; returns where, by name."""
    readable, _, _ = select.select([process.stdout], [], [], START_TIMEOUT_S)
    line = process.stdout.readline() if readable else ""
    assert line.startswith("serving "), (line, process.poll() is not None and process.stderr.read())
    return dict(part.split("=", 1) for part in line.split()[1:])


@contextmanager
def serving(arguments, command=COMMAND, **variables):
    """The process and where it serves; it is made to end afterwards."""
    process = begin(arguments, command, **variables)
    try:
        yield process, places(process)
    finally:
        process.terminate()
        process.communicate(timeout=30)


def failing(arguments, **variables):
    """Runs what must not come up; returns its exit code, its one line, and its seconds."""
    began = time.monotonic()
    process = begin(arguments, **variables)
    try:
        out, err = process.communicate(timeout=START_TIMEOUT_S)
    finally:
        process.kill()
    seconds = time.monotonic() - began
    assert process.returncode > 0, (process.returncode, out, err)
    assert out == ""
    assert err.count("\n") == 1, err
    assert err.startswith("drafter-service: ")
    assert "Traceback" not in err
    return process.returncode, err.strip().removeprefix("drafter-service: "), seconds
