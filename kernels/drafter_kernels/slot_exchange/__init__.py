"""A round's inputs out of arena slots, copied and then checked, and its outputs back into them. No host looks at it."""

from drafter_kernels.slot_exchange.op import leave_slots, take_slots
from drafter_kernels.slot_exchange.reference import (
    NUM_MIRROR_WORDS,
    SlotMemory,
    SlotMirror,
    SlotOffsets,
    SlotWishes,
    StatusNumbers,
    TakenSlots,
    leave_slots_reference,
    take_slots_reference,
)

__all__ = [
    "NUM_MIRROR_WORDS",
    "SlotMemory",
    "SlotMirror",
    "SlotOffsets",
    "SlotWishes",
    "StatusNumbers",
    "TakenSlots",
    "leave_slots",
    "leave_slots_reference",
    "take_slots",
    "take_slots_reference",
]
