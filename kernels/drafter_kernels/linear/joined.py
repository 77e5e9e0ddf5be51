"""Products that share a launch where there is one row of x, and are made one after the other otherwise."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from drafter_kernels.dispatch import (
    Backend,
    check_aligned,
    check_shape,
    is_interpreted,
    launch_options,
    uses_triton,
)
from drafter_kernels.fuse_pair import PairNorms, fuse_pair
from drafter_kernels.linear.op import LinearWorkspace, linear
from drafter_kernels.linear.plan import LinearPlan, WavePlan, plan_linear
from drafter_kernels.linear.reference import InputNorm, LinearWeight
from drafter_kernels.linear.waves import launch_joined_wave, launch_pair_wave
from drafter_kernels.quantize import PackedNvfp4, weight_shape


def linear_joined(
    x: Tensor,
    weights: Sequence[LinearWeight],
    out: Tensor,
    workspace: LinearWorkspace | None = None,
    *,
    norm: InputNorm | None = None,
    row_count: Tensor | None = None,
    plans: Sequence[LinearPlan] | None = None,
    backend: Backend | None = None,
) -> None:
    """The products of x with several weights [N1, K], [N2, K], ... side by side: out [M, N1 + N2 + ...].

    Each as `linear` makes it. One row of x with an NVFP4 weight and then a bf16 one is a single launch. Raises
    ValueError naming what does not fit.
    """
    sizes = [weight_shape(weight)[0] for weight in weights]
    check_shape("out", out, len(x), sum(sizes))
    plans = plans or [plan_linear(weight, len(x), normed=norm is not None) for weight in weights]
    if uses_triton(out, backend) and _is_one_launch(weights, plans) and len(x) == 1:
        first, second = weights
        assert isinstance(first, PackedNvfp4)
        assert isinstance(second, Tensor)
        check_shape("x", x, 1, second.shape[1])
        check_aligned(x=x, out=out)
        match plans:
            case WavePlan() as wave, WavePlan() as other:
                launch_joined_wave(x, first, second, out, norm, row_count, (wave, other))
                return
        _launch_joined(x, first, second, out, norm, row_count, plans)
        return
    for weight, part, plan in zip(weights, out.split(sizes, dim=1), plans, strict=True):
        linear(x, weight, part, workspace, norm=norm, row_count=row_count, plan=plan, backend=backend)


def _is_one_launch(weights: Sequence[LinearWeight], plans: Sequence[LinearPlan]) -> bool:
    is_alike = all(isinstance(plan, WavePlan) for plan in plans) or len({plan.num_warps for plan in plans}) == 1
    if not all(plan.is_vector for plan in plans) or not is_alike:
        return False
    kinds = [isinstance(weight, PackedNvfp4) for weight in weights]
    columns = {weight_shape(weight)[1] for weight in weights}
    return kinds == [True, False] and isinstance(weights[1], Tensor) and len(columns) == 1


def _launch_joined(  # noqa: PLR0917  # in the order of the call
    x: Tensor,
    first: PackedNvfp4,
    second: Tensor,
    out: Tensor,
    norm: InputNorm | None,
    row_count: Tensor | None,
    plans: Sequence[LinearPlan],
) -> None:
    from drafter_kernels.linear.one_row.kernel import joined_row_kernel

    sizes = [first.shape[0], len(second)]
    grid = sum(plan.num_tiles(1, size) for plan, size in zip(plans, sizes, strict=True))
    joined_row_kernel[(grid,)](
        x,
        first.words,
        first.block_scales,
        first.tensor_scale,
        second,
        x if norm is None else norm.scale,
        out,
        out if row_count is None else row_count,
        0.0 if norm is None else norm.epsilon,
        zero=0,
        N=sizes[0],
        KW=first.words.shape[1],
        N2=sizes[1],
        HAS_NORM=norm is not None,
        PACKED_X=False,
        HAS_COUNT=row_count is not None,
        BN=plans[0].block_rows,
        BK=plans[0].block_columns,
        BN2=plans[1].block_rows,
        BK2=plans[1].block_columns,
        PTX=not is_interpreted(),
        num_warps=plans[0].num_warps,
        **launch_options(overlaps=plans[0].overlaps),
    )


def pair_linear(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    tokens: Tensor,
    embedding: Tensor,
    hiddens: Tensor,
    norms: PairNorms,
    weight: LinearWeight,
    out: Tensor,
    joined: Tensor,
    workspace: LinearWorkspace | None = None,
    *,
    hidden_first: bool = False,
    row_count: Tensor | None = None,
    plan: LinearPlan | None = None,
    backend: Backend | None = None,
) -> None:
    """`fuse_pair` into `joined` [M, H + W] and its product with weight [N, H + W] into out [M, N].

    For one pair and a bf16 weight both are a single kernel, and `joined` stays as it is. What is refused there is
    what `fuse_pair` and `linear` refuse.
    """
    plan = plan or plan_linear(weight, len(tokens))
    sizes = (embedding.shape[1], hiddens.shape[1])
    is_one = len(tokens) == 1 and plan.is_vector and isinstance(weight, Tensor)
    is_cut = isinstance(plan, WavePlan) or not any(size % plan.block_columns for size in sizes)
    if not uses_triton(out, backend) or not is_one or not is_cut:
        order = {"hidden_first": hidden_first, "overlaps": plan.overlaps}
        fuse_pair(tokens, embedding, hiddens, norms, joined, row_count=row_count, backend=backend, **order)
        linear(joined, weight, out, workspace, row_count=row_count, plan=plan, backend=backend)
        return
    assert isinstance(weight, Tensor)
    _check_pair(tokens, embedding, hiddens, norms, weight, out)
    if isinstance(plan, WavePlan):
        given = (tokens, embedding, hiddens)
        launch_pair_wave(given, norms, weight, out, row_count, plan, hidden_first=hidden_first)
        return
    _launch_pair((tokens, embedding, hiddens), norms, weight, out, row_count, plan, hidden_first=hidden_first)


def _launch_pair(  # noqa: PLR0917  # in the order of the call
    pair: tuple[Tensor, Tensor, Tensor],
    norms: PairNorms,
    weight: Tensor,
    out: Tensor,
    row_count: Tensor | None,
    plan: LinearPlan,
    *,
    hidden_first: bool,
) -> None:
    from drafter_kernels.linear.one_row.kernel import pair_row_kernel

    tokens, embedding, hiddens = pair
    pair_row_kernel[(plan.num_tiles(1, len(weight)),)](
        *pair,
        norms.embedding,
        norms.hidden,
        weight,
        out,
        tokens if row_count is None else row_count,
        norms.epsilon,
        N=len(weight),
        H=embedding.shape[1],
        W=hiddens.shape[1],
        HIDDEN_FIRST=hidden_first,
        HAS_COUNT=row_count is not None,
        BN=plan.block_rows,
        BK=plan.block_columns,
        num_warps=plan.num_warps,
        **launch_options(overlaps=plan.overlaps),
    )


def _check_pair(  # noqa: PLR0917  # in the order of the call
    tokens: Tensor, embedding: Tensor, hiddens: Tensor, norms: PairNorms, weight: Tensor, out: Tensor
) -> None:
    """Raises ValueError."""
    height, width = embedding.shape[1], hiddens.shape[1]
    check_shape("weight", weight, len(weight), height + width)
    check_shape("hiddens", hiddens, 1, width)
    check_shape("norms.embedding", norms.embedding, height)
    check_shape("norms.hidden", norms.hidden, width)
    check_shape("out", out, 1, len(weight))
    if tokens.dtype != torch.int64:
        raise ValueError(f"tokens holds {tokens.dtype}, expected {torch.int64}")
    check_aligned(embedding=embedding, hiddens=hiddens, weight=weight, out=out)
