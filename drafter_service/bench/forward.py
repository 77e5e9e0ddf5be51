"""The head's own forward: what a Propose costs without a service around it."""

from __future__ import annotations

import itertools
import random
from array import array
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from drafter_service.engine.batch import RunEntry
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import MtpHead, load_head
from drafter_service.state.pool import KvPool, PoolShape

PAGE_ROWS = 16
NUM_DRAFTS = 3
NUM_ROWS = 128
"""Rows of the sequence when a turn begins; a Propose adds one, and at twice as many it begins again."""


@dataclass(frozen=True, slots=True)
class Pairs:
    """Made-up input of the right shape: tokens t_1 .. t_n, hiddens h_0 .. h_{n-1} [n, H]."""

    tokens: list[int]
    hiddens: Tensor


def make_pairs(width: int, vocab_size: int) -> Pairs:
    """`NUM_ROWS` of them, the same ones every time."""
    chance = random.Random(0)  # noqa: S311  # made-up input
    tokens = [chance.randrange(vocab_size) for _ in range(NUM_ROWS)]
    return Pairs(tokens, torch.randn(NUM_ROWS, width, generator=torch.Generator().manual_seed(0)))


def in_turn(call: Callable[[int], object]) -> Callable[[], object]:
    """Calls with one key after the other, as a target does whose drafts are never accepted."""
    keys = itertools.cycle(range(NUM_ROWS, 2 * NUM_ROWS))
    return lambda: call(next(keys))


def load_cpu_head(checkpoint: Path, target_checkpoint: Path) -> MtpHead:
    """The head as a service on a CPU loads it, in a process that lets torch use one thread from now on."""
    torch.set_num_threads(1)
    return load_head(checkpoint, target_checkpoint, dtype=torch.float32)


def make_forward(head: MtpHead) -> Callable[[], object]:
    """The forward of a Propose of one pair with `NUM_DRAFTS` drafts, at one key after the other."""
    bare = BareHead(head)
    return in_turn(lambda key: bare.propose(key, NUM_DRAFTS))


class BareHead:
    """A head with a runner as the service's around it, and pages of its own: the same rows, nobody else.

    Args:
        head: on a CPU.
    """

    def __init__(self, head: MtpHead) -> None:
        pairs = make_pairs(head.config.hidden_width, head.config.vocab_size)
        tokens, hiddens = pairs.tokens, pairs.hiddens
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
