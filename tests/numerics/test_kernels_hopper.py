"""The LM head's own kernels for Hopper: every bucket, odd sizes, masks, ties; and which plan is taken where."""

from dataclasses import replace

import pytest
import torch

from drafter_kernels.lm_head import (
    GrammarMasks,
    LmHeadPlan,
    LmHeadWorkspace,
    lm_head,
    lm_head_reference,
    plan_lm_head,
)
from drafter_kernels.lm_head import plan as plans
from drafter_kernels.lm_head.plan import HopperPlan, plan_portable
from drafter_kernels.rms_norm import RowNorm
from kernel_backends import on, random, unwritten
from lm_head_runs import expect, masks_of, run, stored

pytest.importorskip("triton")

DEVICE = "cuda"
MULTIPROCESSORS = 132


def hopper_plan(columns, batch):
    """What is taken on such a GPU, wherever this runs."""
    plan = plans._plan_hopper(columns // 8, batch, MULTIPROCESSORS)
    assert plan is not None
    return plan


# Rows of the weight a tile and warps: one part of 16 rows a warp, or two.
TILES = [(64, 4), (128, 4), (128, 8), (256, 8)]


def test_where_kernels_are_interpreted_the_portable_plans_are_taken():
    weight = stored("nvfp4", random(64, 1024, seed=1))
    for batch in (1, 8, 64):
        plan = plan_lm_head(weight, batch)
        assert not isinstance(plan, HopperPlan)
        assert plan == plan_portable(batch)


@pytest.mark.parametrize(
    ("columns", "batch", "is_vector"), [(4096, 1, True), (2560, 1, False), (4096, 2, False), (512, 64, False)]
)
def test_one_row_goes_without_tensor_cores_where_it_fits_registers(columns, batch, is_vector):
    plan = hopper_plan(columns, batch)
    assert plan.is_vector == is_vector
    assert is_vector or columns // 8 % (2 * plan.block_columns) == 0


def test_rows_that_do_not_divide_into_steps_have_no_plan():
    assert plans._plan_hopper(4096 // 8 + 2, 8, MULTIPROCESSORS) is None
    assert plans._plan_hopper(2560 // 8 + 32, 8, MULTIPROCESSORS) is None


@pytest.mark.parametrize(("batch", "gains"), [(1, True), (8, False), (32, False), (33, True), (64, True)])
def test_kernels_overlap_where_they_gain_by_it(monkeypatch, batch, gains):
    monkeypatch.setattr(plans, "hopper_multiprocessors", lambda _device: MULTIPROCESSORS)
    weight = stored("nvfp4", random(64, 1024, seed=1))
    assert plan_lm_head(weight, batch, overlaps=True).overlaps == gains
    assert not plan_lm_head(weight, batch).overlaps
    assert replace(plan_lm_head(weight, batch, overlaps=True), overlaps=False) == plan_lm_head(weight, batch)


def test_every_program_has_a_tile():
    plan = HopperPlan(64, 64, 4, 2, programs=396)
    assert plan.num_programs(40) == 1
    assert plan.num_programs(65 * 64) == 65
    assert plan.num_programs(248_320) == 396
    assert [plan.bucket(batch) for batch in (1, 8, 9, 33, 64)] == [8, 8, 16, 64, 64]
    assert [LmHeadPlan(64, 32, 4, 3).bucket(batch) for batch in (1, 16, 17)] == [16, 16, 32]


def test_masks_get_more_registers_and_fewer_warps():
    plan = hopper_plan(4096, 1)
    masked = plan.with_masks()
    for each, most in ((plan, 16), (masked, 12)):
        warps = each.num_warps * each.programs // MULTIPROCESSORS
        assert warps == most
        assert warps * 32 * each.max_registers <= 65536
    assert masked.max_registers > plan.max_registers
    assert masked.block_rows // masked.num_warps == plan.block_rows // plan.num_warps
    assert masked.with_masks() == masked
    assert hopper_plan(4096, 8).with_masks() == hopper_plan(4096, 8)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 2, 8, 9, 16, 17, 32, 33, 64])
@pytest.mark.parametrize("columns", [512, 1024, 1536, 4096])
def test_ids_and_logprobs_are_the_reference_s(batch, columns):
    plan = replace(hopper_plan(columns, batch), programs=6)
    for rows in (5, 77, 64 * 13 + 3):  # less than a tile; one and a part; two or three a program, the last one not full
        weight = stored("nvfp4", random(rows, columns, seed=rows))
        x = random(batch, columns, seed=2, dtype=torch.bfloat16)
        expect(run(x, weight, plan=plan, device=DEVICE), lm_head_reference(x, weight), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("tile", TILES)
@pytest.mark.parametrize(("batch", "columns"), [(7, 1024), (50, 1536)])
def test_other_tiles_give_the_reference_s(batch, columns, tile):
    """Less than a tile; some tiles a program, the last one not full, with masks; and with a draft vocabulary."""
    rows, warps = tile
    plan = replace(hopper_plan(columns, batch), block_rows=rows, num_warps=warps, block_columns=32)
    plan = replace(plan, max_registers=128 if tile == (128, 8) else 248)
    assert plan.has_two_parts == (rows == 32 * warps)
    allowed = torch.rand(3, 6000, generator=torch.Generator().manual_seed(3)) < 0.05
    masks = masks_of(allowed, [row % 4 - 1 for row in range(batch)])
    all_ids = torch.arange(3000, dtype=torch.int32) * 2
    x = random(batch, columns, seed=2, dtype=torch.bfloat16)
    for count, programs, chosen, ids in ((5, 6, None, None), (1347, 4, masks, None), (3000, 7, masks, all_ids)):
        weight = stored("nvfp4", random(count, columns, seed=count))
        used = replace(plan, programs=programs, overlaps=ids is None)
        choice = {"masks": on_gpu(chosen), "draft_ids": on(DEVICE, ids)}
        expected = lm_head_reference(x, weight, masks=chosen, draft_ids=ids)
        expect(run(x, weight, plan=used, device=DEVICE, **choice), expected, x, weight)


def on_gpu(masks):
    return None if masks is None else GrammarMasks(masks.words.to(DEVICE), masks.rows.to(DEVICE))


@pytest.mark.gpu
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize("batch", [1, 5, 12, 20, 50])
def test_masks_and_a_draft_vocabulary(batch, overlaps):
    vocab = 1501
    plan = replace(hopper_plan(1024, batch), programs=7, overlaps=overlaps)
    x = random(batch, 1024, seed=3)
    allowed = torch.rand(4, vocab, generator=torch.Generator().manual_seed(3)) < 0.05
    allowed[0] = False
    rows = [[2, 0, -1, 1, 3][row % 5] for row in range(batch)]
    for draft_ids in (None, torch.arange(3, vocab, 2, dtype=torch.int32)):
        count = vocab if draft_ids is None else len(draft_ids)
        weight = stored("nvfp4", random(count, 1024, seed=1))
        for masks in (masks_of(allowed, rows), masks_of(allowed, [0] * batch), None):
            on_device = None if draft_ids is None else draft_ids.to(DEVICE)
            found = run(x, weight, plan=plan, device=DEVICE, draft_ids=on_device, masks=on_gpu(masks))
            expect(found, lm_head_reference(x, weight, draft_ids=draft_ids, masks=masks), x, weight)


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 3, 64])
def test_ties_padding_and_rows_of_nan(batch):
    plan = replace(hopper_plan(512, batch), programs=5)
    weight = random(700, 512, seed=1, scale=0.1)
    x = random(1, 512, seed=2).repeat(batch, 1)
    weight[[601, 15, 333, 23, 31]] = x[0]  # in different programs, and in one thread's rows
    made = stored("nvfp4", torch.cat((weight, 4 * x[:1])))
    found = run(x, made, plan=plan, device=DEVICE, num_rows=700)
    assert found[0].tolist() == [15] * batch
    expect(found, lm_head_reference(x, made, num_rows=700), x, made)
    x[batch // 2] = torch.nan
    ids, logprobs = run(x, made, plan=plan, device=DEVICE, num_rows=700)
    assert ids.tolist() == [-1 if row == batch // 2 else 15 for row in range(batch)]
    assert float(logprobs[batch // 2]) == -torch.inf


@pytest.mark.gpu
@pytest.mark.parametrize("batch", [1, 6])
@pytest.mark.parametrize("overlaps", [False, True])
def test_the_final_norm_is_written_and_used(batch, overlaps):
    made = stored("nvfp4", random(3000, 2048, seed=1))
    x = random(batch, 2048, scale=30.0, dtype=torch.bfloat16)
    scale = random(2048, seed=4) + 1.0
    out = unwritten(batch, 2048, dtype=torch.bfloat16, device=DEVICE)
    plan = replace(hopper_plan(2048, batch), overlaps=overlaps)
    found = run(x, made, plan=plan, device=DEVICE, norm=RowNorm(scale.to(DEVICE), 1e-6, out))
    normed = torch.empty_like(x)
    lm_head_reference(x, made, norm=RowNorm(scale, 1e-6, normed))
    torch.testing.assert_close(out.cpu(), normed, rtol=2**-7, atol=0)
    expect(found, lm_head_reference(out.cpu(), made), out.cpu(), made)


@pytest.mark.gpu
def test_one_row_leaves_its_workspace_as_it_found_it():
    made = on(DEVICE, stored("nvfp4", random(5000, 1024, seed=1)))
    plan = replace(hopper_plan(1024, 1), programs=77)
    workspace = LmHeadWorkspace(made, 1, (plan,))
    found = []
    for seed in (2, 3, 2):
        ids, logprobs = unwritten(1, dtype=torch.int64, device=DEVICE), unwritten(1, device=DEVICE)
        lm_head(random(1, 1024, seed=seed, device=DEVICE), made, ids, logprobs, workspace, plan=plan)
        found.append((int(ids), float(logprobs)))
        assert not workspace.counter.any()
    assert found[0] == found[2] != found[1]


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1e-30, 1.0, 1e30])
@pytest.mark.parametrize("batch", [1, 4])
def test_x_of_any_size(batch, scale):
    weight = stored("nvfp4", random(300, 1024, seed=1))
    x = random(batch, 1024, scale=scale)
    plan = hopper_plan(1024, batch)
    expect(run(x, weight, plan=plan, device=DEVICE), lm_head_reference(x, weight), x, weight)
