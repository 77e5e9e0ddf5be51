"""The LM head in Triton: two stages, between them one maximum, row and sum for each program and each row of x."""

import triton
import triton.language as tl

from drafter_kernels.interpreter import let_scalars_be_indices
from drafter_kernels.quantize.kernel import DOT8_LACKS, FLOAT16_LACKS, decode, dot8, spread_scales

let_scalars_be_indices()

_LARGEST = tl.constexpr(3.4028234663852886e38)
_NO_ROW = tl.constexpr(2147483647)


@triton.jit
def _allowed(
    first,
    m,
    num_rows,
    M,
    draft_ids,
    masks,
    mask_index,
    WORDS,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BN: tl.constexpr,
):
    """Which of BN rows from `first` on, a multiple of BN, may be drafted by row m [BM] of x: bool [BN, BM]."""
    rows = first + tl.arange(0, BN)
    inside = rows < num_rows
    allowed = inside[:, None] & (m < M)[None, :]
    if HAS_MASK:
        chosen = tl.load(mask_index + m, mask=m < M, other=-1).to(tl.int64)
        base = masks + chosen[None, :] * WORDS
        if HAS_IDS or BN % 32 != 0:
            ids = rows
            if HAS_IDS:
                ids = tl.load(draft_ids + rows, mask=inside, other=0)
            word = tl.load(base + (ids // 32)[:, None], mask=allowed & (chosen >= 0)[None, :], other=-1)
            allowed = allowed & (((word >> (ids % 32)[:, None]) & 1) == 1)
        else:
            # Each word once, and its bits spread in registers: a gather for every row takes 64-bit addresses for each.
            number = first // 32 + tl.arange(0, BN // 32)
            has_word = (number < WORDS)[:, None] & (chosen >= 0)[None, :]
            word = tl.load(base + number[:, None], mask=has_word, other=-1)
            bits = (word[:, None, :] >> tl.arange(0, 32)[None, :, None]) & 1
            allowed = allowed & (tl.reshape(bits, (BN, m.shape[0])) == 1)
    return allowed


@triton.jit
def _fold(logits, allowed, rows, best, best_row, total):
    """Takes a tile of logits [BN, BM] into the running best, its row, and the sum of exp(logit - best), all [BM].

    NaN never wins, infinity counts as the largest number, and of equals the lowest row wins.
    """
    finite = tl.where(allowed & (logits == logits), tl.minimum(logits, _LARGEST), -float("inf"))
    tile_best = tl.max(finite, 0)
    is_best = (finite == tile_best[None, :]) & allowed
    tile_row = tl.min(tl.where(is_best, rows[:, None], _NO_ROW), 0)
    best_row = tl.where(tile_best > best, tile_row, best_row)
    together = tl.maximum(best, tile_best)
    base = tl.where(together == -float("inf"), 0.0, together)
    total = total * tl.exp(best - base) + tl.sum(tl.exp(finite - base[None, :]), 0)
    return together, best_row, total


@triton.jit
def _store_partials(partials, partial_rows, best, best_row, total, m, M):
    """What a program found, for `reduce_kernel`: float32 [2, M, programs] and int32 [M, programs]."""
    program, num_programs = tl.program_id(0), tl.num_programs(0)
    tl.store(partials + m * num_programs + program, best, mask=m < M)
    tl.store(partials + (M + m) * num_programs + program, total, mask=m < M)
    tl.store(partial_rows + m * num_programs + program, best_row, mask=m < M)


@triton.jit(do_not_specialize=["num_rows", "M", "mask_words"], do_not_specialize_on_alignment=["mask_index"])
def dense_kernel(
    x,
    weight,
    scales,
    row_scales,
    draft_ids,
    masks,
    mask_index,
    partials,
    partial_rows,
    num_rows,
    M,
    mask_words,
    K: tl.constexpr,
    HAS_SCALES: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    DOT: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PDL: tl.constexpr,
):
    """First stage for weights of a float type: x [M, K], M <= BM. HAS_SCALES: float32 a row of each."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BM)
    best = tl.full((BM,), -float("inf"), tl.float32)
    best_row = tl.full((BM,), _NO_ROW, tl.int32)
    total = tl.zeros((BM,), tl.float32)
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < num_rows
    base = weight + rows[:, None].to(tl.int64) * K
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, K, BK):
        k = start + tl.arange(0, BK)
        if K % BK == 0:
            w = tl.load(base + k[None, :], mask=inside[:, None], other=0.0)
            part = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(base + k[None, :], mask=inside[:, None] & (k < K)[None, :], other=0.0)
            part = tl.load(x + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0.0)
        acc = tl.dot(w.to(DOT), tl.trans(part.to(DOT)), acc, input_precision="ieee")
    if HAS_SCALES:
        acc *= tl.load(scales + rows, mask=inside, other=0.0)[:, None]
        acc *= tl.load(row_scales + m, mask=m < M, other=0.0)[None, :]
    first = tl.program_id(0) * BN
    allowed = _allowed(first, m, num_rows, M, draft_ids, masks, mask_index, mask_words, HAS_IDS, HAS_MASK, BN)
    best, best_row, total = _fold(acc, allowed, rows, best, best_row, total)
    _store_partials(partials, partial_rows, best, best_row, total, m, M)


@triton.jit(do_not_specialize=["num_rows", "M", "mask_words"], do_not_specialize_on_alignment=["mask_index"])
def nvfp4_kernel(
    packed,
    row_scales,
    words,
    block_scales,
    tensor_scale,
    draft_ids,
    masks,
    mask_index,
    partials,
    partial_rows,
    num_rows,
    M,
    mask_words,
    KW: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BN: tl.constexpr,
    BM: tl.constexpr,
    BK: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """First stage for NVFP4 on tensor cores: `packed` float16 [M, 8, KW] of `prepare_kernel`, words [N, KW], M <= BM.

    An element of all words of a tile makes one product with the matching part of x: no element has to change its place.
    """
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, BM)
    best = tl.full((BM,), -float("inf"), tl.float32)
    best_row = tl.full((BM,), _NO_ROW, tl.int32)
    total = tl.zeros((BM,), tl.float32)
    scale = tl.load(tensor_scale) * FLOAT16_LACKS
    row_scale = tl.load(row_scales + m, mask=m < M, other=0.0) * scale
    rows = tl.program_id(0) * BN + tl.arange(0, BN)
    inside = rows < num_rows
    base = rows[:, None].to(tl.int64) * KW
    scale_base = rows[:, None].to(tl.int64) * (KW // 2)
    acc = tl.zeros((BN, BM), tl.float32)
    for start in range(0, KW, BK):
        k = start + tl.arange(0, BK)
        half = start // 2 + tl.arange(0, BK // 2)
        if KW % BK == 0:
            w = tl.load(words + base + k[None, :], mask=inside[:, None], other=0)
            s = tl.load(block_scales + scale_base + half[None, :], mask=inside[:, None], other=0.0)
            has_x = (m < M)[None, :]
        else:
            here = inside[:, None] & (half < KW // 2)[None, :]
            w = tl.load(words + base + k[None, :], mask=inside[:, None] & (k < KW)[None, :], other=0)
            s = tl.load(block_scales + scale_base + half[None, :], mask=here, other=0.0)
            has_x = (m < M)[None, :] & (k < KW)[:, None]
        part = packed + m[None, :] * (8 * KW) + k[:, None]
        ready = spread_scales(s, BN, BK, tl.float16, PTX)
        for SLOT in tl.static_range(8):
            value = decode(w, ready, SLOT, tl.float16, PTX)
            acc = tl.dot(value, tl.load(part + SLOT * KW, mask=has_x, other=0.0), acc)
    acc *= row_scale[None, :]
    first = tl.program_id(0) * BN
    allowed = _allowed(first, m, num_rows, M, draft_ids, masks, mask_index, mask_words, HAS_IDS, HAS_MASK, BN)
    best, best_row, total = _fold(acc, allowed, rows, best, best_row, total)
    _store_partials(partials, partial_rows, best, best_row, total, m, M)


@triton.jit(do_not_specialize=["num_rows", "mask_words"], do_not_specialize_on_alignment=["mask_index"])
def nvfp4_vector_kernel(
    packed,
    row_scales,
    words,
    block_scales,
    tensor_scale,
    draft_ids,
    masks,
    mask_index,
    partials,
    partial_rows,
    num_rows,
    mask_words,
    KW: tl.constexpr,
    HAS_IDS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    BN: tl.constexpr,
    BK: tl.constexpr,
    TILES: tl.constexpr,
    PTX: tl.constexpr,
    PDL: tl.constexpr,
):
    """First stage for NVFP4 and one row of x, without tensor cores: `packed` int32 [4, KW] of `prepare_kernel`."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.arange(0, 1)
    best = tl.full((1,), -float("inf"), tl.float32)
    best_row = tl.full((1,), _NO_ROW, tl.int32)
    total = tl.zeros((1,), tl.float32)
    scale = tl.load(tensor_scale) * tl.load(row_scales) * DOT8_LACKS
    for tile in range(TILES):
        first = (tl.program_id(0) * TILES + tile) * BN
        rows = first + tl.arange(0, BN)
        inside = rows < num_rows
        base = words + rows[:, None].to(tl.int64) * KW
        scale_base = block_scales + rows[:, None].to(tl.int64) * (KW // 2)
        acc = tl.zeros((BN, BK // 2), tl.float32)
        for start in range(0, KW, BK):
            k = start + tl.arange(0, BK)
            half = start // 2 + tl.arange(0, BK // 2)
            if KW % BK == 0:
                w = tl.load(base + k[None, :], mask=inside[:, None], other=0, eviction_policy="evict_first")
                s = tl.load(scale_base + half[None, :], mask=inside[:, None], other=0.0)
                here = (k < KW)[None, :]
            else:
                here = (k < KW)[None, :]
                w = tl.load(base + k[None, :], mask=inside[:, None] & here, other=0, eviction_policy="evict_first")
                s = tl.load(scale_base + half[None, :], mask=inside[:, None] & (half < KW // 2)[None, :], other=0.0)
            w, x0 = tl.broadcast(w, tl.load(packed + k[None, :], mask=here, other=0))
            w, x1 = tl.broadcast(w, tl.load(packed + KW + k[None, :], mask=here, other=0))
            w, x2 = tl.broadcast(w, tl.load(packed + 2 * KW + k[None, :], mask=here, other=0))
            w, x3 = tl.broadcast(w, tl.load(packed + 3 * KW + k[None, :], mask=here, other=0))
            product = dot8(w, x0, x1, x2, x3, PTX)
            acc += tl.sum(tl.reshape(product, (BN, BK // 2, 2)), 2) * s.to(tl.float32)
        logits = tl.sum(acc, 1)[:, None] * scale
        allowed = _allowed(first, m, num_rows, 1, draft_ids, masks, mask_index, mask_words, HAS_IDS, HAS_MASK, BN)
        best, best_row, total = _fold(logits, allowed, rows, best, best_row, total)
    _store_partials(partials, partial_rows, best, best_row, total, m, 1)


@triton.jit(do_not_specialize=["num_programs", "M"], do_not_specialize_on_alignment=["out_ids", "out_logprobs"])
def reduce_kernel(
    partials,
    partial_rows,
    draft_ids,
    out_ids,
    out_logprobs,
    num_programs,
    M,
    HAS_IDS: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Second stage: the id and log-probability of a row of x from what the programs found. Grid: M."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    m = tl.program_id(0)
    best = tl.full((BLOCK,), -float("inf"), tl.float32)
    best_row = tl.full((BLOCK,), _NO_ROW, tl.int32)
    total = tl.zeros((BLOCK,), tl.float32)
    for start in range(0, num_programs, BLOCK):
        program = start + tl.arange(0, BLOCK)
        inside = program < num_programs
        theirs = tl.load(partials + m * num_programs + program, mask=inside, other=-float("inf"))
        their_total = tl.load(partials + (M + m) * num_programs + program, mask=inside, other=0.0)
        their_row = tl.load(partial_rows + m * num_programs + program, mask=inside, other=_NO_ROW)
        # Later programs have higher rows: of equals the earlier one stays.
        best_row = tl.where(theirs > best, their_row, best_row)
        together = tl.maximum(best, theirs)
        base = tl.where(together == -float("inf"), 0.0, together)
        total = total * tl.exp(best - base) + their_total * tl.exp(theirs - base)
        best = together
    top = tl.max(best, 0)
    row = tl.min(tl.where(best == top, best_row, _NO_ROW), 0)
    base = tl.where(top == -float("inf"), 0.0, top)
    everything = tl.sum(total * tl.exp(best - base), 0)
    if row == _NO_ROW:
        tl.store(out_ids + m, tl.full((), -1, tl.int64))
        tl.store(out_logprobs + m, -float("inf"))
    else:
        token = row.to(tl.int64)
        if HAS_IDS:
            token = tl.load(draft_ids + row).to(tl.int64)
        tl.store(out_ids + m, token)
        tl.store(out_logprobs + m, -tl.log(everything))
