"""Embedding, two norms and their joining in Triton: one program a pair."""

import triton
import triton.language as tl


@triton.jit
def _normed(address, scale, inside, width: tl.constexpr, eps):
    value = tl.load(address, mask=inside, other=0.0).to(tl.float32)
    rms = tl.rsqrt(tl.sum(value * value, 0) / width + eps)
    return value * rms * tl.load(scale, mask=inside, other=0.0)


@triton.jit(do_not_specialize_on_alignment=["tokens", "row_count"])
def fuse_pair_kernel(
    tokens,
    embedding,
    hiddens,
    embedding_norm,
    hidden_norm,
    out,
    row_count,
    eps,
    H: tl.constexpr,
    W: tl.constexpr,
    HIDDEN_FIRST: tl.constexpr,
    HAS_COUNT: tl.constexpr,
    BLOCK_H: tl.constexpr,
    BLOCK_W: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [M, H + W]; a negative token gives zeros, rows from row_count[0] on are not written. Grid: M."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    if HAS_COUNT:
        if row >= tl.load(row_count):
            return
    token = tl.load(tokens + row).to(tl.int64)
    is_pair = token >= 0
    h, w = tl.arange(0, BLOCK_H), tl.arange(0, BLOCK_W)
    first = _normed(embedding + token * H + h, embedding_norm + h, (h < H) & is_pair, H, eps)
    second = _normed(hiddens + row * W + w, hidden_norm + w, (w < W) & is_pair, W, eps)
    base = out + row * (H + W)
    H_AT: tl.constexpr = W if HIDDEN_FIRST else 0
    W_AT: tl.constexpr = 0 if HIDDEN_FIRST else H
    tl.store(base + H_AT + h, first.to(out.dtype.element_ty), mask=h < H)
    tl.store(base + W_AT + w, second.to(out.dtype.element_ty), mask=w < W)
