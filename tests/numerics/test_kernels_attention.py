"""Paged attention by parts agrees with the reference while everything that no sequence wrote is poison."""

import math

import pytest
import torch

from drafter_kernels import Backend
from drafter_kernels.paged_attention import (
    AttentionPlan,
    AttentionWorkspace,
    paged_attention,
    paged_attention_into,
    plan_attention,
    projected_attention_into,
)
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable
from kernel_backends import DEVICES, TRITON, on, random, relative_error, unwritten

pytest.importorskip("triton")

# float32 in another order; bf16: scores are exact products summed in float32, weights are rounded to bf16.
TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 8e-3}


def filled(counts, *, page_rows, kv_heads, width, dtype, poison=math.nan, seed=0):
    """A pool and a table in which each sequence has just its rows, on shuffled pages."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-count // page_rows) for count in counts]
    num_pages = sum(pages_of) + 2
    order = torch.randperm(num_pages, generator=generator).tolist()
    k_pages = torch.full((num_pages, page_rows, kv_heads, width), poison, dtype=dtype)
    v_pages = k_pages.clone()
    table = torch.full((len(counts), max(pages_of) + 1), -1, dtype=torch.int32)
    for index, count in enumerate(counts):
        k, v = torch.randn(2, count, kv_heads, width, generator=generator).to(dtype)
        for page in range(pages_of[index]):
            table[index, page] = order.pop()
            part = slice(page * page_rows, min((page + 1) * page_rows, count))
            k_pages[table[index, page], : part.stop - part.start] = k[part]
            v_pages[table[index, page], : part.stop - part.start] = v[part]
    return k_pages, v_pages, table


def run(q, pages, table, counts, *, plan, device, gate=None, packed_out=False, scale=0.3):
    """The kernel's output on the CPU."""
    batch, heads, width = q.shape
    workspace = AttentionWorkspace(batch, heads, width, plan.parts, torch.device(device))
    workspace.parts.fill_(torch.nan)
    workspace.sums.fill_(torch.nan)
    out = unwritten(*q.shape, dtype=q.dtype, device=device)
    paged_attention_into(
        q.to(device),
        *(part.to(device) for part in pages),
        table.to(device),
        torch.tensor(counts, dtype=torch.int32, device=device),
        scale,
        out,
        workspace,
        gate=gate,
        packed_out=packed_out,
        plan=plan,
        backend=TRITON,
    )
    return out.cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("poison", [math.nan, math.inf])
@pytest.mark.parametrize("parts", [1, 3, 8])
@pytest.mark.parametrize("shape", [(4, 2, 16, 4), (3, 3, 7, 5), (6, 1, 33, 16)], ids=str)
def test_each_sequence_attends_to_its_own_rows_only(device, poison, parts, shape):
    heads, kv_heads, width, page_rows = shape
    counts = [1, 37, 16, 9]
    *pages, table = filled(
        counts, page_rows=page_rows, kv_heads=kv_heads, width=width, dtype=torch.float32, poison=poison
    )
    q = random(4, heads, width, seed=1)
    found = run(q, pages, table, counts, plan=AttentionPlan(parts, 16), device=device)
    expected = paged_attention(q, *pages, table, torch.tensor(counts), 0.3)
    assert relative_error(found, expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_bf16_with_the_gate_of_a_projection(device):
    counts = [70, 5]
    *pages, table = filled(counts, page_rows=8, kv_heads=2, width=16, dtype=torch.bfloat16)
    q = random(2, 4, 16, seed=1, dtype=torch.bfloat16)
    projected = random(2, 4 * 32, seed=2, dtype=torch.bfloat16)
    gate = projected.to(device).view(2, 4, 2, 16)[:, :, 1]
    found = run(q, pages, table, counts, plan=AttentionPlan(2, 16), device=device, gate=gate)
    attended = paged_attention(q.float(), *pages, table, torch.tensor(counts), 0.3)
    assert relative_error(found, attended * torch.sigmoid(gate.float().cpu())) < TOLERANCE[torch.bfloat16]


@pytest.mark.parametrize("device", DEVICES)
def test_padding_rows_of_a_batch_give_zeros(device):
    *pages, table = filled([20], page_rows=4, kv_heads=1, width=8, dtype=torch.float32)
    table = torch.cat((table, torch.full_like(table, -1)))
    q = random(2, 2, 8, seed=1)
    q[1] = torch.nan
    gate = torch.full((2, 2, 8), torch.nan, device=device)
    gate[0] = 1.0
    found = run(q, pages, table, [20, 0], plan=AttentionPlan(2, 16), device=device, gate=gate)
    assert not found[1].any()
    expected = paged_attention(q[:1], *pages, table[:1], torch.tensor([20]), 0.3) * torch.sigmoid(torch.tensor(1.0))
    assert relative_error(found[:1], expected) < TOLERANCE[torch.float32]


@pytest.mark.parametrize("device", DEVICES)
def test_packed_output_is_the_same_in_another_order(device):
    *pages, table = filled([9], page_rows=4, kv_heads=1, width=8, dtype=torch.float32)
    q = random(1, 2, 8, seed=1)
    plain = run(q, pages, table, [9], plan=AttentionPlan(2, 16), device=device)
    packed = run(q, pages, table, [9], plan=AttentionPlan(2, 16), device=device, packed_out=True)
    assert torch.equal(packed.view(8, 2).T.flatten(), plain.flatten())


def projected_run(given, pools, *, device, backend, workspace=None, plan=None):
    """Output and pools of `projected_attention_into`, on the CPU."""
    projected, keys, slots, table, counts, shape, norms, rope = (on(device, part) for part in given)
    out = unwritten(len(projected), shape.num_heads, shape.head_dim, dtype=projected.dtype, device=device)
    pages = [part.clone().to(device) for part in pools]
    where = (*pages, table, counts, shape, norms, rope, 0.3)
    projected_attention_into(projected, keys, slots, *where, out, workspace, plan=plan, backend=backend)
    return [part.cpu() for part in (out, *pages)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("parts", [1, 3, 40])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_projection_attends_to_its_own_row_too(device, parts, gated, dtype):
    """As the two operations would: a row that is written is the last that counts, or one where none counts."""
    shape, counts, writes = HeadShape(6, 2, 24, gated=gated), [1, 37, 16, 9, 33, 0, 0], [1, 1, 0, 1, 1, 1, 0]
    *pools, table = filled(counts, page_rows=5, kv_heads=2, width=24, dtype=dtype)
    free = next(page for page in range(len(pools[0])) if page not in table)
    rows = [max(count - 1, 0) for count in counts]
    pages = [int(table[index, row // 5]) if counts[index] else free for index, row in enumerate(rows)]
    places = zip(pages, rows, writes, strict=True)
    slots = torch.tensor([page * 5 + row % 5 if written else -1 for page, row, written in places])
    for part in pools:
        part.flatten(0, 1)[slots[slots >= 0]] = math.nan
    projected = random(len(counts), shape.width, seed=3, dtype=dtype)
    projected[-1] = math.nan
    keys, row_counts = torch.tensor([0, 199_999, 15, 8, 32, 77, 0]), torch.tensor(counts, dtype=torch.int32)
    norms = HeadNorms(random(24, seed=1) + 1, random(24, seed=2) + 1, 1e-6)
    rope = RopeTable.of([1.0, 0.1, 0.01, 0.001], torch.device("cpu"), amplitude=1.25, position_offset=1)
    given = (projected, keys, slots, table, row_counts, shape, norms, rope)
    workspace = AttentionWorkspace(len(counts), 6, 24, parts, torch.device(device))
    options = {"workspace": workspace, "plan": AttentionPlan(parts, 16), "device": device, "backend": TRITON}
    found, again = projected_run(given, pools, **options), projected_run(given, pools, **options)
    expected = projected_run(given, pools, device="cpu", backend=Backend.REFERENCE)
    assert torch.equal(found[0], again[0])
    assert not workspace.counters.any()
    assert not found[0][-2:].any()
    for mine, theirs in zip(found, expected, strict=True):
        assert torch.equal(mine.isnan(), theirs.isnan())
        assert relative_error(mine.nan_to_num(), theirs.nan_to_num()) < TOLERANCE[dtype]


@pytest.mark.parametrize("packed_out", [False, True])
def test_without_a_gpu_the_reference_runs(packed_out):
    *pages, table = filled([9, 3], page_rows=4, kv_heads=1, width=8, dtype=torch.float32)
    q, out = random(2, 2, 8, seed=1), unwritten(2, 2, 8)
    counts = torch.tensor([9, 0], dtype=torch.int32)
    gate = random(2, 2, 8, seed=2)
    paged_attention_into(q, *pages, table, counts, 0.3, out, gate=gate, packed_out=packed_out)
    expected = paged_attention(q[:1], *pages, table[:1], counts[:1], 0.3) * torch.sigmoid(gate[:1])
    found = out[0].flatten().view(8, 2).T.flatten() if packed_out else out[0].flatten()
    torch.testing.assert_close(found, expected.flatten())
    assert not out[1].any()


def test_plans_follow_the_batch_and_the_longest_possible_sequence():
    assert plan_attention(1, 4, 200_000).parts == 64
    assert plan_attention(1, 4, 64).parts == 1
    assert plan_attention(64, 4, 200_000).parts <= 2


def test_what_does_not_fit_is_refused():
    *pages, table = filled([9], page_rows=4, kv_heads=2, width=8, dtype=torch.float32)
    q, out, counts = random(1, 4, 8), unwritten(1, 4, 8), torch.tensor([9], dtype=torch.int32)
    with pytest.raises(ValueError, match="3 heads"):
        paged_attention_into(q[:, :3], *pages, table, counts, 0.3, out)
    with pytest.raises(ValueError, match="row_counts"):
        paged_attention_into(q, *pages, table, counts.long(), 0.3, out)
    with pytest.raises(ValueError, match="workspace"):
        paged_attention_into(q, *pages, table, counts, 0.3, out, backend=TRITON)


@pytest.mark.gpu
@pytest.mark.parametrize("rows", [1, 1000, 200_000])
def test_long_sequences_in_a_large_pool(rows):
    """The pages in use lie beyond 2^31 elements; everything else is NaN."""
    page_rows, kv_heads, width, heads = 256, 4, 256, 16
    used = -(-rows // page_rows)
    num_pages = 2**31 // (page_rows * kv_heads * width) + used + 3
    pages = [
        torch.full((num_pages, page_rows, kv_heads, width), math.nan, dtype=torch.bfloat16, device="cuda") for _ in "kv"
    ]
    first = num_pages - used - 1
    generator = torch.Generator(device="cuda").manual_seed(rows)
    for part in pages:
        flat = part[first : first + used].flatten(0, 1)[:rows]
        flat.copy_(torch.randn(flat.shape, generator=generator, device="cuda", dtype=torch.float32))
    order = (
        first + torch.randperm(used, generator=torch.Generator().manual_seed(1)) if rows == used * page_rows else None
    )
    table = (torch.arange(used) + first if order is None else order).to(torch.int32).cuda()[None]
    q = torch.randn(1, heads, width, generator=generator, device="cuda").to(torch.bfloat16)
    counts = torch.tensor([rows], dtype=torch.int32, device="cuda")
    plan = plan_attention(1, kv_heads, used * page_rows)
    workspace = AttentionWorkspace(1, heads, width, plan.parts, q.device)
    out = unwritten(1, heads, width, dtype=torch.bfloat16, device="cuda")
    paged_attention_into(q, *pages, table, counts, width**-0.5, out, workspace, plan=plan)
    small = [part[first : first + used].clone() for part in pages]
    expected = paged_attention(q.float(), *small, table - first, counts, width**-0.5)
    assert relative_error(out, expected) < TOLERANCE[torch.bfloat16]
