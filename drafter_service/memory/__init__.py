"""Memory shared with clients: arenas in host and GPU memory, regions, lanes, and rows read with care."""

from drafter_service.memory.arena import HostArena, SlotOutputs
from drafter_service.memory.cuda_arena import CudaArena
from drafter_service.memory.descriptors import DescriptorServer
from drafter_service.memory.layout import ArenaLayout, ArenaWish, lay_out

__all__ = [
    "ArenaLayout",
    "ArenaWish",
    "CudaArena",
    "DescriptorServer",
    "HostArena",
    "SharedArena",
    "SlotOutputs",
    "lay_out",
]

SharedArena = HostArena | CudaArena
"""An arena of either kind; also for isinstance."""
