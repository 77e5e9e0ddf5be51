"""Memory shared with clients: the host arena, the socket that hands it over, and rows read from it with care."""

from drafter_service.memory.arena import HostArena, SlotOutputs
from drafter_service.memory.descriptors import DescriptorServer
from drafter_service.memory.layout import ArenaLayout, ArenaWish, lay_out

__all__ = ["ArenaLayout", "ArenaWish", "DescriptorServer", "HostArena", "SlotOutputs", "lay_out"]
