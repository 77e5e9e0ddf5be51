"""Times calls: on a GPU inside a CUDA graph, by events; elsewhere by the clock, which shows only that they run."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import torch

Call = Callable[[], None]

_LAUNCHES: Final = 20
_REPLAYS: Final = 15


@dataclass(frozen=True)
class Timing:
    """Microseconds of one call: the median, and the distance from the lowest to the highest of the rounds' medians."""

    us: float
    spread_us: float


def time_side_by_side(
    sides: dict[str, Sequence[Call]], device: torch.device, rounds: int = 5, *, launches: int = _LAUNCHES
) -> dict[str, Timing]:
    """Times each side's calls, `rounds` times in turn. The calls of a side are the same work on different memory.

    `launches` calls stand in one graph: fewer where a call takes milliseconds.
    """
    timers = {name: _make_timer(calls, device, launches) for name, calls in sides.items()}
    taken: dict[str, list[float]] = {name: [] for name in sides}
    for _ in range(rounds):
        for name, timer in timers.items():
            taken[name].append(timer())
    return {name: Timing(statistics.median(times), max(times) - min(times)) for name, times in taken.items()}


def copy_bandwidth(device: torch.device, num_bytes: int) -> float:
    """GB/s of a copy on the device, bytes read and written.

    Made by a kernel: what `copy_` leaves in a graph is a memory copy's node, which is a third slower.
    """
    source = torch.empty(num_bytes // 2, dtype=torch.bfloat16, device=device).normal_()
    target = torch.empty_like(source)
    timing = time_side_by_side({"copy": [lambda: torch.mul(source, 1, out=target)]}, device)["copy"]
    return 2 * num_bytes / timing.us / 1e3


def _make_timer(calls: Sequence[Call], device: torch.device, launches: int) -> Callable[[], float]:
    """A function that returns the microseconds of one call, the median of many."""
    if device.type != "cuda":
        return lambda: _by_clock(calls)
    for call in calls:
        call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    repeated = [calls[index % len(calls)] for index in range(max(launches, len(calls)))]
    with torch.cuda.graph(graph):
        for call in repeated:
            call()
    return lambda: _by_events(graph) / len(repeated)


def _by_events(graph: torch.cuda.CUDAGraph) -> float:
    times = []
    graph.replay()
    for _ in range(_REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) * 1e3)
    return statistics.median(times)


def _by_clock(calls: Sequence[Call]) -> float:
    begin = time.perf_counter()
    for call in calls:
        call()
    return (time.perf_counter() - begin) / len(calls) * 1e6
