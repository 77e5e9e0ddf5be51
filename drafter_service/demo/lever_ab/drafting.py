"""Drafts at the positions of windows: the service's head, pool and runner in this process, one sequence a window."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from drafter_service.demo.lever_ab.windows import WINDOW_TOKENS, Window
from drafter_service.engine.batch import RunEntry, RunResult
from drafter_service.engine.operations import DraftWish
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import MtpHead
from drafter_service.state.pool import KvPool, PoolShape

PAGE_ROWS = 16


def draft_at_positions(
    head: MtpHead, windows: Sequence[Window], num_drafts: int, min_logprob: float | None
) -> list[RunResult]:
    """One result a position, window by window. The rows before a position are exact, those of its real text.

    The head is given the hidden states that its configuration asks for. A position's last pair is the target's own
    next token, as after a verify; at the next position the pair of the real text takes its place.
    """
    layout = head.kv_layout()
    shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
    num_pages = -(-(WINDOW_TOKENS + num_drafts) // PAGE_ROWS)
    runner = EagerRunner(head, KvPool(shape, num_pages * len(windows), head.device))
    pages = [array("i", range(num_pages * index, num_pages * (index + 1))) for index in range(len(windows))]
    source = head.config.hidden_source.value
    wish = DraftWish(num_drafts, min_logprob)
    results: list[list[RunResult]] = [[] for _ in windows]
    for step in range(max(len(window.positions) for window in windows)):
        active = [index for index, window in enumerate(windows) if step < len(window.positions)]
        entries = [_entry(windows[index], pages[index], step, source, wish) for index in active]
        for index, result in zip(active, runner.run(entries), strict=True):
            results[index].append(result)
    return [result for of_window in results for result in of_window]


def _entry(window: Window, pages: array[int], step: int, source: str, wish: DraftWish) -> RunEntry:
    position = window.positions[step]
    first_key = window.positions[step - 1] - 1 if step else 0
    return RunEntry(
        pages=pages,
        row_begin=first_key,
        num_live_rows=first_key,
        first_key=first_key,
        tokens=(*window.tokens[first_key + 1 : position], window.truth[step][0]),
        hiddens=window.hiddens[source][first_key:position],
        num_drafts=wish.num_drafts,
        min_logprob=wish.min_logprob,
        masks=None,
    )
