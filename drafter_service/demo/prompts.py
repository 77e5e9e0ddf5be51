"""Held-out text that generations begin with."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

CODE = (".py",)
EVERYTHING = (".py", ".rst.txt")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Tokens of one file.

    Attributes:
        name: the file's path below the texts' folder.
        line: where the prompt begins, from 1; 0 = not at a line's beginning.
        tokens: its ids.
    """

    name: str
    line: int
    tokens: tuple[int, ...]


def read_texts(folder: Path, suffixes: tuple[str, ...]) -> dict[str, str]:
    """The held-out files, in order of their names."""
    paths = sorted(path for path in folder.rglob("*") if path.name.endswith(suffixes))
    return {path.relative_to(folder).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def pick_prompts(folder: Path, tokenizer: Any, num_prompts: int, num_tokens: int, seed: int) -> list[Prompt]:
    """Prompts of `num_tokens` tokens from line beginnings of held-out code, as many files as there are, in turn.

    Raises:
        ValueError: no file is long enough.
    """
    chance = random.Random(seed)
    texts = list(read_texts(folder, CODE).items())
    chance.shuffle(texts)
    prompts: list[Prompt] = []
    for name, text in _cycled(texts, num_prompts):
        starts = _starts(text, tokenizer, num_tokens)
        if starts:
            prompts.append(Prompt(name, *chance.choice(starts)))
    if not prompts:
        raise ValueError(f"no held-out file has {num_tokens} tokens")
    return prompts


def _cycled(texts: list[tuple[str, str]], count: int) -> Iterator[tuple[str, str]]:
    for index in range(count):
        yield texts[index % len(texts)]


def _starts(text: str, tokenizer: Any, num_tokens: int) -> list[tuple[int, tuple[int, ...]]]:
    """Every line that is followed by enough tokens: its number and the prompt from there."""
    encoding = tokenizer.encode(text)
    begins = {0} | {index + 1 for index, character in enumerate(text) if character == "\n"}
    found = []
    for index, (begin, _end) in enumerate(encoding.offsets):
        if begin in begins and index + num_tokens <= len(encoding.ids):
            found.append((text.count("\n", 0, begin) + 1, tuple(encoding.ids[index : index + num_tokens])))
    return found
