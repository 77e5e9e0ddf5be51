"""One row of x by Hopper's own kernels: odd sizes, any share of the rows, what follows; and which plan is taken."""

from dataclasses import replace

import pytest
import torch

from drafter_kernels.fuse_pair import PairNorms, fuse_pair_reference
from drafter_kernels.linear import (
    InputNorm,
    PackedRows,
    linear,
    linear_joined,
    linear_reference,
    pair_linear,
    plan_linear,
)
from drafter_kernels.linear import plan as plans
from drafter_kernels.linear.plan import WavePlan
from drafter_kernels.quantize import pack_nvfp4, quantize_fp8, quantize_nvfp4
from kernel_backends import TRITON, on, random, relative_error, unwritten

pytest.importorskip("triton")

DEVICE = "cuda"
MULTIPROCESSORS = 132
# As of the kernels that run anywhere.
TOLERANCE = 1e-3
KINDS = ["bfloat16", "nvfp4"]


def stored(kind, weight):
    return pack_nvfp4(quantize_nvfp4(weight)) if kind == "nvfp4" else weight.to(torch.bfloat16)


def wave(weight, *, swiglu=False, normed=False, **changes):
    """What is taken on such a GPU, wherever this runs."""
    plan = plans._wave_plan(weight, MULTIPROCESSORS, swiglu=swiglu, normed=normed, overlaps=False)
    assert plan is not None
    return replace(plan, **changes)


def run(x, weight, *, plan, rows, out=None, **options):
    target = unwritten(1, rows, device=DEVICE) if out is None else out
    moved = {name: value if isinstance(value, bool) else on(DEVICE, value) for name, value in options.items()}
    linear(on(DEVICE, x), on(DEVICE, weight), target, plan=plan, backend=TRITON, **moved)
    return (target.unpack() if isinstance(target, PackedRows) else target).float().cpu()


def test_where_kernels_are_interpreted_the_plans_of_any_gpu_are_taken():
    for kind in KINDS:
        plan = plan_linear(stored(kind, random(64, 64, seed=1)), 1)
        assert plan.is_vector
        assert not isinstance(plan, WavePlan)


def test_every_program_has_a_row_and_one_tile_is_known_as_such():
    plan = WavePlan(8, 1, 64, 1, 4, 1, is_vector=True, programs=5, steps_ahead=6)
    assert [plan.num_programs(rows) for rows in (1, 5, 41)] == [1, 5, 5]
    assert plan.options(40, 100) == {"BN": 8, "AHEAD": 2, "ONE_TILE": True}
    assert plan.options(41, 100) == {"BN": 8, "AHEAD": 6, "ONE_TILE": False}


def test_rows_of_x_that_do_not_fit_registers_and_other_weights_go_another_way():
    def of(columns, kind=torch.bfloat16, *, normed=False):
        weight = torch.empty(64, columns, dtype=kind, device="meta")
        return plans._wave_plan(weight, MULTIPROCESSORS, swiglu=False, normed=normed, overlaps=False)

    assert of(16_384) is not None
    assert of(16_400) is None
    assert of(8192, normed=True) is not None
    assert of(8200, normed=True) is None
    assert of(64, torch.float32) is None
    eight = quantize_fp8(random(64, 64))
    assert plans._wave_plan(eight, MULTIPROCESSORS, swiglu=False, normed=False, overlaps=False) is None


@pytest.mark.parametrize("kind", KINDS)
def test_all_programs_run_at_once_and_so_they_overlap_where_that_is_wanted(kind):
    weight = stored(kind, random(64, 64))
    for wanted in (False, True):
        plan = plans._wave_plan(weight, MULTIPROCESSORS, swiglu=False, normed=True, overlaps=wanted)
        assert plan.overlaps == wanted
        assert plan.programs == 2 * MULTIPROCESSORS
        assert 2 * plan.num_warps * 32 * plan.max_registers <= 65_536  # two programs' registers


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [48, 416, 4096])
@pytest.mark.parametrize("normed", [False, True])
def test_the_product_is_the_reference_s(kind, columns, normed):
    x = random(1, columns, scale=30.0, dtype=torch.bfloat16)
    norm = InputNorm(random(columns, seed=4).abs() + 0.5, 1e-6) if normed else None
    for rows in (37, 301):
        weight = stored(kind, random(rows, columns, seed=rows))
        expected = linear_reference(x, weight, norm=norm)
        for programs in (3, 264):  # many tiles each; one tile, with a row or two in it
            for ahead in (1, 5):
                plan = wave(weight, normed=normed, programs=programs, steps_ahead=ahead)
                assert relative_error(run(x, weight, plan=plan, rows=rows, norm=norm), expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("rows", "columns"), [(4096, 11_008), (1024, 16_384)])
def test_long_rows(kind, rows, columns):
    weight, x = stored(kind, random(rows, columns, seed=1)), random(1, columns, dtype=torch.bfloat16)
    residual = random(1, rows, seed=3, dtype=torch.bfloat16)
    found = run(x, weight, plan=wave(weight), rows=rows, residual=residual)
    assert relative_error(found, linear_reference(x, weight, residual=residual)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_x_may_be_of_any_size_that_activations_have(kind):
    weight, x = stored(kind, random(16, 128, seed=1)), random(1, 128)
    for values in (
        x * torch.logspace(-15, 15, 128),
        x * torch.logspace(-15, 15, 128).flip(0),
        x * 1e-15,
        x * 1e15,
        torch.zeros(1, 128),
        torch.cat((torch.zeros(1, 64), x[:, 64:]), dim=1),
    ):
        given = values.to(torch.bfloat16)
        expected = linear_reference(given, weight)
        found = run(given, weight, plan=wave(weight), rows=16)
        assert float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swiglu", [False, True])
@pytest.mark.parametrize("overlaps", [False, True])
def test_what_follows_the_product(kind, swiglu, overlaps):
    weight, x = stored(kind, random(480, 1536, seed=1, scale=0.05)), random(1, 1536, dtype=torch.bfloat16)
    rows = 240 if swiglu else 480
    norm = InputNorm(random(1536, seed=4).abs() + 0.5, 1e-6)
    residual = random(1, rows, seed=2, dtype=torch.bfloat16)
    for gate in (random(1, rows, seed=3), random(1, 1, seed=3)):
        options = {"gate": gate.to(torch.bfloat16), "residual": residual, "swiglu": swiglu, "norm": norm}
        expected = linear_reference(x, weight, **options)
        for programs in (7, 132):
            plan = wave(weight, swiglu=swiglu, normed=True, programs=programs, overlaps=overlaps)
            assert relative_error(run(x, weight, plan=plan, rows=rows, **options), expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_behind_the_count_keeps_what_it_holds(kind):
    weight, x = stored(kind, random(24, 64, seed=1)), random(1, 64, dtype=torch.bfloat16)
    for count in (0, 1, 7):
        held = torch.full((1, 24), 7.0, device=DEVICE)
        found = run(x, weight, plan=wave(weight), rows=24, out=held, row_count=torch.tensor([count]).int())
        expected = linear_reference(x, weight) if count else torch.full((1, 24), 7.0)
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.gpu
def test_packed_rows_go_in_and_out():
    weight, x = stored("nvfp4", random(32, 1056, seed=1)), random(1, 1056, dtype=torch.bfloat16)
    out = PackedRows(unwritten(1, 8, 4, device=DEVICE))
    found = run(PackedRows.pack(x), weight, plan=wave(weight), rows=32, out=out)
    assert relative_error(found, linear_reference(x, weight)) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("overlaps", [False, True])
@pytest.mark.parametrize(("rows", "others"), [(40, 24), (4097, 1023)])
def test_products_side_by_side(overlaps, rows, others):
    weights = [stored("nvfp4", random(rows, 4096, seed=1)), stored("bfloat16", random(others, 4096, seed=2))]
    x, norm = random(1, 4096, dtype=torch.bfloat16), InputNorm(random(4096, seed=3).abs(), 1e-6)
    out = unwritten(1, rows + others, device=DEVICE)
    taken = [wave(weight, normed=True, overlaps=overlaps) for weight in weights]
    moved = [on(DEVICE, weight) for weight in weights]
    linear_joined(on(DEVICE, x), moved, out, norm=on(DEVICE, norm), plans=taken, backend=TRITON)
    expected = torch.cat([linear_reference(x, weight, norm=norm) for weight in weights], dim=1)
    assert relative_error(out, expected) < TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("token", [7, -1])
@pytest.mark.parametrize("overlaps", [False, True])
def test_a_pair_and_its_product(hidden_first, token, overlaps):
    embedding, hidden = random(9, 1000, dtype=torch.bfloat16), random(1, 2048, seed=1, scale=9.0, dtype=torch.bfloat16)
    norms = PairNorms(random(1000, seed=2).abs(), random(2048, seed=3).abs(), 1e-6)
    weight, tokens = random(521, 3048, seed=4).to(torch.bfloat16), torch.tensor([token])
    joined = fuse_pair_reference(tokens, embedding, hidden, norms, hidden_first=hidden_first)
    expected = linear_reference(joined, weight)
    for programs, count in ((264, 1), (9, 1), (264, 0)):
        plan = wave(weight, programs=programs, overlaps=overlaps)
        out, unused = unwritten(1, 521, device=DEVICE), torch.empty(1, 3048, dtype=torch.bfloat16, device=DEVICE)
        given = [on(DEVICE, value) for value in (tokens, embedding, hidden, norms, weight)]
        row_count = torch.tensor([count], dtype=torch.int32, device=DEVICE)
        pair_linear(*given, out, unused, hidden_first=hidden_first, row_count=row_count, plan=plan, backend=TRITON)
        if count:
            assert float((out.cpu() - expected).norm()) <= TOLERANCE * float(expected.norm())
        else:
            assert bool(out.isnan().all())


@pytest.mark.gpu
@pytest.mark.parametrize("kind", KINDS)
def test_overlapping_kernels_wait_for_what_they_read(kind):
    """A chain in which each product reads what the one before has just written."""
    weight = stored(kind, random(4096, 4096, seed=1, scale=4096**-0.5))
    rows = [random(1, 4096, seed=2, dtype=torch.bfloat16, device=DEVICE) for _ in range(2)]
    moved, results = on(DEVICE, weight), []
    for overlaps in (False, True):
        plan = wave(weight, overlaps=overlaps)
        buffers = [row.clone() for row in rows]
        for step in range(30):
            linear(buffers[step % 2], moved, buffers[(step + 1) % 2], plan=plan)
        results.append(torch.cat(buffers))
    assert torch.equal(*results)
