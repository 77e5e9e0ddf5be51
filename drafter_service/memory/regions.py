"""Regions: memory that a client exported, opened here for reading."""

from __future__ import annotations

import secrets
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from drafter_service.memory.device_view import bytes_at, rows_of
from drafter_service.memory.hiddens import DTYPES, checked_rows
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.memory.mappings import Mapping, Mappings, check_range

if TYPE_CHECKING:
    from torch import Tensor

REGION_ID_BYTES = 16


@dataclass(frozen=True, slots=True)
class RegionWish:
    """A registration, as asked for; sizes in bytes.

    Attributes:
        handle: the IPC handle of the allocation: a secret, and no part of any text.
        allocation_size: of the whole allocation.
        offset: of the region from the allocation's base; a handle always opens the base.
        length: of the region.
    """

    handle: bytes
    allocation_size: int
    offset: int
    length: int

    def __repr__(self) -> str:
        return f"RegionWish(allocation_size={self.allocation_size}, offset={self.offset}, length={self.length})"


@dataclass(slots=True)
class _Region:
    wish: RegionWish
    mapping: Mapping
    memory: Tensor
    num_readers: int = 0
    is_ending: bool = False


class RegionTable:
    """The regions of one session.

    A region's id is random and carries the generation of its mapping: memory that was freed and allocated again can
    have the same handle, and never the same id.

    Args:
        mappings: opens allocations, once for the whole service.
        device: torch's name of the GPU.
        limit: most regions.
    """

    def __init__(self, mappings: Mappings, device: torch.device, limit: int) -> None:
        self._mappings = mappings
        self._device = device
        self._limit = limit
        self._changed = threading.Condition()
        self._regions: dict[bytes, _Region] = {}
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._regions)

    def register(self, wish: RegionWish) -> bytes:
        """Opens a region; returns its id.

        Raises:
            REGIONS_EXHAUSTED, MEMORY_OUT_OF_BOUNDS, MEMORY_NOT_SHAREABLE, SAME_PID, DEVICE_LOST.
        """
        check_range(wish.allocation_size, wish.offset, wish.length)
        with self._changed:
            self._check_room()
        mapping = self._mappings.open(wish.handle, wish.allocation_size)
        try:
            check_range(mapping.size, wish.offset, wish.length)
            memory = bytes_at(mapping.base + wish.offset, wish.length, self._device)
            region_id = secrets.token_bytes(REGION_ID_BYTES - 4) + mapping.generation.to_bytes(4, "little")
            with self._changed:
                self._check_room()
                self._regions[region_id] = _Region(wish, mapping, memory)
        except BaseException:
            self._mappings.close(wish.handle)
            raise
        return region_id

    def unregister(self, region_id: bytes, timeout_s: float) -> None:
        """Closes a region once nobody reads it any more. Raises REGION_UNKNOWN, TIMEOUT."""
        with self._changed:
            region = self._find(region_id)
            region.is_ending = True
            if not self._changed.wait_for(lambda: region.num_readers == 0, timeout_s):
                region.is_ending = False
                raise make_error(Reason.TIMEOUT, "the region is still being read")
            del self._regions[region_id]
        self._mappings.close(region.wish.handle)

    def hidden_rows(
        self, region_id: bytes, offset: int, num_rows: int, *, dtype: str, head_dtype: str, width: int, stride: int = 0
    ) -> Tensor:
        """A private, checked copy of hidden rows [num_rows, width] on the device.

        Args:
            region_id: where they are.
            offset: of the first row from the region's start, in bytes.
            num_rows: rows, at least one.
            dtype: of the elements.
            head_dtype: what they are converted to.
            width: elements of a row.
            stride: distance of two rows in bytes; 0 = dense.

        Raises:
            REGION_UNKNOWN, MEMORY_OUT_OF_BOUNDS, HIDDEN_NOT_FINITE.
        """
        item_bytes = DTYPES[dtype].itemsize
        row_bytes = width * item_bytes
        stride = stride or row_bytes
        with self._reading(region_id) as region:
            check_range(region.wish.length, offset, (num_rows - 1) * stride + row_bytes)
            if stride < row_bytes:
                raise _unusable("row_stride_bytes", stride, row_bytes)
            # The peer may write meanwhile; from here on only the copy is looked at.
            copied = rows_of(region.memory, offset, stride, num_rows, row_bytes).clone(
                memory_format=torch.contiguous_format
            )
            return checked_rows(copied.view(DTYPES[dtype]), head_dtype)

    def close(self) -> None:
        """Closes all regions, when the session ends. Safe to call twice."""
        with self._changed:
            self._is_closed = True
            regions = list(self._regions.values())
            self._changed.wait_for(lambda: not any(region.num_readers for region in regions))
            self._regions.clear()
        for region in regions:
            self._mappings.close(region.wish.handle)

    @contextmanager
    def _reading(self, region_id: bytes) -> Iterator[_Region]:
        with self._changed:
            region = self._find(region_id)
            region.num_readers += 1
        try:
            yield region
        finally:
            with self._changed:
                region.num_readers -= 1
                self._changed.notify_all()

    def _find(self, region_id: bytes) -> _Region:
        region = self._regions.get(region_id)
        if region is None or region.is_ending:
            raise make_error(Reason.REGION_UNKNOWN, "the session has no such region")
        return region

    def _check_room(self) -> None:
        if self._is_closed:
            raise make_error(Reason.SESSION_UNKNOWN, "the session has ended")
        if len(self._regions) >= self._limit:
            raise make_error(
                Reason.REGIONS_EXHAUSTED,
                f"the session has {self._limit} regions, which is the limit",
                retry_delay_ms=1000,
                limit=self._limit,
            )


def _unusable(field: str, value: int, limit: int) -> SpecdraftError:
    return make_error(
        Reason.MEMORY_OUT_OF_BOUNDS, f"{field} {value} is below {limit}", field=field, value=value, limit=limit
    )
