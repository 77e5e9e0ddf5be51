"""Products of one row of x on Hopper, in Triton's Gluon: one wave of programs, each with its share of rows.

A program brings x into shared memory once, in the order in which its warps take it. A warp has whole rows, a few at a
time; the words of its next steps are on their way into registers while one step is multiplied. x is asked for before
the weight, whose requests would stand in its way; with PDL the weight comes first, and x after the wait.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from drafter_kernels.linear.one_row.hopper.stream.kernel import (
    load_pair,
    load_x,
    norm_pair,
    norm_x,
    place_elements,
    place_pairs,
    places_of_elements,
    places_of_pairs,
    read_ahead,
    row_layout,
    share,
    stream,
)
from drafter_kernels.quantize.kernel import DOT8_LACKS


@gluon.jit
def _nvfp4_rows(
    program,
    programs,
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
    N: gl.constexpr,
    KW: gl.constexpr,
    HAS_NORM: gl.constexpr,
    PACKED_X: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out [1, N] from x [1, 8 KW] and words int64 [N, KW / 2], two words each."""
    L: gl.constexpr = row_layout(BN, num_warps, 2)
    first, end = share(program, programs, N)
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, L))
    at, inside = places_of_pairs(KW, PACKED_X, num_warps)
    if not PDL:
        value, x_scale = load_x(x, norm, at, inside, HAS_NORM)
    scale = gl.load(tensor_scale) * DOT8_LACKS
    ahead = read_ahead(words, block_scales, rows, end, N, KW // 2, True, SWIGLU, AHEAD, L)
    if PDL:
        gdc_wait()
        value, x_scale = load_x(x, norm, at, inside, HAS_NORM)
    value, root = norm_x(value, x_scale, eps, 8 * KW, HAS_NORM)
    x_smem, down_smem = place_pairs(value)
    stream(
        ahead,
        x_smem,
        down_smem,
        scale * root,
        words,
        block_scales,
        first,
        end,
        gate,
        residual,
        out,
        row_count,
        N,
        KW // 2,
        True,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        HAS_COUNT,
        AHEAD,
        ONE_TILE,
        BN,
        L,
    )


@gluon.jit(do_not_specialize_on_alignment=["row_count"])
def nvfp4_wave_kernel(
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
    N: gl.constexpr,
    KW: gl.constexpr,
    HAS_NORM: gl.constexpr,
    PACKED_X: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`_nvfp4_rows`, shared by all programs. Grid: up to N programs."""
    if PDL:
        gdc_launch_dependents()
    _nvfp4_rows(
        gl.program_id(0),
        gl.num_programs(0),
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
        N,
        KW,
        HAS_NORM,
        PACKED_X,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        HAS_COUNT,
        BN,
        AHEAD,
        ONE_TILE,
        PDL,
        num_warps,
    )


@gluon.jit
def _dense_rows(
    program,
    programs,
    x,
    weight,
    norm,
    gate,
    residual,
    out,
    row_count,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_NORM: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """The same for a weight [N, K] ([2 N, K] for SwiGLU) of a type of two bytes."""
    L: gl.constexpr = row_layout(BN, num_warps, 8)
    first, end = share(program, programs, N)
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, L))
    k = places_of_elements(K, num_warps)
    if not PDL:
        value, x_scale = load_x(x, norm, k, k < K, HAS_NORM)
    ahead = read_ahead(weight, weight, rows, end, N, K, False, SWIGLU, AHEAD, L)
    if PDL:
        gdc_wait()
        value, x_scale = load_x(x, norm, k, k < K, HAS_NORM)
    value, root = norm_x(value, x_scale, eps, K, HAS_NORM)
    x_smem = place_elements(value)
    stream(
        ahead,
        x_smem,
        x_smem,
        root,
        weight,
        weight,
        first,
        end,
        gate,
        residual,
        out,
        row_count,
        N,
        K,
        False,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        HAS_COUNT,
        AHEAD,
        ONE_TILE,
        BN,
        L,
    )


@gluon.jit(do_not_specialize_on_alignment=["row_count"])
def dense_wave_kernel(
    x,
    weight,
    norm,
    gate,
    residual,
    out,
    row_count,
    eps,
    N: gl.constexpr,
    K: gl.constexpr,
    HAS_NORM: gl.constexpr,
    GATE_COLUMNS: gl.constexpr,
    HAS_RESIDUAL: gl.constexpr,
    SWIGLU: gl.constexpr,
    PACKED_OUT: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """`_dense_rows`, shared by all programs. Grid: up to N programs."""
    if PDL:
        gdc_launch_dependents()
    _dense_rows(
        gl.program_id(0),
        gl.num_programs(0),
        x,
        weight,
        norm,
        gate,
        residual,
        out,
        row_count,
        eps,
        N,
        K,
        HAS_NORM,
        GATE_COLUMNS,
        HAS_RESIDUAL,
        SWIGLU,
        PACKED_OUT,
        HAS_COUNT,
        BN,
        AHEAD,
        ONE_TILE,
        PDL,
        num_warps,
    )


@gluon.jit(do_not_specialize_on_alignment=["row_count"])
def joined_wave_kernel(
    x,
    words,
    block_scales,
    tensor_scale,
    weight,
    norm,
    out,
    row_count,
    eps,
    N: gl.constexpr,
    KW: gl.constexpr,
    N2: gl.constexpr,
    HAS_NORM: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    FIRST: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    SECOND: gl.constexpr,
    BN2: gl.constexpr,
    AHEAD2: gl.constexpr,
    ONE_TILE2: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out [1, N + N2] of x with an NVFP4 weight [N, K] and one of two bytes [N2, K]. Grid: FIRST + SECOND."""
    if PDL:
        gdc_launch_dependents()
    program = gl.program_id(0)
    if program < FIRST:
        _nvfp4_rows(
            program,
            FIRST,
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
            N,
            KW,
            HAS_NORM,
            False,
            0,
            False,
            False,
            False,
            HAS_COUNT,
            BN,
            AHEAD,
            ONE_TILE,
            PDL,
            num_warps,
        )
    else:
        _dense_rows(
            program - FIRST,
            SECOND,
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
            HAS_COUNT,
            BN2,
            AHEAD2,
            ONE_TILE2,
            PDL,
            num_warps,
        )


@gluon.jit(do_not_specialize_on_alignment=["tokens", "row_count"])
def pair_wave_kernel(
    tokens,
    embedding,
    hiddens,
    embedding_norm,
    hidden_norm,
    weight,
    out,
    row_count,
    eps,
    N: gl.constexpr,
    H: gl.constexpr,
    W: gl.constexpr,
    HIDDEN_FIRST: gl.constexpr,
    HAS_COUNT: gl.constexpr,
    BN: gl.constexpr,
    AHEAD: gl.constexpr,
    ONE_TILE: gl.constexpr,
    PDL: gl.constexpr,
    num_warps: gl.constexpr,
):
    """out [1, N] = the joined row of `fuse_pair` times weight [N, H + W]. Grid: up to N programs."""
    K: gl.constexpr = H + W
    L: gl.constexpr = row_layout(BN, num_warps, 8)
    if PDL:
        gdc_launch_dependents()
    first, end = share(gl.program_id(0), gl.num_programs(0), N)
    rows = first + gl.arange(0, BN, gl.SliceLayout(1, L))
    k = places_of_elements(K, num_warps)
    if not PDL:
        value, x_scale, half = load_pair(tokens, embedding, hiddens, embedding_norm, hidden_norm, k, H, W, HIDDEN_FIRST)
    ahead = read_ahead(weight, weight, rows, end, N, K, False, False, AHEAD, L)
    if PDL:
        gdc_wait()
        value, x_scale, half = load_pair(tokens, embedding, hiddens, embedding_norm, hidden_norm, k, H, W, HIDDEN_FIRST)
    x_smem = place_elements(norm_pair(value, x_scale, half, eps, H, W))
    stream(
        ahead,
        x_smem,
        x_smem,
        1.0,
        weight,
        weight,
        first,
        end,
        out,
        out,
        out,
        row_count,
        N,
        K,
        False,
        0,
        False,
        False,
        False,
        HAS_COUNT,
        AHEAD,
        ONE_TILE,
        BN,
        L,
    )
