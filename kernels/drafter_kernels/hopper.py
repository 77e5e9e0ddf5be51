"""Where kernels in Gluon for Hopper run."""

from __future__ import annotations

from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Final

import torch

from drafter_kernels.dispatch import is_interpreted

HOPPER_MULTIPROCESSORS: Final = 132
"""Of an H200, and of what kernels are compiled for where no GPU is."""

# Gluon promises nothing from one version of Triton to the next.
_TRITON_OF_GLUON: Final = "3.6."


@cache
def hopper_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a Hopper GPU; 0 where its kernels do not run.

    Compiled kernels of tensors on a CPU are never launched, only looked at: those are Hopper's.
    """
    try:
        has_gluon = version("triton").startswith(_TRITON_OF_GLUON)
    except PackageNotFoundError:
        has_gluon = False
    if is_interpreted() or not has_gluon:
        return 0
    if device.type != "cuda":
        return HOPPER_MULTIPROCESSORS
    properties = torch.cuda.get_device_properties(device)
    return int(properties.multi_processor_count) if properties.major == 9 else 0
