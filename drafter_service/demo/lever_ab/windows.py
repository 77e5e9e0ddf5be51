"""Where the levers are compared: windows of held-out files, and what the target itself says at each position.

The target reads a window once. At every position it then goes on greedily, all positions of the window in one batch:
a copy of the cache each, in which whatever lies behind its position is masked.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import torch
from torch import Tensor

from drafter_service.demo.prompts import EVERYTHING, read_texts
from drafter_service.demo.target import TEXTS, Target

WINDOW_TOKENS = 384
CONTEXT_TOKENS = 128
"""Least real tokens before a position."""

POSITIONS_MAX = (WINDOW_TOKENS - CONTEXT_TOKENS) // 2
"""Most positions of a window: every other one."""

_BATCH = 64


@dataclass(frozen=True, slots=True)
class Window:
    """A piece of a file as the target sees it.

    Attributes:
        tokens: t_0 .. t_{W-1}.
        hiddens: by hidden source, float32 [W, H]: h_0 .. h_{W-1}.
        positions: P of each position, ascending; CONTEXT_TOKENS <= P < W.
        truth: of each position, the target's greedy t_P and the num_drafts tokens after it.
    """

    tokens: tuple[int, ...]
    hiddens: dict[str, Tensor]
    positions: tuple[int, ...]
    truth: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class Halves:
    """The held-out files in two halves; no subject (`queue.py`, `library/queue.rst.txt`) is in both.

    Attributes:
        counted: ids of the files that frequencies come from.
        measured: ids of the files that acceptance is measured on.
    """

    counted: tuple[tuple[int, ...], ...]
    measured: tuple[tuple[int, ...], ...]

    def frequent_ids(self, count: int) -> list[int]:
        """The commonest ids of the counted half, most frequent first; fewer if it has fewer."""
        counts = Counter(token for ids in self.counted for token in ids)
        return [token for token, _ in sorted(counts.items(), key=lambda item: (-item[1], item[0]))][:count]


def read_halves(target: Target, folder: Path = TEXTS) -> Halves:
    """Splits the files: subjects in the order of their names, in turn."""
    texts = {name: tuple(target.tokenizer.encode(text).ids) for name, text in read_texts(folder, EVERYTHING).items()}
    subjects = sorted({_subject(name) for name in texts})
    counted = {subject for index, subject in enumerate(subjects) if index % 2 == 0}
    return Halves(
        tuple(ids for name, ids in texts.items() if _subject(name) in counted),
        tuple(ids for name, ids in texts.items() if _subject(name) not in counted),
    )


def read_windows(target: Target, halves: Halves, num_positions: int, num_drafts: int, seed: int) -> list[Window]:
    """Windows with `num_positions` positions in all, as few windows as that takes. Raises ValueError if too many."""
    places = [
        ids[start : start + WINDOW_TOKENS]
        for ids in halves.measured
        for start in range(0, len(ids) - WINDOW_TOKENS + 1, WINDOW_TOKENS)
    ]
    num_windows = -(-num_positions // POSITIONS_MAX)
    if not 1 <= num_windows <= len(places):
        raise ValueError(f"{num_positions} positions: the held-out files have 1 to {len(places) * POSITIONS_MAX}")
    picked = random.Random(seed).sample(places, num_windows)
    shares = _shares(num_positions, num_windows)
    return [_read(target, ids, count, num_drafts) for ids, count in zip(picked, shares, strict=True)]


def _shares(total: int, parts: int) -> Iterator[int]:
    for index in range(parts):
        yield total * (index + 1) // parts - total * index // parts


def _subject(name: str) -> str:
    return PurePosixPath(name).name.partition(".")[0]


@torch.inference_mode()
def _read(target: Target, tokens: tuple[int, ...], num_positions: int, num_drafts: int) -> Window:
    inner = target.model.model
    before_norm: list[Tensor] = []
    hook = inner.norm.register_forward_pre_hook(lambda _module, given: before_norm.append(given[0]))
    try:
        read = inner(torch.tensor([tokens], device=target.device), use_cache=True)
    finally:
        hook.remove()
    state = read.last_hidden_state[0]
    span = WINDOW_TOKENS - CONTEXT_TOKENS
    positions = torch.tensor([CONTEXT_TOKENS + span * index // num_positions for index in range(num_positions)])
    firsts = target.model.lm_head(state[positions.to(target.device) - 1]).argmax(-1)
    truth: list[list[int]] = []
    for part, first in zip(positions.split(_BATCH), firsts.split(_BATCH), strict=True):
        truth += _go_on(target, read.past_key_values, part.to(target.device), first, num_drafts)
    hiddens = {"post_norm": state, "pre_norm": before_norm[0][0]}
    return Window(
        tokens,
        {source: rows.float().cpu().contiguous() for source, rows in hiddens.items()},
        tuple(positions.tolist()),
        tuple(map(tuple, truth)),
    )


def _go_on(target: Target, cache: object, positions: Tensor, firsts: Tensor, count: int) -> list[list[int]]:
    """Of each position, its first token and the target's `count` greedy tokens after it, whatever they are."""
    own = copy.deepcopy(cache)
    own.batch_repeat_interleave(len(positions))  # type: ignore[attr-defined]  # transformers' caches have it
    mask = (torch.arange(WINDOW_TOKENS, device=positions.device) < positions[:, None]).long()
    grown = [firsts]
    for step in range(count):
        mask = torch.cat((mask, mask.new_ones(len(positions), 1)), dim=1)
        output = target.model(
            grown[-1][:, None],
            past_key_values=own,
            attention_mask=mask,
            position_ids=(positions + step)[:, None],
        )
        grown.append(output.logits[:, -1].argmax(-1))
    rows: list[list[int]] = torch.stack(grown, dim=1).tolist()
    return rows
