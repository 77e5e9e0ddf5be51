"""What a program does with one step of the weight, for several rows of x: its copies, and its products."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait

from drafter_kernels.quantize.kernel import FLOAT16_NEIGHBOURS, FLOAT16_UP


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


@gluon.jit
def buffers_of_step(BN: gl.constexpr, BM: gl.constexpr, NSUB: gl.constexpr, BOXES: gl.constexpr):
    """Shared memory for a step: scales; and once or twice 32 words of each row, and what they meet of x.

    Each is an allocation of its own: Triton puts a barrier between accesses to one that may meet.
    """
    x_layout: gl.constexpr = gl.NVMMASharedLayout(128, 16)
    # Both ways of saying it mean the same places in shared memory.
    word_layout: gl.constexpr = gl.NVMMASharedLayout(128, 32) if BOXES else gl.SwizzledSharedLayout(4, 1, 8, [1, 0])
    flat: gl.constexpr = gl.NVMMASharedLayout(0, 8) if BOXES else gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    scales = gl.allocate_shared_memory(gl.float8e4nv, [BN, 16 * NSUB], flat)
    words = gl.allocate_shared_memory(gl.int32, [BN, 32], word_layout)
    x = gl.allocate_shared_memory(gl.float16, [4 * BM, 64], x_layout)
    more_words = words
    more_x = x
    if NSUB == 2:
        more_words = gl.allocate_shared_memory(gl.int32, [BN, 32], word_layout)
        more_x = gl.allocate_shared_memory(gl.float16, [4 * BM, 64], x_layout)
    return scales, words, x, more_words, more_x


@gluon.jit
def places_of_step(
    packed,
    words,
    block_scales,
    M,
    KW: gl.constexpr,
    BN: gl.constexpr,
    BM: gl.constexpr,
    NSUB: gl.constexpr,
    num_warps: gl.constexpr,
):
    """What all threads copy of words and scales, and of x, from the first step's places on; and which rows they are."""
    W: gl.constexpr = gl.BlockedLayout([1, 4], [4, 8], [num_warps, 1], [1, 0])
    S: gl.constexpr = gl.BlockedLayout([1, 8 * NSUB], [16, 2], [num_warps, 1], [1, 0])
    X: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [num_warps, 1], [1, 0])
    w_rows = gl.arange(0, BN, gl.SliceLayout(1, W))
    s_rows = gl.arange(0, BN, gl.SliceLayout(1, S))
    x_rows = gl.arange(0, 4 * BM, gl.SliceLayout(1, X))
    w_place = (w_rows * KW)[:, None] + gl.arange(0, 32, gl.SliceLayout(0, W))[None, :]
    s_place = (s_rows * (KW // 2))[:, None] + gl.arange(0, 16 * NSUB, gl.SliceLayout(0, S))[None, :]
    x_place = ((x_rows % BM) * (8 * KW) + (x_rows // BM) * (2 * KW))[:, None]
    x_place = x_place + gl.arange(0, 64, gl.SliceLayout(0, X))[None, :]
    has_x = (x_rows % BM < M)[:, None]
    return (words, block_scales, w_place, s_place, w_rows, s_rows), (packed, x_place, has_x)


@gluon.jit
def copy_weights(buffers, weights, word, left, NSUB: gl.constexpr):
    """Starts the copies of a step's words, which begin at `word` of all, and scales; `left` rows are there."""
    words, block_scales, w_place, s_place, w_rows, s_rows = weights
    for SUB in gl.static_range(NSUB):
        here = words + (word + SUB * 32) + w_place
        async_copy.async_copy_global_to_shared(buffers[1 + 2 * SUB], here, mask=(w_rows < left)[:, None])
    async_copy.async_copy_global_to_shared(
        buffers[0], block_scales + word // 2 + s_place, mask=(s_rows < left)[:, None]
    )


@gluon.jit
def copy_x(buffers, x, column, NSUB: gl.constexpr):
    """Starts the copies of what a step's words meet of x, which begins at `column`."""
    packed, x_place, has_x = x
    for SUB in gl.static_range(NSUB):
        here = packed + (column + SUB * 64) + x_place
        async_copy.async_copy_global_to_shared(buffers[2 + 2 * SUB], here, mask=has_x)


@gluon.jit
def next_step(word, column, left, KW: gl.constexpr, BN: gl.constexpr, BK: gl.constexpr):
    """Where the step after this one begins: further along K, or in the next BN rows."""
    is_last = column == 2 * (KW - BK)
    word += gl.where(is_last, BN * KW - KW + BK, BK)
    return word, gl.where(is_last, 0, column + 2 * BK), gl.where(is_last, left - BN, left)


@gluon.jit
def _part_of_weights(buffers, SUB: gl.constexpr, PART: gl.constexpr, num_warps: gl.constexpr):
    """A step's words [16 num_warps, 32] of one part of the tile, and their scales beside them, twice in a word each."""
    ROWS: gl.constexpr = 16 * num_warps
    w = buffers[1 + 2 * SUB].slice(PART * ROWS, ROWS, 0).load(_word_layout(ROWS, num_warps))
    scales_smem = buffers[0].slice(PART * ROWS, ROWS, 0).slice(SUB * 16, 16, 1)
    s = scales_smem.load(gl.SliceLayout(2, _scale_layout(ROWS, num_warps)))
    scales = s.to(gl.float16) * FLOAT16_UP
    pairs = gl.inline_asm_elementwise("mov.b32 $0, {$1, $1};", "=r,h", [scales], dtype=gl.int32, is_pure=True, pack=1)
    wide = gl.zeros([ROWS, 16, 2], gl.int32, _scale_layout(ROWS, num_warps))
    pairs = gl.reshape(gl.broadcast(gl.expand_dims(pairs, 2), wide)[0], [ROWS, 32])
    return w, gl.convert_layout(pairs, _word_layout(ROWS, num_warps), assert_trivial=True)


@gluon.jit
def _decoded(w, pairs, SLOT: gl.constexpr, BM: gl.constexpr, num_warps: gl.constexpr):
    """One pair of neighbours of each word as the tensor core's left operand [16 num_warps, 64]: nothing moves."""
    ROWS: gl.constexpr = 16 * num_warps
    A: gl.constexpr = gl.DotOperandLayout(0, gl.NVMMADistributedLayout([3, 0], [num_warps, 1], [16, BM, 16]), 2)
    low, high = gl.inline_asm_elementwise(
        FLOAT16_NEIGHBOURS[SLOT],
        "=h,=h,r,r",
        [w, pairs],
        dtype=(gl.float16, gl.float16),
        is_pure=True,
        pack=1,
    )
    turned = gl.permute(gl.reshape(gl.join(low, high), [ROWS, 4, 8, 2]), [0, 2, 1, 3])
    return gl.convert_layout(gl.reshape(turned, [ROWS, 64]), A, assert_trivial=True)


@gluon.jit
def copy_step(buffers, weights, x, step, NSUB: gl.constexpr):
    """Starts the copies of a step, which is there if its number is below that of all steps."""
    word, column, left, number, num_steps = step
    if number < num_steps:
        copy_weights(buffers, weights, word, left, NSUB)
        copy_x(buffers, x, column, NSUB)
    async_copy.commit_group()


@gluon.jit
def box_barriers():
    """Of one step's words, scales and x: each by itself, so that Triton sees that their copies do not meet."""
    LAYOUT: gl.constexpr = mbarrier.MBarrierLayout()
    words = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    scales = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    x = gl.allocate_shared_memory(gl.int64, [1], LAYOUT)
    mbarrier.init(words, count=1)
    mbarrier.init(scales, count=1)
    mbarrier.init(x, count=1)
    return words, scales, x


@gluon.jit
def expect_boxes(ready, is_there, BN: gl.constexpr, BM: gl.constexpr):
    """Tells the barriers of a step how many bytes will come, if the step is there."""
    mbarrier.expect(ready[0], BN * 128, pred=is_there)
    mbarrier.expect(ready[1], BN * 16, pred=is_there)
    mbarrier.expect(ready[2], 4 * BM * 128, pred=is_there)


@gluon.jit
def wait_for_boxes(ready, phase):
    """Until all of a step is there."""
    mbarrier.wait(ready[0], phase)
    mbarrier.wait(ready[1], phase)
    mbarrier.wait(ready[2], phase)


@gluon.jit
def copy_weight_boxes(buffers, boxes, row, column, ready, is_there):
    """Starts the copies of a step's words and scales."""
    tma.async_copy_global_to_shared(boxes[1], [row, column // 2], ready[0], buffers[1], pred=is_there)
    tma.async_copy_global_to_shared(boxes[2], [row, column // 4], ready[1], buffers[0], pred=is_there)


@gluon.jit
def copy_x_box(buffers, boxes, column, ready, is_there, BM: gl.constexpr):
    """Starts the copy of what a step's words meet of x."""
    x_slots = buffers[2]._reinterpret(gl.float16, [4, BM, 64], gl.NVMMASharedLayout(128, 16, 3))  # noqa: SLF001
    tma.async_copy_global_to_shared(boxes[0], [0, 0, column], ready[2], x_slots, pred=is_there)


@gluon.jit
def copy_boxes(buffers, boxes, step, ready, BN: gl.constexpr, BM: gl.constexpr):
    """As `copy_step`, by one thread, and behind a barrier: until then a warp may read what the last step read."""
    row, column, number, num_steps = step
    is_there = number < num_steps
    expect_boxes(ready, is_there, BN, BM)
    gl.thread_barrier()
    copy_weight_boxes(buffers, boxes, row, column, ready, is_there)
    copy_x_box(buffers, boxes, column, ready, is_there, BM)


@gluon.jit
def multiply(
    acc,
    more,
    held,
    buffers,
    SUB: gl.constexpr,
    BM: gl.constexpr,
    PARTS: gl.constexpr,
    num_warps: gl.constexpr,
):
    """acc [16 num_warps, BM] plus words [16 num_warps, 32] times x; and `more` likewise, of the second of two parts.

    Four products each, one for each pair of neighbours in a word. Each thread decodes its words into the very registers
    that the tensor core reads, while the product before is made. The last one is still being made, from the registers
    `held`.
    """
    x_smem = buffers[2 + 2 * SUB]
    x_slots = x_smem._reinterpret(gl.float16, [4, BM, 64], x_smem.layout)  # noqa: SLF001  # there is no other way
    for PART in gl.static_range(PARTS):
        w, pairs = _part_of_weights(buffers, SUB, PART, num_warps)
        for SLOT in gl.static_range(4):
            a = _decoded(w, pairs, SLOT, BM, num_warps)
            x = x_slots.index(SLOT).permute((1, 0))
            if PART == 0:
                acc = warpgroup_mma(a, x, acc, is_async=True)
            else:
                more = warpgroup_mma(a, x, more, is_async=True)
            acc, more, held = _wait_for_others(acc, more, held, PARTS)
            held = a
    return acc, more, held


@gluon.jit
def _wait_for_others(acc, more, held, PARTS: gl.constexpr):
    """Until no product but the last one is being made: then `held`, which the one before it reads, is free again."""
    if PARTS == 2:
        acc, more, held = warpgroup_mma_wait(1, deps=(acc, more, held))
    else:
        acc, held = warpgroup_mma_wait(1, deps=(acc, held))
    return acc, more, held


@gluon.jit
def wait_for_all(acc, more, held, PARTS: gl.constexpr):
    """Until all products are made."""
    if PARTS == 2:
        acc, more, held = warpgroup_mma_wait(0, deps=(acc, more, held))
    else:
        acc, held = warpgroup_mma_wait(0, deps=(acc, held))
    return acc, more, held
