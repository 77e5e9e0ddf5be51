"""What a round takes out of arena slots and leaves in them, in plain PyTorch: the specification of the kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from drafter_kernels.draft_chain import ChainState

NUM_MIRROR_WORDS = 5
"""Per entry, before its tokens and drafts: status, first key, pairs, drafts, stop reason."""


@dataclass(frozen=True, slots=True)
class StatusNumbers:
    """Numbers of the reasons that a round can give, as they stand on the wire."""

    fenced: int
    pair_count: int
    token: int
    not_finite: int
    missing_rows: int
    position: int
    pages: int
    internal: int


@dataclass(frozen=True, slots=True)
class SlotOffsets:
    """Where things lie, in bytes: `slots` from the arena's start, `stride` from slot to slot, the rest in a slot.

    All are multiples of 64. The outputs come first, up to `first_key`. `row_stride` is from hidden row to hidden row.
    """

    slots: int
    stride: int
    status: int
    op: int
    draft_count: int
    stop_reason: int
    drafts: int
    logprobs: int
    last_embedding: int
    row_count: int
    last_pair_key: int
    first_key: int
    pair_count: int
    tokens: int
    hidden: int
    row_stride: int


@dataclass(frozen=True, slots=True)
class SlotMemory:
    """An arena, and what decides whether a round may run.

    Attributes:
        arena: uint8, whoever shares it may write to it at any time.
        offsets: in it.
        dtype: of hidden rows and embeddings.
        fence: int64 [1], not 0 = the lane was given up.
        ready: int64 [1], the client's counter.
        released: what the counter says, or more, once the lane is released.
        states: int64 [N, 3], by sequence: key and row index at which its last run of keys begins, and its last key.
    """

    arena: Tensor
    offsets: SlotOffsets
    dtype: torch.dtype
    fence: Tensor
    ready: Tensor
    released: int
    states: Tensor

    def slots(self) -> Tensor:
        """The slots as rows of bytes: a view."""
        stride, begin = self.offsets.stride, self.offsets.slots
        count = (len(self.arena) - begin) // stride
        return self.arena[begin : begin + count * stride].view(count, stride)


@dataclass(frozen=True, slots=True)
class SlotWishes:
    """What the host says about a round's entries; int64 [B] each unless it says otherwise.

    Attributes:
        ticket: [1].
        slot: of the arena. Entries that only pad the batch repeat the first one's.
        state_index: in the table of sequence states; padding has the index of nobody's.
        is_real: bool.
        is_told: bool, the table does not know the sequence's state yet, and is told.
        told: [B, 3], that state.
        op: the operation's number.
        planned: drafts that the pages allow.
        planned_stop: why no more are planned.
        max_keys: keys are below.
        num_rows_max: rows that the pages hold.
    """

    ticket: Tensor
    slot: Tensor
    state_index: Tensor
    is_real: Tensor
    is_told: Tensor
    told: Tensor
    op: Tensor
    planned: Tensor
    planned_stop: Tensor
    max_keys: Tensor
    num_rows_max: Tensor


@dataclass(frozen=True, slots=True)
class TakenSlots:
    """A private copy of what the slots hold, checked; harmless where it was not right.

    Attributes:
        status: int64 [B], 0 = fine, else a reason's number.
        is_live: bool [B].
        is_limited: bool [B], positions allow fewer drafts than were planned.
        first_key: int64 [B].
        pair_count: int64 [B], 1 to R.
        row_begin: int64 [B].
        num_drafts: int64 [B].
        tokens: int64 [B, R].
        hiddens: [B, R, W], in the head's type.
        is_finite: bool [B, R], rows of hiddens.
        may_run: bool [1].
    """

    status: Tensor
    is_live: Tensor
    is_limited: Tensor
    first_key: Tensor
    pair_count: Tensor
    row_begin: Tensor
    num_drafts: Tensor
    tokens: Tensor
    hiddens: Tensor
    is_finite: Tensor
    may_run: Tensor

    @staticmethod
    def empty(batch: int, pairs: int, width: int, dtype: torch.dtype, device: torch.device) -> TakenSlots:
        """Room for B entries of up to R pairs."""

        def room(*size: int, of: torch.dtype = torch.int64) -> Tensor:
            return torch.zeros(size, dtype=of, device=device)

        return TakenSlots(
            status=room(batch),
            is_live=room(batch, of=torch.bool),
            is_limited=room(batch, of=torch.bool),
            first_key=room(batch),
            pair_count=room(batch),
            row_begin=room(batch),
            num_drafts=room(batch),
            tokens=room(batch, pairs),
            hiddens=room(batch, pairs, width, of=dtype),
            is_finite=room(batch, pairs, of=torch.bool),
            may_run=room(1, of=torch.bool),
        )


@dataclass(frozen=True, slots=True)
class SlotMirror:
    """What the service keeps of a round.

    Attributes:
        words: int64 [B, 5 + R + K]: status, first key, pair count, draft count, stop, tokens, drafts.
        logprobs: float32 [B, K].
    """

    words: Tensor
    logprobs: Tensor


def take_slots_reference(
    memory: SlotMemory, wishes: SlotWishes, like: Tensor, vocab_size: int, numbers: StatusNumbers
) -> TakenSlots:
    """See `take_slots`; `like` [B, R, W] is of the head's type."""
    pairs, width, dtype = like.shape[1], like.shape[2], like.dtype
    offsets, batch = memory.offsets, len(wishes.slot)
    begin = offsets.first_key
    copied = memory.slots()[:, begin : offsets.hidden + pairs * offsets.row_stride].index_select(0, wishes.slot)

    def field(offset: int, kind: torch.dtype, count: int) -> Tensor:
        columns = copied[:, offset - begin : offset - begin + count * kind.itemsize]
        return columns.contiguous().view(kind).long()

    rows = copied[:, offsets.hidden - begin :].reshape(batch, pairs, offsets.row_stride)
    hiddens = rows[:, :, : width * memory.dtype.itemsize].contiguous().view(memory.dtype).to(dtype)
    first_key = field(offsets.first_key, torch.int64, 1)[:, 0]
    count = field(offsets.pair_count, torch.int32, 1)[:, 0]
    tokens = field(offsets.tokens, torch.int32, pairs)
    ready = memory.ready.clone()
    may_run = (memory.fence.clone() == 0) & (wishes.ticket <= ready) & (ready < memory.released)
    found = (first_key, count, tokens, torch.isfinite(hiddens).all(dim=-1), may_run)
    return _checked(memory, wishes, found, hiddens, vocab_size, numbers)


def _checked(  # noqa: PLR0917  # what `take_slots_reference` hands on
    memory: SlotMemory,
    wishes: SlotWishes,
    found: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    hiddens: Tensor,
    vocab_size: int,
    numbers: StatusNumbers,
) -> TakenSlots:
    first_key, count, tokens, is_finite, may_run = found
    states = memory.states.index_select(0, wishes.state_index)
    is_told = wishes.is_real & wishes.is_told
    states = torch.where(is_told[:, None], wishes.told, states)
    memory.states.index_copy_(0, wishes.state_index[is_told], states[is_told])
    begin, begin_row, last_key = states.unbind(1)
    pairs = tokens.shape[1]
    is_count = (count >= 1) & (count <= pairs)
    is_pair = torch.arange(pairs, device=count.device) < count.clamp(0, pairs)[:, None]
    is_token = (tokens >= 0) & (tokens < vocab_size)
    follows = (first_key >= begin) & (first_key <= last_key + 1)
    # Replaced, so that no sum can wrap around whatever the slot says.
    first_key, count = torch.where(follows, first_key, begin), torch.where(is_count, count, 1)
    row_begin, end_key = begin_row + first_key - begin, first_key + count
    positions = (wishes.max_keys - end_key + 1).clamp(min=0)
    num_drafts = torch.minimum(wishes.planned, positions)
    fits = row_begin + count + (num_drafts - 1).clamp(min=0) <= wishes.num_rows_max
    # The first of these that fails is told.
    status = _first_wrong(
        (may_run, numbers.fenced),
        (is_count, numbers.pair_count),
        ((is_token | ~is_pair).all(dim=1), numbers.token),
        ((is_finite | ~is_pair).all(dim=1), numbers.not_finite),
        (follows, numbers.missing_rows),
        (end_key <= wishes.max_keys, numbers.position),
        (fits, numbers.pages),
    )
    is_live = wishes.is_real & (status == 0)
    rows, drafts = torch.where(is_live, row_begin, 0), torch.where(is_live, num_drafts, 0)
    tokens, is_limited = torch.where(is_token, tokens, 0), positions < wishes.planned
    sums = (first_key, count, rows, drafts)
    return TakenSlots(status, is_live, is_limited, *sums, tokens, hiddens, is_finite, may_run)


def _first_wrong(*checks: tuple[Tensor, int]) -> Tensor:
    """int64 [B]: the number of the first check that failed, 0 = none."""
    status = torch.zeros(len(checks[-1][0]), dtype=torch.int64, device=checks[-1][0].device)
    for is_fine, number in reversed(checks):
        status = torch.where(is_fine, status, number)
    return status


def leave_slots_reference(  # noqa: PLR0917  # in the order of the call
    memory: SlotMemory,
    wishes: SlotWishes,
    taken: TakenSlots,
    chains: ChainState,
    embedding: Tensor,
    mirror: SlotMirror,
    numbers: StatusNumbers,
    position_limit: int,
) -> None:
    """See `leave_slots`."""
    status = torch.where(chains.is_broken & (taken.status == 0), numbers.internal, taken.status)
    count = torch.where(status == 0, chains.draft_count, 0)
    planned = torch.where(taken.is_limited, position_limit, wishes.planned_stop)
    stop = torch.where(status == 0, torch.where(chains.stop > 0, chains.stop, planned), 0)
    before = memory.states.index_select(0, wishes.state_index)
    end = torch.where(status == 0, taken.first_key + taken.pair_count - 1, before[:, 2])
    # What failed while computing has lost the rows that it overwrote.
    end = torch.where(status == numbers.internal, torch.minimum(before[:, 2], taken.first_key - 1), end)
    after = torch.cat((before[:, :2], end[:, None]), dim=1)
    memory.states.index_copy_(0, wishes.state_index[wishes.is_real], after[wishes.is_real])
    drafts = mirror.logprobs.shape[1]
    head = torch.stack((status, taken.first_key, taken.pair_count, count, stop), dim=1)
    given = mirror.words.shape[1] - NUM_MIRROR_WORDS - taken.tokens.shape[1]
    mirror.words.copy_(torch.cat((head, taken.tokens, chains.drafts[:, :given]), dim=1))
    mirror.logprobs.copy_(chains.logprobs[:, :drafts])
    out = _outputs(memory, chains, embedding, (status, count, stop), after)
    slots, real = memory.slots(), wishes.is_real
    slots[:, : out.shape[1]].index_copy_(0, wishes.slot[real], out[real])
    packed = _bytes_of(wishes.op[real][:, None])
    slots[:, memory.offsets.op : memory.offsets.op + 8].index_copy_(0, wishes.slot[real], packed)


def _outputs(
    memory: SlotMemory, chains: ChainState, embedding: Tensor, told: tuple[Tensor, Tensor, Tensor], states: Tensor
) -> Tensor:
    """The bytes of the slots' outputs, uint8 [B, first_key]."""
    offsets, (status, count, stop) = memory.offsets, told
    last = chains.drafts.gather(1, (count - 1).clamp(min=0)[:, None])[:, 0]
    row = torch.where((count > 0)[:, None], embedding[last].to(memory.dtype), 0)
    row_count = states[:, 1] + states[:, 2] + 1 - states[:, 0]
    out = torch.zeros(len(status), offsets.first_key, dtype=torch.uint8, device=status.device)
    for offset, values in (
        (offsets.status, status.int()),
        (offsets.draft_count, count.int()),
        (offsets.stop_reason, stop.int()),
        (offsets.drafts, chains.drafts.int()),
        (offsets.logprobs, chains.logprobs),
        (offsets.last_embedding, row),
        (offsets.row_count, row_count.int()),
        (offsets.last_pair_key, states[:, 2]),
    ):
        packed = _bytes_of(values.reshape(len(status), -1))
        out[:, offset : offset + packed.shape[1]] = packed
    return out


def _bytes_of(values: Tensor) -> Tensor:
    """Rows of numbers as rows of bytes. A copy: a single number counts as contiguous whatever its stride."""
    return values.clone(memory_format=torch.contiguous_format).view(torch.uint8)
