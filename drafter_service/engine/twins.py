"""Small tensors that lie together on the device, and again on the host: one copy moves all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16

INLINE_BYTES_MAX: Final = 4096
"""So much the driver takes from pageable memory into the command stream itself: no copy engine is waited for."""

# As Python writes single elements; a boolean is a byte.
_FORMATS: Final = {
    torch.int64: "q",
    torch.int32: "i",
    torch.float32: "f",
    torch.bool: "B",
}

Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class HostTwin:
    """The tensors once more, in host memory.

    Args:
        memory: all of it, uint8.
        tensors: by name, over that memory.

    Attributes:
        memory: as given.
        tensors: as given.
        views: the same, flat: writing a few numbers through them takes no tensor operation.
    """

    def __init__(self, memory: Tensor, tensors: Mapping[str, Tensor]) -> None:
        self.memory = memory
        self.tensors = tensors
        self.views: Mapping[str, Any] = {name: _view(tensor) for name, tensor in tensors.items()}


class Twins:
    """Named tensors in one piece of memory on a device, zeros at first.

    Args:
        sizes: element type and shape of each.
        device: where.

    Attributes:
        device: the tensors by name.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        self._sizes = sizes
        self._is_pinned = device.type == "cuda"
        self._begins, end = {}, 0
        for name, (dtype, shape) in sizes.items():
            self._begins[name] = end
            size = dtype.itemsize * torch.Size(shape).numel()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self.device = self._carved(self._device)

    def new_host(self, *, for_reading: bool = False) -> HostTwin:
        """Their like in host memory, zeros at first; pinned for a GPU, unless little goes there and none comes back."""
        is_pinned = self._is_pinned and (for_reading or len(self._device) > INLINE_BYTES_MAX)
        memory = torch.zeros(len(self._device), dtype=torch.uint8, pin_memory=is_pinned)
        return HostTwin(memory, self._carved(memory))

    def to_device(self, host: HostTwin) -> None:
        """Copies host to device on the current stream, and waits for nothing. Once that is done host may change."""
        self._device.copy_(host.memory, non_blocking=True)

    def start_to_host(self, host: HostTwin) -> None:
        """Copies device to host on the current stream, and waits for nothing."""
        host.memory.copy_(self._device, non_blocking=True)

    def to_host(self, host: HostTwin) -> None:
        """Copies device to host, and waits for it."""
        host.memory.copy_(self._device)

    def _carved(self, memory: Tensor) -> dict[str, Tensor]:
        carved = {}
        for name, (dtype, shape) in self._sizes.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            begin = self._begins[name]
            carved[name] = memory[begin : begin + size].view(dtype).view(shape)
        return carved


def _view(tensor: Tensor) -> Any:
    """A memoryview of a tensor's elements in host memory. It must not outlive the tensor."""
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    elements: Any = memoryview(memory).cast("B")
    return elements.cast(_FORMATS[tensor.dtype])
