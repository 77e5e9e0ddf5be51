"""Flags of the benchmarks that need a GPU. Imports no torch: they are read before the command is known."""

from __future__ import annotations

import argparse

from drafter_service.arguments import count, seconds

MODES = ("timesliced", "mps", "peer")
DEFAULT_MODES = ("timesliced", "mps")


def add_tax_flags(tax: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench tax`."""
    tax.add_argument(
        "--modes",
        nargs="+",
        choices=MODES,
        default=DEFAULT_MODES,
        help="how the two share a GPU: in turns, or under an MPS daemon of its own (default timesliced mps); peer, "
        "never by default: a second GPU for the drafter",
    )
    tax.add_argument(
        "--drafter-device",
        type=count(1, 63),
        help="the drafter's GPU, the target's being 0; measures the mode peer alone (default there 1)",
    )
    tax.add_argument(
        "--verify-ms", type=seconds, nargs="+", default=(2.0, 6.0, 12.0), help="lengths of the verify (default 2 6 12)"
    )
    tax.add_argument(
        "--steps", type=count(1, 10_000), default=200, help="steps of each kind in a turn (default %(default)s)"
    )
    tax.add_argument("--turns", type=count(1, 100), default=5, help="alternating turns (default %(default)s)")
    tax.add_argument(
        "--checks",
        type=count(0, 1_000_000),
        default=0,
        help="check what so many early rounds read (default: 48 of each verify)",
    )
    _add_sizes(tax)


def add_step_flags(step: argparse.ArgumentParser) -> None:
    """Adds the flags of `bench step`."""
    step.add_argument(
        "--batches",
        type=count(1, 1024),
        nargs="+",
        default=(1, 2, 4, 8, 16, 32, 64),
        help="entries of a Propose (default 1 2 4 8 16 32 64)",
    )
    step.add_argument("--drafts", type=count(1, 64), nargs="+", default=(1, 4, 8), help="K (default 1 4 8)")
    step.add_argument(
        "--steps", type=count(1, 10_000), default=50, help="timed runs of each case (default %(default)s)"
    )
    _add_sizes(step)


def _add_sizes(kind: argparse.ArgumentParser) -> None:
    kind.add_argument(
        "--vocab-size", type=count(0, 1 << 20), default=0, help="of the head; 0 = 151,936 (default %(default)s)"
    )
    kind.add_argument("--dry", action="store_true", help="without a GPU, at toy size: the figures mean nothing")
