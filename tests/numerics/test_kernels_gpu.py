"""Compiled kernels on a GPU at the sizes of a real head: right, captured once, and never compiled again."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from drafter_kernels import CompileWatch
from drafter_kernels.linear import InputNorm, LinearWorkspace, linear, linear_reference, plan_linear
from drafter_kernels.lm_head import LmHeadPlan, LmHeadWorkspace, lm_head, lm_head_reference, plan_lm_head
from drafter_kernels.lm_head.plan import plan_portable
from drafter_kernels.paged_attention import AttentionWorkspace, paged_attention, paged_attention_into, plan_attention
from drafter_kernels.quantize import (
    PackedNvfp4,
    nvfp4_tensor_scale,
    pack_nvfp4,
    quantize_fp8,
    quantize_nvfp4,
)
from kernel_backends import relative_error, unwritten

pytestmark = pytest.mark.gpu

DEVICE = "cuda:0"
VOCAB, HIDDEN = 248_320, 4096
TOLERANCE = 1e-2
STORED = {
    "bf16": lambda weight: weight,
    "fp8": quantize_fp8,
    "nvfp4": lambda weight: pack_nvfp4(quantize_nvfp4(weight)),
}


@pytest.fixture
def generator():
    return torch.Generator(DEVICE).manual_seed(torch.seed())  # a fresh random input every time


def normal(generator, *shape, scale=1.0):
    return (torch.randn(shape, generator=generator, device=DEVICE) * scale).to(torch.bfloat16)


def packed_vocabulary(generator, rows=VOCAB):
    """Some rows at a time: whole it takes 30 GB, and tests may run side by side."""
    weight = normal(generator, rows, HIDDEN, scale=HIDDEN**-0.5)
    scale = nvfp4_tensor_scale(weight)
    parts = [pack_nvfp4(quantize_nvfp4(part, scale)) for part in weight.split(16_384)]
    scales = torch.cat([part.block_scales.view(torch.uint8) for part in parts]).view(torch.float8_e4m3fn)
    return PackedNvfp4(torch.cat([part.words for part in parts]), scales, scale.reshape(1))


@pytest.mark.parametrize("batch", [1, 2, 8, 16, 17, 64])
def test_the_lm_head_of_a_real_vocabulary(generator, batch):
    weight = packed_vocabulary(generator)
    x = normal(generator, batch, HIDDEN, scale=3.0)
    plans = [plan_lm_head(weight, batch), plan_portable(batch)]
    if batch == 1:
        plans.append(LmHeadPlan(64, 32, 4, 3))  # with tensor cores
    expected_ids, expected = lm_head_reference(x, weight)
    for plan in plans:
        ids, logprobs = unwritten(batch, dtype=torch.int64, device=DEVICE), unwritten(batch, device=DEVICE)
        lm_head(x, weight, ids, logprobs, LmHeadWorkspace(weight, batch, (plan,)), plan=plan)
        # Logits are of size 3; an id may differ where its log-probability does not.
        error = (logprobs - expected).abs()
        assert float(error.max()) < 3 * TOLERANCE
        assert bool(((ids == expected_ids) | (error < 3e-3)).all())


@pytest.mark.parametrize("kind", ["bf16", "fp8", "nvfp4"])
@pytest.mark.parametrize("batch", [1, 8, 64, 300])
def test_projections_of_real_sizes_split_and_not(generator, kind, batch):
    for rows, columns, normed in ((4096, 11_008, False), (10_240, 4096, True)):
        weight = normal(generator, rows, columns, scale=columns**-0.5)
        weight = STORED[kind](weight)
        x, residual = normal(generator, batch, columns), normal(generator, batch, rows)
        norm = InputNorm(torch.rand(columns, device=DEVICE) + 0.5, 1e-6) if normed else None
        plan = plan_linear(weight, batch, normed=normed)
        workspace = LinearWorkspace([(plan, batch, rows, columns)], torch.device(DEVICE))
        out = unwritten(batch, rows, dtype=torch.bfloat16, device=DEVICE)
        for _ in range(3):  # counters must be back at zero each time
            out.fill_(torch.nan)
            linear(x, weight, out, workspace, norm=norm, residual=residual, plan=plan)
            expected = linear_reference(x, weight, norm=norm, residual=residual)
            assert relative_error(out, expected) < TOLERANCE
        assert not workspace.counters.any()


def test_overlapping_kernels_give_the_same(generator):
    weight = normal(generator, HIDDEN, HIDDEN, scale=HIDDEN**-0.5)
    x, middle, out = (normal(generator, 8, HIDDEN) for _ in range(3))
    results = []
    for overlaps in (False, True):
        plan = replace(plan_linear(weight, 8), overlaps=overlaps)
        workspace = LinearWorkspace([(plan, 8, HIDDEN, HIDDEN)], torch.device(DEVICE))
        for _ in range(20):
            linear(x, weight, middle, workspace, plan=plan)
            linear(middle, weight, out, workspace, plan=plan)
        results.append(out.clone())
    assert torch.equal(*results)


def test_a_captured_call_follows_lengths_and_counts_on_the_device(generator):
    batch, heads, kv_heads, width, page_rows, max_pages = 4, 16, 4, 256, 64, 40
    pool = (batch * max_pages, page_rows, kv_heads, width)
    pages = [normal(generator, *pool) for _ in "kv"]
    table = torch.randperm(batch * max_pages, device=DEVICE).to(torch.int32).view(batch, max_pages)
    q, out = normal(generator, batch, heads, width), unwritten(batch, heads, width, dtype=torch.bfloat16, device=DEVICE)
    counts = torch.ones(batch, dtype=torch.int32, device=DEVICE)
    plan = plan_attention(batch, kv_heads, max_pages * page_rows)
    workspace = AttentionWorkspace(batch, heads, width, plan.parts, torch.device(DEVICE))

    def call():
        paged_attention_into(q, *pages, table, counts, width**-0.5, out, workspace, plan=plan)

    call()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    for lengths in ([1, 2560, 64, 65], [0, 1, 1000, 2559]):
        counts.copy_(torch.tensor(lengths, dtype=torch.int32))
        out.fill_(torch.nan)
        graph.replay()
        used = counts > 0
        expected = paged_attention(q[used].float(), *pages, table[used], counts[used], width**-0.5)
        assert relative_error(out[used], expected) < TOLERANCE
        assert not out[~used].any()


def test_nothing_is_compiled_for_a_live_batch(generator):
    weight = packed_vocabulary(generator, 16_384)
    workspace = LmHeadWorkspace(weight, 64)
    body = normal(generator, HIDDEN, HIDDEN)
    linear_workspace = LinearWorkspace(
        [(plan_linear(body, bucket), bucket, HIDDEN, HIDDEN) for bucket in (16, 32, 64)], torch.device(DEVICE)
    )

    def run(batch):
        x, ids = normal(generator, batch, HIDDEN), torch.empty(batch, dtype=torch.int64, device=DEVICE)
        lm_head(x, weight, ids, torch.empty(batch, device=DEVICE), workspace)
        linear(x, body, torch.empty_like(x), linear_workspace)

    for bucket in (1, 8, 16, 32, 64):
        run(bucket)
    compiled: list[str] = []
    with CompileWatch(compiled.append):
        for batch in (1, 2, 3, 4, 9, 15, 16, 17, 31, 33, 64):
            run(batch)
    assert compiled == []
