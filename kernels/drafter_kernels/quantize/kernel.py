"""Decoding of packed NVFP4 inside kernels: with inline PTX, or with portable operations, to the same numbers."""

import triton
import triton.language as tl

# E2M1 bits in a float32's place: the exponent's bias is 127 instead of 1, so that values come out times 2^-126. A
# block scale times 2^112 brings that back without leaving the range of a bfloat16.
_TO_FLOAT32 = tl.constexpr(2.0**126)
_BFLOAT16_UP = tl.constexpr(2.0**112)
# The same for float16, whose bias is 15. What a decoded weight still lacks is left to the caller.
_FLOAT16_UP = tl.constexpr(2.0**6)

BFLOAT16_LACKS = tl.constexpr(2.0**14)
FLOAT16_LACKS = tl.constexpr(2.0**8)
DOT8_LACKS = tl.constexpr(2.0**14)


@triton.jit
def code_of(words, SLOT: tl.constexpr):
    """Element SLOT (0 to 7) of each word, float32, true value (before any scale)."""
    half = words >> (16 * (SLOT % 2))
    INDEX: tl.constexpr = SLOT // 2
    MAGNITUDE_BIT: tl.constexpr = 9 - 3 * INDEX
    SIGN_BIT: tl.constexpr = 15 if INDEX == 0 else (12 if INDEX == 1 else (14 if INDEX == 2 else 13))
    magnitude = ((half >> MAGNITUDE_BIT) & 7) << 22
    sign = ((half >> SIGN_BIT) & 1) << 31
    return (magnitude | sign).to(tl.float32, bitcast=True) * _TO_FLOAT32


@triton.jit
def decode8_portable(words, scales, DTYPE: tl.constexpr):
    """The 8 elements of each word times its scale (same shape, float32) as DTYPE: exact, up to the factor `*_LACKS`."""
    LACKS: tl.constexpr = FLOAT16_LACKS if tl.float16 == DTYPE else BFLOAT16_LACKS
    scaled = scales * (1.0 / LACKS)
    return (
        (code_of(words, 0) * scaled).to(DTYPE),
        (code_of(words, 1) * scaled).to(DTYPE),
        (code_of(words, 2) * scaled).to(DTYPE),
        (code_of(words, 3) * scaled).to(DTYPE),
        (code_of(words, 4) * scaled).to(DTYPE),
        (code_of(words, 5) * scaled).to(DTYPE),
        (code_of(words, 6) * scaled).to(DTYPE),
        (code_of(words, 7) * scaled).to(DTYPE),
    )


# Two neighbouring words (operands 8 and 9) to 8 pairs; operand 10 is the pair of their scales. First the low halves
# of both words side by side, then the high halves: each decoded pair then is the same element of the two words.
_FLOAT16_PAIRS = tl.constexpr("""
{
.reg .b32 a, b, t, u;
prmt.b32 a, $8, $9, 0x5410; prmt.b32 b, $8, $9, 0x7632;
and.b32 t, a, 0x8E008E00; mul.rn.f16x2 $0, t, $10;
and.b32 t, b, 0x8E008E00; mul.rn.f16x2 $1, t, $10;
shl.b32 t, a, 3; and.b32 t, t, 0x8E008E00; mul.rn.f16x2 $2, t, $10;
shl.b32 t, b, 3; and.b32 t, t, 0x8E008E00; mul.rn.f16x2 $3, t, $10;
shl.b32 t, a, 6; shl.b32 u, a, 1; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.f16x2 $4, t, $10;
shl.b32 t, b, 6; shl.b32 u, b, 1; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.f16x2 $5, t, $10;
shl.b32 t, a, 9; shl.b32 u, a, 2; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.f16x2 $6, t, $10;
shl.b32 t, b, 9; shl.b32 u, b, 2; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.f16x2 $7, t, $10;
}
""")
_BFLOAT16_PAIRS = tl.constexpr("""
{
.reg .b32 a, b, t, u;
prmt.b32 a, $8, $9, 0x5410; prmt.b32 b, $8, $9, 0x7632;
shr.u32 t, a, 3; and.b32 t, t, 0x01C001C0; lop3.b32 t, a, 0x80008000, t, 0xEA; mul.rn.bf16x2 $0, t, $10;
shr.u32 t, b, 3; and.b32 t, t, 0x01C001C0; lop3.b32 t, b, 0x80008000, t, 0xEA; mul.rn.bf16x2 $1, t, $10;
shl.b32 u, a, 3; and.b32 t, a, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.bf16x2 $2, t, $10;
shl.b32 u, b, 3; and.b32 t, b, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA; mul.rn.bf16x2 $3, t, $10;
shl.b32 t, a, 3; shl.b32 u, a, 1; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $4, t, $10;
shl.b32 t, b, 3; shl.b32 u, b, 1; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $5, t, $10;
shl.b32 t, a, 6; shl.b32 u, a, 2; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $6, t, $10;
shl.b32 t, b, 6; shl.b32 u, b, 2; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;
    mul.rn.bf16x2 $7, t, $10;
}
""")


@triton.jit
def decode8(words, scales, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """The 8 elements of each word times its block scale, as DTYPE (float16 or bfloat16), short of the factor `*_LACKS`.

    words int32, scales float32 of the same shape, whose last dimension is even. Both ways give the same numbers: a
    magnitude has 2 significant bits and a scale 4, so that a product has no more than 6.
    """
    # One branch, one value: Triton looks past a return at what follows it.
    if not PTX:
        decoded = decode8_portable(words, scales, DTYPE)
    elif tl.float16 == DTYPE:
        # After the magnitude's own 2^-14.
        decoded = tl.inline_asm_elementwise(
            _FLOAT16_PAIRS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, (scales * _FLOAT16_UP).to(tl.float16)],
            dtype=(tl.float16,) * 8,
            is_pure=True,
            pack=2,
        )
    else:
        # After the magnitude's own 2^-126.
        decoded = tl.inline_asm_elementwise(
            _BFLOAT16_PAIRS,
            "=r,=r,=r,=r,=r,=r,=r,=r,r,r,r",
            [words, (scales * _BFLOAT16_UP).to(tl.bfloat16)],
            dtype=(tl.bfloat16,) * 8,
            is_pure=True,
            pack=2,
        )
    return decoded


_DOT8 = tl.constexpr("""
{
.reg .b32 t, u, acc; .reg .b16 lo, hi; .reg .f32 fl, fh;
mov.b32 acc, 0;
and.b32 t, $1, 0x8E008E00; fma.rn.f16x2 acc, t, $2, acc;
shl.b32 t, $1, 3; and.b32 t, t, 0x8E008E00; fma.rn.f16x2 acc, t, $3, acc;
shl.b32 t, $1, 6; shl.b32 u, $1, 1; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.f16x2 acc, t, $4, acc;
shl.b32 t, $1, 9; shl.b32 u, $1, 2; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA;
    fma.rn.f16x2 acc, t, $5, acc;
mov.b32 {lo, hi}, acc; cvt.f32.f16 fl, lo; cvt.f32.f16 fh, hi; add.f32 $0, fl, fh;
}
""")


@triton.jit
def half_of(pairs, HALF: tl.constexpr):
    """The low or high float16 of each int32, as float32."""
    return ((pairs >> (16 * HALF)) & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def dot8(words, x0, x1, x2, x3, PTX: tl.constexpr):
    """Sum of 8 elements of each word times 8 float16 of x, without scales, float32, short of the factor DOT8_LACKS.

    words int32; x0 to x3 int32 of the same shape, each a pair of float16: elements 0 and 1, 2 and 3, 4 and 5, 6 and 7.
    With PTX four products are summed in float16, where |x| should be large but below 2^15; the portable way sums in
    float32.
    """
    if PTX:
        total = tl.inline_asm_elementwise(
            _DOT8, "=f,r,r,r,r,r", [words, x0, x1, x2, x3], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        total = code_of(words, 0) * half_of(x0, 0) + code_of(words, 1) * half_of(x0, 1)
        total += code_of(words, 2) * half_of(x1, 0) + code_of(words, 3) * half_of(x1, 1)
        total += code_of(words, 4) * half_of(x2, 0) + code_of(words, 5) * half_of(x2, 1)
        total += code_of(words, 6) * half_of(x3, 0) + code_of(words, 7) * half_of(x3, 1)
        total *= 1.0 / DOT8_LACKS
    return total


@triton.jit
def decode_kernel(words, block_scales, out, num_words, DTYPE: tl.constexpr, PTX: tl.constexpr, BLOCK: tl.constexpr):
    """Decodes words int32 [num_words], one block scale for two, into out [num_words * 8]. For tests."""
    index = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = index < num_words
    word = tl.load(words + index, mask=inside, other=0)
    scale = tl.load(block_scales + index // 2, mask=inside, other=0.0).to(tl.float32)
    v0, v1, v2, v3, v4, v5, v6, v7 = decode8(word, scale, DTYPE, PTX)
    LACKS: tl.constexpr = FLOAT16_LACKS if tl.float16 == DTYPE else BFLOAT16_LACKS
    tl.store(out + index * 8 + 0, v0.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 1, v1.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 2, v2.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 3, v3.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 4, v4.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 5, v5.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 6, v6.to(tl.float32) * LACKS, mask=inside)
    tl.store(out + index * 8 + 7, v7.to(tl.float32) * LACKS, mask=inside)
