"""Paged attention in Triton: sequences cut into parts, the parts put together afterwards."""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices

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


@triton.jit(do_not_specialize=["max_pages"], do_not_specialize_on_alignment=["page_table", "row_counts"])
def part_kernel(
    q,
    k_pages,
    v_pages,
    page_table,
    row_counts,
    parts,
    part_sums,
    gate,
    out,
    gate_row_stride,
    scale_log2,
    max_pages,
    PAGE: tl.constexpr,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    DOT: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_R: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """One part of one sequence for all query heads of one K/V head. Grid: B, NUM_KV_HEADS, PARTS.

    parts float32 [B, NUM_HEADS, PARTS, D] sums of weight * v; part_sums float32 [2, B, NUM_HEADS, PARTS]: the largest
    score (in powers of two) and the sum of weights. How long parts are follows from the count on the device; one that
    is empty says so by a score of -infinity and writes nothing else. A part that is the only one goes to `out`, as
    `join_kernel` would write it. Rows that do not count are never read.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, kv_head, part = tl.program_id(0), tl.program_id(1), tl.program_id(2)
    HEADS: tl.constexpr = NUM_HEADS // NUM_KV_HEADS
    g, d = tl.arange(0, GROUP), tl.arange(0, BLOCK_D)
    head = sequence.to(tl.int64) * NUM_HEADS + kv_head * HEADS + g
    count = tl.load(row_counts + sequence).to(tl.int32)
    length = ((count + PARTS - 1) // PARTS + BLOCK_R - 1) // BLOCK_R * BLOCK_R
    begin = part * length
    end = tl.minimum(begin + length, count)
    sums = part_sums + head * PARTS + part
    num_sums = tl.num_programs(0).to(tl.int64) * (NUM_HEADS * PARTS)
    if PARTS > 1 and begin >= end:
        tl.store(sums, tl.full((GROUP,), -float("inf"), tl.float32), mask=g < HEADS)
        return
    has_q = (g < HEADS)[:, None] & (d < D)[None, :]
    query = tl.load(q + head[:, None] * D + d[None, :], mask=has_q, other=0.0).to(DOT)
    best = tl.full((GROUP,), -float("inf"), tl.float32)
    weights = tl.zeros((GROUP,), tl.float32)
    acc = tl.zeros((GROUP, BLOCK_D), tl.float32)
    table = page_table + sequence.to(tl.int64) * max_pages
    for start in range(begin, end, BLOCK_R):
        row = start + tl.arange(0, BLOCK_R)
        counts = row < end
        page = tl.load(table + row // PAGE, mask=counts, other=0).to(tl.int64)
        at = (page * PAGE + row % PAGE) * (NUM_KV_HEADS * D) + kv_head * D
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
    if PARTS == 1:
        value = acc / tl.where(weights > 0, weights, 1.0)[:, None]
        mine, is_used = kv_head * HEADS + g, count > 0
        first = sequence.to(tl.int64)
        _write(value, is_used, gate, out, first, mine, gate_row_stride, has_q, d, NUM_HEADS, D, GATE_STEP, PACKED_OUT)
    else:
        tl.store(sums, best, mask=g < HEADS)
        tl.store(sums + num_sums, weights, mask=g < HEADS)
        tl.store(parts + (head[:, None] * PARTS + part) * D + d[None, :], acc, mask=has_q)


@triton.jit
def join_kernel(
    parts,
    part_sums,
    gate,
    out,
    gate_row_stride,
    NUM_HEADS: tl.constexpr,
    D: tl.constexpr,
    PARTS: tl.constexpr,
    GATE_STEP: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):
    """Puts the parts of a head together and multiplies by sigmoid(gate) if GATE_STEP > 0. Grid: B, NUM_HEADS.

    A sequence without rows gives zeros.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    sequence, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    head = sequence * NUM_HEADS + h
    num_sums = tl.num_programs(0).to(tl.int64) * (NUM_HEADS * PARTS)
    p, d = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_D)
    score = tl.load(part_sums + head * PARTS + p, mask=p < PARTS, other=-float("inf"))
    has_rows = score != -float("inf")
    weights = tl.load(part_sums + num_sums + head * PARTS + p, mask=has_rows, other=0.0)
    best = tl.max(score, 0)
    share = tl.where(has_rows, tl.exp2(score - best), 0.0)
    total = tl.sum(share * weights, 0)
    here = has_rows[:, None] & (d < D)[None, :]
    values = tl.load(parts + (head * PARTS + p)[:, None] * D + d[None, :], mask=here, other=0.0)
    value = tl.sum(values * share[:, None], 0) / tl.where(total > 0, total, 1.0)
    only = h + tl.arange(0, 1)
    _write(
        value[None, :],
        total > 0,
        gate,
        out,
        sequence,
        only,
        gate_row_stride,
        (only < NUM_HEADS)[:, None] & (d < D)[None, :],
        d,
        NUM_HEADS,
        D,
        GATE_STEP,
        PACKED_OUT,
    )
