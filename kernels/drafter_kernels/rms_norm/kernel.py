"""RMSNorm of rows, and their packing for NVFP4 weights, in Triton."""

import torch
import triton
import triton.language as tl

# Biased exponent of what the largest |x| of a row is scaled to: 2^12, whose products with decoded codes are neither
# lost nor infinite in float16.
SCALED_EXPONENT = tl.constexpr(127 + 12)


def dot_type(dtype: torch.dtype, *, interpreted: bool) -> tl.dtype:
    """What the product's operands are for weights of a torch dtype. The interpreter has no bfloat16 product."""
    if dtype == torch.float32 or (interpreted and dtype != torch.float16):
        return tl.float32
    return tl.float16 if dtype == torch.float16 else tl.bfloat16


@triton.jit
def rms_norm_kernel(
    x,
    norm,
    normed,
    packed,
    row_scales,
    eps,
    K: tl.constexpr,
    HAS_NORM: tl.constexpr,
    PACKING: tl.constexpr,
    BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):
    """Normalises a row of x [M, K] into `normed`, and packs it for narrow weights.

    PACKING 0: nothing; 1: pairs for the products of `dot8`, float16 [M, 4, K / 8, 2]; 2: elements for `tl.dot`, float16
    [M, 8, K / 8]; 3: the same in bfloat16, not scaled; 4: pairs in the order in which threads feed
    tensor cores, float16 [M, 4, K / 256, 8, 4, 2]; 5: float16 [M, K]. `row_scales` float32 [M] undoes the scaling.
    Grid: M.
    """
    row = tl.program_id(0).to(tl.int64)
    k = tl.arange(0, BLOCK)
    inside = k < K
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    if HAS_NORM:
        scale = tl.load(norm + k, mask=inside, other=0.0)  # on its way while x is waited for and summed
    if PDL:
        tl.extra.cuda.gdc_wait()
    value = tl.load(x + row * K + k, mask=inside, other=0.0).to(tl.float32)
    if HAS_NORM:
        rms = tl.rsqrt(tl.sum(value * value, 0) / K + eps)
        value = value * rms * scale
        rounded = value.to(normed.dtype.element_ty)
        tl.store(normed + row * K + k, rounded, mask=inside)
        value = rounded.to(tl.float32)
    WORDS: tl.constexpr = K // 8
    if PACKING == 1:
        place = (k % 8 // 2) * (2 * WORDS) + (k // 8) * 2 + k % 2
    elif PACKING == 4:
        # Of 32 words a thread reads 8 neighbours, and the tensor core takes one of each of four threads at a time.
        word = k // 8
        turned = word // 32 * 32 + (word % 8) * 4 + word % 32 // 8
        place = (k % 8 // 2) * (2 * WORDS) + turned * 2 + k % 2
    elif PACKING == 5:
        place = k
    else:
        place = (k % 8) * WORDS + k // 8
    if PACKING == 3:
        tl.store(packed + row * K + place, value.to(packed.dtype.element_ty), mask=inside)
    elif PACKING != 0:
        largest = tl.max(tl.where(value == value, tl.abs(value), 0.0), 0)
        exponent = tl.maximum(largest.to(tl.int32, bitcast=True) >> 23, SCALED_EXPONENT - 126)
        up = ((-exponent + (127 + SCALED_EXPONENT)) << 23).to(tl.float32, bitcast=True)
        down = ((exponent + (127 - SCALED_EXPONENT)) << 23).to(tl.float32, bitcast=True)
        tl.store(row_scales + row, down)
        tl.store(packed + row * K + place, (value * up).to(tl.float16), mask=inside)
