"""Head norms, rotary positions and the paged write as they are called."""

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
from drafter_kernels.qk_rope_write.reference import HeadNorms, HeadShape, RopeTable, qk_rope_reference


def qk_rope_write(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    projected: Tensor,
    keys: Tensor,
    slots: Tensor,
    k_pages: Tensor,
    v_pages: Tensor,
    shape: HeadShape,
    norms: HeadNorms,
    rope: RopeTable,
    *,
    q_out: Tensor | None = None,
    row_count: Tensor | None = None,
    overlaps: bool = False,
    backend: Backend | None = None,
) -> None:
    """Norms and rotates the heads of a projection: queries go to q_out, keys and values to rows `slots` of the pool.

    projected [M, shape.width]: queries (each followed by its gate if `shape.gated`), keys, values. keys, slots int64
    [M]: key k turns by k + offset; slot = page * page_rows + row in the page, and a negative one writes no K/V.
    k_pages and v_pages [num_pages, page_rows, Hkv, D], any number of elements. q_out [M, Hq, D], required if there
    are queries. row_count int32 [1] on the device: nothing is written for rows from there on. Two rows with one slot:
    either may stay. Raises ValueError naming what does not fit.
    """
    batch = len(projected)
    check_shape("projected", projected, batch, shape.width)
    check_tensor("keys", keys, torch.int64, batch)
    check_tensor("slots", slots, torch.int64, batch)
    check_shape("k_pages", k_pages, *k_pages.shape[:2], shape.num_kv_heads, shape.head_dim)
    check_shape("v_pages", v_pages, *k_pages.shape)
    if 2 * len(rope.turns) > shape.head_dim:
        raise ValueError(f"qk_rope_write: {2 * len(rope.turns)} rotary elements of a head of {shape.head_dim}")
    if shape.num_heads:
        if q_out is None:
            raise ValueError("qk_rope_write: no q_out for the queries")
        check_shape("q_out", q_out, batch, shape.num_heads, shape.head_dim)
    if row_count is not None:
        check_tensor("row_count", row_count, torch.int32, 1)
    if uses_triton(projected, backend):
        check_aligned(projected=projected, k_pages=k_pages, v_pages=v_pages, q_out=q_out)
        _launch(projected, (keys, slots), (k_pages, v_pages), shape, norms, rope, q_out, row_count, overlaps=overlaps)
        return
    count = batch if row_count is None else int(row_count)
    q, k, v = qk_rope_reference(projected[:count], keys[:count], shape, norms, rope)
    if q_out is not None:
        q_out[:count] = q.to(q_out.dtype)
    is_kept = slots[:count] >= 0
    for pages, rows in ((k_pages, k), (v_pages, v)):
        pages.flatten(0, 1).index_copy_(0, slots[:count][is_kept], rows[is_kept].to(pages.dtype))


def _launch(  # noqa: PLR0917  # in the order of the call
    projected: Tensor,
    where: tuple[Tensor, Tensor],
    pages: tuple[Tensor, Tensor],
    shape: HeadShape,
    norms: HeadNorms,
    rope: RopeTable,
    q_out: Tensor | None,
    row_count: Tensor | None,
    *,
    overlaps: bool,
) -> None:
    from drafter_kernels.qk_rope_write.kernel import qk_rope_write_kernel

    qk_rope_write_kernel[(len(projected), shape.num_heads + shape.num_kv_heads)](
        projected,
        *where,
        rope.turns if norms.q is None else norms.q,
        rope.turns if norms.k is None else norms.k,
        rope.turns,
        projected if q_out is None else q_out,
        *pages,
        where[0] if row_count is None else row_count,
        rope.position_offset,
        rope.amplitude,
        norms.epsilon,
        NUM_HEADS=shape.num_heads,
        NUM_KV_HEADS=shape.num_kv_heads,
        D=shape.head_dim,
        Q_STEP=2 * shape.head_dim if shape.gated else shape.head_dim,
        ROTARY=2 * len(rope.turns),
        HAS_Q_NORM=norms.q is not None,
        HAS_K_NORM=norms.k is not None,
        HAS_COUNT=row_count is not None,
        BLOCK=next_power_of_2(shape.head_dim),
        num_warps=1 if shape.head_dim <= 128 else 2,
        **launch_options(overlaps=overlaps),
    )
