"""The LM head's first stage for NVFP4 on Hopper: Triton's Gluon, in which layouts and copies are written out.

What it leaves is as `lm_head/kernel.py` leaves it: one maximum, its row and a sum for each program and row of x.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from drafter_kernels.quantize.kernel import DOT8_LACKS, DOT16, FLOAT16_LACKS, FLOAT16_NEIGHBOURS, FLOAT16_UP
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
def _warp_bases(step, num_warps, rank):
    return [[step << i] + [0] * (rank - 1) for i in range(num_warps.bit_length() - 1)]


@gluon.constexpr_function
def _word_layout(BN, num_warps):
    """[BN, 32] words as a warp reads them: a thread has 8 neighbours, 32 bytes, of rows i and i + 8.

    In this order threads of two rows never meet in a bank of shared memory, and they hold what the tensor core takes of
    them: an element of four of its words at a time, with x packed accordingly (`Packing.FRAGMENTS`).
    """
    lanes = [[0, 8], [0, 16], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout(
        [[0, 1], [0, 2], [0, 4], [8, 0]], lanes, _warp_bases(16, num_warps, 2), [], [BN, 32]
    )


@gluon.constexpr_function
def _scale_layout(BN, num_warps):
    """[BN, 16 blocks, 2 words] beside `_word_layout`."""
    registers = [[0, 0, 1], [0, 1, 0], [0, 2, 0], [8, 0, 0]]
    lanes = [[0, 4, 0], [0, 8, 0], [1, 0, 0], [2, 0, 0], [4, 0, 0]]
    return gl.DistributedLinearLayout(registers, lanes, _warp_bases(16, num_warps, 3), [], [BN, 16, 2])


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
def _buffers(BN: gl.constexpr, BM: gl.constexpr, NSUB: gl.constexpr):
    """Shared memory for a step: scales; and once or twice 32 words of each row, and what they meet of x.

    Each is an allocation of its own: Triton puts a barrier between accesses to one that may meet.
    """
    word_layout: gl.constexpr = gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    scales = gl.allocate_shared_memory(gl.float8e4nv, [BN, 16 * NSUB], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    words = gl.allocate_shared_memory(gl.int32, [BN, 32], word_layout)
    x = gl.allocate_shared_memory(gl.float16, [4 * BM, 64], x_layout)
    more_words = words
    more_x = x
    if NSUB == 2:
        more_words = gl.allocate_shared_memory(gl.int32, [BN, 32], word_layout)
        more_x = gl.allocate_shared_memory(gl.float16, [4 * BM, 64], x_layout)
    return scales, words, x, more_words, more_x


@gluon.jit
def _copy_weights(buffers, words, block_scales, word, left, w_place, s_place, w_rows, s_rows, NSUB: gl.constexpr):
    """Starts the copies of a step's words, which begin at `word` of all, and scales; `left` rows are there."""
    for SUB in gl.static_range(NSUB):
        here = words + (word + SUB * 32) + w_place
        async_copy.async_copy_global_to_shared(buffers[1 + 2 * SUB], here, mask=(w_rows < left)[:, None])
    async_copy.async_copy_global_to_shared(
        buffers[0], block_scales + word // 2 + s_place, mask=(s_rows < left)[:, None]
    )


@gluon.jit
def _copy_x(buffers, packed, column, x_place, has_x, NSUB: gl.constexpr):
    for SUB in gl.static_range(NSUB):
        here = packed + (column + SUB * 64) + x_place
        async_copy.async_copy_global_to_shared(buffers[2 + 2 * SUB], here, mask=has_x)


@gluon.jit
def _next_step(word, column, left, KW: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """Where the step after this one begins: further along K, or in the next BN rows."""
    is_last = column == 2 * (KW - BK)
    word += gl.where(is_last, BN * KW - KW + BK, BK)
    return word, gl.where(is_last, 0, column + 2 * BK), gl.where(is_last, left - BN, left)


@gluon.jit
def _multiply(acc, buffers, SUB: gl.constexpr, BN: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr):
    """acc [BN, BM] plus words [BN, 32] times x: four products, one for each pair of neighbours in a word.

    Each thread decodes its words into the very registers that the tensor core reads, while the product before is made.
    """
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16]), 2)
    w = buffers[1 + 2 * SUB].load(_word_layout(BN, num_warps))
    s = buffers[0].slice(SUB * 16, 16, 1).load(gl.SliceLayout(2, _scale_layout(BN, num_warps)))
    x_smem = buffers[2 + 2 * SUB]
    x_slots = x_smem._reinterpret(gl.float16, [4, BM, 64], x_smem.layout)  # noqa: SLF001  # there is no other way
    scales = s.to(gl.float16) * FLOAT16_UP
    pairs = gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [scales], dtype=gl.int32, is_pure=True, pack=1)
    wide = gl.zeros([BN, 16, 2], gl.int32, _scale_layout(BN, num_warps))
    pairs = gl.reshape(gl.broadcast(gl.expand_dims(pairs, 2), wide)[0], [BN, 32])
    pairs = gl.convert_layout(pairs, _word_layout(BN, num_warps), assert_trivial=True)
    held = w
    for SLOT in gl.static_range(4):
        low, high = gl.inline_asm_elementwise(
            FLOAT16_NEIGHBOURS[SLOT],
            "=h,=h,r,r",
            [w, pairs],
            dtype=(gl.float16, gl.float16),
            is_pure=True,
            pack=1,
        )
        turned = gl.permute(gl.reshape(gl.join(low, high), [BN, 4, 8, 2]), [0, 2, 1, 3])
        a = gl.convert_layout(gl.reshape(turned, [BN, 64]), A, assert_trivial=True)
        acc = warpgroup_mma(a, x_slots.index(SLOT).permute((1, 0)), acc, is_async=True)
        if SLOT > 0:
            acc, held = warpgroup_mma_wait(1, deps=(acc, held))
        held = a
    acc, held = warpgroup_mma_wait(0, deps=(acc, held))
    return acc


@gluon.jit
def _take(logits, allowed, rows, best, best_row, total):
    """Folds logits [parts, rows, BM] into the best of each part, its row, and the sum of exp(logit - best)."""
    finite = _finite(logits, allowed)
    tile_best = gl.max(finite, 1)
    is_best = (finite == gl.expand_dims(tile_best, 1)) & allowed
    best_row = gl.where(tile_best > best, gl.min(gl.where(is_best, rows, _NO_ROW), 1), best_row)
    together = gl.maximum(best, tile_best)
    base = _base(together)
    total = total * _exp(best - base) + gl.sum(_exp(finite - gl.expand_dims(base, 1)), 1)
    return together, best_row, total


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
    """
    if PDL:
        gdc_launch_dependents()
    BK: gl.constexpr = 32 * NSUB
    STEPS: gl.constexpr = KW // BK
    ring = (_buffers(BN, BM, NSUB), _buffers(BN, BM, NSUB))
    logit_layout: gl.constexpr = gl.SwizzledSharedLayout(4 if BM >= 32 else 2, 1, min(8, BM // 2), [1, 0])
    logit_smem = gl.allocate_shared_memory(gl.float32, [BN, BM], logit_layout)

    first, after = _tiles_of_program(num_rows, BN)
    num_steps = (after - first) * STEPS
    W: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    S: gl.constexpr = gl.BlockedLayout([1, 8 * NSUB], [16, 2], [num_warps, 1], [1, 0])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    w_rows = gl.arange(0, BN, gl.SliceLayout(1, W))
    s_rows = gl.arange(0, BN, gl.SliceLayout(1, S))
    x_rows = gl.arange(0, 4 * BM, gl.SliceLayout(1, X))
    w_place = (w_rows * KW)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, W))[None, :]
    s_place = (s_rows * (KW // 2))[:, None] + gl.arange(0, BK // 2, gl.SliceLayout(0, S))[None, :]
    x_place = ((x_rows % BM) * (8 * KW) + (x_rows // BM) * (2 * KW))[:, None]
    x_place = x_place + gl.arange(0, 64, gl.SliceLayout(0, X))[None, :]
    has_x = (x_rows % BM < M)[:, None]
    word, column, left = (first * BN).to(gl.int64) * KW, 0, num_rows - first * BN
    _copy_weights(ring[0], words, block_scales, word, left, w_place, s_place, w_rows, s_rows, NSUB)
    if PDL:
        gdc_wait()  # weights were not written by the kernel before this one, all else may be
    _copy_x(ring[0], packed, column, x_place, has_x, NSUB)
    async_copy.commit_group()
    word, column, left = _next_step(word, column, left, KW, BN, BK)

    F: gl.constexpr = _fold_layout(BN, BM, num_warps)
    P: gl.constexpr = gl.SliceLayout(1, F)
    RUN: gl.constexpr = BN * BM // (32 * num_warps)
    m = gl.arange(0, BM, gl.SliceLayout(0, P))
    m_wide = gl.expand_dims(gl.expand_dims(m, 0), 1)
    part = gl.expand_dims(gl.arange(0, BN // RUN, gl.SliceLayout(1, P)) * RUN, 1)
    parts = gl.expand_dims(part, 1) + gl.expand_dims(gl.expand_dims(gl.arange(0, RUN, _middle(F)), 0), 2)
    best = gl.full([BN // RUN, BM], -float("inf"), gl.float32, P)
    best_row = gl.full([BN // RUN, BM], _NO_ROW, gl.int32, P)
    total = gl.zeros([BN // RUN, BM], gl.float32, P)
    scale = gl.load(row_scales + m, mask=m < M, other=0.0) * (gl.load(tensor_scale) * FLOAT16_LACKS)
    scale = gl.expand_dims(gl.expand_dims(scale, 0), 1)

    done = 0
    for tile in range(first, after):
        if HAS_MASK:
            chosen = gl.expand_dims(gl.load(mask_index + m, mask=m < M, other=-1).to(gl.int64), 0)
            mask_base, has_mask = masks + chosen * mask_words, chosen >= 0
        if HAS_MASK and not HAS_IDS:
            bits = gl.expand_dims(_mask_words(mask_base, has_mask, tile * BN + part, tile * BN + part, num_rows), 1)
        acc = gl.zeros([BN, BM], gl.float32, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16]))
        for _ in range(STEPS // 2):
            for TURN in gl.static_range(2):
                async_copy.wait_group(0)
                gl.thread_barrier()
                fence_async_shared()
                done += 1
                if done < num_steps:
                    free = ring[1 - TURN]
                    _copy_weights(free, words, block_scales, word, left, w_place, s_place, w_rows, s_rows, NSUB)
                    _copy_x(free, packed, column, x_place, has_x, NSUB)
                async_copy.commit_group()
                word, column, left = _next_step(word, column, left, KW, BN, BK)
                for SUB in gl.static_range(NSUB):
                    acc = _multiply(acc, ring[TURN], SUB, BN, BM, num_warps)
        logit_smem.store(acc)
        gl.thread_barrier()
        logits = logit_smem.load(_flat(F))
        logits = gl.convert_layout(gl.reshape(logits, [BN // RUN, RUN, BM]), F, assert_trivial=True) * scale
        rows = tile * BN + parts
        allowed = (rows < num_rows) & (m_wide < M)
        if HAS_MASK:
            ids = rows
            if HAS_IDS:
                ids = gl.load(draft_ids + rows, mask=rows < num_rows, other=0)
                bits = _mask_words(gl.expand_dims(mask_base, 1), gl.expand_dims(has_mask, 1), ids, rows, num_rows)
            allowed = allowed & (((bits >> (ids % 32)) & 1) != 0)
        best, best_row, total = _take(logits, allowed, rows, best, best_row, total)
    top = gl.max(best, 0)
    total = gl.sum(total * _exp(best - gl.expand_dims(_base(top), 0)), 0)
    best_row = gl.min(gl.where(best == gl.expand_dims(top, 0), best_row, _NO_ROW), 0)
    program, programs = gl.program_id(0), gl.num_programs(0)
    gl.store(partials + m * programs + program, top, mask=m < M)
    gl.store(partials + (M + m) * programs + program, total, mask=m < M)
    gl.store(partial_rows + m * programs + program, best_row, mask=m < M)
