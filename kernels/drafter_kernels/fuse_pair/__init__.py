"""A pair becomes the input of a head: embedding, two norms and their joining in one pass."""

from drafter_kernels.fuse_pair.op import fuse_pair
from drafter_kernels.fuse_pair.reference import PairNorms, fuse_pair_reference

__all__ = ["PairNorms", "fuse_pair", "fuse_pair_reference"]
