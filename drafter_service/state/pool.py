"""The KV pool: the memory behind the pages."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class PoolShape:
    """What a page holds.

    Attributes:
        num_layers: decoder layers of the head.
        page_rows: rows in a page.
        num_kv_heads: key/value heads.
        head_dim: elements of one head.
        dtype: element type.
    """

    num_layers: int
    page_rows: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def page_bytes(self) -> int:
        """Bytes of one page, keys and values of all layers."""
        elements = self.num_layers * 2 * self.page_rows * self.num_kv_heads * self.head_dim
        return elements * self.dtype.itemsize


class KvPool:
    """Keys and values of every page: per layer two tensors [num_pages + 1, page_rows, num_kv_heads, head_dim].

    A **slot** here is page * page_rows + row within the page.
    """

    def __init__(self, shape: PoolShape, num_pages: int, device: torch.device) -> None:
        self.shape = shape
        self.num_pages = num_pages
        # One page more, of nobody's: rows that only pad a batch are written there.
        self.spare_page = num_pages
        size = (shape.num_layers, num_pages + 1, shape.page_rows, shape.num_kv_heads, shape.head_dim)
        self._keys = torch.zeros(size, dtype=shape.dtype, device=device)
        self._values = torch.zeros(size, dtype=shape.dtype, device=device)

    def pages(self, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of one layer."""
        return self._keys[layer], self._values[layer]

    def write(self, layer: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Stores rows: slots int64 [N]; keys, values [N, num_kv_heads, head_dim]."""
        self._rows(self._keys, layer).index_copy_(0, slots, keys.to(self.shape.dtype))
        self._rows(self._values, layer).index_copy_(0, slots, values.to(self.shape.dtype))

    def copy_page(self, source: int, destination: int) -> None:
        """Copies all rows of a page."""
        for store in (self._keys, self._values):
            store[:, destination] = store[:, source]

    def read(self, slots: Tensor) -> Tensor:
        """A copy of rows: slots int64 [N] -> [2, num_layers, N, num_kv_heads, head_dim]."""
        both = (self._keys, self._values)
        return torch.stack([store.flatten(1, 2).index_select(1, slots) for store in both])

    def restore(self, slots: Tensor, saved: Tensor) -> None:
        """Puts back what `read` returned for the same slots."""
        for store, rows in zip((self._keys, self._values), saved, strict=True):
            store.flatten(1, 2).index_copy_(1, slots, rows)

    def poison(self, pages: Iterable[int], value: float = float("nan")) -> None:
        """Fills pages with `value`. For tests: nobody may ever read a page that it did not write."""
        for page in pages:
            self._keys[:, page] = value
            self._values[:, page] = value

    def _rows(self, store: Tensor, layer: int) -> Tensor:
        return store[layer].flatten(0, 1)
