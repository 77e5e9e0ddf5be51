"""What flags may be: parsers for argparse, whose errors name the range."""

from __future__ import annotations

import argparse
from collections.abc import Callable

from drafter_service.config import TIME_MAX_S


def count(least: int, most: int) -> Callable[[str], int]:
    """A parser of whole numbers from `least` to `most`, for argparse."""

    def parse(text: str) -> int:
        try:
            number = int(text)
        except ValueError:
            number = least - 1
        if not least <= number <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is no whole number from {least} to {most}")
        return number

    return parse


def seconds(text: str) -> float:
    """A parser of times, for argparse."""
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if not 0 < seconds <= TIME_MAX_S:
        raise argparse.ArgumentTypeError(f"{text!r} is no time above 0 s")
    return seconds
