"""The LM head as it is used: rounded to what was asked for, once, at load."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.quantize import (
    dequantize_fp8,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    quantize_fp8,
    quantize_nvfp4,
)
from drafter_service.heads.levers import LmHeadPrecision

# Rows widened to float32 at a time: a whole table would be gigabytes.
_CHUNK_ROWS: Final = 16384


@dataclass(frozen=True)
class LmHead:
    """`table` [rows, hidden_size] is what the logits are made with.

    `relative_error` is its Frobenius distance from the table as stored, as a part of that table's norm.
    """

    table: Tensor
    relative_error: float


def make_lm_head(stored: Tensor, precision: LmHeadPrecision, dtype: torch.dtype) -> LmHead:
    """Rounds a stored table [rows, hidden_size] for a head that computes in dtype, on the table's device.

    What was rounded to fewer bits is widened to dtype again: plain PyTorch has no product with anything narrower.
    """
    used = torch.float32 if precision is LmHeadPrecision.FLOAT32 else dtype
    is_rounded = precision not in {LmHeadPrecision.AS_STORED, LmHeadPrecision.FLOAT32}
    if not is_rounded and torch.promote_types(stored.dtype, used) == used:
        return LmHead(stored.to(used), 0.0)
    scale = _tensor_scale(stored) if precision is LmHeadPrecision.NVFP4 else None
    table = torch.empty_like(stored, dtype=used)
    difference = norm = 0.0
    for begin in range(0, len(stored), _CHUNK_ROWS):
        rows = stored[begin : begin + _CHUNK_ROWS]
        part = table[begin : begin + _CHUNK_ROWS]
        part.copy_(_rounded(rows, precision, scale))
        difference += float((part.float() - rows.float()).square().sum())
        norm += float(rows.float().square().sum())
    return LmHead(table, (difference / norm) ** 0.5 if norm else 0.0)


def _rounded(rows: Tensor, precision: LmHeadPrecision, scale: Tensor | None) -> Tensor:
    match precision:
        case LmHeadPrecision.NVFP4:
            return dequantize_nvfp4(quantize_nvfp4(rows, scale))
        case LmHeadPrecision.FP8:
            return dequantize_fp8(quantize_fp8(rows))
        case LmHeadPrecision.BF16:
            return rows.to(torch.bfloat16)
        case _:
            return rows


def _tensor_scale(stored: Tensor) -> Tensor:
    """The scale of all rows, which is the largest of the parts'."""
    return torch.stack([nvfp4_tensor_scale(rows) for rows in stored.split(_CHUNK_ROWS)]).max()
