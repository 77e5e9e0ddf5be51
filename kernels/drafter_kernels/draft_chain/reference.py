"""The bookkeeping of draft chains in plain PyTorch: the specification that the kernels are tested against."""

from dataclasses import dataclass, fields

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class ChainWishes:
    """What is wanted of each of B chains; all on the device, so that one captured graph serves any of it.

    Attributes:
        is_live: bool [B]; the others write and draft nothing.
        first_key: int64 [B], key of the first pair.
        row_begin: int64 [B], row index of the first pair.
        pair_count: int64 [B], 1 to R.
        page_table: int32 [B, P].
        num_drafts: int64 [B], 0 to K.
        min_logprob: float32 [B], a chain ends with the first draft below it; -inf = never.
        keeps_drafts: bool [B], whether the last draft gets a row as well.
    """

    is_live: Tensor
    first_key: Tensor
    row_begin: Tensor
    pair_count: Tensor
    page_table: Tensor
    num_drafts: Tensor
    min_logprob: Tensor
    keeps_drafts: Tensor


@dataclass(frozen=True, slots=True)
class ChainPairs:
    """The pairs of all chains, flat: int64 [B * R] each, and int64 [B].

    Attributes:
        tokens: -1 where there is no pair.
        keys: 0 where there is no pair.
        slots: where each pair's row goes, -1 where there is no pair.
        ends: index of each chain's last pair.
    """

    tokens: Tensor
    keys: Tensor
    slots: Tensor
    ends: Tensor

    @staticmethod
    def empty(batch: int, pairs: int, device: torch.device) -> "ChainPairs":
        """Room for B chains of up to R pairs."""
        sizes = (batch * pairs, batch * pairs, batch * pairs, batch)
        return ChainPairs(*(torch.zeros(size, dtype=torch.int64, device=device) for size in sizes))


@dataclass(frozen=True, slots=True)
class ChainState:
    """Where B chains of up to K drafts are.

    Attributes:
        drafts: int64 [B, K]; entries from draft_count on are 0.
        logprobs: float32 [B, K], likewise.
        draft_count: int64 [B].
        stop: int64 [B]: the number of the reason that ended a chain early, else 0.
        is_broken: bool [B]: the head computed NaN.
        tokens: int64 [B], the draft to be absorbed next, -1 = none.
        keys: int64 [B], the key that the next draft is made at.
        slots: int64 [B], where the draft's row goes, -1 = nowhere.
        row_counts: int32 [B], rows that the next draft attends to; 0 = there will be none.
    """

    drafts: Tensor
    logprobs: Tensor
    draft_count: Tensor
    stop: Tensor
    is_broken: Tensor
    tokens: Tensor
    keys: Tensor
    slots: Tensor
    row_counts: Tensor

    @staticmethod
    def empty(batch: int, drafts: int, device: torch.device) -> "ChainState":
        """Room for B chains of up to K drafts."""
        whole = {name: torch.zeros(batch, dtype=torch.int64, device=device) for name in _WHOLE}
        return ChainState(
            drafts=torch.zeros(batch, max(drafts, 1), dtype=torch.int64, device=device),
            logprobs=torch.zeros(batch, max(drafts, 1), device=device),
            is_broken=torch.zeros(batch, dtype=torch.bool, device=device),
            row_counts=torch.zeros(batch, dtype=torch.int32, device=device),
            **whole,
        )


_WHOLE = ("draft_count", "stop", "tokens", "keys", "slots")


@dataclass(frozen=True, slots=True)
class ChainStops:
    """Numbers of the reasons that end a chain early."""

    confidence: int
    grammar: int


def begin_chains_reference(wishes: ChainWishes, tokens: Tensor, page_rows: int) -> tuple[ChainPairs, ChainState]:
    """See `begin_chains`; K of the state is 1."""
    batch, most = tokens.shape
    steps = torch.arange(most, device=tokens.device)
    is_pair = wishes.is_live[:, None] & (steps < wishes.pair_count[:, None])
    slots = _slots(wishes, wishes.row_begin[:, None] + steps, page_rows)
    ends = torch.arange(batch, device=tokens.device) * most + (wishes.pair_count - 1).clamp(0, most - 1)
    pairs = ChainPairs(
        torch.where(is_pair, tokens, -1).flatten(),
        torch.where(is_pair, wishes.first_key[:, None] + steps, 0).flatten(),
        torch.where(is_pair, slots, -1).flatten(),
        ends,
    )
    state = ChainState.empty(batch, 1, tokens.device)
    state.tokens.fill_(-1)
    state.slots.fill_(-1)
    state.keys.copy_(wishes.first_key + wishes.pair_count - 1)
    state.row_counts.copy_(_row_counts(wishes, state, 0))
    return pairs, state


def extend_chains_reference(  # noqa: PLR0917  # in the order of the call
    step: int,
    wishes: ChainWishes,
    state: ChainState,
    ids: Tensor,
    logprobs: Tensor,
    witness: Tensor,
    mask_rows: Tensor | None,
    stops: ChainStops,
    page_rows: int,
) -> ChainState:
    """See `extend_chains`; a new state."""
    after = ChainState(*(getattr(state, part.name).clone() for part in fields(ChainState)))
    goes_on = _is_going(wishes, state, step)
    is_draft = goes_on & (ids >= 0)
    is_nothing = goes_on & (ids < 0)
    is_masked = torch.zeros_like(goes_on) if mask_rows is None else mask_rows >= 0
    is_nan = witness.isnan().any(-1) | ~is_masked
    after.drafts[:, step] = torch.where(is_draft, ids, 0)
    after.logprobs[:, step] = torch.where(is_draft, logprobs, 0.0)
    after.draft_count.add_(is_draft)
    stop = torch.where(is_draft & (logprobs < wishes.min_logprob), stops.confidence, state.stop)
    after.stop.copy_(torch.where(is_nothing & ~is_nan, stops.grammar, stop))
    after.is_broken.logical_or_(is_nothing & is_nan)
    rows = wishes.row_begin + wishes.pair_count + step
    owes_row = wishes.is_live & wishes.keeps_drafts & (after.draft_count == step + 1)
    is_written = _is_going(wishes, after, step + 1) | owes_row
    after.tokens.copy_(torch.where(is_draft, ids, -1))
    after.keys.copy_(wishes.first_key + wishes.pair_count + step)
    after.slots.copy_(torch.where(is_written, _slots(wishes, rows[:, None], page_rows)[:, 0], -1))
    after.row_counts.copy_(_row_counts(wishes, after, step + 1))
    return after


def _is_going(wishes: ChainWishes, state: ChainState, step: int) -> Tensor:
    """bool [B]: whether draft number `step` is wanted."""
    return wishes.is_live & (step < wishes.num_drafts) & (state.stop == 0) & ~state.is_broken


def _row_counts(wishes: ChainWishes, state: ChainState, step: int) -> Tensor:
    return torch.where(_is_going(wishes, state, step), wishes.row_begin + wishes.pair_count + step, 0)


def _slots(wishes: ChainWishes, rows: Tensor, page_rows: int) -> Tensor:
    """Slots [B, n] of row indices [B, n]."""
    index = (rows // page_rows).clamp(0, wishes.page_table.shape[1] - 1)
    return wishes.page_table.gather(1, index).long() * page_rows + rows % page_rows
