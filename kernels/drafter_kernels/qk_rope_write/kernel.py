"""Head norms, rotary positions and the paged write in Triton: one program a row and head."""

import triton
import triton.language as tl

_TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def _normed_and_turned(
    base,
    norm,
    turns,
    position,
    amplitude,
    eps,
    HAS_NORM: tl.constexpr,
    D: tl.constexpr,
    ROTARY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """A head's D elements, float32. Each thread reads its partner's element too: no exchange between threads."""
    d = tl.arange(0, BLOCK)
    inside = d < D
    HALF: tl.constexpr = ROTARY // 2
    is_turned = d < ROTARY
    partner = tl.where(is_turned, tl.where(d < HALF, d + HALF, d - HALF), d)
    value = tl.load(base + d, mask=inside, other=0.0).to(tl.float32)
    theirs = tl.load(base + partner, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(value * value, 0) / D + eps)
        value = value * rms * tl.load(norm + d, mask=inside, other=0.0)
        theirs = theirs * rms * tl.load(norm + partner, mask=inside, other=0.0)
    # Turns in float64, and only what is left of the last one in float32: position 200,000 is as exact as position 1.
    whole = position.to(tl.float64) * tl.load(turns + d % HALF, mask=is_turned, other=0.0)
    angle = (whole - tl.floor(whole + 0.5)).to(tl.float32) * _TWO_PI
    cos, sin = tl.cos(angle) * amplitude, tl.sin(angle) * amplitude
    turned = value * cos + tl.where(d < HALF, -theirs, theirs) * sin
    return tl.where(is_turned, turned, value)


@triton.jit(do_not_specialize=["position_offset"], do_not_specialize_on_alignment=["keys", "slots", "row_count"])
def qk_rope_write_kernel(
    projected,
    keys,
    slots,
    q_norm,
    k_norm,
    turns,
    q_out,
    k_pages,
    v_pages,
    row_count,
    position_offset,
    amplitude,
    eps,
    NUM_HEADS: tl.constexpr,
    NUM_KV_HEADS: tl.constexpr,
    D: tl.constexpr,
    Q_STEP: tl.constexpr,
    ROTARY: tl.constexpr,
    HAS_Q_NORM: tl.constexpr,
    HAS_K_NORM: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """q_out [M, NUM_HEADS, D], and the rows `slots` of the pool but for negative ones. Grid: M, heads of both kinds."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row, head = tl.program_id(0).to(tl.int64), tl.program_id(1)
    if HAS_COUNT:
        if row >= tl.load(row_count):
            return
    KV_WIDTH: tl.constexpr = NUM_KV_HEADS * D
    base = projected + row * (NUM_HEADS * Q_STEP + 2 * KV_WIDTH)
    position = tl.load(keys + row) + position_offset
    d = tl.arange(0, BLOCK)
    if head < NUM_HEADS:
        at = base + head * Q_STEP
        q = _normed_and_turned(at, q_norm, turns, position, amplitude, eps, HAS_Q_NORM, D, ROTARY, BLOCK)
        tl.store(q_out + (row * NUM_HEADS + head) * D + d, q.to(q_out.dtype.element_ty), mask=d < D)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            kv_head = head - NUM_HEADS
            at = base + NUM_HEADS * Q_STEP + kv_head * D
            k = _normed_and_turned(at, k_norm, turns, position, amplitude, eps, HAS_K_NORM, D, ROTARY, BLOCK)
            v = tl.load(at + KV_WIDTH + d, mask=d < D, other=0.0)
            place = slot * KV_WIDTH + kv_head * D + d
            tl.store(k_pages + place, k.to(k_pages.dtype.element_ty), mask=d < D)
            tl.store(v_pages + place, v.to(v_pages.dtype.element_ty), mask=d < D)
