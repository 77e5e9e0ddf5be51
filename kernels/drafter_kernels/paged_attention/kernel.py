"""Paged attention in Triton: sequences cut into parts, put together by the program that is done last."""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices
from drafter_kernels.qk_rope_write.kernel import normed_and_turned, rotation

let_scalars_be_indices()


@triton.jit
def _write(
    value,
    is_used,
    gate,
    out,
    sequence,
    head,
    gate_row_stride,
    has_value,
    d,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PACKED_OUT: tl.constexpr,
):
    """Writes heads [G] of a sequence, value [G, D], times sigmoid(gate) if GATE_STEP > 0, zeros if it has no rows.

    The gate of head h lies at gate + row * gate_row_stride + h * GATE_STEP.
    """
    if GATE_STEP > 0:
        at = sequence * gate_row_stride + head[:, None] * GATE_STEP + d[None, :]
        value = value / (1.0 + tl.exp(-tl.load(gate + at, mask=has_value, other=0.0).to(tl.float32)))
        value = tl.where(is_used, value, 0.0)
    column = head[:, None] * D + d[None, :]
    if PACKED_OUT:
        column = (column % 8) * (NUM_HEADS * D // 8) + column // 8
    tl.store(out + sequence * (NUM_HEADS * D) + column, value.to(out.dtype.element_ty), mask=has_value)


@triton.jit
def _prefetch(
    k_pages,
    v_pages,
    table,
    begin,
    end,
    kv_head,
    PAGE: tl.constexpr,
    KV_WIDTH: tl.constexpr,
    D: tl.constexpr,
    BLOCK_R: tl.constexpr,
):
    """Asks for a part's first rows: they come to L2 while other things are done."""
    LINE: tl.constexpr = 1024 // k_pages.dtype.element_ty.primitive_bitwidth
    LINES: tl.constexpr = max(1, D // LINE)
    row = tl.maximum(tl.minimum(begin + tl.arange(0, BLOCK_R), end - 1), 0)
    page = tl.load(table + row // PAGE, mask=row < end, other=0).to(tl.int64)
    at = ((page * PAGE + row % PAGE) * KV_WIDTH + kv_head * D)[:, None] + (tl.arange(0, LINES) * LINE)[None, :]
    for pages in tl.static_range(2):
        where = ((v_pages if pages else k_pages) + at).to(tl.int64)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [where], dtype=tl.int32, is_pure=False, pack=1
        )


@triton.jit
def _join(
    parts,
    part_sums,
    num_sums,
    head,
    has_head,
    used,
    d,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Heads [G] of `used` parts: the weighted sums [G, D] by the sum of all weights.

    Other programs wrote the parts: they are read past L1, and always in the same order.
    """
    STEP: tl.constexpr = min(8, PARTS)
    every = tl.arange(0, BLOCK_P)
    is_part = has_head[:, None] & (every < used)[None, :]
    their_scores = part_sums + (head * PARTS)[:, None] + every[None, :]
    scores = tl.load(their_scores, mask=is_part, other=-float("inf"), cache_modifier=".cg")
    best = tl.where(has_head, tl.max(scores, 1), 0.0)
    total = tl.zeros(head.shape, tl.float32)
    acc = tl.zeros((head.shape[0], d.shape[0]), tl.float32)
    for first in range(0, used, STEP):
        for step in tl.static_range(STEP):
            p = first + step
            here = has_head & (p < used)
            sums = part_sums + head * PARTS + p
            score = tl.load(sums, mask=here, other=-float("inf"), cache_modifier=".cg")
            weights = tl.load(sums + num_sums, mask=here, other=0.0, cache_modifier=".cg")
            place = parts + (head * PARTS + p)[:, None] * D + d[None, :]
            value = tl.load(place, mask=here[:, None] & (d < D)[None, :], other=0.0, cache_modifier=".cg")
            share = tl.exp2(score - best)
            total += share * weights
            acc += share[:, None] * value
    return acc / tl.where(has_head, total, 1.0)[:, None]


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
    BLOCK_P: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PREFETCH: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one sequence for all query heads of one K/V head. Grid: B, NUM_KV_HEADS, PARTS.

    ROTARY > 0: q is the projection of `qk_rope_write`, and the first part does for its K/V head what that would have
    done: the new row counts as the last one and is read from registers; the parts share the rows before it. Else q is
    [B, NUM_HEADS, D]. How long parts are follows from the count on the device. Parts go to `parts` float32 [B,
    NUM_HEADS, PARTS, D], and their largest score (in powers of two) and sum of weights to `part_sums` float32 [2, B,
    NUM_HEADS, PARTS]; the last to arrive at a counter, zero before and after, writes `out`. Rows that do not count are
    never read.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, kv_head, part = tl.program_id(0).to(tl.int64), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    KV_WIDTH: tl.constexpr = NUM_KV_HEADS * D
    g, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    count = tl.load(row_counts + sequence).to(tl.int32)
    slot = tl.full((), -1, tl.int64)
    if ROTARY > 0:
        slot = tl.load(slots + sequence)
    old = count - ((slot >= 0) & (count > 0)).to(tl.int32)
    length = tl.maximum(((old + PARTS - 1) // PARTS + BLOCK_R - 1) // BLOCK_R * BLOCK_R, 1)
    used = tl.maximum((old + length - 1) // length, 1)
    if part >= used:
        return
    begin = part * length
    end = tl.minimum(begin + length, old)
    table = page_table + sequence * max_pages
    if PREFETCH:
        _prefetch(k_pages, v_pages, table, begin, end, kv_head, PAGE, KV_WIDTH, D, BLOCK_R)
    has_q = (g < HEADS)[:, None] & (d < D)[None, :]
    best = tl.full((GROUP,), -float("inf"), tl.float32)
    weights = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    if ROTARY > 0:
        base = q + sequence * (NUM_HEADS * Q_STEP + 2 * KV_WIDTH)
        cos, sin = rotation(turns, tl.load(keys + sequence) + position_offset, amplitude, d, ROTARY)
        heads = base + (kv_head * HEADS + g)[:, None] * Q_STEP
        query = normed_and_turned(heads, (g < HEADS)[:, None], q_norm, cos, sin, eps, d, HAS_Q_NORM, D, ROTARY)
        query = query.to(q.dtype.element_ty).to(DOT)
        if (part == 0) & (slot >= 0):
            only = tl.arange(0, 1)[:, None]
            row_of_k = base + NUM_HEADS * Q_STEP + kv_head * D + only
            new_k = normed_and_turned(row_of_k, only == 0, k_norm, cos, sin, eps, d, HAS_K_NORM, D, ROTARY)
            new_k = new_k.to(k_pages.dtype.element_ty)
            new_v = tl.load(row_of_k + KV_WIDTH + d[None, :], mask=(d < D)[None, :], other=0.0).to(
                v_pages.dtype.element_ty
            )
            place = slot * KV_WIDTH + kv_head * D + only + d[None, :]
            tl.store(k_pages + place, new_k, mask=(d < D)[None, :])
            tl.store(v_pages + place, new_v, mask=(d < D)[None, :])
            if count > 0:
                best = tl.sum(query.to(tl.float32) * new_k.to(tl.float32), 1) * scale_log2
                weights += 1.0
                acc += new_v.to(tl.float32)
    else:
        heads = (sequence * NUM_HEADS + kv_head * HEADS + g)[:, None] * D
        query = tl.load(q + heads + d[None, :], mask=has_q, other=0.0).to(DOT)
    for start in range(begin, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        counts = row < end
        page = tl.load(table + row // PAGE, mask=counts, other=0).to(tl.int64)
        at = (page * PAGE + row % PAGE) * KV_WIDTH + kv_head * D
        # Masked rows come as zeros, so that nothing that was never written is multiplied by zero.
        here = counts[:, None] & (d < D)[None, :]
        k = tl.load(k_pages + at[:, None] + d[None, :], mask=here, other=0.0).to(DOT)
        v = tl.load(v_pages + at[:, None] + d[None, :], mask=here, other=0.0).to(DOT)
        scores = tl.dot(query, tl.trans(k), input_precision="ieee") * scale_log2
        scores = tl.where(counts[None, :], scores, -float("inf"))
        together = tl.maximum(best, tl.max(scores, 1))
        shrink = tl.exp2(best - together)
        weight = tl.exp2(scores - together[:, None])
        weights = weights * shrink + tl.sum(weight, 1)
        acc = tl.dot(weight.to(DOT), v, acc * shrink[:, None], input_precision="ieee")
        best = together
    if used == 1:
        value = acc / tl.where(weights > 0, weights, 1.0)[:, None]
        mine, is_used = kv_head * HEADS + g, count > 0
        _write(
            value, is_used, gate, out, sequence, mine, gate_row_stride, has_q, d, NUM_HEADS, D, GATE_STEP, PACKED_OUT
        )
    elif PARTS > 1:
        num_sums = tl.num_programs(0).to(tl.int64) * (NUM_HEADS * PARTS)
        head = sequence * NUM_HEADS + kv_head * HEADS + g
        tl.store(part_sums + head * PARTS + part, best, mask=g < HEADS)
        tl.store(part_sums + num_sums + head * PARTS + part, weights, mask=g < HEADS)
        tl.store(parts + (head * PARTS + part)[:, None] * D + d[None, :], acc, mask=has_q)
        # All threads' stores before the one that counts, which releases them to whoever sees the last number.
        tl.debug_barrier()
        counter = counters + sequence * NUM_KV_HEADS + kv_head
        if tl.atomic_add(counter, 1, sem="acq_rel") == used - 1:
            tl.store(counter, 0)  # ready for the next launch
            h = tl.arange(0, BLOCK_G)
            mine, has_value = kv_head * HEADS + h, (h < HEADS)[:, None] & (d < D)[None, :]
            value = _join(
                parts, part_sums, num_sums, sequence * NUM_HEADS + mine, h < HEADS, used, d, D, PARTS, BLOCK_P
            )
            _write(
                value,
                True,
                gate,
                out,
                sequence,
                mine,
                gate_row_stride,
                has_value,
                d,
                NUM_HEADS,
                D,
                GATE_STEP,
                PACKED_OUT,
            )
