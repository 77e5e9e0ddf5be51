"""Catch-up: pairs become K/V rows by embedding, norms, join, k and v alone."""

from drafter_kernels.absorb.op import AbsorbWorkspace, absorb
from drafter_kernels.absorb.reference import AbsorbWeights, absorb_reference

__all__ = ["AbsorbWeights", "AbsorbWorkspace", "absorb", "absorb_reference"]
