"""The first step of a head as it is called."""

import torch
from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_aligned,
    check_shape,
    check_tensor,
    launch_options,
    next_power_of_2,
    uses_triton,
)
from drafter_kernels.fuse_pair.reference import PairNorms, fuse_pair_reference


def fuse_pair(
    tokens: Tensor,
    embedding: Tensor,
    hiddens: Tensor,
    norms: PairNorms,
    out: Tensor,
    *,
    hidden_first: bool = False,
    row_count: Tensor | None = None,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """out = cat(RMSNorm(embedding[token]), RMSNorm(hidden)), or hidden first; norms in float32.

    tokens int64 [M]: a negative one is no token, and its row becomes zeros whatever the hidden holds; one from V on
    is the caller's bug. embedding [V, H], hiddens [M, W], out [M, H + W], each of any float type. row_count int32 [1]
    on the device: rows of out from there on keep what they hold. Raises ValueError naming what does not fit.
    """
    (batch, width), height = _check(tokens, embedding, hiddens, norms, out, row_count), embedding.shape[1]
    if not uses_triton(out, backend):
        count = batch if row_count is None else int(row_count)
        joined = fuse_pair_reference(tokens[:count], embedding, hiddens[:count], norms, hidden_first=hidden_first)
        out[:count] = joined.to(out.dtype)
        return
    from drafter_kernels.fuse_pair.kernel import fuse_pair_kernel

    check_aligned(embedding=embedding, hiddens=hiddens, out=out)
    fuse_pair_kernel[(batch,)](
        tokens,
        embedding,
        hiddens,
        norms.embedding,
        norms.hidden,
        out,
        tokens if row_count is None else row_count,
        norms.epsilon,
        H=height,
        W=width,
        HIDDEN_FIRST=hidden_first,
        HAS_COUNT=row_count is not None,
        BLOCK_H=next_power_of_2(height),
        BLOCK_W=next_power_of_2(width),
        num_warps=8 if max(height, width) >= 2048 else 4,
        **launch_options(overlaps=overlaps),
    )


def _check(  # noqa: PLR0917  # in the order of the call
    tokens: Tensor, embedding: Tensor, hiddens: Tensor, norms: PairNorms, out: Tensor, row_count: Tensor | None
) -> tuple[int, int]:
    """M and W. Raises ValueError."""
    (batch, width), height = hiddens.shape, embedding.shape[1]
    check_tensor("tokens", tokens, torch.int64, batch)
    check_tensor("norms.embedding", norms.embedding, torch.float32, height)
    check_tensor("norms.hidden", norms.hidden, torch.float32, width)
    check_shape("out", out, batch, height + width)
    if row_count is not None:
        check_tensor("row_count", row_count, torch.int32, 1)
    return batch, width
