"""What a program does with its rows: x in shared memory, the weight on its way into registers, and what is written."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from drafter_kernels.linear.one_row.kernel import SCALED_EXPONENT
from drafter_kernels.quantize.kernel import DOT16

# Columns of a step, 16 bytes a thread: pairs of words of NVFP4, or elements of two bytes.
STEP_PAIRS = gl.constexpr(64)
STEP_ELEMENTS = gl.constexpr(256)


@gluon.constexpr_function
def _steps(width, step):
    return -(-width // step)


@gluon.constexpr_function
def _power_of_2(number):
    return 1 << (number - 1).bit_length()


@gluon.constexpr_function
def row_layout(rows, num_warps, columns):
    """[rows, 32 columns]: a warp has whole rows, a thread neighbouring columns of each."""
    return gl.BlockedLayout([rows // num_warps, columns], [1, 32], [num_warps, 1], [1, 0])


@gluon.jit
def share(program, programs, N: gl.constexpr):
    """A program's first row and the one after its last."""
    return program * N // programs, (program + 1) * N // programs


@gluon.jit
def _exp(x):
    return gl.inline_asm_elementwise(
        "ex2.approx.ftz.f32 $0, $1;", "=f,f", [x * 1.4426950408889634], dtype=gl.float32, is_pure=True, pack=1
    )


# x


@gluon.jit
def load_x(x, norm, at, inside, HAS_NORM: gl.constexpr):
    """x, and the norm's scale where there is one."""
    value = gl.load(x + at, mask=inside, other=0.0)
    scale = 1.0
    if HAS_NORM:
        scale = gl.load(norm + at, mask=inside, other=0.0)
    return value, scale


@gluon.jit
def norm_x(value, scale, eps, K: gl.constexpr, HAS_NORM: gl.constexpr):
    """x as float32, times the norm's scale; and the root that is left to the result."""
    value = value.to(gl.float32)
    root = 1.0
    if HAS_NORM:
        square = value * value
        root = gl.rsqrt(gl.sum(gl.reshape(square, [square.numel]), 0) / K + eps)
        value = value * scale
    return value, root


@gluon.jit
def places_of_pairs(KW: gl.constexpr, PACKED_X: gl.constexpr, num_warps: gl.constexpr):
    """Where the 16 elements of x for each pair of words lie, [pairs, 16]: a thread has all of a pair."""
    X: gl.constexpr = gl.BlockedLayout([1, 16], [32, 1], [num_warps, 1], [1, 0])
    PAIRS: gl.constexpr = _power_of_2(_steps(KW // 2, STEP_PAIRS)) * STEP_PAIRS
    pair = gl.arange(0, PAIRS, gl.SliceLayout(1, X))[:, None]
    element = gl.arange(0, 16, gl.SliceLayout(0, X))[None, :]
    if PACKED_X:
        at = element % 8 * KW + 2 * pair + element // 8
    else:
        at = pair * 16 + element
    return at, (pair < KW // 2) & (element < 16)


@gluon.jit
def place_pairs(value):
    """Leaves x in shared memory as `DOT16` takes it, divided by a power of two a pair of words; and those powers."""
    PAIRS: gl.constexpr = value.shape[0]
    STEPS: gl.constexpr = PAIRS // STEP_PAIRS
    largest = gl.max(gl.maximum(value, -value), 1)
    exponent = gl.maximum(largest.to(gl.int32, bitcast=True) >> 23, 2 * SCALED_EXPONENT)
    up = ((-exponent + (254 + SCALED_EXPONENT)) << 23).to(gl.float32, bitcast=True)
    down = ((exponent - SCALED_EXPONENT) << 23).to(gl.float32, bitcast=True)
    low, high = gl.split(gl.reshape(value * gl.expand_dims(up, 1), [PAIRS, 2, 4, 2]))
    pair = gl.inline_asm_elementwise(
        "cvt.rn.f16x2.f32 $0, $2, $1;", "=r,f,f", [low, high], dtype=gl.int32, is_pure=True, pack=1
    )
    first, second = gl.split(gl.permute(pair, [0, 2, 1]))
    both = gl.inline_asm_elementwise(
        "mov.b64 $0, {$1, $2};", "=l,r,r", [first, second], dtype=gl.int64, is_pure=True, pack=1
    )
    plain: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    x_smem = gl.allocate_shared_memory(gl.int64, [4 * STEPS, STEP_PAIRS], plain)
    down_smem = gl.allocate_shared_memory(gl.float32, [STEPS, STEP_PAIRS], plain)
    turned = gl.permute(gl.reshape(both, [STEPS, STEP_PAIRS, 4]), [0, 2, 1])
    x_smem.store(gl.reshape(turned, [4 * STEPS, STEP_PAIRS]))
    down_smem.store(gl.reshape(down, [STEPS, STEP_PAIRS]))
    gl.thread_barrier()
    return x_smem, down_smem


@gluon.jit
def places_of_elements(K: gl.constexpr, num_warps: gl.constexpr):
    """Columns of x, [K] and as many more as make steps of a power of two."""
    SIZE: gl.constexpr = _power_of_2(_steps(K, STEP_ELEMENTS)) * STEP_ELEMENTS
    return gl.arange(0, SIZE, gl.BlockedLayout([8], [32], [num_warps], [0]))


@gluon.jit
def place_elements(value):
    """Leaves x in shared memory."""
    STEPS: gl.constexpr = value.shape[0] // STEP_ELEMENTS
    x_smem = gl.allocate_shared_memory(gl.float32, [STEPS, STEP_ELEMENTS], gl.SwizzledSharedLayout(1, 1, 1, [1, 0]))
    x_smem.store(gl.reshape(value, [STEPS, STEP_ELEMENTS]))
    gl.thread_barrier()
    return x_smem


@gluon.jit
def load_pair(
    tokens,
    embedding,
    hiddens,
    embedding_norm,
    hidden_norm,
    k,
    H: gl.constexpr,
    W: gl.constexpr,
    HIDDEN_FIRST: gl.constexpr,
):
    """The row of a token and its hidden as one row, the scales of both norms, and where the embedding lies in it."""
    token = gl.load(tokens).to(gl.int64)
    AT: gl.constexpr = W if HIDDEN_FIRST else 0
    HIDDEN_AT: gl.constexpr = 0 if HIDDEN_FIRST else H
    is_embedding = (k >= AT) & (k < AT + H)
    is_hidden = (k >= HIDDEN_AT) & (k < HIDDEN_AT + W)
    value = gl.load(hiddens + k - HIDDEN_AT, mask=is_hidden & (token >= 0), other=0.0).to(gl.float32)
    scale = gl.load(hidden_norm + k - HIDDEN_AT, mask=is_hidden, other=0.0)
    scale += gl.load(embedding_norm + k - AT, mask=is_embedding, other=0.0)
    value += gl.load(embedding + token * H + k - AT, mask=is_embedding & (token >= 0), other=0.0).to(gl.float32)
    return value, scale, is_embedding


@gluon.jit
def norm_pair(value, scale, is_embedding, eps, H: gl.constexpr, W: gl.constexpr):
    """Both halves normalised, each by itself."""
    square = value * value
    embedding = gl.rsqrt(gl.sum(gl.where(is_embedding, square, 0.0), 0) / H + eps)
    hidden = gl.rsqrt(gl.sum(gl.where(is_embedding, 0.0, square), 0) / W + eps)
    return value * (scale * gl.where(is_embedding, embedding, hidden))


# The weight


@gluon.jit
def _read(
    weight,
    block_scales,
    rows,
    end,
    step: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_NVFP4: gl.constexpr,
    L: gl.constexpr,
):
    """Columns of a step of rows [BN], counted on into the BN rows after them, and the scales of NVFP4.

    Weights are read once: they take no room in L2 from what is read again.
    """
    STEP: gl.constexpr = STEP_PAIRS if IS_NVFP4 else STEP_ELEMENTS
    STEPS: gl.constexpr = _steps(WIDTH, STEP)
    BN: gl.constexpr = rows.shape[0]
    k = step % STEPS * STEP + gl.arange(0, STEP, gl.SliceLayout(0, L))
    here = rows + step // STEPS * BN
    at = here.to(gl.int64)[:, None] * WIDTH + k[None, :]
    inside = (here < end)[:, None] & (k < WIDTH)[None, :]
    w = gl.load(weight + at, mask=inside, other=0, eviction_policy="evict_first")
    s = 0.0
    if IS_NVFP4:
        s = gl.load(block_scales + at, mask=inside, other=0.0, eviction_policy="evict_first")
    return w, s


@gluon.jit
def read_ahead(
    weight,
    block_scales,
    rows,
    end,
    N: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_NVFP4: gl.constexpr,
    SWIGLU: gl.constexpr,
    AHEAD: gl.constexpr,
    L: gl.constexpr,
):
    """The first AHEAD steps; for SwiGLU also those of the rows that are multiplied."""
    held = ()
    more = ()
    for STEP in gl.static_range(AHEAD):
        step = _read(weight, block_scales, rows, end, STEP, WIDTH, IS_NVFP4, L)
        held += (step,)  # type: ignore[assignment]  # it grows
        if SWIGLU:
            other = _read(weight + N * WIDTH, block_scales + N * WIDTH, rows, end, STEP, WIDTH, IS_NVFP4, L)
            more += (other,)  # type: ignore[assignment]
    return held, more


@gluon.jit
def _multiply(held, x_smem, down_smem, step: gl.constexpr, IS_NVFP4: gl.constexpr, L: gl.constexpr):
    """Products of a step, float32 [BN, columns], short of DOT8_LACKS for NVFP4."""
    w, s = held
    if IS_NVFP4:
        x0 = gl.broadcast(x_smem.slice(4 * step, 1, 0).load(L), w)[0]
        x1 = gl.broadcast(x_smem.slice(4 * step + 1, 1, 0).load(L), w)[0]
        x2 = gl.broadcast(x_smem.slice(4 * step + 2, 1, 0).load(L), w)[0]
        x3 = gl.broadcast(x_smem.slice(4 * step + 3, 1, 0).load(L), w)[0]
        product = gl.inline_asm_elementwise(
            DOT16, "=f,l,l,l,l,l", [w, x0, x1, x2, x3], dtype=gl.float32, is_pure=True, pack=1
        )
        product = product * (s.to(gl.float32) * down_smem.slice(step, 1, 0).load(L))
    else:
        product = w.to(gl.float32) * x_smem.slice(step, 1, 0).load(L)
    return product


@gluon.jit
def _tile(
    held,
    more,
    x_smem,
    down_smem,
    scale,
    weight,
    block_scales,
    rows,
    end,
    gate,
    residual,
    out,
    count,
    N: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_NVFP4: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    L: gl.constexpr,
):
    """Writes rows [BN] of out, and asks for the AHEAD steps that follow them."""
    STEP: gl.constexpr = STEP_PAIRS if IS_NVFP4 else STEP_ELEMENTS
    STEPS: gl.constexpr = _steps(WIDTH, STEP)
    inside = (rows < end) & (count > 0)
    if GATE_COLUMNS > 0:
        gates = gl.load(gate + (rows if GATE_COLUMNS > 1 else rows * 0), mask=inside, other=0.0).to(gl.float32)
    if HAS_RESIDUAL:
        left = gl.load(residual + rows, mask=inside, other=0.0).to(gl.float32)
    acc = gl.zeros([rows.shape[0], STEP], gl.float32, L)
    other = gl.zeros([rows.shape[0], STEP], gl.float32, L)
    for step in gl.static_range(STEPS):
        now = held[0]
        held = held[1:]
        if step + AHEAD < STEPS or not ONE_TILE:
            held += (_read(weight, block_scales, rows, end, step + AHEAD, WIDTH, IS_NVFP4, L),)
        if SWIGLU:
            now_more = more[0]
            more = more[1:]
            if step + AHEAD < STEPS or not ONE_TILE:
                more += (
                    _read(weight + N * WIDTH, block_scales + N * WIDTH, rows, end, step + AHEAD, WIDTH, IS_NVFP4, L),
                )
            other += _multiply(now_more, x_smem, down_smem, step, IS_NVFP4, L)
        acc += _multiply(now, x_smem, down_smem, step, IS_NVFP4, L)
    value = gl.sum(acc, 1) * scale
    if SWIGLU:
        value = value / (1.0 + _exp(-value)) * (gl.sum(other, 1) * scale)
    if GATE_COLUMNS > 0:
        value = value / (1.0 + _exp(-gates))
    if HAS_RESIDUAL:
        value += left
    place = rows % 8 * (N // 8) + rows // 8 if PACKED_OUT else rows
    gl.store(out + place, value.to(out.dtype.element_ty), mask=inside)
    return held, more


@gluon.jit
def stream(
    ahead,
    x_smem,
    down_smem,
    scale,
    weight,
    block_scales,
    first,
    end,
    gate,
    residual,
    out,
    row_count,
    N: gl.constexpr,
    WIDTH: gl.constexpr,
    IS_NVFP4: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    BN: gl.constexpr,
    L: gl.constexpr,
):
    """Rows first to end of out. `ahead` is of `read_ahead`, x of `place_pairs` or `place_elements`."""
    held, more = ahead
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, L))
    count = 1
    if HAS_COUNT:
        count = gl.load(row_count)
    if ONE_TILE:
        _tile(
            held,
            more,
            x_smem,
            down_smem,
            scale,
            weight,
            block_scales,
            rows,
            end,
            gate,
            residual,
            out,
            count,
            N,
            WIDTH,
            IS_NVFP4,
            GATE_COLUMNS,
            HAS_RESIDUAL,
            SWIGLU,
            PACKED_OUT,
            AHEAD,
            True,
            L,
        )
    else:
        for _ in range((end - first + BN - 1) // BN):
            held, more = _tile(
                held,
                more,
                x_smem,
                down_smem,
                scale,
                weight,
                block_scales,
                rows,
                end,
                gate,
                residual,
                out,
                count,
                N,
                WIDTH,
                IS_NVFP4,
                GATE_COLUMNS,
                HAS_RESIDUAL,
                SWIGLU,
                PACKED_OUT,
                AHEAD,
                False,
                L,
            )
            rows += BN
