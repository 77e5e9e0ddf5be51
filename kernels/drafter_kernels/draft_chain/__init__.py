"""A batch of draft chains between forwards: what was drafted, who goes on, and where rows go. No host looks at it."""

from drafter_kernels.draft_chain.op import begin_chains, extend_chains
from drafter_kernels.draft_chain.reference import (
    ChainPairs,
    ChainState,
    ChainStops,
    ChainWishes,
    begin_chains_reference,
    extend_chains_reference,
)

__all__ = [
    "ChainPairs",
    "ChainState",
    "ChainStops",
    "ChainWishes",
    "begin_chains",
    "begin_chains_reference",
    "extend_chains",
    "extend_chains_reference",
]
