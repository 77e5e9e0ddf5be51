"""Small tensors that lie together on the device, and once more on the host: one copy moves all of them."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping
from typing import Any, Final

import torch
from torch import Tensor

_ALIGNMENT: Final = 16

# As Python writes single elements; a boolean is a byte.
_FORMATS: Final = {
    torch.int64: "q",
    torch.int32: "i",
    torch.float32: "f",
    torch.bool: "B",
}

Sizes = Mapping[str, tuple[torch.dtype, tuple[int, ...]]]


class Twins:
    """Named tensors in one piece of memory on a device, with their twins in (pinned) host memory.

    Args:
        sizes: element type and shape of each.
        device: where.

    Attributes:
        device: the tensors on the device, by name, zeros at first.
        host: their twins, zeros at first.
        views: the twins' memory, flat: writing a few numbers through it takes no tensor operation.
    """

    def __init__(self, sizes: Sizes, device: torch.device) -> None:
        ends, end = {}, 0
        for name, (dtype, shape) in sizes.items():
            ends[name] = end
            size = dtype.itemsize * torch.Size(shape).numel()
            end += -(-size // _ALIGNMENT) * _ALIGNMENT
        self._device = torch.zeros(end, dtype=torch.uint8, device=device)
        self._host = torch.zeros(end, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self.device = self._carved(self._device, sizes, ends)
        self.host = self._carved(self._host, sizes, ends)
        self.views: dict[str, Any] = {name: _view(tensor) for name, tensor in self.host.items()}

    @staticmethod
    def _carved(memory: Tensor, sizes: Sizes, begins: Mapping[str, int]) -> dict[str, Tensor]:
        carved = {}
        for name, (dtype, shape) in sizes.items():
            size = dtype.itemsize * torch.Size(shape).numel()
            carved[name] = memory[begins[name] : begins[name] + size].view(dtype).view(shape)
        return carved

    def to_device(self) -> None:
        """Copies host to device on the current stream. The host's part may change once that is done."""
        self._device.copy_(self._host, non_blocking=True)

    def to_host(self) -> None:
        """Copies device to host, and waits for it."""
        self._host.copy_(self._device)


def _view(tensor: Tensor) -> Any:
    """A memoryview of a tensor's elements in host memory. It must not outlive the tensor."""
    memory: Any = (ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())
    elements: Any = memoryview(memory).cast("B")
    return elements.cast(_FORMATS[tensor.dtype])
