"""The head's own forward: what a Propose costs without a service around it."""

from __future__ import annotations

from array import array
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.engine.batch import RunEntry
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import load_head
from drafter_service.state.pool import KvPool, PoolShape

PAGE_ROWS = 16


class BareHead:
    """The service's head and runner in this process: the same pages, rows and thread settings, nobody else.

    Args:
        checkpoint: the head's.
        target_checkpoint: where the tables are that it lacks.
        tokens: t_1 .. t_n.
        hiddens: h_0 .. h_{n-1}, float32 [n, H].
    """

    def __init__(self, checkpoint: Path, target_checkpoint: Path, tokens: list[int], hiddens: Tensor) -> None:
        torch.set_num_threads(1)
        head = load_head(checkpoint, target_checkpoint, dtype=torch.float32)
        layout = head.kv_layout()
        shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
        self._pages = array("i", range(2 * len(tokens) // PAGE_ROWS + 1))  # one more, for the rows of drafts
        self._runner = EagerRunner(head, KvPool(shape, len(self._pages), head.device))
        self._tokens, self._hiddens = tokens, hiddens
        self._runner.run([self._entry(0, len(tokens), 0)])

    def propose(self, key: int, num_drafts: int) -> None:
        """What the service's engine runs for a Propose of one pair, whose key is the next one."""
        self._runner.run([self._entry(key, 1, num_drafts)])

    def _entry(self, key: int, count: int, num_drafts: int) -> RunEntry:
        tokens = tuple(self._tokens[index % len(self._tokens)] for index in range(key, key + count))
        start = key % len(self._tokens)
        return RunEntry(
            self._pages,
            key,
            key,
            key,
            tokens,
            self._hiddens[start : start + count],
            num_drafts,
            min_logprob=None,
            masks=None,
        )
