"""Products of one row of x in Triton, without tensor cores: a program streams rows of the weight past all of x.

The first part of a program's rows is on its way before the kernel waits for the one before it, and the next part
always is while one is multiplied.
"""

import triton
import triton.language as tl

from drafter_kernels.linear.kernel import finish
from drafter_kernels.quantize.kernel import DOT8_LACKS, dot8

# Exponent that the largest of 16 neighbours of x is brought to: sums of eight products with decoded codes stay below 64
# in float16.
SCALED_EXPONENT = tl.constexpr(13)
# E4M3 bits in a float32's place come out times 2^-120, which is brought back in two steps. So x may be of sizes from
# 2^-55 to 2^55.
SCALE_UP = tl.constexpr(2.0**80)
SCALE_REST = tl.constexpr(2.0**40)

# The codes of word {a} that belong to pair 0 to 3 of x, as float16 short of DOT8_LACKS, in t. One multiplication shifts
# sign and magnitude by different widths at once; what else it leaves is cut off.
_PLACES = (
    "and.b32 t, {a}, 0x8E008E00;",
    "shl.b32 t, {a}, 3; and.b32 t, t, 0x8E008E00;",
    "and.b32 t, {a}, 0x40384038; mul.lo.u32 t, t, 66; and.b32 t, t, 0x8E008E00;",
    "and.b32 t, {a}, 0x20072007; mul.lo.u32 t, t, 516; and.b32 t, t, 0x8E008E00;",
)


def _dot16_text() -> str:
    """PTX: the sum (operand 0) of the 16 elements of two words (1) times 16 float16 of x (2 to 9).

    Eight products are summed in float16 in each of two lanes: four of each word, then both.
    """
    text = "{ .reg .b32 a, b, t, u, v; .reg .b16 lo, hi; .reg .f32 fl, fh;\n"
    text += "mov.b64 {a, b}, $1; mov.b32 u, 0; mov.b32 v, 0;\n"
    for index, place in enumerate(_PLACES):
        text += place.format(a="a") + f" fma.rn.f16x2 u, t, ${2 + index}, u;\n"
        text += place.format(a="b") + f" fma.rn.f16x2 v, t, ${6 + index}, v;\n"
    text += "add.rn.f16x2 u, u, v;\n"
    return text + "mov.b32 {lo, hi}, u; cvt.f32.f16 fl, lo; cvt.f32.f16 fh, hi; add.f32 $0, fl, fh; }"


_DOT16 = tl.constexpr(_dot16_text())


@triton.jit
def _pair(low, high, PTX: tl.constexpr):
    """Two float32 as float16 in one int32."""
    if PTX:
        pair = tl.inline_asm_elementwise(
            "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=tl.int32, is_pure=True, pack=1
        )
    else:
        first, second = low.to(tl.float16).to(tl.int16, bitcast=True), high.to(tl.float16).to(tl.int16, bitcast=True)
        pair = (first.to(tl.int32) & 0xFFFF) | (second.to(tl.int32) << 16)
    return pair


@triton.jit
def _read_word(x, norm, words, WORDS: tl.constexpr, BK: tl.constexpr, HAS_NORM: tl.constexpr, PACKED_X: tl.constexpr):
    """The elements of x for each of `words` [BK], normalised but for the root: float32 [BK, 8]; and squares."""
    eight = tl.arange(0, 8)[None, :]
    at = words[:, None] * 8 + eight
    inside = (words < WORDS)[:, None]
    if PACKED_X:
        value = tl.load(x + eight * WORDS + words[:, None], mask=inside, other=0.0).to(tl.float32)
    else:
        value = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    if HAS_NORM:
        squares = tl.sum(value * value, 1)
        value = value * tl.load(norm + at, mask=inside, other=0.0)
    return value, squares


@triton.jit
def _as_pairs(value, BK: tl.constexpr, PTX: tl.constexpr):
    """float32 [BK, 8] as four int32 [BK, 1] of two neighbours in float16."""
    low, high = tl.split(tl.reshape(value, (BK, 4, 2)))
    first, second = tl.split(tl.reshape(_pair(low, high, PTX), (BK, 2, 2)))
    x0, x2 = tl.split(first)
    x1, x3 = tl.split(second)
    return x0[:, None], x1[:, None], x2[:, None], x3[:, None]


@triton.jit
def _read_x(
    x,
    norm,
    start,
    PAIRS: tl.constexpr,
    BK: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PACKED_X: tl.constexpr,
    PTX: tl.constexpr,
):
    """Pairs of words `start` to `start + BK` of x: 16 elements each, divided by a power of two of their own.

    That power times 2^80, float32 [BK, 1]; squares of x [BK]; and twice four int32 [BK, 1], of the first word and of
    the second. A thread reads its own elements alone: nothing is exchanged.
    """
    k = start + tl.arange(0, BK)
    first, squares = _read_word(x, norm, 2 * k, 2 * PAIRS, BK, HAS_NORM, PACKED_X)
    second, more = _read_word(x, norm, 2 * k + 1, 2 * PAIRS, BK, HAS_NORM, PACKED_X)
    largest = tl.maximum(tl.max(tl.abs(first), 1), tl.max(tl.abs(second), 1))
    exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, 2 * SCALED_EXPONENT)
    up = ((-exponent + (254 + SCALED_EXPONENT)) << 23).to(tl.float32, bitcast=True)[:, None]
    down = ((exponent - SCALED_EXPONENT) << 23).to(tl.float32, bitcast=True)[:, None] * SCALE_UP
    x0, x1, x2, x3 = _as_pairs(first * up, BK, PTX)
    y0, y1, y2, y3 = _as_pairs(second * up, BK, PTX)
    return down, squares + more, x0, x1, x2, x3, y0, y1, y2, y3


@triton.jit
def _read_words(
    words, block_scales, rows, start, zero, N: tl.constexpr, PAIRS: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr
):
    """Pairs of words, int64 [BK, BN], and the bits of their scales.

    `zero` hides how pairs are aligned: Triton reads them one by one, so that a thread's words are those of its x.
    """
    k = start + tl.arange(0, BK)
    at = rows.to(tl.int64)[None, :] * PAIRS + k[:, None]
    place = words.to(tl.pointer_type(tl.int64)) + zero + at
    scales = block_scales.to(tl.pointer_type(tl.int8)) + zero + at
    if N % BN == 0 and PAIRS == BK:
        w, s = tl.load(place), tl.load(scales)
    else:  # also what lies behind the end is asked for, and must not be read
        inside = (rows < N)[None, :] & (k < PAIRS)[:, None]
        w, s = tl.load(place, mask=inside, other=0), tl.load(scales, mask=inside, other=0)
    return w, s


@triton.jit
def _products(w, s, down, x0, x1, x2, x3, y0, y1, y2, y3, PTX: tl.constexpr):
    """float32 [BK, BN], whose sum over the pairs is the product, short of SCALE_REST and DOT8_LACKS."""
    scale = ((s.to(tl.int32) << 20) & -0x78100000).to(tl.float32, bitcast=True) * down
    w, x0 = tl.broadcast(w, x0)
    w, x1 = tl.broadcast(w, x1)
    w, x2 = tl.broadcast(w, x2)
    w, x3 = tl.broadcast(w, x3)
    w, y0 = tl.broadcast(w, y0)
    w, y1 = tl.broadcast(w, y1)
    w, y2 = tl.broadcast(w, y2)
    w, y3 = tl.broadcast(w, y3)
    if PTX:
        product = tl.inline_asm_elementwise(
            _DOT16,
            "=f,l,r,r,r,r,r,r,r,r",
            [w, x0, x1, x2, x3, y0, y1, y2, y3],
            dtype=tl.float32,
            is_pure=True,
            pack=1,
        )
    else:
        product = dot8(w.to(tl.int32), x0, x1, x2, x3, False) + dot8((w >> 32).to(tl.int32), y0, y1, y2, y3, False)
    return product * scale


@triton.jit
def _start(PDL: tl.constexpr):
    """What is before it is asked for before the kernel waits, and not put off until it is needed."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    else:
        tl.debug_barrier()


@triton.jit
def _count(row_count, HAS_COUNT: tl.constexpr):
    count = 1
    if HAS_COUNT:
        count = tl.minimum(count, tl.load(row_count))
    return count


@triton.jit(do_not_specialize=["zero"], do_not_specialize_on_alignment=["row_count"])
def nvfp4_row_kernel(
    x,
    words,
    block_scales,
    tensor_scale,
    norm,
    gate,
    residual,
    out,
    row_count,
    eps,
    zero,
    N: tl.constexpr,
    KW: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PACKED_X: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
    BEFORE: tl.constexpr = 0,
):
    """out [1, N] from x [1, 8 KW] of a float type, which is normalised and scaled here. `zero` is 0. Grid: N / BN."""
    rows = (tl.program_id(0) - BEFORE) * BN + tl.arange(0, BN)
    PAIRS: tl.constexpr = KW // 2
    other_words, other_scales = words + N * KW, block_scales + N * PAIRS
    w, s = _read_words(words, block_scales, rows, 0, zero, N, PAIRS, BN, BK)
    if SWIGLU:
        w2, s2 = _read_words(other_words, other_scales, rows, 0, zero, N, PAIRS, BN, BK)
    scale = tl.load(tensor_scale) * (DOT8_LACKS * SCALE_REST)
    _start(PDL)
    acc, other = tl.zeros((BK, BN), tl.float32), tl.zeros((BK, BN), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, PAIRS, BK):
        v, t = w, s
        if SWIGLU:
            v2, t2 = w2, s2
        if PAIRS > BK:
            w, s = _read_words(words, block_scales, rows, start + BK, zero, N, PAIRS, BN, BK)
            if SWIGLU:
                w2, s2 = _read_words(other_words, other_scales, rows, start + BK, zero, N, PAIRS, BN, BK)
        down, more, x0, x1, x2, x3, y0, y1, y2, y3 = _read_x(x, norm, start, PAIRS, BK, HAS_NORM, PACKED_X, PTX)
        squares += more
        acc += _products(v, t, down, x0, x1, x2, x3, y0, y1, y2, y3, PTX)
        if SWIGLU:
            other += _products(v2, t2, down, x0, x1, x2, x3, y0, y1, y2, y3, PTX)
    if HAS_NORM:
        scale *= tl.rsqrt(tl.sum(squares, 0) / (8 * KW) + eps)
    value, second = (tl.sum(acc, 0) * scale)[:, None], (tl.sum(other, 0) * scale)[:, None]
    m, count = tl.arange(0, 1), _count(row_count, HAS_COUNT)
    finish(
        value,
        second,
        out,
        gate,
        residual,
        m,
        rows,
        count,
        N,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        OUT_STRIDE,
    )


@triton.jit
def _read_rows(weight, rows, start, N: tl.constexpr, K: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr):
    k = start + tl.arange(0, BK)
    place = weight + rows.to(tl.int64)[:, None] * K + k[None, :]
    # The part behind the last one is asked for too, and must not be read.
    inside = (k < K)[None, :] if N % BN == 0 else (rows < N)[:, None] & (k < K)[None, :]
    return tl.load(place, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["row_count"])
def dense_row_kernel(
    x,
    weight,
    norm,
    gate,
    residual,
    out,
    row_count,
    eps,
    N: tl.constexpr,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
    BEFORE: tl.constexpr = 0,
):
    """The same for a weight [N, K] ([2 N, K] for SwiGLU) of a float type without scales."""
    rows = (tl.program_id(0) - BEFORE) * BN + tl.arange(0, BN)
    w = _read_rows(weight, rows, 0, N, K, BN, BK)
    if SWIGLU:
        w2 = _read_rows(weight + N * K, rows, 0, N, K, BN, BK)
    _start(PDL)
    acc, other = tl.zeros((BN, BK), tl.float32), tl.zeros((BN, BK), tl.float32)
    squares = tl.zeros((BK,), tl.float32)
    for start in range(0, K, BK):
        v = w
        w = _read_rows(weight, rows, start + BK, N, K, BN, BK)
        if SWIGLU:
            v2 = w2
            w2 = _read_rows(weight + N * K, rows, start + BK, N, K, BN, BK)
        k = start + tl.arange(0, BK)
        part = tl.load(x + k, mask=k < K, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += part * part
            part = part * tl.load(norm + k, mask=k < K, other=0.0)
        acc += v.to(tl.float32) * part[None, :]
        if SWIGLU:
            other += v2.to(tl.float32) * part[None, :]
    value, second = tl.sum(acc, 1), tl.sum(other, 1)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(squares, 0) / K + eps)
        value *= rms
        second *= rms
    value, second, m, count = value[:, None], second[:, None], tl.arange(0, 1), _count(row_count, HAS_COUNT)
    finish(
        value,
        second,
        out,
        gate,
        residual,
        m,
        rows,
        count,
        N,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        OUT_STRIDE,
    )


@triton.jit(do_not_specialize=["zero"], do_not_specialize_on_alignment=["row_count"])
def joined_row_kernel(
    x,
    words,
    block_scales,
    tensor_scale,
    weight,
    norm,
    out,
    row_count,
    eps,
    zero,
    N: tl.constexpr,
    KW: tl.constexpr,
    N2: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PACKED_X: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    BN2: tl.constexpr,
    BK2: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [1, N + N2] of one row of x with an NVFP4 weight [N, K] and one of a float type [N2, K]."""
    FIRST: tl.constexpr = (N + BN - 1) // BN
    if tl.program_id(0) < FIRST:
        nvfp4_row_kernel(
            x,
            words,
            block_scales,
            tensor_scale,
            norm,
            x,
            x,
            out,
            row_count,
            eps,
            zero,
            N,
            KW,
            HAS_NORM,
            PACKED_X,
            0,
            False,
            False,
            False,
            N,
            HAS_COUNT,
            BN,
            BK,
            PTX,
            PDL,
        )
    else:
        dense_row_kernel(
            x,
            weight,
            norm,
            x,
            x,
            out + N,
            row_count,
            eps,
            N2,
            8 * KW,
            HAS_NORM,
            0,
            False,
            False,
            False,
            N2,
            HAS_COUNT,
            BN2,
            BK2,
            PDL,
            FIRST,
        )


@triton.jit
def _half(
    acc,
    w,
    rows,
    weight,
    source,
    norm,
    is_pair,
    eps,
    AT: tl.constexpr,
    SIZE: tl.constexpr,
    N: tl.constexpr,
    K: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
):
    """Adds the product with a half of a joined row to acc [BN]; w is its first part. Returns the next one too."""
    part_acc, squares = tl.zeros((BN, BK), tl.float32), tl.zeros((BK,), tl.float32)
    for start in range(0, SIZE, BK):
        v = w
        w = _read_rows(weight, rows, AT + start + BK, N, K, BN, BK)
        k = start + tl.arange(0, BK)
        part = tl.load(source + k, mask=(k < SIZE) & is_pair, other=0.0).to(tl.float32)
        squares += part * part
        part_acc += v.to(tl.float32) * (part * tl.load(norm + k))[None, :]
    return acc + tl.sum(part_acc, 1) * tl.rsqrt(tl.sum(squares, 0) / SIZE + eps), w


@triton.jit(do_not_specialize_on_alignment=["tokens", "row_count"])
def pair_row_kernel(
    tokens,
    embedding,
    hiddens,
    embedding_norm,
    hidden_norm,
    weight,
    out,
    row_count,
    eps,
    N: tl.constexpr,
    H: tl.constexpr,
    W: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [1, N] = the joined row of `fuse_pair` times weight [N, H + W]; BK divides H and W. Grid: N / BN."""
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    K: tl.constexpr = H + W
    w = _read_rows(weight, rows, 0, N, K, BN, BK)
    _start(PDL)
    token = tl.load(tokens).to(tl.int64)
    is_pair = token >= 0
    acc = tl.zeros((BN,), tl.float32)
    if HIDDEN_FIRST:
        acc, w = _half(acc, w, rows, weight, hiddens, hidden_norm, is_pair, eps, 0, W, N, K, BN, BK)
        acc, w = _half(acc, w, rows, weight, embedding + token * H, embedding_norm, is_pair, eps, W, H, N, K, BN, BK)
    else:
        acc, w = _half(acc, w, rows, weight, embedding + token * H, embedding_norm, is_pair, eps, 0, H, N, K, BN, BK)
        acc, w = _half(acc, w, rows, weight, hiddens, hidden_norm, is_pair, eps, H, W, N, K, BN, BK)
    inside = (rows < N) & (_count(row_count, HAS_COUNT) > 0)
    tl.store(out + rows, acc.to(out.dtype.element_ty), mask=inside)
