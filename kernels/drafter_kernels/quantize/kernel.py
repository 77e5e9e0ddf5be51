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


# How the four codes of a half word are brought into place, from register a into t; u is free.
_FLOAT16_PLACING = (
    "and.b32 t, a, 0x8E008E00;",
    "shl.b32 t, a, 3; and.b32 t, t, 0x8E008E00;",
    "shl.b32 t, a, 6; shl.b32 u, a, 1; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA;",
    "shl.b32 t, a, 9; shl.b32 u, a, 2; and.b32 t, t, 0x0E000E00; lop3.b32 t, u, 0x80008000, t, 0xEA;",
)
_BFLOAT16_PLACING = (
    "shr.u32 t, a, 3; and.b32 t, t, 0x01C001C0; lop3.b32 t, a, 0x80008000, t, 0xEA;",
    "shl.b32 u, a, 3; and.b32 t, a, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;",
    "shl.b32 t, a, 3; shl.b32 u, a, 1; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;",
    "shl.b32 t, a, 6; shl.b32 u, a, 2; and.b32 t, t, 0x01C001C0; lop3.b32 t, u, 0x80008000, t, 0xEA;",
)


def _pair_texts(placing: tuple[str, ...], kind: str) -> tuple[str, ...]:
    """PTX for each slot: from two words (operands 1 and 2) the pair of their elements, times a pair of scales (3).

    First the halves of both words that hold the element are put side by side; the assembler does that once for all
    slots.
    """
    selectors = ("0x5410", "0x7632")
    return tuple(
        "{ .reg .b32 a, t, u;\n"
        f"prmt.b32 a, $1, $2, {selectors[slot % 2]}; {placing[slot // 2]} mul.rn.{kind} $0, t, $3; }}"
        for slot in range(8)
    )


_FLOAT16_PAIRS = tl.constexpr(_pair_texts(_FLOAT16_PLACING, "f16x2"))
_BFLOAT16_PAIRS = tl.constexpr(_pair_texts(_BFLOAT16_PLACING, "bf16x2"))


@triton.jit
def spread_scales(scales, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Block scales [BN, BK / 2] beside the words [BN, BK] that they belong to, in the form that `decode` takes."""
    wide = scales.to(tl.float32)
    # PTX: after the magnitude's own 2^-14 or 2^-126.
    if not PTX:
        ready = wide * (1.0 / (FLOAT16_LACKS if tl.float16 == DTYPE else BFLOAT16_LACKS))
    else:
        ready = (wide * (_FLOAT16_UP if tl.float16 == DTYPE else _BFLOAT16_UP)).to(DTYPE)
    # Broadcast and reshaped, never loaded twice: so Triton keeps weights in registers from the decode to the product.
    return tl.reshape(tl.broadcast_to(ready[:, :, None], (BN, BK // 2, 2)), (BN, BK))


@triton.jit
def decode(words, scales, SLOT: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Element SLOT (0 to 7) of each word times its block scale, as DTYPE (float16 or bfloat16), short of `*_LACKS`.

    words int32 [BN, BK], scales of `spread_scales`. Both ways give the same numbers, and exact ones: a magnitude has 2
    significant bits and a scale 4. One value a branch: Triton looks past a return at what follows it.
    """
    if not PTX:
        decoded = (code_of(words, SLOT) * scales).to(DTYPE)
    elif tl.float16 == DTYPE:
        decoded = tl.inline_asm_elementwise(
            _FLOAT16_PAIRS[SLOT], "=r,r,r,r", [words, scales], dtype=tl.float16, is_pure=True, pack=2
        )
    else:
        decoded = tl.inline_asm_elementwise(
            _BFLOAT16_PAIRS[SLOT], "=r,r,r,r", [words, scales], dtype=tl.bfloat16, is_pure=True, pack=2
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


# The same places in fewer instructions, from register {a} into t: one multiplication shifts sign and magnitude by
# different widths at once. What else it leaves is cut off; carries end below bit 25, where the next code begins.
_FLOAT16_PLACES = (
    "and.b32 t, {a}, 0x8E008E00;",
    "shl.b32 t, {a}, 3; and.b32 t, t, 0x8E008E00;",
    "and.b32 t, {a}, 0x40384038; mul.lo.u32 t, t, 66; and.b32 t, t, 0x8E008E00;",
    "and.b32 t, {a}, 0x20072007; mul.lo.u32 t, t, 516; and.b32 t, t, 0x8E008E00;",
)

# For each of the four pairs of neighbours in a word (operand 2): both as float16 (0 and 1), times a pair of scales (3)
# that were multiplied by FLOAT16_UP. They lack FLOAT16_LACKS, as those of `decode`.
FLOAT16_NEIGHBOURS = tl.constexpr(
    tuple(
        "{ .reg .b32 t;\n" + place.format(a="$2") + " mul.rn.f16x2 t, t, $3; mov.b32 {$0, $1}, t; }"
        for place in _FLOAT16_PLACES
    )
)
FLOAT16_UP = _FLOAT16_UP


def _dot16_text() -> str:
    """PTX: the sum (operand 0) of the 16 elements of two words (1) times 16 float16 of x (2 to 5), as `dot8`'s.

    Eight products are summed in float16 in each of two lanes: four of each word, then both.
    """
    text = "{ .reg .b32 a, b, t, u, v, xa, xb; .reg .b16 lo, hi; .reg .f32 fl, fh;\n"
    text += "mov.b64 {a, b}, $1; mov.b32 u, 0; mov.b32 v, 0;\n"
    for index, place in enumerate(_FLOAT16_PLACES):
        text += f"mov.b64 {{xa, xb}}, ${2 + index};\n"
        text += place.format(a="a") + " fma.rn.f16x2 u, t, xa, u;\n"
        text += place.format(a="b") + " fma.rn.f16x2 v, t, xb, v;\n"
    text += "add.rn.f16x2 u, u, v;\n"
    return text + "mov.b32 {lo, hi}, u; cvt.f32.f16 fl, lo; cvt.f32.f16 fh, hi; add.f32 $0, fl, fh; }"


# For int64 of two words each, and of x two pairs each; lacks DOT8_LACKS, and takes x as `dot8` does.
DOT16 = tl.constexpr(_dot16_text())


@triton.jit
def decode_kernel(words, block_scales, out, BN: tl.constexpr, BK: tl.constexpr, DTYPE: tl.constexpr, PTX: tl.constexpr):
    """Decodes words int32 [BN, BK] with block scales [BN, BK / 2] into out float32 [BN, BK, 8]. For tests."""
    row, k = tl.arange(0, BN), tl.arange(0, BK)
    word = tl.load(words + row[:, None] * BK + k[None, :])
    half = tl.arange(0, BK // 2)
    scales = tl.load(block_scales + row[:, None] * (BK // 2) + half[None, :])
    ready = spread_scales(scales, BN, BK, DTYPE, PTX)
    LACKS: tl.constexpr = FLOAT16_LACKS if tl.float16 == DTYPE else BFLOAT16_LACKS
    place = out + (row[:, None] * BK + k[None, :]) * 8
    for SLOT in tl.static_range(8):
        tl.store(place + SLOT, decode(word, ready, SLOT, DTYPE, PTX).to(tl.float32) * LACKS)
