"""Skinny matrix products in Triton: few rows of x, weights read once, what follows the product in the same kernel."""

import triton
import triton.language as tl

from drafter_kernels.quantize.kernel import BFLOAT16_LACKS, decode, spread_scales


@triton.jit
def _tile_of(program, num_m, NUM_N: tl.constexpr, GROUP: tl.constexpr):
    """Which tile (rows of x, rows of the weight) a program makes: GROUP tiles of x share a part of the weight."""
    width = GROUP * NUM_N
    first = program // width * GROUP
    size = tl.minimum(num_m - first, GROUP)
    return first + program % width % size, program % width // size


@triton.jit
def finish(
    value,
    other,
    out,
    gate,
    residual,
    m,
    n,
    count,
    N: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
):
    """Writes a tile [BN, BM] of out [M, N]: SwiGLU with the tile `other`, then the gate, then the residual."""
    inside = (n < N)[:, None] & (m < count)[None, :]
    at = m.to(tl.int64)[None, :] * N + n[:, None]
    if SWIGLU:
        value = value / (1.0 + tl.exp(-value)) * other
    if GATE_COLUMNS == 1:
        value = value / (1.0 + tl.exp(-tl.load(gate + m, mask=m < count, other=0.0).to(tl.float32)))[None, :]
    elif GATE_COLUMNS > 1:
        value = value / (1.0 + tl.exp(-tl.load(gate + at, mask=inside, other=0.0).to(tl.float32)))
    if HAS_RESIDUAL:
        value += tl.load(residual + at, mask=inside, other=0.0).to(tl.float32)
    if PACKED_OUT:
        at = m.to(tl.int64)[None, :] * N + ((n % 8) * (N // 8) + n // 8)[:, None]
    elif OUT_STRIDE != N:
        at = m.to(tl.int64)[None, :] * OUT_STRIDE + n[:, None]
    tl.store(out + at, value.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _is_last(partials, counters, acc, tile, split, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """Leaves a part of a sum for the program that comes last, and says whether that is this one."""
    n, m = tl.arange(0, BN), tl.arange(0, BM)
    place = partials + (tile.to(tl.int64) * SPLIT + split) * (BN * BM) + n[:, None] * BM + m[None, :]
    tl.store(place, acc)
    # All threads' stores before the one that counts; what is counted is released to the program that sees the last
    # number.
    tl.debug_barrier()
    arrived = tl.atomic_add(counters + tile, 1, sem="acq_rel")
    is_last = arrived == SPLIT - 1
    if is_last:
        tl.store(counters + tile, 0)  # ready for the next launch
    return is_last


@triton.jit
def _sum_parts(partials, tile, BN: tl.constexpr, BM: tl.constexpr, SPLIT: tl.constexpr):
    """The sum of all parts, always in the same order."""
    n, m = tl.arange(0, BN), tl.arange(0, BM)
    place = partials + tile.to(tl.int64) * SPLIT * (BN * BM) + n[:, None] * BM + m[None, :]
    total = tl.zeros((BN, BM), tl.float32)
    for split in range(SPLIT):
        total += tl.load(place + split * (BN * BM), cache_modifier=".cg")
    return total


@triton.jit
def _weight_tile(weight, n, k, N, K: tl.constexpr, BK: tl.constexpr):
    base = weight + n[:, None].to(tl.int64) * K + k[None, :]
    if K % BK == 0:
        tile = tl.load(base, mask=(n < N)[:, None], other=0.0)
    else:
        tile = tl.load(base, mask=(n < N)[:, None] & (k < K)[None, :], other=0.0)
    return tile


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["row_count"])
def dense_kernel(
    x,
    weight,
    scales,
    norm,
    gate,
    residual,
    out,
    row_count,
    partials,
    counters,
    eps,
    M,
    N: tl.constexpr,
    K: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_NORM: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    DOT: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, N] from x [M, K] and a weight [N, K] ([2 N, K] for SwiGLU) of a float type.

    SCALES 0: none; 1: float32 a row of the weight; 2: float32 a block of 128 x 128, where BN and BK divide 128.
    HAS_NORM: RMSNorm of x, whose sum of squares is taken on the way. Rows from row_count[0] on are not written. Grid:
    tiles, SPLIT.
    """
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    STEPS: tl.constexpr = ((K + BK - 1) // BK + SPLIT - 1) // SPLIT
    tile_m, tile_n = _tile_of(tl.program_id(0), (M + BM - 1) // BM, NUM_N, 8)
    first = tl.program_id(1) * (STEPS * BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = M
    if HAS_COUNT:
        count = tl.minimum(count, tl.load(row_count))
    if tile_m * BM >= count:
        return
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    squares = tl.zeros((BM,), tl.float32)
    for step in range(STEPS):
        k = first + step * BK + tl.arange(0, BK)
        has_x = (m < count)[:, None] & (k < K)[None, :]
        part = tl.load(x + m[:, None].to(tl.int64) * K + k[None, :], mask=has_x, other=0.0)
        if HAS_NORM:
            wide = part.to(tl.float32)
            squares += tl.sum(wide * wide, 1)
            part = wide * tl.load(norm + k, mask=k < K, other=0.0)[None, :]
        turned = tl.trans(part.to(DOT))
        w = _weight_tile(weight, n, k, N, K, BK * SPLIT).to(DOT)
        if SCALES == 2:
            KB: tl.constexpr = (K + 127) // 128
            block = (first + step * BK) // 128
            scale = tl.load(scales + (tile_n * BN // 128) * KB + block, mask=block < KB, other=0.0)
            acc += tl.dot(w, turned, input_precision="ieee") * scale
        else:
            acc = tl.dot(w, turned, acc, input_precision="ieee")
        if SWIGLU:
            w = _weight_tile(weight + N * K, n, k, N, K, BK * SPLIT).to(DOT)
            if SCALES == 2:
                scale = tl.load(scales + ((N + tile_n * BN) // 128) * KB + block, mask=block < KB, other=0.0)
                other += tl.dot(w, turned, input_precision="ieee") * scale
            else:
                other = tl.dot(w, turned, other, input_precision="ieee")
    if SPLIT > 1:
        tile = tile_m * NUM_N + tile_n
        if not _is_last(partials, counters, acc, tile, tl.program_id(1), BN, BM, SPLIT):
            return
        acc = _sum_parts(partials, tile, BN, BM, SPLIT)
    if SCALES == 1:
        acc *= tl.load(scales + n, mask=n < N, other=0.0)[:, None]
        if SWIGLU:
            other *= tl.load(scales + N + n, mask=n < N, other=0.0)[:, None]
    if HAS_NORM:
        rms = tl.rsqrt(squares / K + eps)[None, :]
        acc *= rms
        other *= rms
    finish(acc, other, out, gate, residual, m, n, count, N, GATE_COLUMNS, HAS_RESIDUAL, SWIGLU, PACKED_OUT, OUT_STRIDE)


@triton.jit(do_not_specialize=["M"], do_not_specialize_on_alignment=["row_count"])
def nvfp4_kernel(
    packed,
    words,
    block_scales,
    tensor_scale,
    gate,
    residual,
    out,
    row_count,
    partials,
    counters,
    M,
    N: tl.constexpr,
    KW: tl.constexpr,
    GATE_COLUMNS: tl.constexpr,
    HAS_RESIDUAL: tl.constexpr,
    SWIGLU: tl.constexpr,
    PACKED_OUT: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    DOT: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    SPLIT: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """The same for NVFP4: x packed as bfloat16 [M, 8, KW], words [N, KW] ([2 N, KW] for SwiGLU). Grid: tiles, SPLIT."""
    NUM_N: tl.constexpr = (N + BN - 1) // BN
    STEPS: tl.constexpr = ((KW + BK - 1) // BK + SPLIT - 1) // SPLIT
    tile_m, tile_n = _tile_of(tl.program_id(0), (M + BM - 1) // BM, NUM_N, 8)
    first = tl.program_id(1) * (STEPS * BK)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    count = M
    if HAS_COUNT:
        count = tl.minimum(count, tl.load(row_count))
    if tile_m * BM >= count:
        return
    m, n = tile_m * BM + tl.arange(0, BM), tile_n * BN + tl.arange(0, BN)
    acc = tl.zeros((BN, BM), tl.float32)
    other = tl.zeros((BN, BM), tl.float32)
    base, scale_base = n[:, None].to(tl.int64) * KW, n[:, None].to(tl.int64) * (KW // 2)
    for step in range(STEPS):
        start = first + step * BK
        k, half = start + tl.arange(0, BK), start // 2 + tl.arange(0, BK // 2)
        here = (n < N)[:, None] & (k < KW)[None, :]
        has_scale = (n < N)[:, None] & (half < KW // 2)[None, :]
        w = tl.load(words + base + k[None, :], mask=here, other=0)
        s = tl.load(block_scales + scale_base + half[None, :], mask=has_scale, other=0.0)
        ready = spread_scales(s, BN, BK, DOT, PTX)
        part = packed + m[None, :].to(tl.int64) * (8 * KW) + k[:, None]
        has_x = (m < count)[None, :] & (k < KW)[:, None]
        if SWIGLU:
            w2 = tl.load(words + N * KW + base + k[None, :], mask=here, other=0)
            s2 = tl.load(block_scales + N * (KW // 2) + scale_base + half[None, :], mask=has_scale, other=0.0)
            ready2 = spread_scales(s2, BN, BK, DOT, PTX)
        for SLOT in tl.static_range(8):
            elements = tl.load(part + SLOT * KW, mask=has_x, other=0.0).to(DOT)
            acc = tl.dot(decode(w, ready, SLOT, DOT, PTX), elements, acc, input_precision="ieee")
            if SWIGLU:
                other = tl.dot(decode(w2, ready2, SLOT, DOT, PTX), elements, other, input_precision="ieee")
    if SPLIT > 1:
        tile = tile_m * NUM_N + tile_n
        if not _is_last(partials, counters, acc, tile, tl.program_id(1), BN, BM, SPLIT):
            return
        acc = _sum_parts(partials, tile, BN, BM, SPLIT)
    scale = tl.load(tensor_scale) * BFLOAT16_LACKS
    acc *= scale
    other *= scale
    finish(acc, other, out, gate, residual, m, n, count, N, GATE_COLUMNS, HAS_RESIDUAL, SWIGLU, PACKED_OUT, OUT_STRIDE)
