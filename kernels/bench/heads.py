"""The head that is measured: its size, random weights of it in every format, and its byte floor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.qk_rope_write import HeadShape
from drafter_kernels.quantize import Fp8Weight, PackedNvfp4, pack_nvfp4, quantize_fp8, quantize_nvfp4
from drafter_kernels.quantize.reference import nvfp4_tensor_scale

CHUNK_ROWS: Final = 16384


@dataclass(frozen=True)
class HeadSize:
    """A dense MTP head."""

    hidden: int
    vocab: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rotary: int
    ffn: int
    draft_vocab: int
    page_rows: int

    @property
    def shape(self) -> HeadShape:
        """Of the projection of queries, gates, keys and values."""
        return HeadShape(self.num_heads, self.num_kv_heads, self.head_dim, gated=True)


# Width, vocabulary and FFN of the head whose floors are known; the projections' sizes follow from its bytes.
DENSE: Final = HeadSize(4096, 248_320, 16, 4, 256, 64, 11_008, 65_536, 64)
TOY: Final = HeadSize(32, 96, 2, 1, 16, 8, 48, 64, 4)

# Name -> (rows, columns) of the projections of a draft forward.
PROJECTIONS: Final = ("fc", "qkv", "o", "gate_up", "down")


def projection_shape(size: HeadSize, name: str) -> tuple[int, int]:
    """N and K."""
    return {
        "fc": (size.hidden, 2 * size.hidden),
        "qkv": (size.shape.width, size.hidden),
        "q": (size.shape.query_width, size.hidden),
        "kv": (size.shape.width - size.shape.query_width, size.hidden),
        "o": (size.hidden, size.num_heads * size.head_dim),
        "gate_up": (2 * size.ffn, size.hidden),
        "down": (size.hidden, size.ffn),
        "lm_head": (size.vocab, size.hidden),
        "lm_head_cut": (size.draft_vocab, size.hidden),
    }[name]


class Weights:
    """Makes weights where and how they are wanted: random numbers, or memory as it comes if nothing is computed."""

    def __init__(self, device: torch.device, *, empty: bool = False, seed: int = 0) -> None:
        self.device = device
        self.empty = empty
        self._generator = torch.Generator(device).manual_seed(seed)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype = torch.bfloat16) -> Tensor:
        """Normal numbers."""
        values = torch.empty(shape, dtype=dtype, device=self.device)
        if not self.empty:
            for part in values.view(-1, shape[-1]).split(CHUNK_ROWS):
                part.copy_(torch.randn(part.shape, generator=self._generator, device=self.device) * scale)
        return values

    def matrix(self, rows: int, columns: int, kind: str) -> Tensor | Fp8Weight | PackedNvfp4:
        """A weight whose products with normal numbers are normal."""
        weight = self.normal(rows, columns, scale=columns**-0.5)
        return self.convert(weight, kind)

    def convert(self, weight: Tensor, kind: str) -> Tensor | Fp8Weight | PackedNvfp4:
        """A bf16 weight as `bf16`, `fp8` or `nvfp4`, some rows at a time."""
        if kind == "bf16":
            return weight
        if self.empty:
            return self._empty(*weight.shape, kind=kind)
        parts = weight.split(CHUNK_ROWS)
        if kind == "fp8":
            eights = [quantize_fp8(part) for part in parts]
            values = torch.cat([part.values.view(torch.uint8) for part in eights]).view(torch.float8_e4m3fn)
            return Fp8Weight(values, torch.cat([part.row_scales for part in eights]))
        scale = torch.stack([nvfp4_tensor_scale(part) for part in parts]).max()
        fours = [pack_nvfp4(quantize_nvfp4(part, scale)) for part in parts]
        scales = torch.cat([part.block_scales.view(torch.uint8) for part in fours]).view(torch.float8_e4m3fn)
        return PackedNvfp4(torch.cat([part.words for part in fours]), scales, scale.reshape(1))

    def _empty(self, rows: int, columns: int, *, kind: str) -> Fp8Weight | PackedNvfp4:
        if kind == "fp8":
            values = torch.empty(rows, columns, dtype=torch.float8_e4m3fn, device=self.device)
            return Fp8Weight(values, torch.empty(rows, device=self.device))
        words = torch.empty(rows, columns // 8, dtype=torch.int32, device=self.device)
        scales = torch.empty(rows, columns // 16, dtype=torch.float8_e4m3fn, device=self.device)
        return PackedNvfp4(words, scales, torch.empty(1, device=self.device))


def num_bytes(weight: Tensor | Fp8Weight | PackedNvfp4) -> int:
    """Stored."""
    return weight.nbytes if isinstance(weight, Tensor) else weight.num_bytes
