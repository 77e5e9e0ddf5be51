"""K/V of one sequence on scattered, poisoned pages, and the chain of drafts that a head makes over it."""

import math
from collections.abc import Iterator

import torch
from torch import Tensor

from drafter_kernels.paged_attention import paged_attention
from drafter_service.heads import MtpHead


class PlainKv:
    """Writer and reader of one sequence. Pages are NaN until written, and handed out from the last to the first."""

    def __init__(self, head: MtpHead, *, page_rows: int = 4, num_pages: int = 40) -> None:
        layout = head.kv_layout()
        shape = (num_pages, page_rows, layout.num_kv_heads, layout.head_dim)
        self._k = torch.full(shape, math.nan, dtype=layout.dtype)
        self._v = torch.full(shape, math.nan, dtype=layout.dtype)
        self._table = torch.arange(num_pages - 1, -1, -1)
        self.num_rows = 0

    def write(self, layer: int, k: Tensor, v: Tensor) -> None:
        assert layer == 0
        for page, slot, k_row, v_row in zip(*self._places(len(k)), k, v, strict=True):
            self._k[page, slot], self._v[page, slot] = k_row, v_row
        self.num_rows += len(k)

    def attend(self, layer: int, q: Tensor, scale: float) -> Tensor:
        assert layer == 0
        return paged_attention(q, self._k, self._v, self._table[None], torch.tensor([self.num_rows]), scale)

    def _places(self, count: int) -> tuple[Tensor, Tensor]:
        rows = torch.arange(self.num_rows, self.num_rows + count)
        return self._table[rows // self._k.shape[1]], rows % self._k.shape[1]


def draft_steps(head: MtpHead, tokens: Tensor, hiddens: Tensor, keys: Tensor, num_drafts: int) -> Iterator[Tensor]:
    """The logits [vocab_size] of each draft, chained over the pairs given."""
    kv = PlainKv(head)
    x, key = head.absorb(tokens, hiddens, keys, kv)[-1:], keys[-1:]
    for _ in range(num_drafts):
        output = head.finish(x, key, kv)
        yield output.logits[0]
        key = key + 1
        x = head.absorb(output.logits.argmax(-1), output.recycle, key, kv)
