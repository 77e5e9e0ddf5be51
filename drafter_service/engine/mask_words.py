"""Grammar masks as kernels read them: 32 ids a word."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

# Moves the lowest bits of 8 bytes into the highest byte, in order.
_GATHER: Final = 0x0102040810204080


def pack_masks(masks: Tensor) -> Tensor:
    """bool [n, V] on the host as int32 [n, ceil(V / 32)]: bit id % 32 of word id // 32 is set where id is allowed."""
    rows, vocab_size = masks.shape
    padded = torch.nn.functional.pad(masks, (0, -vocab_size % 32)).contiguous()
    eights = padded.view(torch.int64) * _GATHER >> 56 & 255
    return eights.to(torch.uint8).view(torch.int32).view(rows, -1)


def unpack_masks(words: Tensor, vocab_size: int) -> Tensor:
    """What `pack_masks` was given, on the words' device."""
    bits = words[:, :, None] >> torch.arange(32, dtype=torch.int32, device=words.device) & 1
    return bits.flatten(1)[:, :vocab_size].bool()
