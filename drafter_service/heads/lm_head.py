"""The LM head as it is used: rounded to what was asked for, once, at load."""

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.lm_head import LmHeadWeight
from drafter_kernels.quantize import (
    Fp8Weight,
    PackedNvfp4,
    dequantize_fp8,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    pack_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
)
from drafter_service.heads.levers import LmHeadPrecision

# Rows widened to float32 at a time: a whole table would be gigabytes.
_CHUNK_ROWS: Final = 16384
_EIGHT_BITS: Final = torch.float8_e4m3fn


@dataclass(frozen=True)
class LmHead:
    """`table` [rows, hidden_size] is what the logits are made with.

    `relative_error` is its Frobenius distance from the table as stored, as a part of that table's norm.
    """

    table: LmHeadWeight
    relative_error: float


def make_lm_head(
    stored: Tensor,
    precision: LmHeadPrecision,
    dtype: torch.dtype,
    device: torch.device | None = None,
    *,
    packed: bool = False,
) -> LmHead:
    """Rounds a stored table [rows, hidden_size] for a head that computes in dtype, onto a device (None = its own).

    What is rounded to fewer bits stays `packed` for kernels, or is widened to dtype again: plain PyTorch has no
    product with anything narrower.
    """
    device = device or stored.device
    used = torch.float32 if precision is LmHeadPrecision.FLOAT32 else dtype
    is_rounded = precision not in {LmHeadPrecision.AS_STORED, LmHeadPrecision.FLOAT32}
    if not is_rounded and torch.promote_types(stored.dtype, used) == used:
        return LmHead(stored.to(device=device, dtype=used), 0.0)
    rounded = _Rounded(stored, precision, used, device, packed=packed)
    difference = norm = 0.0
    for begin in range(0, len(stored), _CHUNK_ROWS):
        rows = stored[begin : begin + _CHUNK_ROWS].to(device)
        numbers = rounded.put(begin, rows)
        difference += float((numbers.float() - rows.float()).square().sum())
        norm += float(rows.float().square().sum())
    return LmHead(rounded.table, (difference / norm) ** 0.5 if norm else 0.0)


class _Rounded:
    """The rounded table as it is filled, some rows at a time."""

    def __init__(
        self, stored: Tensor, precision: LmHeadPrecision, used: torch.dtype, device: torch.device, *, packed: bool
    ) -> None:
        self._precision = precision
        self._scale = _tensor_scale(stored, device) if precision is LmHeadPrecision.NVFP4 else None
        rows, columns = stored.shape
        self.table: LmHeadWeight
        if packed and self._scale is not None:
            words = torch.empty(rows, columns // 8, dtype=torch.int32, device=device)
            scales = torch.empty(rows, columns // 16, dtype=torch.uint8, device=device).view(_EIGHT_BITS)
            self.table = PackedNvfp4(words, scales, self._scale.reshape(1))
        elif packed and precision is LmHeadPrecision.FP8:
            values = torch.empty(rows, columns, dtype=torch.uint8, device=device).view(_EIGHT_BITS)
            self.table = Fp8Weight(values, torch.empty(rows, device=device))
        else:
            self.table = torch.empty(rows, columns, dtype=used, device=device)

    def put(self, begin: int, rows: Tensor) -> Tensor:
        """Takes rows from `begin` on; returns the numbers that they have become."""
        part = slice(begin, begin + len(rows))
        numbers: Tensor
        match self._precision:
            case LmHeadPrecision.NVFP4:
                four = quantize_nvfp4(rows, self._scale)
                numbers = dequantize_nvfp4(four)
                if isinstance(self.table, PackedNvfp4):
                    made = pack_nvfp4(four)
                    self.table.words[part] = made.words
                    self.table.block_scales.view(torch.uint8)[part] = made.block_scales.view(torch.uint8)
            case LmHeadPrecision.FP8:
                eight = quantize_fp8(rows)
                numbers = dequantize_fp8(eight)
                if isinstance(self.table, Fp8Weight):
                    self.table.values.view(torch.uint8)[part] = eight.values.view(torch.uint8)
                    self.table.row_scales[part] = eight.row_scales
            case LmHeadPrecision.BF16:
                numbers = rows.to(torch.bfloat16)
            case _:
                numbers = rows
        if isinstance(self.table, Tensor):
            self.table[part].copy_(numbers)
            numbers = self.table[part]
        return numbers


def _tensor_scale(stored: Tensor, device: torch.device) -> Tensor:
    """The scale of all rows, which is the largest of the parts'."""
    return torch.stack([nvfp4_tensor_scale(rows.to(device)) for rows in stored.split(_CHUNK_ROWS)]).max()
