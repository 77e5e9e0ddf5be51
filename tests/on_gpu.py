"""Where the tests that need a GPU have the service draft; their clients are on the first GPU."""

import os

DRAFTER_DEVICE = os.environ.get("SPECDRAFT_TEST_DRAFTER_DEVICE", "cuda:0")
"""Torch's name of the drafter's GPU. `cuda:1`: another GPU than the target's, on a machine with two."""
