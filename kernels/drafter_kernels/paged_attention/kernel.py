"""Paged attention in Triton: sequences cut into parts, put together by the program that is done last."""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices
from drafter_kernels.qk_rope_write.kernel import load_heads, load_turns, normed_and_turned, rotation

let_scalars_be_indices()

# Of more parts than these most have nothing to do for a short sequence.
_FEW_PARTS = tl.constexpr(33)


@triton.jit
def _gates(gate, sequence, head, gate_row_stride, has_value, d, GATE_STEP: tl.constexpr):
    """Gates [G, D] of heads [G] of a sequence, at gate + row * gate_row_stride + h * GATE_STEP; zeros if 0."""
    if GATE_STEP > 0:
        at = sequence * gate_row_stride + head[:, None] * GATE_STEP + d[None, :]
        return tl.load(gate + at, mask=has_value, other=0.0).to(tl.float32)
    return tl.zeros((head.shape[0], d.shape[0]), tl.float32)


@triton.jit
def _write(
    value,
    gates,
    is_used,
    out,
    sequence,
    head,
    has_value,
    d,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PACKED_OUT: tl.constexpr,
):
    """Writes heads [G] of a sequence, value [G, D], times sigmoid(gates) if GATE_STEP > 0, zeros if it has no rows."""
    if GATE_STEP > 0:
        value = tl.where(is_used, value / (1.0 + tl.exp(-gates)), 0.0)
    column = head[:, None] * D + d[None, :]
    if PACKED_OUT:
        column = (column % 8) * (NUM_HEADS * D // 8) + column // 8
    tl.store(out + sequence * (NUM_HEADS * D) + column, value.to(out.dtype.element_ty), mask=has_value)


@triton.jit
def _attend(query, k, v, counts, best, weights, acc, scale_log2, DOT: tl.constexpr):
    """Takes rows k, v [R, D], those that count [R], into acc [G, D] of weight * v, and into the sum of weights [G]."""
    scores = tl.dot(query, tl.trans(k.to(DOT)), input_precision="ieee") * scale_log2
    scores = tl.where(counts[None, :], scores, -float("inf"))
    together = tl.maximum(best, tl.max(scores, 1))
    shrink = tl.exp2(best - together)
    weight = tl.exp2(scores - together[:, None])
    weights = weights * shrink + tl.sum(weight, 1)
    acc = tl.dot(weight.to(DOT), v.to(DOT), acc * shrink[:, None], input_precision="ieee")
    return together, weights, acc


@triton.jit
def _load_rows(
    k_pages, v_pages, page, row, counts, kv_head, d, PAGE: tl.constexpr, KV_WIDTH: tl.constexpr, D: tl.constexpr
):
    """K and V of rows [R] on pages [R]. Those that do not count come as zeros and are not read: 0 * NaN is NaN."""
    at = (page.to(tl.int64) * PAGE + row % PAGE) * KV_WIDTH + kv_head * D
    here = counts[:, None] & (d < D)[None, :]
    k = tl.load(k_pages + at[:, None] + d[None, :], mask=here, other=0.0)
    return k, tl.load(v_pages + at[:, None] + d[None, :], mask=here, other=0.0)


@triton.jit
def _leave(sums, parts, part_sums, num_sums, head, part, has_head, d, D: tl.constexpr, PARTS: tl.constexpr):
    """Leaves a part's largest scores [G], sums of weights [G] and acc [G, D] for the program that comes last."""
    tl.store(part_sums + head * PARTS + part, sums[0], mask=has_head)
    tl.store(part_sums + num_sums + head * PARTS + part, sums[1], mask=has_head)
    inside = has_head[:, None] & (d < D)[None, :]
    tl.store(parts + (head * PARTS + part)[:, None] * D + d[None, :], sums[2], mask=inside)
    # All threads' stores before the one that counts, which releases them to whoever sees the last number.
    tl.debug_barrier()


@triton.jit
def _join(
    parts, part_sums, num_sums, head, has_head, used, d, D: tl.constexpr, PARTS: tl.constexpr, STEP: tl.constexpr
):
    """Heads [G] of `used` parts: the weighted sums [G, D] by the sum of all weights, and that sum.

    Other programs wrote the parts: they are read past L1, and always in the same order.
    """
    best = tl.full(head.shape, -float("inf"), tl.float32)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros((head.shape[0], d.shape[0]), tl.float32)
    for first in range(0, used, STEP):
        for step in tl.static_range(STEP):
            part = first + step
            here = has_head & (part < used)
            sums = part_sums + head * PARTS + part
            score = tl.load(sums, mask=here, other=-float("inf"), cache_modifier=".cg")
            weights = tl.load(sums + num_sums, mask=here, other=0.0, cache_modifier=".cg")
            place = parts + (head * PARTS + part)[:, None] * D + d[None, :]
            value = tl.load(place, mask=here[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
            together = tl.maximum(best, score)
            base = tl.where(together == -float("inf"), 0.0, together)
            shrink, share = tl.exp2(best - base), tl.exp2(score - base)
            total = total * shrink + share * weights
            acc = acc * shrink[:, None] + share[:, None] * value
            best = together
    return acc / tl.where(total > 0, total, 1.0)[:, None]


@triton.jit(
    do_not_specialize=["max_pages", "position_offset"],
    do_not_specialize_on_alignment=["keys", "slots", "page_table", "row_counts"],
)
def attention_kernel(
    q,
    keys,
    slots,
    q_norm,
    k_norm,
    turns,
    k_pages,
    v_pages,
    page_table,
    row_counts,
    parts,
    part_sums,
    counters,
    gate,
    out,
    gate_row_stride,
    scale_log2,
    max_pages,
    position_offset,
    amplitude,
    eps,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    Q_STEP: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    PARTS: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    STEP: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one sequence for all query heads of one K/V head. Grid: B, NUM_KV_HEADS, parts.

    ROTARY > 0: q is the projection of `qk_rope_write`, whose work is done for the new row, which counts as the last
    one and is read from registers: by a program of its own, behind the parts that share the rows before it, or by the
    only one. Else q is [B, NUM_HEADS, D]. Parts take blocks of BLOCK_R rows in turn; how many there are follows from
    the count on the device. They go to `parts` float32 [B, NUM_HEADS, parts, D], and their largest score (in powers of
    two) and sum of weights to `part_sums` float32 [2, B, NUM_HEADS, parts]; the last to arrive at a counter, zero
    before and after, writes `out`. Rows that do not count are never read.

    What is read from memory is asked for as early as can be: all that a short sequence costs is waiting.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    KV_WIDTH: tl.constexpr = NUM_KV_HEADS * D
    SHARES: tl.constexpr = PARTS - 1 if (ROTARY > 0 and PARTS > 1) else PARTS
    ALWAYS: tl.constexpr = SHARES if SHARES < PARTS else 0
    g, d, only = tl.arange(0, GROUP), tl.arange(0, BLOCK_D), tl.arange(0, 1)[:, None]
    has_q = (g < HEADS)[:, None] & (d < D)[None, :]
    count = tl.load(row_counts + sequence).to(tl.int32)
    table = page_table + sequence * max_pages
    # The first page is asked for before it is known whether its rows count.
    page = tl.load(table + part * BLOCK_R // PAGE, mask=part * BLOCK_R < max_pages * PAGE, other=0)
    slot = tl.full((), -1, tl.int64)
    if ROTARY > 0:
        slot = tl.load(slots + sequence)
    has_new = (slot >= 0) & (count > 0)
    old = count - has_new.to(tl.int32)
    shares = tl.minimum((old + BLOCK_R - 1) // BLOCK_R, SHARES)
    # One program takes part for any sequence: it has the new row, and writes zeros if no row counts.
    used = shares + has_new.to(tl.int32) if PARTS > SHARES else shares
    arrivals = shares + 1 if PARTS > SHARES else tl.maximum(shares, 1)
    if PARTS > _FEW_PARTS:
        if (part >= shares) & (part != ALWAYS):
            return  # few parts don't look: all that is asked for below would wait for the count
    if ROTARY > 0:
        position = tl.load(keys + sequence) + position_offset
        turn = load_turns(turns, d, ROTARY)
        base = q + sequence * (NUM_HEADS * Q_STEP + 2 * KV_WIDTH)
        own_heads = base + (kv_head * HEADS + g)[:, None] * Q_STEP
        heads = load_heads(own_heads, (g < HEADS)[:, None], q_norm, d, HAS_Q_NORM, D, ROTARY)
        row_of_k = base + NUM_HEADS * Q_STEP + kv_head * D + only
        new_heads = load_heads(row_of_k, only == 0, k_norm, d, HAS_K_NORM, D, ROTARY)
        new_v = tl.load(row_of_k + KV_WIDTH + d[None, :], mask=(d < D)[None, :], other=0.0)
    else:
        own_heads = q + (sequence * NUM_HEADS + kv_head * HEADS + g)[:, None] * D
        query = tl.load(own_heads + d[None, :], mask=has_q, other=0.0)
    h = tl.arange(0, BLOCK_G)
    has_value = (h < HEADS)[:, None] & (d < D)[None, :]
    gates = _gates(gate, sequence, kv_head * HEADS + h, gate_row_stride, has_value, d, GATE_STEP)
    end = tl.where((page < 0) | (part >= SHARES), 0, old)
    best = tl.full((GROUP,), -float("inf"), tl.float32)
    weights = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    if ROTARY > 0:
        cos, sin = rotation(turn, position, amplitude)
        query = normed_and_turned(heads, cos, sin, eps, d, HAS_Q_NORM, D, ROTARY).to(q.dtype.element_ty)
        if (part == ALWAYS) & (slot >= 0):
            new_k = normed_and_turned(new_heads, cos, sin, eps, d, HAS_K_NORM, D, ROTARY).to(k_pages.dtype.element_ty)
            place = slot * KV_WIDTH + kv_head * D + only + d[None, :]
            tl.store(k_pages + place, new_k, mask=(d < D)[None, :])
            tl.store(v_pages + place, new_v.to(v_pages.dtype.element_ty), mask=(d < D)[None, :])
            if count > 0:
                best = tl.sum(query.to(tl.float32) * new_k.to(tl.float32), 1) * scale_log2
                weights += 1.0
                acc += new_v.to(v_pages.dtype.element_ty).to(tl.float32)
    query = query.to(DOT)
    for start in range(part * BLOCK_R, end, SHARES * BLOCK_R):
        rows = start + tl.arange(0, BLOCK_R)
        counts = rows < end
        pages = tl.load(table + rows // PAGE, mask=counts, other=0)
        k, v = _load_rows(k_pages, v_pages, pages, rows, counts, kv_head, d, PAGE, KV_WIDTH, D)
        best, weights, acc = _attend(query, k, v, counts, best, weights, acc, scale_log2, DOT)
    if PARTS == 1:
        value, first = acc / tl.where(weights > 0, weights, 1.0)[:, None], kv_head * HEADS + g
        own_gates = _gates(gate, sequence, first, gate_row_stride, has_q, d, GATE_STEP)
        _write(value, own_gates, count > 0, out, sequence, first, has_q, d, NUM_HEADS, D, GATE_STEP, PACKED_OUT)
    elif (part < shares) | (part == ALWAYS):
        place_of_part = tl.minimum(part, shares) if PARTS > SHARES else part  # the new row's comes last
        num_sums = tl.num_programs(0).to(tl.int64) * (NUM_HEADS * PARTS)
        head = sequence * NUM_HEADS + kv_head * HEADS
        _leave((best, weights, acc), parts, part_sums, num_sums, head + g, place_of_part, g < HEADS, d, D, PARTS)
        counter = counters + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == arrivals - 1:
            tl.store(counter, 0)  # ready for the next launch
            mine = kv_head * HEADS + h
            joined = _join(parts, part_sums, num_sums, head + h, h < HEADS, used, d, D, PARTS, STEP)
            _write(joined, gates, count > 0, out, sequence, mine, has_value, d, NUM_HEADS, D, GATE_STEP, PACKED_OUT)
