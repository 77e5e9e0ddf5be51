"""What is measured of each operation: calls, their peer in plain PyTorch, their floor, and whether they are right."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Final

import torch
from heads import TOY, HeadSize, Weights, num_bytes, projection_shape
from torch import Tensor
from torch.nn.functional import linear as torch_linear
from torch.nn.functional import scaled_dot_product_attention, silu

from drafter_kernels import Backend
from drafter_kernels.absorb import AbsorbWeights, AbsorbWorkspace, absorb, absorb_reference
from drafter_kernels.fuse_pair import PairNorms, fuse_pair, fuse_pair_reference
from drafter_kernels.linear import InputNorm, LinearPlan, LinearWorkspace, linear, linear_reference, plan_linear
from drafter_kernels.linear.plan import WavePlan
from drafter_kernels.linear.plan import plan_portable as plan_portable_row
from drafter_kernels.lm_head import (
    GrammarMasks,
    LmHeadPlan,
    LmHeadWorkspace,
    lm_head,
    lm_head_reference,
    plan_lm_head,
)
from drafter_kernels.lm_head.plan import HopperPlan, plan_portable
from drafter_kernels.paged_attention import (
    AttentionPlan,
    AttentionWorkspace,
    paged_attention,
    paged_attention_into,
    plan_attention,
)
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable, qk_rope_reference, qk_rope_write

Call = Callable[[], None]

# Copies of the operands together are several times a cache of 60 MB.
_ROTATED_BYTES: Final = 256 * 2**20
_MAX_COPIES: Final = 16
_TOLERANCE: Final = 1e-2
_EPSILON: Final = 1e-6


@dataclass
class Case:
    """One call of an operation, on different memory each time.

    `error` runs the first one on fresh outputs and compares; it may not exceed `tolerance`. `candidates` are other
    plans for the same call; the one in use is not among them.
    """

    name: str
    floor_bytes: int
    calls: Sequence[Call]
    peer: Sequence[Call]
    error: Callable[[], float]
    candidates: dict[str, Sequence[Call]] = field(default_factory=dict)
    tolerance: float = _TOLERANCE


@dataclass(frozen=True)
class Bench:
    """What cases are made of. With `toy` there is one copy of everything."""

    size: HeadSize
    weights: Weights
    toy: bool

    @property
    def device(self) -> torch.device:
        """Where."""
        return self.weights.device

    @property
    def tolerance(self) -> float:
        """Twice in toy runs: the interpreter cuts off where a GPU rounds, and SwiGLU multiplies two results."""
        return _TOLERANCE * (2 if self.toy else 1)

    def copies(self, num_bytes_each: int) -> int:
        """How many copies of an operand are made."""
        return 1 if self.toy else max(1, min(_MAX_COPIES, _ROTATED_BYTES // num_bytes_each))


def relative_error(found: Tensor, expected: Tensor) -> float:
    """Frobenius; NaN anywhere is infinite."""
    found, expected = found.double(), expected.double()
    if bool(found.isnan().any()):
        return float("inf")
    return float((found - expected).norm() / expected.norm())


# lm_head


def lm_head_cases(bench: Bench, batches: Sequence[int]) -> Iterator[Case]:
    """Formats and batches; with a mask, and with a cut vocabulary."""
    whole = bench.weights.normal(*projection_shape(bench.size, "lm_head"), scale=bench.size.hidden**-0.5)
    for kind in ("nvfp4", "fp8", "bf16"):
        weight = bench.weights.convert(whole, kind)
        for batch in batches:
            yield _lm_head_case(bench, f"lm_head/{kind}/B={batch}", whole, weight, batch)
            if kind == "nvfp4":
                yield _lm_head_case(bench, f"lm_head/{kind}/mask/B={batch}", whole, weight, batch, masked=True)
    cut = whole[: bench.size.draft_vocab].contiguous()
    ids = torch.arange(len(cut), dtype=torch.int32, device=bench.device)
    packed = bench.weights.convert(cut, "nvfp4")
    yield _lm_head_case(bench, "lm_head/nvfp4/cut/B=1", cut, packed, 1, draft_ids=ids)


def _lm_head_case(
    bench: Bench,
    name: str,
    whole: Tensor,
    weight: object,
    batch: int,
    *,
    masked: bool = False,
    draft_ids: Tensor | None = None,
) -> Case:
    x = bench.weights.normal(batch, bench.size.hidden, scale=3.0)
    masks = _random_masks(bench, batch) if masked else None
    ids = torch.full((batch,), -99, dtype=torch.int64, device=bench.device)
    logprobs = torch.full((batch,), torch.nan, device=bench.device)
    candidates = _lm_head_plans(weight, batch) if not masked and draft_ids is None else {}
    plans = (plan_lm_head(weight, batch), *candidates.values())
    workspace = LmHeadWorkspace(weight, batch, plans)

    def call(plan: LmHeadPlan | None = None) -> None:
        lm_head(
            x, weight, ids, logprobs, workspace, masks=masks, draft_ids=draft_ids, plan=plan, backend=Backend.TRITON
        )

    def error(plan: LmHeadPlan | None = None) -> float:
        ids.fill_(-99)
        logprobs.fill_(torch.nan)
        call(plan)
        return _lm_head_error(x, weight, ids, logprobs, masks, draft_ids)

    def peer() -> None:
        logits = torch_linear(x, whole)
        best = logits.max(-1)
        logprobs.copy_(best.values.float() - logits.float().logsumexp(-1))
        ids.copy_(best.indices)

    floor = num_bytes(weight) + (0 if masks is None else masks.words.nbytes)
    checked = {key: _Checked(partial(error, plan), partial(call, plan)) for key, plan in candidates.items()}
    return Case(name, floor, [call], [peer], error, {key: [value] for key, value in checked.items()})


def _random_masks(bench: Bench, batch: int) -> GrammarMasks:
    """One for each row, with half of the bits set."""
    shape = (batch, -(-bench.size.vocab // 32))
    bits = torch.randint(-(2**31), 2**31 - 1, shape, device=bench.device).to(torch.int32)
    return GrammarMasks(bits, torch.arange(batch, dtype=torch.int32, device=bench.device))


class _Checked:
    """A candidate's call, with the comparison that must come before its time."""

    def __init__(self, error: Callable[[], float], call: Call) -> None:
        self.error = error
        self._call = call

    def __call__(self) -> None:
        self._call()


def _lm_head_error(  # noqa: PLR0917  # what a call was made of
    x: Tensor,
    weight: object,
    ids: Tensor,
    logprobs: Tensor,
    masks: GrammarMasks | None,
    draft_ids: Tensor | None,
) -> float:
    """Of log-probabilities, in parts of the logits' size; 1 if an id differs by more than rounding can explain."""
    expected_ids, expected = lm_head_reference(x, weight, masks=masks, draft_ids=draft_ids)
    rms = float(x.float().square().mean().sqrt())  # of logits: rows of the weight have norm 1
    error = float((logprobs - expected).abs().max()) / rms
    differs = ids != expected_ids
    # A log-probability as good as the best one's is a tie; the error above has compared it.
    return error if not bool((differs & ((logprobs - expected).abs() > _TOLERANCE * rms)).any()) else 1.0


def _lm_head_plans(weight: object, batch: int) -> dict[str, LmHeadPlan]:
    """Few, since each costs a compilation: kernels that run anywhere, kernels that overlap, and neighbours."""
    if type(weight).__name__ != "PackedNvfp4":
        return {}
    plan = plan_lm_head(weight, batch)
    found = {"portable": plan_portable(batch), "overlap": replace(plan, overlaps=True)}
    if isinstance(plan, HopperPlan):
        wide = replace(plan, programs=plan.programs // 3 * 2, max_registers=248)
        match batch:
            case 1:
                found["4 warps"] = replace(plan, block_rows=8, num_warps=4, programs=396, max_registers=168)
            case _ if batch <= 8:
                found["2 a multiprocessor"] = wide
            case _ if batch <= 16:
                found["3 a multiprocessor"] = replace(plan, programs=396, max_registers=168)
            case _ if batch <= 32:
                found["64 words"] = replace(wide, block_columns=64)
            case _:
                found["tiles of one part"] = replace(plan, block_rows=64)
    return found


# linear


def linear_cases(bench: Bench, batches: Sequence[int]) -> Iterator[Case]:
    """The projections of a draft forward, each with what goes with it."""
    for kind, names in (
        ("bf16", ("fc", "qkv", "o", "gate_up", "down", "kv")),
        ("nvfp4", ("q", "o", "gate_up", "down")),
    ):
        for name in names:
            rows, columns = projection_shape(bench.size, name)
            whole = [bench.weights.matrix(rows, columns, "bf16") for _ in range(bench.copies(rows * columns * 2))]
            used = [bench.weights.convert(weight, kind) for weight in whole]
            for batch in batches:
                yield _linear_case(bench, f"linear/{kind}/{name}/B={batch}", whole, used, batch)


def _linear_case(bench: Bench, name: str, whole: list[Tensor], used: list[object], batch: int) -> Case:
    projection = name.split("/")[2]
    swiglu, normed = projection == "gate_up", projection in {"qkv", "q", "kv", "gate_up"}
    rows, columns = whole[0].shape
    num_out = rows // 2 if swiglu else rows
    x = bench.weights.normal(batch, columns)
    norm = InputNorm(bench.weights.normal(columns, scale=0.1, dtype=torch.float32) + 1, _EPSILON) if normed else None
    residual = bench.weights.normal(batch, num_out) if projection in {"o", "down"} else None
    out = torch.empty(batch, num_out, dtype=torch.bfloat16, device=bench.device)
    plan = plan_linear(used[0], batch, swiglu=swiglu, normed=normed)
    others = _linear_plans(plan, projection) | _one_row_plans(plan, used[0], swiglu=swiglu, normed=normed)
    workspace = LinearWorkspace([(each, batch, num_out, columns) for each in (plan, *others.values())], bench.device)
    options = {"norm": norm, "swiglu": swiglu, "residual": residual, "backend": Backend.TRITON}

    def call(weight: object, chosen: LinearPlan) -> None:
        linear(x, weight, out, workspace, plan=chosen, **options)

    def error(chosen: LinearPlan = plan) -> float:
        out.fill_(torch.nan)
        call(used[0], chosen)
        return relative_error(out, linear_reference(x, used[0], norm=norm, swiglu=swiglu, residual=residual))

    def peer(weight: Tensor) -> None:
        rows_in = x
        if norm is not None:
            rows_in = torch.nn.functional.rms_norm(x, (columns,), norm.scale.to(x.dtype), _EPSILON)
        value = torch_linear(rows_in, weight)
        if swiglu:
            first, second = value.chunk(2, dim=-1)
            value = silu(first) * second
        out.copy_(value if residual is None else value + residual)

    floor = num_bytes(used[0]) + batch * 2 * (columns + num_out * (2 if residual is not None else 1))
    candidates = {
        key: [_Checked(partial(error, other), partial(call, weight, other)) for weight in used]
        for key, other in others.items()
    }
    calls = [partial(call, weight, plan) for weight in used]
    return Case(name, floor, calls, [partial(peer, weight) for weight in whole], error, candidates, bench.tolerance)


def _linear_plans(plan: LinearPlan, projection: str) -> dict[str, LinearPlan]:
    """Other splits, and one with more steps ahead, of the cases that weigh most."""
    if plan.block_batch != 16 or projection not in {"fc", "o", "gate_up", "down"}:
        return {}
    rows, batch, columns, warps = plan.block_rows, plan.block_batch, plan.block_columns, plan.num_warps
    if plan.split == 1:
        return {"s+1": LinearPlan(rows, batch, columns, 1, warps, plan.num_stages + 1)}
    return {
        "split x2": LinearPlan(rows, batch, columns, 2 * plan.split, warps, plan.num_stages),
        "split /2": LinearPlan(rows, batch, columns, max(1, plan.split // 2), warps, plan.num_stages),
    }


def _one_row_plans(plan: LinearPlan, weight: object, *, swiglu: bool, normed: bool) -> dict[str, LinearPlan]:
    """Beside Hopper's own kernels those that run on any GPU, and those for several rows of x."""
    if not isinstance(plan, WavePlan):
        return {}
    found = {"tensor cores": plan_linear(weight, 2, swiglu=swiglu, normed=normed)}
    portable = plan_portable_row(weight, swiglu=swiglu)
    return found if portable is None else found | {"portable": portable}


# rows and attention


def row_cases(bench: Bench, batches: Sequence[int]) -> Iterator[Case]:
    """The small kernels: joining a pair, and heads into pages."""
    embedding = bench.weights.normal(bench.size.vocab, bench.size.hidden)
    for batch in batches:
        yield _fuse_pair_case(bench, embedding, batch)
        yield _rope_case(bench, batch)


def _fuse_pair_case(bench: Bench, embedding: Tensor, batch: int) -> Case:
    width = bench.size.hidden
    tokens = torch.randint(0, len(embedding), (batch,), device=bench.device)
    hiddens = bench.weights.normal(batch, width)
    scales = [bench.weights.normal(width, scale=0.1, dtype=torch.float32) + 1 for _ in range(2)]
    norms = PairNorms(*scales, _EPSILON)
    out = torch.empty(batch, 2 * width, dtype=torch.bfloat16, device=bench.device)

    def call() -> None:
        fuse_pair(tokens, embedding, hiddens, norms, out, backend=Backend.TRITON)

    def error() -> float:
        out.fill_(torch.nan)
        call()
        return relative_error(out, fuse_pair_reference(tokens, embedding, hiddens, norms))

    def peer() -> None:
        first = torch.nn.functional.rms_norm(embedding[tokens], (width,), norms.embedding.to(out.dtype), _EPSILON)
        second = torch.nn.functional.rms_norm(hiddens, (width,), norms.hidden.to(out.dtype), _EPSILON)
        out.copy_(torch.cat((first, second), -1))

    return Case(f"fuse_pair/B={batch}", batch * width * 8 + width * 8, [call], [peer], error)


def _rope_case(bench: Bench, batch: int) -> Case:
    size, shape = bench.size, bench.size.shape
    projected = bench.weights.normal(batch, shape.width)
    keys = torch.arange(batch, device=bench.device) + 1000
    slots = torch.arange(batch, device=bench.device)
    pool = (batch, size.page_rows, size.num_kv_heads, size.head_dim)
    k_pages, v_pages = bench.weights.normal(*pool), bench.weights.normal(*pool)
    scales = [bench.weights.normal(size.head_dim, scale=0.1, dtype=torch.float32) + 1 for _ in range(2)]
    norms = HeadNorms(*scales, _EPSILON)
    rotary = size.rotary
    rope = RopeTable.of([1e7 ** (-2 * i / rotary) for i in range(rotary // 2)], bench.device)
    q_out = torch.empty(batch, size.num_heads, size.head_dim, dtype=torch.bfloat16, device=bench.device)

    def call() -> None:
        qk_rope_write(projected, keys, slots, k_pages, v_pages, shape, norms, rope, q_out=q_out, backend=Backend.TRITON)

    def error() -> float:
        for tensor in (q_out, k_pages, v_pages):
            tensor.fill_(torch.nan)
        call()
        q, k, v = qk_rope_reference(projected, keys, shape, norms, rope)
        found = (q_out, k_pages.flatten(0, 1)[slots], v_pages.flatten(0, 1)[slots])
        return max(relative_error(mine, right) for mine, right in zip(found, (q, k, v), strict=True))

    def peer() -> None:
        q, k, v = qk_rope_reference(projected, keys, shape, norms, rope)
        q_out.copy_(q)
        k_pages.flatten(0, 1).index_copy_(0, slots, k.to(k_pages.dtype))
        v_pages.flatten(0, 1).index_copy_(0, slots, v.to(v_pages.dtype))

    return Case(f"qk_rope_write/B={batch}", batch * shape.width * 4, [call], [peer], error)


def attention_cases(bench: Bench, shapes: Sequence[tuple[int, int]]) -> Iterator[Case]:
    """(sequences, rows each)."""
    for batch, rows in shapes:
        yield _attention_case(bench, batch, rows)


def _attention_case(bench: Bench, batch: int, rows: int) -> Case:
    size = bench.size
    pages = -(-rows // size.page_rows)
    pools = pools_of(bench, batch * pages)
    order = torch.randperm(batch * pages, device=bench.device).to(torch.int32)
    table = order.view(batch, pages)
    counts = torch.full((batch,), rows, dtype=torch.int32, device=bench.device)
    q = bench.weights.normal(batch, size.num_heads, size.head_dim)
    out, scale = torch.empty_like(q), size.head_dim**-0.5
    plan = plan_attention(batch, size.num_kv_heads, pages * size.page_rows)
    workspace = AttentionWorkspace(batch, size.num_heads, size.head_dim, plan.parts, bench.device)
    dense = [tuple(gathered(part, table, rows) for part in pair) for pair in pools]

    def call(pair: tuple[Tensor, Tensor], chosen: AttentionPlan = plan) -> None:
        paged_attention_into(q, *pair, table, counts, scale, out, workspace, plan=chosen, backend=Backend.TRITON)

    def error(chosen: AttentionPlan = plan) -> float:
        out.fill_(torch.nan)
        call(pools[0], chosen)
        return relative_error(out, paged_attention(q.float(), *pools[0], table, counts, scale))

    def peer(pair: tuple[Tensor, Tensor]) -> None:
        out.copy_(scaled_dot_product_attention(q[:, :, None], *pair, scale=scale, enable_gqa=True)[:, :, 0])

    candidates = {
        key: [_Checked(partial(error, other), partial(call, pair, other)) for pair in pools]
        for key, other in _attention_plans(bench, plan).items()
    }
    floor, name = batch * rows * size.num_kv_heads * size.head_dim * 4, f"attention/B={batch}/rows={rows}"
    peers = [partial(peer, pair) for pair in dense]
    return Case(name, floor, [partial(call, pair) for pair in pools], peers, error, candidates)


def pools_of(bench: Bench, num_pages: int) -> list[tuple[Tensor, Tensor]]:
    """Copies of K and V."""
    size = bench.size
    pool = (num_pages, size.page_rows, size.num_kv_heads, size.head_dim)
    copies = bench.copies(4 * num_pages * size.page_rows * size.num_kv_heads * size.head_dim)
    return [(bench.weights.normal(*pool), bench.weights.normal(*pool)) for _ in range(copies)]


def gathered(pages: Tensor, table: Tensor, rows: int) -> Tensor:
    """[B, Hkv, rows, D], as PyTorch's attention takes it."""
    return pages[table.long()].flatten(1, 2)[:, :rows].transpose(1, 2).contiguous()


def _attention_plans(bench: Bench, plan: AttentionPlan) -> dict[str, AttentionPlan]:
    if bench.size is TOY:
        return {}
    return {"32 rows s3": AttentionPlan(plan.parts, 32, 4, 3), "128 rows w8": AttentionPlan(plan.parts, 128, 8, 2)}


# absorb


def absorb_cases(bench: Bench, buckets: Sequence[int]) -> Iterator[Case]:
    """Catch-up of all rows of a bucket."""
    size = bench.size
    shape = HeadShape(0, size.num_kv_heads, size.head_dim)
    norms = [bench.weights.normal(size.hidden, scale=0.1, dtype=torch.float32) + 1 for _ in range(3)]
    rotary = size.rotary
    weights = AbsorbWeights(
        embedding=bench.weights.normal(size.vocab, size.hidden),
        pair_norms=PairNorms(norms[0], norms[1], _EPSILON),
        join_proj=bench.weights.matrix(*projection_shape(size, "fc"), "bf16"),
        input_norm=InputNorm(norms[2], _EPSILON),
        kv_proj=bench.weights.matrix(*projection_shape(size, "kv"), "bf16"),
        shape=shape,
        head_norms=HeadNorms(None, bench.weights.normal(size.head_dim, dtype=torch.float32), _EPSILON),
        rope=RopeTable.of([1e7 ** (-2 * i / rotary) for i in range(rotary // 2)], bench.device),
    )
    for bucket in buckets:
        yield _absorb_case(bench, weights, bucket)


def _absorb_case(bench: Bench, weights: AbsorbWeights, bucket: int) -> Case:
    size = bench.size
    tokens = torch.randint(0, size.vocab, (bucket,), device=bench.device)
    hiddens = bench.weights.normal(bucket, size.hidden)
    keys = torch.arange(bucket, device=bench.device)
    pool = (-(-bucket // size.page_rows), size.page_rows, size.num_kv_heads, size.head_dim)
    k_pages, v_pages = bench.weights.normal(*pool), bench.weights.normal(*pool)
    x = torch.empty(bucket, size.hidden, dtype=torch.bfloat16, device=bench.device)
    workspace = AbsorbWorkspace(weights, bucket, torch.bfloat16)

    def call() -> None:
        absorb(tokens, hiddens, keys, keys, weights, k_pages, v_pages, x, workspace, backend=Backend.TRITON)

    def error() -> float:
        for tensor in (x, k_pages, v_pages):
            tensor.fill_(torch.nan)
        call()
        right, k, v = absorb_reference(tokens, hiddens, keys, weights)
        found = (x, k_pages.flatten(0, 1)[:bucket], v_pages.flatten(0, 1)[:bucket])
        return max(relative_error(mine, part) for mine, part in zip(found, (right, k, v), strict=True))

    def peer() -> None:
        rms_norm, width = torch.nn.functional.rms_norm, (size.hidden,)
        scales = [part.to(x.dtype) for part in (weights.pair_norms.embedding, weights.pair_norms.hidden)]
        first = rms_norm(weights.embedding[tokens], width, scales[0], _EPSILON)
        second = rms_norm(hiddens, width, scales[1], _EPSILON)
        joined = torch_linear(torch.cat((first, second), -1), weights.join_proj)
        torch_linear(rms_norm(joined, width, weights.input_norm.scale.to(x.dtype), _EPSILON), weights.kv_proj)

    floor = num_bytes(weights.join_proj) + num_bytes(weights.kv_proj) + bucket * size.hidden * 2 * 4
    # x in bf16, its norm, and K: three roundings.
    return Case(f"absorb/rows={bucket}", floor, [call], [peer], error, tolerance=2 * _TOLERANCE)
