"""Taking from arena slots and leaving in them, as it is called."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any, Final

import torch
from torch import Tensor

from drafter_kernels.dispatch import Backend, check_shape, check_tensor, launch_options, next_power_of_2, uses_triton
from drafter_kernels.draft_chain import ChainState
from drafter_kernels.slot_exchange.reference import (
    NUM_MIRROR_WORDS,
    SlotMemory,
    SlotMirror,
    SlotWishes,
    StatusNumbers,
    TakenSlots,
    leave_slots_reference,
    take_slots_reference,
)

_BLOCK: Final = 1024

# What the check is given, in its order.
_CHECKED: Final = (
    *("slot", "state_index", "is_real", "is_told", "told", "planned", "max_keys", "num_rows_max"),
    *("status", "is_live", "is_limited", "first_key", "pair_count", "row_begin", "num_drafts", "tokens"),
    *("is_finite", "may_run"),
)


def take_slots(
    memory: SlotMemory,
    wishes: SlotWishes,
    taken: TakenSlots,
    vocab_size: int,
    numbers: StatusNumbers,
    *,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Copies what the slots of B entries hold, each byte read once, and checks the copy.

    Whoever writes to a slot meanwhile changes what is copied, and nothing that was checked. Writes all of `taken`.
    Raises ValueError naming what does not fit.
    """
    _check(memory, wishes, len(taken.hiddens))
    check_shape("taken.tokens", taken.tokens, *taken.hiddens.shape[:2])
    if not uses_triton(memory.arena, backend):
        found = take_slots_reference(memory, wishes, taken.hiddens, vocab_size, numbers)
        for each in fields(TakenSlots):
            getattr(taken, each.name).copy_(getattr(found, each.name))
        return
    _launch_taking(memory, wishes, taken, vocab_size, numbers, launch_options(overlaps=overlaps))


def _launch_taking(  # noqa: PLR0917  # in the order of the call
    memory: SlotMemory,
    wishes: SlotWishes,
    taken: TakenSlots,
    vocab_size: int,
    numbers: StatusNumbers,
    options: dict[str, Any],
) -> None:
    from drafter_kernels.slot_exchange import kernel

    views, offsets, item = _Views(memory), memory.offsets, memory.dtype.itemsize
    batch, pairs, width = taken.hiddens.shape
    part = _parts(taken) | _parts(wishes)
    kernel.take_rows_kernel[(batch * pairs,)](
        views.of(memory.dtype),
        *(wishes.slot, memory.fence, memory.ready, wishes.ticket),
        *(taken.hiddens, part["is_finite"], part["may_run"], memory.released, pairs),
        at_rows=(offsets.slots + offsets.hidden) // item,
        stride=offsets.stride // item,
        row_stride=offsets.row_stride // item,
        W=width,
        BLOCK=min(_BLOCK, next_power_of_2(width)),
        num_warps=4,
        **options,
    )
    kernel.check_kernel[(batch,)](
        *(views.of(torch.int64), views.of(torch.int32), memory.states),
        *(part[name] for name in _CHECKED),
        *(vocab_size, pairs),
        **_checking(memory, numbers),
        BLOCK_R=_few(pairs),
        num_warps=1,
        **options,
    )


def leave_slots(  # noqa: PLR0917  # everything that a round leaves
    memory: SlotMemory,
    wishes: SlotWishes,
    taken: TakenSlots,
    chains: ChainState,
    embedding: Tensor,
    mirror: SlotMirror,
    numbers: StatusNumbers,
    position_limit: int,
    *,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Leaves the outputs of a round in its entries' slots, `op` behind the rest; enters it in the sequences' states.

    embedding [V, H] is the table of which the last draft's row is left; `position_limit` is the stop reason of entries
    that positions limit. Entries that only pad the batch leave nothing but their line of the mirror. Raises ValueError
    naming what does not fit.
    """
    batch, pairs = taken.tokens.shape
    drafts = chains.drafts.shape[1]
    _check(memory, wishes, batch)
    check_shape("chains.drafts", chains.drafts, batch, drafts)
    check_tensor("mirror.logprobs", mirror.logprobs, torch.float32, batch, drafts)
    given = mirror.words.shape[1] - NUM_MIRROR_WORDS - pairs
    check_tensor("mirror.words", mirror.words, torch.int64, batch, NUM_MIRROR_WORDS + pairs + given)
    if not uses_triton(memory.arena, backend):
        leave_slots_reference(memory, wishes, taken, chains, embedding, mirror, numbers, position_limit)
        return
    constants = {"INTERNAL": numbers.internal, "POSITION_LIMIT": position_limit}
    options = launch_options(overlaps=overlaps)
    _launch_leaving(memory, wishes, taken, chains, embedding, mirror, constants, options)


def _launch_leaving(  # noqa: PLR0917  # in the order of the call
    memory: SlotMemory,
    wishes: SlotWishes,
    taken: TakenSlots,
    chains: ChainState,
    embedding: Tensor,
    mirror: SlotMirror,
    constants: dict[str, int],
    options: dict[str, Any],
) -> None:
    from drafter_kernels.slot_exchange import kernel

    views, (batch, pairs), drafts = _Views(memory), taken.tokens.shape, chains.drafts.shape[1]
    given = mirror.words.shape[1] - NUM_MIRROR_WORDS - pairs
    is_real, is_limited, is_broken = (
        tensor.view(torch.uint8) for tensor in (wishes.is_real, taken.is_limited, chains.is_broken)
    )
    kernel.leave_kernel[(batch,)](
        *(views.of(dtype) for dtype in (torch.int64, torch.int32, torch.float32, memory.dtype)),
        *(embedding, memory.states),
        *(wishes.slot, wishes.state_index, is_real, wishes.planned_stop),
        *(taken.status, is_limited, taken.first_key, taken.pair_count, taken.tokens),
        *(chains.drafts, chains.logprobs, chains.draft_count, chains.stop, is_broken),
        *(mirror.words, mirror.logprobs, pairs, drafts, given, embedding.shape[1]),
        **_leaving(memory),
        **constants,
        num_warps=4,
        **options,
    )
    base = (memory.offsets.slots + memory.offsets.op) // 8
    stride = memory.offsets.stride // 8
    kernel.op_kernel[(batch,)](
        views.of(torch.int64), wishes.slot, is_real, wishes.op, at_op=base, stride64=stride, num_warps=1, **options
    )


def _few(count: int) -> int:
    """A block for so many pairs or drafts; one for all usual numbers, so that sessions share a kernel."""
    return max(64, next_power_of_2(count))


def _parts(value: SlotWishes | TakenSlots) -> dict[str, Tensor]:
    """The tensors by name, booleans as bytes."""
    tensors = {part.name: getattr(value, part.name) for part in fields(value)}
    return {name: each.view(torch.uint8) if each.dtype is torch.bool else each for name, each in tensors.items()}


@dataclass(frozen=True)
class _Views:
    """The arena as elements of several types."""

    memory: SlotMemory

    def of(self, dtype: torch.dtype) -> Tensor:
        arena = self.memory.arena
        return arena[: len(arena) // 8 * 8].view(dtype)


def _checking(memory: SlotMemory, numbers: StatusNumbers) -> dict[str, int]:
    offsets = memory.offsets
    return {
        "at_key": (offsets.slots + offsets.first_key) // 8,
        "stride64": offsets.stride // 8,
        "at_count": (offsets.slots + offsets.pair_count) // 4,
        "at_tokens": (offsets.slots + offsets.tokens) // 4,
        "stride32": offsets.stride // 4,
        "FENCED": numbers.fenced,
        "PAIR_COUNT": numbers.pair_count,
        "TOKEN": numbers.token,
        "NOT_FINITE": numbers.not_finite,
        "MISSING_ROWS": numbers.missing_rows,
        "POSITION": numbers.position,
        "PAGES": numbers.pages,
    }


def _leaving(memory: SlotMemory) -> dict[str, int]:
    offsets, item = memory.offsets, memory.dtype.itemsize
    # Drafts and log-probabilities fill their fields, whatever the round's own number of drafts.
    wide = (offsets.logprobs - offsets.drafts) // 4
    return {
        "stride64": offsets.stride // 8,
        "at_last_key": (offsets.slots + offsets.last_pair_key) // 8,
        "stride32": offsets.stride // 4,
        "at_status": (offsets.slots + offsets.status) // 4,
        "at_count": (offsets.slots + offsets.draft_count) // 4,
        "at_stop": (offsets.slots + offsets.stop_reason) // 4,
        "at_drafts": (offsets.slots + offsets.drafts) // 4,
        "at_logprobs": (offsets.slots + offsets.logprobs) // 4,
        "at_row_count": (offsets.slots + offsets.row_count) // 4,
        "wide": wide,
        "stride_rows": offsets.stride // item,
        "at_embedding": (offsets.slots + offsets.last_embedding) // item,
        "BLOCK_R": _few(max(wide, (offsets.hidden - offsets.tokens) // 4)),
        "BLOCK_H": _BLOCK,
    }


def _check(memory: SlotMemory, wishes: SlotWishes, batch: int) -> None:
    check_tensor("arena", memory.arena, torch.uint8, len(memory.arena))
    check_tensor("states", memory.states, torch.int64, len(memory.states), 3)
    for part in fields(SlotWishes):
        size = {"ticket": (1,), "told": (batch, 3)}.get(part.name, (batch,))
        kind = torch.bool if part.name in {"is_real", "is_told"} else torch.int64
        check_tensor(f"wishes.{part.name}", getattr(wishes, part.name), kind, *size)
    if memory.arena.data_ptr() % 8:
        raise ValueError("arena does not begin at a multiple of 8 bytes")
