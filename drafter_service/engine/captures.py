"""CUDA graphs, captured while lanes wait for verifies."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch

WARM_UPS = 2
"""Eager runs before a capture: libraries allocate and choose kernels on their first calls."""


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where this process warms rounds up and captures them: one stream, whose hardware queue no wait need share."""
    return torch.cuda.Stream(device)


@dataclass(frozen=True, slots=True)
class CapturedWork:
    """Work as a CUDA graph, launched on the current stream.

    Attributes:
        graph: knows addresses, and keeps no tensor that was made before the capture.
        work: what was captured: whoever owns those tensors. Without it their memory would be handed to others, and
            each launch would write there.
    """

    graph: torch.cuda.CUDAGraph
    work: Callable[[], object]

    def __call__(self) -> None:
        """Launches it."""
        self.graph.replay()


@contextmanager
def _no_collection() -> Iterator[None]:
    """No garbage is collected: a graph among it would be destroyed, which a thread that captures must not do.

    CUDA gives the capture up then, with "operation not permitted when stream is capturing".
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


def captured(work: Callable[[], object], device: torch.device, graph_memory: Any = None) -> CapturedWork:
    """The work as a CUDA graph.

    `torch.cuda.graph` would synchronise the device first, and so wait for every verify that any lane waits for.

    Args:
        work: what is captured; it has run before. It owns every tensor that it uses, and is kept with the graph.
        device: where.
        graph_memory: shared with other graphs of which never two run at once; None = its own.
    """
    graph = torch.cuda.CUDAGraph()
    with _no_collection(), torch.cuda.stream(capture_stream(device)):
        graph.capture_begin(pool=graph_memory, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return CapturedWork(graph, work)


def capture(
    run: Callable[[], Any], device: torch.device, graph_memory: Any, warm: Callable[[], Any] | None = None
) -> Callable[[], Any]:
    """What runs `run` again: a CUDA graph on a GPU, the same operations one by one on a CPU.

    `graph_memory` is PyTorch's, shared by rounds of which never two run at once. `warm` runs before instead of `run`.
    """
    if device.type != "cuda":
        return run
    stream = capture_stream(device)
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        for _ in range(WARM_UPS):
            (warm or run)()
    stream.synchronize()
    return captured(run, device, graph_memory)
