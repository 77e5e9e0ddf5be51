"""The bookkeeping of draft chains as it is called: two kernels in the place of some dozens."""

from dataclasses import fields
from typing import Final

import torch
from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_shape,
    check_tensor,
    launch_options,
    next_power_of_2,
    uses_triton,
)
from drafter_kernels.draft_chain.reference import (
    ChainPairs,
    ChainState,
    ChainStops,
    ChainWishes,
    begin_chains_reference,
    extend_chains_reference,
)

# Of the wishes, in order: all but the floor and whether drafts are kept.
_BEGINNING: Final = 6

# Pairs or drafts up to which one kernel serves all.
_FEW: Final = 16


def begin_chains(
    wishes: ChainWishes,
    tokens: Tensor,
    pairs: ChainPairs,
    state: ChainState,
    page_rows: int,
    *,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Where the pairs of every chain go, and every chain before its first draft.

    tokens int64 [B, R]: what lies behind a chain's own pairs may be anything. Writes all of `pairs` and `state`.
    Raises ValueError naming what does not fit.
    """
    batch, most = tokens.shape
    _check(wishes, state, batch)
    check_tensor("tokens", tokens, torch.int64, batch, most)
    check_shape("pairs.tokens", pairs.tokens, batch * most)
    if not uses_triton(tokens, backend):
        new_pairs, new_state = begin_chains_reference(wishes, tokens, page_rows)
        _put(new_pairs, pairs)
        state.drafts.zero_()
        state.logprobs.zero_()
        _put(new_state, state, "drafts", "logprobs")
        return
    from drafter_kernels.draft_chain.kernel import begin_kernel

    _check_contiguous(tokens, wishes)
    drafts = state.drafts.shape[1]
    begin_kernel[(batch,)](
        *_pointers(wishes)[:_BEGINNING],
        tokens,
        *_pointers(pairs),
        *_pointers(state),
        most,
        drafts,
        wishes.page_table.shape[1],
        PAGE=page_rows,
        BLOCK_R=max(_FEW, next_power_of_2(most)),
        BLOCK_K=max(_FEW, next_power_of_2(drafts)),
        num_warps=1,
        **launch_options(overlaps=overlaps),
    )


def extend_chains(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    step: int,
    wishes: ChainWishes,
    state: ChainState,
    ids: Tensor,
    logprobs: Tensor,
    witness: Tensor,
    mask_rows: Tensor | None,
    stops: ChainStops,
    page_rows: int,
    *,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Takes draft number `step` of every chain that goes on, and says where its row goes and what comes next.

    ids int64 [B], logprobs float32 [B] as `lm_head` leaves them: -1 where nothing could be drafted. Then `witness`
    [B, W] tells why: it holds NaN if the head computed NaN, else the mask allowed nothing; without a mask (mask_rows
    int32 [B] negative, or None) it can only be NaN. Changes `state`. Raises ValueError naming what does not fit.
    """
    _check(wishes, state, len(ids))
    _check_found(step, state, ids, logprobs, witness, mask_rows)
    if not uses_triton(ids, backend):
        given = (ids, logprobs, witness, mask_rows, stops, page_rows)
        _put(extend_chains_reference(step, wishes, state, *given), state)
        return
    from drafter_kernels.draft_chain.kernel import extend_kernel

    _check_contiguous(witness, wishes)
    found = (ids, logprobs, witness, ids if mask_rows is None else mask_rows)
    extend_kernel[(len(ids),)](
        *_pointers(wishes),
        *found,
        *_pointers(state),
        step,
        state.drafts.shape[1],
        wishes.page_table.shape[1],
        witness.shape[1],
        CONFIDENCE=stops.confidence,
        GRAMMAR=stops.grammar,
        HAS_MASK=mask_rows is not None,
        PAGE=page_rows,
        BLOCK_W=1024,
        num_warps=4,
        **launch_options(overlaps=overlaps),
    )


def _check_contiguous(given: Tensor, wishes: ChainWishes) -> None:
    """The kernels count elements. Raises ValueError."""
    if not all(tensor.is_contiguous() for tensor in (given, *_pointers(wishes))):
        raise ValueError("draft_chain: not all of the tensors are contiguous")


def _check(wishes: ChainWishes, state: ChainState, batch: int) -> None:
    types = {"is_live": torch.bool, "keeps_drafts": torch.bool, "min_logprob": torch.float32}
    for name in ("is_live", "first_key", "row_begin", "pair_count", "num_drafts", "min_logprob", "keeps_drafts"):
        check_tensor(f"wishes.{name}", getattr(wishes, name), types.get(name, torch.int64), batch)
    check_tensor("wishes.page_table", wishes.page_table, torch.int32, batch, wishes.page_table.shape[1])
    check_tensor("state.drafts", state.drafts, torch.int64, batch, state.drafts.shape[1])
    check_tensor("state.logprobs", state.logprobs, torch.float32, *state.drafts.shape)
    check_tensor("state.row_counts", state.row_counts, torch.int32, batch)


def _check_found(  # noqa: PLR0917  # in the order of the call
    step: int, state: ChainState, ids: Tensor, logprobs: Tensor, witness: Tensor, mask_rows: Tensor | None
) -> None:
    batch = len(ids)
    check_tensor("ids", ids, torch.int64, batch)
    check_tensor("logprobs", logprobs, torch.float32, batch)
    check_shape("witness", witness, batch, witness.shape[1])
    if mask_rows is not None:
        check_tensor("mask_rows", mask_rows, torch.int32, batch)
    if not 0 <= step < state.drafts.shape[1]:
        raise ValueError(f"extend_chains: draft {step} of a state of {state.drafts.shape[1]}")


def _pointers(parts: ChainWishes | ChainPairs | ChainState) -> list[Tensor]:
    """The tensors in order, booleans as bytes."""
    names = ChainWishes if isinstance(parts, ChainWishes) else type(parts)
    tensors = [getattr(parts, part.name) for part in fields(names)]
    return [tensor.view(torch.uint8) if tensor.dtype is torch.bool else tensor for tensor in tensors]


def _put(new: ChainPairs | ChainState, kept: ChainPairs | ChainState, *without: str) -> None:
    for part in fields(new):
        if part.name not in without:
            getattr(kept, part.name).copy_(getattr(new, part.name))
