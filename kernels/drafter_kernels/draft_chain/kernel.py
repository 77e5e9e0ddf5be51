"""The bookkeeping of draft chains in Triton: one program a chain."""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices

let_scalars_be_indices()


@triton.jit
def _slot(page_table, chain, row, P, PAGE: tl.constexpr):
    """The slot of a row index, int64: of one, or of a block of them."""
    index = tl.minimum(tl.maximum(row // PAGE, 0), P - 1)
    page = tl.load(page_table + chain * P + index).to(tl.int64)
    return page * PAGE + row % PAGE


@triton.jit(
    do_not_specialize=["R", "K", "P"],
    do_not_specialize_on_alignment=[
        "is_live", "first_key", "row_begin", "pair_count", "page_table", "num_drafts",
        "tokens", "pair_tokens", "pair_keys", "pair_slots", "ends", "drafts", "logprobs", "draft_count", "stop",
        "is_broken", "next_tokens", "keys", "slots", "row_counts",
    ],
)  # fmt: skip
def begin_kernel(
    is_live,
    first_key,
    row_begin,
    pair_count,
    page_table,
    num_drafts,
    tokens,
    pair_tokens,
    pair_keys,
    pair_slots,
    ends,
    drafts,
    logprobs,
    draft_count,
    stop,
    is_broken,
    next_tokens,
    keys,
    slots,
    row_counts,
    R,
    K,
    P,
    PAGE: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_K: tl.constexpr,
    PDL: tl.constexpr,
):
    """All of `pairs` [B * R] and of `state` [B, K]. Grid: B."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chain = tl.program_id(0).to(tl.int64)
    lives = tl.load(is_live + chain) != 0
    first = tl.load(first_key + chain)
    begin = tl.load(row_begin + chain)
    count = tl.load(pair_count + chain)
    pair = tl.arange(0, BLOCK_R).to(tl.int64)
    inside = pair < R
    is_pair = lives & (pair < count) & inside
    at = chain * R + pair
    token = tl.load(tokens + at, mask=is_pair, other=-1)
    tl.store(pair_tokens + at, token, mask=inside)
    tl.store(pair_keys + at, tl.where(is_pair, first + pair, 0), mask=inside)
    slot = _slot(page_table, chain, begin + pair, P, PAGE)
    tl.store(pair_slots + at, tl.where(is_pair, slot, -1), mask=inside)
    last = tl.minimum(tl.maximum(count - 1, 0), R - 1)
    tl.store(ends + chain, chain * R + last)

    draft = tl.arange(0, BLOCK_K)
    place = chain * K + draft
    tl.store(drafts + place, tl.zeros((BLOCK_K,), tl.int64), mask=draft < K)
    tl.store(logprobs + place, tl.zeros((BLOCK_K,), tl.float32), mask=draft < K)
    nothing = tl.full((), 0, tl.int64)
    nobody = tl.full((), -1, tl.int64)
    tl.store(draft_count + chain, nothing)
    tl.store(stop + chain, nothing)
    tl.store(is_broken + chain, nothing.to(tl.uint8))
    tl.store(next_tokens + chain, nobody)
    tl.store(slots + chain, nobody)
    tl.store(keys + chain, first + count - 1)
    goes_on = lives & (tl.load(num_drafts + chain) > 0)
    tl.store(row_counts + chain, tl.where(goes_on, begin + count, 0).to(tl.int32))


@triton.jit(
    do_not_specialize=["step", "K", "P", "W"],
    do_not_specialize_on_alignment=[
        "is_live", "first_key", "row_begin", "pair_count", "page_table", "num_drafts", "min_logprob", "keeps_drafts",
        "ids", "id_logprobs", "witness", "mask_rows", "drafts", "logprobs", "draft_count", "stop", "is_broken",
        "next_tokens", "keys", "slots", "row_counts",
    ],
)  # fmt: skip
def extend_kernel(
    is_live,
    first_key,
    row_begin,
    pair_count,
    page_table,
    num_drafts,
    min_logprob,
    keeps_drafts,
    ids,
    id_logprobs,
    witness,
    mask_rows,
    drafts,
    logprobs,
    draft_count,
    stop,
    is_broken,
    next_tokens,
    keys,
    slots,
    row_counts,
    step,
    K,
    P,
    W,
    CONFIDENCE: tl.constexpr,
    GRAMMAR: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """Draft number `step` of a chain. Grid: B."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    chain = tl.program_id(0).to(tl.int64)
    lives = tl.load(is_live + chain) != 0
    wanted = tl.load(num_drafts + chain)
    rows = tl.load(row_begin + chain) + tl.load(pair_count + chain) + step
    reason = tl.load(stop + chain)
    broken = tl.load(is_broken + chain) != 0
    goes_on = lives & (step < wanted) & (reason == 0) & (broken == 0)
    token = tl.load(ids + chain)
    logprob = tl.load(id_logprobs + chain)
    is_draft = goes_on & (token >= 0)
    is_nothing = goes_on & (token < 0)
    # Without a mask every id is allowed: only NaN can have left none.
    is_nan = is_nothing
    if HAS_MASK:
        found = tl.zeros((BLOCK_W,), tl.int32)
        # Looked at only where it decides.
        for start in range(0, tl.where(is_nothing, W, 0), BLOCK_W):
            w = start + tl.arange(0, BLOCK_W)
            part = tl.load(witness + chain * W + w, mask=w < W, other=0.0).to(tl.float32)
            found += (part != part).to(tl.int32)
        is_nan = is_nothing & ((tl.sum(found, 0) > 0) | (tl.load(mask_rows + chain) < 0))
    broken = broken | is_nan
    reason = tl.where(is_nothing & (is_nan == 0), GRAMMAR, reason)
    reason = tl.where(is_draft & (logprob < tl.load(min_logprob + chain)), CONFIDENCE, reason)
    count = tl.load(draft_count + chain) + is_draft.to(tl.int64)
    tl.store(drafts + chain * K + step, tl.where(is_draft, token, 0))
    tl.store(logprobs + chain * K + step, tl.where(is_draft, logprob, 0.0))
    tl.store(draft_count + chain, count)
    tl.store(stop + chain, reason)
    tl.store(is_broken + chain, broken.to(tl.uint8))

    goes_on = lives & (step + 1 < wanted) & (reason == 0) & (broken == 0)
    keeps = lives & (tl.load(keeps_drafts + chain) != 0) & (count == step + 1)
    slot = _slot(page_table, chain, rows, P, PAGE)
    tl.store(next_tokens + chain, tl.where(is_draft, token, -1))
    tl.store(keys + chain, tl.load(first_key + chain) + tl.load(pair_count + chain) + step)
    tl.store(slots + chain, tl.where(goes_on | keeps, slot, -1))
    tl.store(row_counts + chain, tl.where(goes_on, rows + 1, 0).to(tl.int32))
