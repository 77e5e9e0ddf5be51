"""Bookkeeping between forwards: the kernels leave what the specification says, whatever the chains want."""

from dataclasses import fields

import pytest
import torch

from drafter_kernels.draft_chain import (
    ChainPairs,
    ChainState,
    ChainStops,
    ChainWishes,
    begin_chains,
    begin_chains_reference,
    extend_chains,
    extend_chains_reference,
)
from kernel_backends import DEVICES, TRITON

pytest.importorskip("triton")

STOPS = ChainStops(confidence=3, grammar=4)
BATCH, PAIRS, DRAFTS, PAGES, PAGE_ROWS, WIDTH = 7, 5, 4, 6, 4, 40


def wishes(seed, device):
    """Chains of every kind: not live, without drafts, with a floor, whose drafts are kept."""
    random = torch.Generator().manual_seed(seed)

    def whole(high, low=0):
        return torch.randint(low, high, (BATCH,), generator=random)

    made = ChainWishes(
        is_live=whole(4) > 0,
        first_key=whole(1000),
        row_begin=whole(PAGES * PAGE_ROWS - PAIRS - DRAFTS),
        pair_count=whole(PAIRS + 1, 1),
        page_table=torch.randperm(BATCH * PAGES, generator=random).view(BATCH, PAGES).int(),
        num_drafts=whole(DRAFTS + 1),
        min_logprob=torch.where(whole(2) > 0, -1.5, -torch.inf),
        keeps_drafts=whole(2) > 0,
    )
    return ChainWishes(*(getattr(made, part.name).to(device) for part in fields(made)))


def expect_equal(found, expected, *without):
    for part in fields(expected):
        if part.name not in without:
            assert torch.equal(getattr(found, part.name), getattr(expected, part.name)), part.name


def begun(seed, device):
    """A begun batch, by the kernel; everything held something else before."""
    asked = wishes(seed, device)
    tokens = torch.randint(-(2**62), 2**62, (BATCH, PAIRS), generator=torch.Generator().manual_seed(seed)).to(device)
    pairs, state = ChainPairs.empty(BATCH, PAIRS, device), ChainState.empty(BATCH, DRAFTS, device)
    for part in (*fields(pairs), *fields(state)):
        getattr(pairs if hasattr(pairs, part.name) else state, part.name).fill_(1)
    begin_chains(asked, tokens, pairs, state, PAGE_ROWS, backend=TRITON)
    return asked, tokens, pairs, state


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("seed", range(4))
def test_pairs_and_chains_begin_as_specified(device, seed):
    asked, tokens, pairs, state = begun(seed, device)
    expected_pairs, expected = begin_chains_reference(asked, tokens, PAGE_ROWS)
    expect_equal(pairs, expected_pairs)
    expect_equal(state, expected, "drafts", "logprobs")
    assert not state.drafts.any()
    assert not state.logprobs.any()
    assert bool((pairs.slots >= 0).sum() == torch.where(asked.is_live, asked.pair_count, 0).sum())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("has_masks", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_chains_grow_and_end_as_specified(device, has_masks, seed):
    asked, _, _, state = begun(seed, device)
    random = torch.Generator().manual_seed(seed + 100)
    for step in range(DRAFTS):
        ids = torch.randint(-1, 3, (BATCH,), generator=random).to(device)
        logprobs = (-2 * torch.rand(BATCH, generator=random)).to(device)
        witness = torch.randn(BATCH, WIDTH, generator=random).bfloat16()
        witness[::3, WIDTH - 1] = torch.nan
        masks = torch.randint(-1, 9, (BATCH,), generator=random).int().to(device) if has_masks else None
        given = (ids, logprobs, witness.to(device), masks, STOPS, PAGE_ROWS)
        expected = extend_chains_reference(step, asked, state, *given)
        extend_chains(step, asked, state, *given, backend=TRITON)
        expect_equal(state, expected)
    assert bool((state.draft_count > 0).any())
    assert bool((state.stop == STOPS.grammar).any()) <= has_masks


def test_what_does_not_fit_is_named():
    asked = wishes(0, "cpu")
    pairs, state = ChainPairs.empty(BATCH, PAIRS, "cpu"), ChainState.empty(BATCH, DRAFTS, "cpu")
    with pytest.raises(ValueError, match="tokens holds"):
        begin_chains(asked, torch.zeros(BATCH, PAIRS, dtype=torch.int32), pairs, state, PAGE_ROWS)
    ids, logprobs, witness = torch.zeros(BATCH, dtype=torch.int64), torch.zeros(BATCH), torch.zeros(BATCH, 1)
    with pytest.raises(ValueError, match="draft 4 of a state of 4"):
        extend_chains(DRAFTS, asked, state, ids, logprobs, witness, None, STOPS, PAGE_ROWS)
    with pytest.raises(ValueError, match="logprobs is"):
        extend_chains(0, asked, state, ids, logprobs[:3], witness, None, STOPS, PAGE_ROWS)
