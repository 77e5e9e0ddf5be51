"""CUDA graphs, captured while lanes wait for verifies."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch


@cache
def capture_stream(device: torch.device) -> torch.cuda.Stream:
    """Where this process warms rounds up and captures them: one stream, whose hardware queue no wait need share."""
    return torch.cuda.Stream(device)


def captured(work: Callable[[], object], device: torch.device, graph_memory: Any = None) -> Callable[[], None]:
    """The work as a CUDA graph; what is returned launches it on the current stream.

    `torch.cuda.graph` would synchronise the device first, and so wait for every verify that any lane waits for.

    Args:
        work: what is captured; it has run before.
        device: where.
        graph_memory: shared with other graphs of which never two run at once; None = its own.
    """
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(capture_stream(device)):
        graph.capture_begin(pool=graph_memory, capture_error_mode="thread_local")
        try:
            work()
        finally:
            graph.capture_end()
    return graph.replay
