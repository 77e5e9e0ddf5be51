"""Colours on a terminal, and marks elsewhere."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import groupby
from typing import Any, TextIO

from specdraft.integrations.transformers import RoundRecord

_RESET = "\x1b[0m"


class Ink(Enum):
    """What a piece of text is; the value is its colour."""

    PROMPT = "\x1b[2m"
    FIRST = "\x1b[1m"
    ACCEPTED = "\x1b[32m"
    CORRECTION = "\x1b[31;4m"  # underlined too: red and green look alike to many
    BONUS = "\x1b[36m"
    TITLE = "\x1b[1;4m"


MARKS = {
    Ink.FIRST: ("<|>", ""),
    Ink.ACCEPTED: ("[+", "+]"),
    Ink.CORRECTION: ("{!", "!}"),
    Ink.BONUS: ("(*", "*)"),
}
"""What stands for a colour: pairs that Python source, which is what they are put around, has no use for."""


class Painter:
    """Says what a piece of text is.

    Args:
        in_color: False puts marks around it instead.
    """

    def __init__(self, *, in_color: bool) -> None:
        self.in_color = in_color

    def paint(self, text: str, ink: Ink) -> str:
        """The text in a colour, line by line, so that pagers keep it; or in its marks, if it has some."""
        if not self.in_color:
            before, after = MARKS.get(ink, ("", ""))
            return f"{before}{text}{after}"
        return "\n".join(f"{ink.value}{line}{_RESET}" if line else line for line in text.split("\n"))


def wants_color(choice: str, stream: TextIO, environment: Mapping[str, str]) -> bool:
    """Whether to colour. "auto": on a terminal, unless NO_COLOR is set to anything (no-color.org) or TERM is dumb."""
    if choice != "auto":
        return choice == "always"
    return stream.isatty() and not environment.get("NO_COLOR") and environment.get("TERM") != "dumb"


def inks(records: list[RoundRecord]) -> Iterator[tuple[int, Ink]]:
    """Every generated token and what it is. The last of a round is a bonus if all drafts were accepted."""
    for number, record in enumerate(records):
        for index, token in enumerate(record.tokens):
            if number == 0:
                yield token, Ink.FIRST
            elif index < record.num_accepted:
                yield token, Ink.ACCEPTED
            elif record.num_accepted < len(record.drafts):
                yield token, Ink.CORRECTION
            else:
                yield token, Ink.BONUS


def paint_generation(records: list[RoundRecord], tokenizer: Any, painter: Painter) -> str:
    """The generated text, each token in the colour or the marks of what it is."""
    pieces = []
    for ink, run in groupby(inks(records), key=lambda pair: pair[1]):
        text: str = tokenizer.decode([token for token, _ in run], skip_special_tokens=False)
        pieces.append(painter.paint(text, ink))
    return "".join(pieces)
