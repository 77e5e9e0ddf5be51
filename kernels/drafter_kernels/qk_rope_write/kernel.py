"""Head norms, rotary positions and the paged write in Triton: one program a row and head."""

import triton
import triton.language as tl

_TWO_PI = tl.constexpr(6.283185307179586)


@triton.jit
def rotation(turn, position, amplitude):
    """Cosines and sines of a position for elements that do `turn` float64 turns a position, float32."""
    # Turns in float64, and only what is left of the last one in float32: position 200,000 is as exact as position 1.
    whole = position.to(tl.float64) * turn
    rest = (whole - tl.floor(whole + 0.5)).to(tl.float32)
    # To a quarter of a turn either way, where a few terms are exact to float32; the library's sine is much longer.
    halves = tl.floor(2.0 * rest + 0.5)
    x = (rest - 0.5 * halves) * _TWO_PI
    amplitude = amplitude * (1.0 - 2.0 * tl.abs(halves))
    y = x * x
    sin = 1.0 + y * (-1 / 6 + y * (1 / 120 + y * (-1 / 5040 + y * (1 / 362880 - y * (1 / 39916800)))))
    cos = -1 / 720 + y * (1 / 40320 + y * (-1 / 3628800 + y * (1 / 479001600)))
    cos = 1.0 + y * (-1 / 2 + y * (1 / 24 + y * cos))
    return cos * amplitude, x * sin * amplitude


@triton.jit
def load_turns(turns, d, ROTARY: tl.constexpr):
    """Turns a position of elements d of a head; zeros behind ROTARY."""
    return tl.load(turns + d % (ROTARY // 2), mask=d < ROTARY, other=0.0)


@triton.jit
def _partner(d, ROTARY: tl.constexpr):
    """The element that each element turns with: itself behind ROTARY."""
    HALF: tl.constexpr = ROTARY // 2
    return tl.where(d < ROTARY, tl.where(d < HALF, d + HALF, d - HALF), d)


@triton.jit
def load_heads(base, has_head, norm, d, HAS_NORM: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr):
    """Heads [G, D] that begin at `base` [G, 1] and the scales of their norm, each with its partners'.

    Zeros where has_head [G, 1] is false. Each thread reads its partner's element too: no exchange between threads.
    """
    inside = has_head & (d < D)[None, :]
    value = tl.load(base + d[None, :], mask=inside, other=0.0)
    theirs = tl.load(base + _partner(d, ROTARY)[None, :], mask=inside, other=0.0)
    scale, their_scale = value, theirs
    if HAS_NORM:
        # Read for each head anew: to be read once they would have to change threads.
        first = norm + has_head.to(tl.int32) * 0
        scale = tl.load(first + d[None, :], mask=inside, other=0.0)
        their_scale = tl.load(first + _partner(d, ROTARY)[None, :], mask=inside, other=0.0)
    return value, theirs, scale, their_scale


@triton.jit
def normed_and_turned(heads, cos, sin, eps, d, HAS_NORM: tl.constexpr, D: tl.constexpr, ROTARY: tl.constexpr):
    """What `load_heads` has loaded, normalised and turned, float32 [G, D]."""
    value, theirs = heads[0].to(tl.float32), heads[1].to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(value * value, 1) / D + eps)[:, None]
        value = value * rms * heads[2]
        theirs = theirs * rms * heads[3]
    turned = value * cos[None, :] + tl.where((d < ROTARY // 2)[None, :], -theirs, theirs) * sin[None, :]
    return tl.where((d < ROTARY)[None, :], turned, value)


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
    d, only = tl.arange(0, BLOCK), tl.arange(0, 1)[:, None]
    inside = (d < D)[None, :]
    cos, sin = rotation(load_turns(turns, d, ROTARY), tl.load(keys + row) + position_offset, amplitude)
    if head < NUM_HEADS:
        at = base + head * Q_STEP + only
        heads = load_heads(at, only == 0, q_norm, d, HAS_Q_NORM, D, ROTARY)
        q = normed_and_turned(heads, cos, sin, eps, d, HAS_Q_NORM, D, ROTARY)
        place = (row * NUM_HEADS + head) * D + only + d[None, :]
        tl.store(q_out + place, q.to(q_out.dtype.element_ty), mask=inside)
    else:
        slot = tl.load(slots + row).to(tl.int64)
        if slot >= 0:
            kv_head = head - NUM_HEADS
            at = base + NUM_HEADS * Q_STEP + kv_head * D + only
            heads = load_heads(at, only == 0, k_norm, d, HAS_K_NORM, D, ROTARY)
            k = normed_and_turned(heads, cos, sin, eps, d, HAS_K_NORM, D, ROTARY)
            v = tl.load(at + KV_WIDTH + d[None, :], mask=inside, other=0.0)
            place = slot * KV_WIDTH + kv_head * D + only + d[None, :]
            tl.store(k_pages + place, k.to(k_pages.dtype.element_ty), mask=inside)
            tl.store(v_pages + place, v.to(v_pages.dtype.element_ty), mask=inside)
