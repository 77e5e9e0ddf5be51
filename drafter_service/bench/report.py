"""A benchmark's result: what was measured, on what, with which versions, by which command."""

from __future__ import annotations

import datetime as dt
import json
import os
import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

PACKAGES = ("drafter-service", "torch", "grpcio", "protobuf")
_CPU_INFO = Path("/proc/cpuinfo")


@dataclass(frozen=True, slots=True)
class Report:
    """One result, as it is committed.

    Attributes:
        name: of the benchmark.
        device: what it ran on.
        versions: of Python and of the packages that matter.
        date: ISO date.
        command: what repeats it.
        figures: what was measured; times in microseconds where a name ends in _us.
    """

    name: str
    device: str
    versions: Mapping[str, str]
    date: str
    command: str
    figures: Mapping[str, Any]

    def as_json(self) -> str:
        """One JSON object, indented."""
        return json.dumps(asdict(self), indent=2)


def make_report(name: str, command: str, figures: Mapping[str, Any]) -> Report:
    """A report of figures measured here and now."""
    versions = {"python": platform.python_version()} | {package: version(package) for package in PACKAGES}
    today = dt.datetime.now(tz=dt.UTC).date().isoformat()
    return Report(name, device_name(), versions, today, command, figures)


def device_name() -> str:
    """The first GPU, where there is one, and the processor."""
    import torch

    return f"{torch.cuda.get_device_name(0)}, {cpu_name()}" if torch.cuda.is_available() else cpu_name()


def missing_gpus(name: str, count: int) -> str:
    """What a benchmark that needs `count` GPUs says where there are fewer; empty where there are enough."""
    import torch

    visible = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if visible >= count:
        return ""
    needed = "a GPU" if count == 1 else f"{count} GPUs"
    return f"{name} needs {needed}, and {visible} are visible; --dry runs it without one, and its figures mean nothing"


def cpu_name() -> str:
    """The processor, and how many of its cores this process may use."""
    lines = _CPU_INFO.read_text(encoding="utf-8").splitlines() if _CPU_INFO.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.machine()}, {len(os.sched_getaffinity(0))} cores"
