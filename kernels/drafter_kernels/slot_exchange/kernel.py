"""What a round takes out of arena slots and leaves in them, in Triton. The arena is read as elements of several types.

Offsets are in elements of the pointer that they go with.
"""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices

let_scalars_be_indices()

_WORDS = tl.constexpr(5)


@triton.jit(
    do_not_specialize=["R", "released", "at_rows", "stride", "row_stride"],
    do_not_specialize_on_alignment=["slot", "fence", "ready", "ticket", "is_finite", "may_run"],
)
def take_rows_kernel(
    arena,
    slot,
    fence,
    ready,
    ticket,
    hiddens,
    is_finite,
    may_run,
    released,
    R,
    at_rows,
    stride,
    row_stride,
    W: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Hidden rows [B, R, W] and whether they are finite [B, R]; whether the round may run, once for all. Grid: B R."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    place = tl.program_id(0).to(tl.int64)
    if place == 0:
        counted = tl.load(ready, volatile=True)
        fenced = tl.load(fence, volatile=True) != 0
        runs = (fenced == 0) & (tl.load(ticket) <= counted) & (counted < released)
        tl.store(may_run, runs.to(tl.uint8))
    base = arena + at_rows + tl.load(slot + place // R) * stride + place % R * row_stride
    wrong = tl.zeros((BLOCK,), tl.int32)
    for start in range(0, W, BLOCK):
        w = start + tl.arange(0, BLOCK)
        value = tl.load(base + w, mask=w < W, other=0.0).to(tl.float32).to(hiddens.dtype.element_ty)
        tl.store(hiddens + place * W + w, value, mask=w < W)
        size = tl.abs(value.to(tl.float32))
        wrong += tl.where(size < float("inf"), 0, 1)
    tl.store(is_finite + place, (tl.sum(wrong, 0) == 0).to(tl.uint8))


@triton.jit(
    do_not_specialize=["R", "vocab_size", "at_key", "stride64", "at_count", "at_tokens", "stride32"],
    do_not_specialize_on_alignment=[
        "slot", "state_index", "is_real", "is_told", "told", "planned", "max_keys", "num_rows_max", "states", "status",
        "is_live", "is_limited", "first_key", "pair_count", "row_begin", "num_drafts", "tokens", "is_finite", "may_run",
    ],
)  # fmt: skip
def check_kernel(
    arena64,
    arena32,
    states,
    slot,
    state_index,
    is_real,
    is_told,
    told,
    planned,
    max_keys,
    num_rows_max,
    status,
    is_live,
    is_limited,
    first_key,
    pair_count,
    row_begin,
    num_drafts,
    tokens,
    is_finite,
    may_run,
    vocab_size,
    R,
    at_key,
    stride64,
    at_count,
    at_tokens,
    stride32,
    FENCED: tl.constexpr,
    PAIR_COUNT: tl.constexpr,
    TOKEN: tl.constexpr,
    NOT_FINITE: tl.constexpr,
    MISSING_ROWS: tl.constexpr,
    POSITION: tl.constexpr,
    PAGES: tl.constexpr,
    BLOCK_R: tl.constexpr,
    PDL: tl.constexpr,
):
    """Keys, counts and tokens of the slots, each read once, and what is wrong with them. Grid: B."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    its = tl.load(slot + entry)
    key = tl.load(arena64 + at_key + its * stride64, volatile=True)
    count = tl.load(arena32 + at_count + its * stride32, volatile=True).to(tl.int64)
    r = tl.arange(0, BLOCK_R)
    token = tl.load(arena32 + at_tokens + its * stride32 + r, mask=r < R, other=0, volatile=True).to(tl.int64)
    finite = tl.load(is_finite + entry * R + r, mask=r < R, other=1)
    row, given = states + 3 * tl.load(state_index + entry), told + 3 * entry
    begin, begin_row, last_key = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    real = tl.load(is_real + entry) != 0
    if real & (tl.load(is_told + entry) != 0):
        begin, begin_row, last_key = tl.load(given), tl.load(given + 1), tl.load(given + 2)
        tl.store(row, begin)
        tl.store(row + 1, begin_row)
        tl.store(row + 2, last_key)
    most_keys, most_rows = tl.load(max_keys + entry), tl.load(num_rows_max + entry)
    wanted = tl.load(planned + entry)

    is_count = (count >= 1) & (count <= R)
    is_pair = r < tl.minimum(tl.maximum(count, 0), R)
    is_token = (token >= 0) & (token < vocab_size)
    follows = (key >= begin) & (key <= last_key + 1)
    # Replaced, so that no sum can wrap around whatever the slot says.
    key = tl.where(follows, key, begin)
    count = tl.where(is_count, count, 1)
    first_row, end = begin_row + key - begin, key + count
    positions = tl.maximum(most_keys - end + 1, 0)
    drafts = tl.minimum(wanted, positions)
    fits = first_row + count + tl.maximum(drafts - 1, 0) <= most_rows
    # The first of these that fails is told: the last one written wins.
    number = tl.where(fits, 0, PAGES)
    number = tl.where(end <= most_keys, number, POSITION)
    number = tl.where(follows, number, MISSING_ROWS)
    number = tl.where(tl.sum((is_pair & (finite == 0)).to(tl.int32), 0) == 0, number, NOT_FINITE)
    number = tl.where(tl.sum((is_pair & (is_token == 0)).to(tl.int32), 0) == 0, number, TOKEN)
    number = tl.where(is_count, number, PAIR_COUNT)
    number = tl.where(tl.load(may_run) != 0, number, FENCED)
    lives = real & (number == 0)
    tl.store(status + entry, number.to(tl.int64))
    tl.store(is_live + entry, lives.to(tl.uint8))
    tl.store(is_limited + entry, (positions < wanted).to(tl.uint8))
    tl.store(first_key + entry, key)
    tl.store(pair_count + entry, count)
    tl.store(row_begin + entry, tl.where(lives, first_row, 0))
    tl.store(num_drafts + entry, tl.where(lives, drafts, 0))
    tl.store(tokens + entry * R + r, tl.where(is_token, token, 0), mask=r < R)


@triton.jit(
    do_not_specialize=[
        "R", "K", "G", "H", "stride64", "at_last_key", "stride32", "at_status", "at_count", "at_stop", "at_drafts",
        "at_logprobs", "at_row_count", "wide", "stride_rows", "at_embedding",
    ],
    do_not_specialize_on_alignment=[
        "states", "slot", "state_index", "is_real", "planned_stop", "status", "is_limited", "first_key", "pair_count",
        "tokens", "drafts", "logprobs", "draft_count", "stop", "is_broken", "words", "kept",
    ],
)  # fmt: skip
def leave_kernel(
    arena64,
    arena32,
    arena_floats,
    arena_rows,
    embedding,
    states,
    slot,
    state_index,
    is_real,
    planned_stop,
    status,
    is_limited,
    first_key,
    pair_count,
    tokens,
    drafts,
    logprobs,
    draft_count,
    stop,
    is_broken,
    words,
    kept,
    R,
    K,
    G,
    H,
    stride64,
    at_last_key,
    stride32,
    at_status,
    at_count,
    at_stop,
    at_drafts,
    at_logprobs,
    at_row_count,
    wide,
    stride_rows,
    at_embedding,
    INTERNAL: tl.constexpr,
    POSITION_LIMIT: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_H: tl.constexpr,
    PDL: tl.constexpr,
):
    """States, mirror and all outputs of an entry but `op`; drafts are [B, K], the mirror has G. Grid: B."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0).to(tl.int64)
    found = tl.load(status + entry)
    found = tl.where((tl.load(is_broken + entry) != 0) & (found == 0), INTERNAL, found)
    fine = found == 0
    key, pairs = tl.load(first_key + entry), tl.load(pair_count + entry)
    count = tl.where(fine, tl.load(draft_count + entry), 0)
    reason = tl.load(stop + entry)
    limit = tl.where(tl.load(is_limited + entry) != 0, POSITION_LIMIT, tl.load(planned_stop + entry))
    reason = tl.where(fine, tl.where(reason > 0, reason, limit), 0)
    row = states + 3 * tl.load(state_index + entry)
    begin, begin_row, last_key = tl.load(row), tl.load(row + 1), tl.load(row + 2)
    end = tl.where(fine, key + pairs - 1, last_key)
    # What failed while computing has lost the rows that it overwrote.
    end = tl.where(found == INTERNAL, tl.minimum(last_key, key - 1), end)

    r = tl.arange(0, BLOCK_R)
    line = words + entry * (_WORDS + R + G)
    tl.store(line, found)
    tl.store(line + 1, key)
    tl.store(line + 2, pairs)
    tl.store(line + 3, count)
    tl.store(line + 4, reason)
    tl.store(line + _WORDS + r, tl.load(tokens + entry * R + r, mask=r < R, other=0), mask=r < R)
    draft = tl.load(drafts + entry * K + r, mask=r < K, other=0)
    logprob = tl.load(logprobs + entry * K + r, mask=r < K, other=0.0)
    tl.store(line + _WORDS + R + r, draft, mask=r < G)
    tl.store(kept + entry * K + r, logprob, mask=r < K)
    if tl.load(is_real + entry) != 0:
        tl.store(row + 2, end)
        its = tl.load(slot + entry)
        out = arena32 + its * stride32
        tl.store(out + at_status, found.to(tl.int32))
        tl.store(out + at_count, count.to(tl.int32))
        tl.store(out + at_stop, reason.to(tl.int32))
        tl.store(out + at_row_count, (begin_row + end + 1 - begin).to(tl.int32))
        tl.store(out + at_drafts + r, draft.to(tl.int32), mask=r < wide)
        tl.store(arena_floats + its * stride32 + at_logprobs + r, logprob, mask=r < wide)
        tl.store(arena64 + its * stride64 + at_last_key, end)
        last = tl.load(drafts + entry * K + tl.maximum(count - 1, 0))
        for start in range(0, H, BLOCK_H):
            h = start + tl.arange(0, BLOCK_H)
            value = tl.load(embedding + last * H + h, mask=(h < H) & (count > 0), other=0.0).to(tl.float32)
            target = arena_rows + its * stride_rows + at_embedding + h
            tl.store(target, value.to(arena_rows.dtype.element_ty), mask=h < H)


@triton.jit(do_not_specialize=["at_op", "stride64"], do_not_specialize_on_alignment=["slot", "is_real", "op"])
def op_kernel(arena64, slot, is_real, op, at_op, stride64, PDL: tl.constexpr):
    """The operation's number, behind everything else. Grid: B."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    entry = tl.program_id(0)
    if tl.load(is_real + entry) != 0:
        tl.store(arena64 + tl.load(slot + entry) * stride64 + at_op, tl.load(op + entry))
