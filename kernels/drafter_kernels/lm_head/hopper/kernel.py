"""The LM head's first stage for NVFP4 on Hopper: Triton's Gluon, in which layouts and copies are written out.

What it leaves is as `lm_head/kernel.py` leaves it: one maximum, its row and a sum for each program and row of x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from drafter_kernels.lm_head.hopper.stream.kernel import (
    box_barriers,
    buffers_of_step,
    copy_boxes,
    copy_step,
    copy_weight_boxes,
    copy_weights,
    copy_x,
    copy_x_box,
    expect_boxes,
    multiply,
    next_step,
    places_of_step,
    wait_for_all,
    wait_for_boxes,
)
from drafter_kernels.quantize.kernel import DOT8_LACKS, DOT16, FLOAT16_LACKS
from drafter_kernels.rms_norm.kernel import SCALED_EXPONENT

_LARGEST = gl.constexpr(3.4028234663852886e38)
_NO_ROW = gl.constexpr(2147483647)
_LOG2_E = gl.constexpr(1.4426950408889634)
_UNALIGNED = ["mask_index", "out_ids", "out_logprobs"]


@gluon.jit
def _exp(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * _LOG2_E], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def _finite(logits, allowed):
    """Logits that may win: NaN never wins, and infinity counts as the largest number."""
    return gl.where(allowed & (logits == logits), gl.minimum(logits, _LARGEST), -float("inf"))


@gluon.jit
def _base(best):
    return gl.where(best == -float("inf"), 0.0, best)


@gluon.jit
def _tiles_of_program(num_rows, BN: gl.constexpr):
    """A program's first tile and the one after its last: neighbours, so that later programs have higher rows."""
    num_tiles = (num_rows + BN - 1) // BN
    program, programs = gl.program_id(0).to(gl.int64), gl.num_programs(0)
    return (program * num_tiles // programs).to(gl.int32), ((program + 1) * num_tiles // programs).to(gl.int32)


@gluon.jit
def _shared_tiles(num_rows, BN: gl.constexpr):
    """The same where programs share a multiprocessor: the first ones have one more tile where tiles do not divide.

    Programs on one multiprocessor are far apart, so that few have one more.
    """
    num_tiles = (num_rows + BN - 1) // BN
    program, programs = gl.program_id(0), gl.num_programs(0)
    share, more = num_tiles // programs, num_tiles % programs
    first = program * share + gl.minimum(program, more)
    return first, first + share + gl.where(program < more, 1, 0)


@gluon.jit
def _mask_words(base, has_mask, ids, rows, num_rows):
    """The words that hold the bits of ids; rows that there are none of count as allowed here."""
    return gl.load(base + ids // 32, mask=(rows < num_rows) & has_mask, other=-1)


# One row of x, without tensor cores


@gluon.jit
def _weight_rows(words, block_scales, rows, num_rows, k, PAIRS: gl.constexpr):
    """Words of rows, two and two, and their block scales; behind the last row the last one again."""
    at = gl.minimum(rows, num_rows - 1).to(gl.int64)[:, None] * PAIRS + k[None, :]
    return (
        gl.load(words + at, eviction_policy="evict_first"),
        gl.load(block_scales + at, eviction_policy="evict_first"),
    )


@gluon.jit
def _mask_of_rows(masks, mask_index, mask_words, draft_ids, rows, num_rows, HAS_IDS: gl.constexpr):
    """For each row the word of the mask that holds its bit, and the bit's place."""
    ids = rows
    if HAS_IDS:
        ids = gl.load(draft_ids + rows, mask=rows < num_rows, other=0)
    chosen = gl.load(mask_index).to(gl.int64)
    return _mask_words(masks + chosen * mask_words, chosen >= 0, ids, rows, num_rows), ids % 32


@gluon.jit
def _spread(x, BN: gl.constexpr, L: gl.constexpr):
    return gl.broadcast(gl.expand_dims(x, 0), gl.zeros([BN, x.shape[0]], gl.int64, L))[0]


@gluon.jit
def _packed_row(
    x,
    norm,
    normed,
    eps,
    PAIRS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    L: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The one row of x as `rms_norm_kernel` would normalise and pack it: int64 [PAIRS] four times, and what undoes it.

    Every program makes it again, while the first rows of the weight are on their way; the first writes `normed`.
    """
    K: gl.constexpr = 16 * PAIRS
    ROW: gl.constexpr = gl.BlockedLayout([16], [32], [num_warps], [0])
    k = gl.arange(0, K, ROW)
    value = gl.load(x + k).to(gl.float32)
    if HAS_NORM:
        scale = gl.load(norm + k)
        value = value * gl.rsqrt(gl.sum(value * value, 0) / K + eps) * scale
        rounded = value.to(normed.dtype.element_ty)
        if gl.program_id(0) == 0:
            gl.store(normed + k, rounded)
        value = rounded.to(gl.float32)
    largest = gl.max(gl.where(value == value, gl.abs(value), 0.0), 0)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, SCALED_EXPONENT - 126)
    up = ((-exponent + (127 + SCALED_EXPONENT)) << 23).to(gl.float32, bitcast=True)
    down = ((exponent + (127 - SCALED_EXPONENT)) << 23).to(gl.float32, bitcast=True)
    # [pairs of words, 2 words, 4 pairs, 2]: of two words the same pair, four times.
    turned = gl.permute(gl.reshape((value * up).to(gl.float16), [PAIRS, 2, 4, 2]), [2, 0, 1, 3])
    FLAT: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    smem = gl.allocate_shared_memory(gl.float16, [K], FLAT)
    smem.store(gl.reshape(turned, [K]))
    gl.thread_barrier()
    words = smem._reinterpret(gl.int64, [4 * PAIRS], FLAT)  # noqa: SLF001  # there is no other way
    C: gl.constexpr = gl.SliceLayout(0, L)
    return (
        words.slice(0, PAIRS, 0).load(C),
        words.slice(PAIRS, PAIRS, 0).load(C),
        words.slice(2 * PAIRS, PAIRS, 0).load(C),
        words.slice(3 * PAIRS, PAIRS, 0).load(C),
        down,
    )


@gluon.jit
def _choose(
    partials,
    partial_rows,
    draft_ids,
    out_ids,
    out_logprobs,
    programs,
    HAS_IDS: gl.constexpr,
    BLOCK: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The second stage: the id and log-probability from what the programs found, which is read past L1."""
    F: gl.constexpr = gl.BlockedLayout([BLOCK // (32 * num_warps)], [32], [num_warps], [0])
    p = gl.arange(0, BLOCK, F)
    inside = p < programs
    best = gl.load(partials + p, mask=inside, other=-float("inf"), cache_modifier=".cg")
    total = gl.load(partials + programs + p, mask=inside, other=0.0, cache_modifier=".cg")
    rows = gl.load(partial_rows + p, mask=inside, other=_NO_ROW, cache_modifier=".cg")
    top = gl.max(best, 0)
    row = gl.min(gl.where(best == top, rows, _NO_ROW), 0)
    everything = gl.sum(total * _exp(best - _base(top)), 0)
    token = row.to(gl.int64)
    if HAS_IDS:
        token = gl.load(draft_ids + row, mask=row != _NO_ROW, other=0).to(gl.int64)
    gl.store(out_ids, gl.where(row == _NO_ROW, -1, token))
    gl.store(out_logprobs, gl.where(row == _NO_ROW, -float("inf"), -gl.log(everything)))


@gluon.jit(do_not_specialize=["num_rows", "mask_words"], do_not_specialize_on_alignment=_UNALIGNED)
def vector_kernel(
    x,
    norm,
    normed,
    eps,
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
    counter,
    out_ids,
    out_logprobs,
    PAIRS: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_IDS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    BN: gl.constexpr,
    BLOCK: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """One row of x [16 PAIRS], normalised into `normed` first if HAS_NORM; words int64 [N, PAIRS], two words each.

    All of x stays in registers, and a warp has whole rows of the weight: while it multiplies some, the next ones are
    on their way into registers. Each thread keeps the best of its own rows until the end. The last of at most BLOCK
    programs to arrive at `counter`, zero before and after, puts together what all found.
    """
    L: gl.constexpr = gl.BlockedLayout([1, 2], [1, 32], [num_warps, 1], [1, 0])
    LR: gl.constexpr = gl.SliceLayout(1, L)
    k = gl.arange(0, PAIRS, gl.SliceLayout(0, L))
    first, after = _tiles_of_program(num_rows, BN)
    rows = first * BN + gl.arange(0, BN, LR)
    if PDL:
        gdc_launch_dependents()
    w, s = _weight_rows(words, block_scales, rows, num_rows, k, PAIRS)
    if PDL:
        gdc_wait()  # weights were not written by the kernel before this one, all else may be
    if HAS_MASK:
        word, place = _mask_of_rows(masks, mask_index, mask_words, draft_ids, rows, num_rows, HAS_IDS)
    x0, x1, x2, x3, row_scale = _packed_row(x, norm, normed, eps, PAIRS, HAS_NORM, L, num_warps)
    x0, x1, x2, x3 = _spread(x0, BN, L), _spread(x1, BN, L), _spread(x2, BN, L), _spread(x3, BN, L)
    scale = gl.load(tensor_scale) * row_scale * DOT8_LACKS
    best = gl.full([BN], -float("inf"), gl.float32, LR)
    best_row = gl.full([BN], _NO_ROW, gl.int32, LR)
    total = gl.zeros([BN], gl.float32, LR)
    for _ in range(first, after):
        now_w, now_s = w, s
        w, s = _weight_rows(words, block_scales, rows + BN, num_rows, k, PAIRS)
        allowed = rows < num_rows
        if HAS_MASK:
            allowed = allowed & (((word >> place) & 1) != 0)
            word, place = _mask_of_rows(masks, mask_index, mask_words, draft_ids, rows + BN, num_rows, HAS_IDS)
        product = gl.inline_asm_elementwise(
            DOT16, "=f,l,l,l,l,l", [now_w, x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=1
        )
        finite = _finite(gl.sum(product * now_s.to(gl.float32), 1) * scale, allowed)
        best_row = gl.where(finite > best, rows, best_row)
        together = gl.maximum(best, finite)
        total = total * _exp(best - _base(together)) + _exp(finite - _base(together))
        best = together
        rows += BN
    top = gl.max(best, 0)
    program, programs = gl.program_id(0), gl.num_programs(0)
    gl.store(partials + program, top)
    gl.store(partials + programs + program, gl.sum(total * _exp(best - _base(top)), 0))
    gl.store(partial_rows + program, gl.min(gl.where(best == top, best_row, _NO_ROW), 0))
    # All threads' stores before the one that counts, which releases them to whoever sees the last number.
    gl.thread_barrier()
    if gl.atomic_add(counter, 1, sem="acq_rel") == programs - 1:
        gl.store(counter, 0)  # ready for the next launch
        _choose(partials, partial_rows, draft_ids, out_ids, out_logprobs, programs, HAS_IDS, BLOCK, num_warps)


# Up to 64 rows of x, on tensor cores


@gluon.constexpr_function
def _fold_layout(BN, BM, num_warps):
    """[parts, rows of a part, BM]: a thread has neighbouring rows of one row of x, within 32."""
    columns = min(32, BM)
    warps = BM // columns
    rows = BN * BM // (32 * num_warps)
    return gl.BlockedLayout([1, rows, 1], [32 // columns, 1, columns], [num_warps // warps, 1, warps], [1, 2, 0])


@gluon.constexpr_function
def _flat(fold):
    """`_fold_layout` of [rows, BM]."""
    return gl.BlockedLayout(fold.size_per_thread[1:], fold.threads_per_warp[::2], fold.warps_per_cta[::2], [1, 0])


@gluon.constexpr_function
def _middle(fold):
    return gl.SliceLayout(0, gl.SliceLayout(2, fold))


@gluon.jit
def _chosen_masks(masks, mask_index, mask_words, m, M):
    """Where the masks of rows of x begin, and which have one: [1, BM] each."""
    chosen = gl.expand_dims(gl.load(mask_index + m, mask=m < M, other=-1).to(gl.int64), 0)
    return masks + chosen * mask_words, chosen >= 0


@gluon.jit
def _bits_of_run(mask, row, num_rows):
    """The word of the mask for the 32 rows, or fewer, from `row` on."""
    return gl.expand_dims(_mask_words(mask[0], mask[1], row, row, num_rows), 1)


@gluon.jit
def _allowed(rows, bits, mask, draft_ids, num_rows, HAS_IDS: gl.constexpr, HAS_MASK: gl.constexpr):
    """Which of a part's rows of the weight may win; what rows of x beyond M find is not stored."""
    allowed = rows < num_rows
    if HAS_MASK:
        ids = rows
        if HAS_IDS:
            ids = gl.load(draft_ids + rows, mask=rows < num_rows, other=0)
            bits = _mask_words(gl.expand_dims(mask[0], 1), gl.expand_dims(mask[1], 1), ids, rows, num_rows)
        allowed = allowed & (((bits >> (ids % 32)) & 1) != 0)
    return allowed


@gluon.jit
def _take(logits, allowed, rows, best, best_row, total):
    """Folds logits [parts, rows, BM] into the best of each part, its row, and the sum of exp(logit - best)."""
    finite = _finite(logits, allowed)
    tile_best = gl.max(finite, 1)
    is_best = finite == gl.expand_dims(tile_best, 1)  # where nothing is allowed, nothing is better than before
    best_row = gl.where(tile_best > best, gl.min(gl.where(is_best, rows, _NO_ROW), 1), best_row)
    together = gl.maximum(best, tile_best)
    base = _base(together)
    total = total * _exp(best - base) + gl.sum(_exp(finite - gl.expand_dims(base, 1)), 1)
    return together, best_row, total


@gluon.jit
def _leave(partials, partial_rows, best, best_row, total, m, M):
    """Writes what a program found, [parts, BM] each."""
    top = gl.max(best, 0)
    total = gl.sum(total * _exp(best - gl.expand_dims(_base(top), 0)), 0)
    best_row = gl.min(gl.where(best == gl.expand_dims(top, 0), best_row, _NO_ROW), 0)
    program, programs = gl.program_id(0), gl.num_programs(0)
    gl.store(partials + m * programs + program, top, mask=m < M)
    gl.store(partials + (M + m) * programs + program, total, mask=m < M)
    gl.store(partial_rows + m * programs + program, best_row, mask=m < M)


@gluon.jit(do_not_specialize=["num_rows", "M", "mask_words"], do_not_specialize_on_alignment=["mask_index"])
def stream_kernel(
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
    x_boxes,
    word_boxes,
    scale_boxes,
    KW: gl.constexpr,
    HAS_IDS: gl.constexpr,
    HAS_MASK: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    NSUB: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """Up to BM rows of x, `packed` float16 [M, 4, KW, 2] of `Packing.FRAGMENTS`; words int32 [N, KW].

    A program goes through its tiles as through one long stream of steps of 32 NSUB words; the next step is always under
    way into the other of two buffers, so that K must have an even number of steps. A tile's logits pass through shared
    memory once, so that a thread gets neighbouring rows of one row of x: their mask is one word, and their maximum
    takes no other thread until the end.

    Where BN is twice the rows that the warps multiply at once, both parts of a tile share a step's x. One thread copies
    boxes then, and the logits lie where the last step's x and words were.
    """
    if PDL:
        gdc_launch_dependents()
    BK: gl.constexpr = 32 * NSUB
    STEPS: gl.constexpr = KW // BK
    LN: gl.constexpr = 16 * num_warps
    PARTS: gl.constexpr = BN // LN
    IN_BOXES: gl.constexpr = PARTS == 2
    ring = (buffers_of_step(BN, BM, NSUB, IN_BOXES), buffers_of_step(BN, BM, NSUB, IN_BOXES))
    logit_layout: gl.constexpr = gl.SwizzledSharedLayout(4 if BM >= 32 else 2, 1, min(8, BM // 2), [1, 0])
    if PARTS == 2:
        logit_smem = ring[1][2]._reinterpret(gl.float32, [LN, BM], logit_layout)  # noqa: SLF001  # there is no other way
        other_smem = ring[1][1]._reinterpret(gl.float32, [LN, BM], logit_layout)  # noqa: SLF001
    else:
        logit_smem = gl.allocate_shared_memory(gl.float32, [LN, BM], logit_layout)
        other_smem = logit_smem

    first, after = _shared_tiles(num_rows, BN)
    num_steps = (after - first) * STEPS
    word, column, left = (first * BN).to(gl.int64) * KW, 0, num_rows - first * BN
    weights, x = places_of_step(packed, words, block_scales, M, KW, BN, BM, NSUB, num_warps)
    boxes = (x_boxes, word_boxes, scale_boxes)
    if IN_BOXES:
        ready = (box_barriers(), box_barriers())
        fence_async_shared()
        gl.thread_barrier()
        expect_boxes(ready[0], True, BN, BM)
        copy_weight_boxes(ring[0], boxes, first * BN, column, ready[0], True)
    else:
        copy_weights(ring[0], weights, word, left, NSUB)
    if PDL:
        gdc_wait()  # weights were not written by the kernel before this one, all else may be
    if IN_BOXES:
        copy_x_box(ring[0], boxes, column, ready[0], True, BM)
    else:
        copy_x(ring[0], x, column, NSUB)
        async_copy.commit_group()
    word, column, left = next_step(word, column, left, KW, BN, BK)
    F: gl.constexpr = _fold_layout(LN, BM, num_warps)
    P: gl.constexpr = gl.SliceLayout(1, F)
    RUN: gl.constexpr = LN * BM // (32 * num_warps)
    m = gl.arange(0, BM, gl.SliceLayout(0, P))
    part = gl.expand_dims(gl.arange(0, LN // RUN, gl.SliceLayout(1, P)) * RUN, 1)
    parts = gl.expand_dims(part, 1) + gl.expand_dims(gl.expand_dims(gl.arange(0, RUN, _middle(F)), 0), 2)
    best = gl.full([LN // RUN, BM], -float("inf"), gl.float32, P)
    best_row = gl.full([LN // RUN, BM], _NO_ROW, gl.int32, P)
    total = gl.zeros([LN // RUN, BM], gl.float32, P)
    scale = gl.load(row_scales + m, mask=m < M, other=0.0) * (gl.load(tensor_scale) * FLOAT16_LACKS)
    scale = gl.expand_dims(gl.expand_dims(scale, 0), 1)
    done = 0
    for tile in range(first, after):
        mask, bits, other_bits = m, m, m  # stand for what there is not
        if HAS_MASK:
            mask = _chosen_masks(masks, mask_index, mask_words, m, M)
        if HAS_MASK and not HAS_IDS:
            bits = _bits_of_run(mask, tile * BN + part, num_rows)
            if PARTS == 2:
                other_bits = _bits_of_run(mask, tile * BN + LN + part, num_rows)
        D: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16])
        acc = gl.zeros([LN, BM], gl.float32, D)
        more = acc
        held = gl.zeros([LN, 64], gl.float16, gl.DotOperandLayout(0, D, 2))
        for _ in range(STEPS // 2):
            for TURN in gl.static_range(2):
                if IN_BOXES:
                    wait_for_boxes(ready[TURN], (done >> 1) & 1)
                else:
                    async_copy.wait_group(0)
                    gl.thread_barrier()
                    fence_async_shared()
                done += 1
                if IN_BOXES:
                    at = (num_rows - left, column, done, num_steps)
                    copy_boxes(ring[1 - TURN], boxes, at, ready[1 - TURN], BN, BM)
                else:
                    copy_step(ring[1 - TURN], weights, x, (word, column, left, done, num_steps), NSUB)
                for SUB in gl.static_range(NSUB):
                    acc, more, held = multiply(acc, more, held, ring[TURN], SUB, BM, PARTS, num_warps)
                acc, more, held = wait_for_all(acc, more, held, PARTS)
                word, column, left = next_step(word, column, left, KW, BN, BK)
        if PARTS == 2:
            gl.thread_barrier()  # until all warps' products have read what is written now
        logit_smem.store(acc)
        if PARTS == 2:
            other_smem.store(more)
        gl.thread_barrier()
        for PART in gl.static_range(PARTS):
            logits = (logit_smem if PART == 0 else other_smem).load(_flat(F))
            logits = gl.convert_layout(gl.reshape(logits, [LN // RUN, RUN, BM]), F, assert_trivial=True) * scale
            rows = tile * BN + PART * LN + parts
            allowed = _allowed(rows, bits if PART == 0 else other_bits, mask, draft_ids, num_rows, HAS_IDS, HAS_MASK)
            best, best_row, total = _take(logits, allowed, rows, best, best_row, total)
        if IN_BOXES:
            fence_async_shared()  # before the next copy to where the logits were
    _leave(partials, partial_rows, best, best_row, total, m, M)
