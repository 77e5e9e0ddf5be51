"""The kernels for one row of x agree with the reference: whatever x holds, and whatever follows the product."""

from dataclasses import replace

import pytest
import torch

from drafter_kernels.fuse_pair import PairNorms, fuse_pair_reference
from drafter_kernels.linear import (
    InputNorm,
    LinearPlan,
    LinearWorkspace,
    PackedRows,
    linear,
    linear_joined,
    linear_reference,
    pair_linear,
    plan_linear,
)
from drafter_kernels.quantize import pack_nvfp4, quantize_nvfp4
from kernel_backends import DEVICES, TRITON, on, random, relative_error, unwritten

pytest.importorskip("triton")

# x is brought to float16 in NVFP4 products, and sums are float32: nothing comes near bfloat16's 2e-3.
TOLERANCE = 1e-3
KINDS = ["bfloat16", "nvfp4"]


def stored(kind, weight):
    return pack_nvfp4(quantize_nvfp4(weight)) if kind == "nvfp4" else weight.to(torch.bfloat16)


def plan_for(kind, block=None):
    """Several parts of K and a remainder, in rows and in columns."""
    return LinearPlan(4, 1, block or (16 if kind == "nvfp4" else 64), 1, 4, 1, is_vector=True)


def run(x, weight, device, *, plan, rows, out=None, **options):
    """The kernel's output, on the CPU."""
    target = unwritten(1, rows, device=device) if out is None else out
    moved = {name: value if isinstance(value, bool) else on(device, value) for name, value in options.items()}
    linear(on(device, x), on(device, weight), target, plan=plan, backend=TRITON, **moved)
    return (target.unpack() if isinstance(target, PackedRows) else target).float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("columns", [32, 48, 64, 416])
@pytest.mark.parametrize("normed", [False, True])
def test_the_product_is_the_reference_s(device, kind, columns, normed):
    weight, x = stored(kind, random(37, columns, seed=1)), random(1, columns, scale=30.0, dtype=torch.bfloat16)
    norm = InputNorm(random(columns, seed=4).abs() + 0.5, 1e-6) if normed else None
    for plan in (plan_for(kind), plan_for(kind, 256)):
        found = run(x, weight, device, plan=plan, rows=37, norm=norm)
        assert relative_error(found, linear_reference(x, weight, norm=norm)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_x_may_be_of_any_size_that_activations_have(device, kind):
    weight = stored(kind, random(16, 128, seed=1))
    x = random(1, 128)
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
        found = run(given, weight, device, plan=plan_for(kind), rows=16)
        assert float((found - expected).norm()) <= TOLERANCE * float(expected.norm())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("swiglu", [False, True])
def test_what_follows_the_product(device, kind, swiglu):
    weight, x = stored(kind, random(48, 96, seed=1, scale=0.2)), random(1, 96, dtype=torch.bfloat16)
    rows = 24 if swiglu else 48
    residual = random(1, rows, seed=2, dtype=torch.bfloat16)
    for gate in (random(1, rows, seed=3), random(1, 1, seed=3)):
        options = {"gate": gate.to(torch.bfloat16), "residual": residual, "swiglu": swiglu}
        found = run(x, weight, device, plan=plan_for(kind), rows=rows, **options)
        assert relative_error(found, linear_reference(x, weight, **options)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_a_row_behind_the_count_keeps_what_it_holds(device, kind):
    weight, x = stored(kind, random(24, 64, seed=1)), random(1, 64, dtype=torch.bfloat16)
    for count in (0, 1, 7):
        held = torch.full((1, 24), 7.0, device=device)
        found = run(x, weight, device, plan=plan_for(kind), rows=24, out=held, row_count=torch.tensor([count]).int())
        expected = linear_reference(x, weight) if count else torch.full((1, 24), 7.0)
        assert relative_error(found, expected) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
def test_packed_rows_go_in_and_out(device):
    weight, x = stored("nvfp4", random(32, 64, seed=1)), random(1, 64, dtype=torch.bfloat16)
    out = PackedRows(unwritten(1, 8, 4, device=device))
    found = run(PackedRows.pack(x), weight, device, plan=plan_for("nvfp4"), rows=32, out=out)
    assert relative_error(found, linear_reference(x, weight)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("batch", [1, 3])
def test_products_side_by_side(device, batch):
    """One row of x in one launch; more rows go by parts of out, whose rows are further apart than they are long."""
    weights = [stored("nvfp4", random(40, 128, seed=1)), stored("bfloat16", random(24, 128, seed=2))]
    x, norm = random(batch, 128, dtype=torch.bfloat16), InputNorm(random(128, seed=3).abs(), 1e-6)
    out = unwritten(batch, 64, device=device)
    plans = [plan_linear(weight, batch, normed=True) for weight in weights]
    workspace = LinearWorkspace([(plan, batch, 40, 128) for plan in plans], torch.device(device))
    moved = [on(device, weight) for weight in weights]
    linear_joined(on(device, x), moved, out, workspace, norm=on(device, norm), plans=plans, backend=TRITON)
    expected = torch.cat([linear_reference(x, weight, norm=norm) for weight in weights], dim=1)
    assert relative_error(out, expected) < (TOLERANCE if batch == 1 else 5 * TOLERANCE)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize("token", [7, -1])
def test_a_pair_and_its_product(device, hidden_first, token):
    embedding, hidden = random(9, 64, dtype=torch.bfloat16), random(1, 128, seed=1, scale=9.0, dtype=torch.bfloat16)
    norms = PairNorms(random(64, seed=2).abs(), random(128, seed=3).abs(), 1e-6)
    weight = random(21, 192, seed=4).to(torch.bfloat16)
    tokens = torch.tensor([token])
    expected = linear_reference(
        fuse_pair_reference(tokens, embedding, hidden, norms, hidden_first=hidden_first), weight
    )
    for block, count in ((32, 1), (32, 0), (1024, 1)):  # the last one does not divide the halves: two kernels
        plan = replace(plan_linear(weight, 1), block_columns=block)
        out, joined = unwritten(1, 21, device=device), torch.empty(1, 192, dtype=torch.bfloat16, device=device)
        given = [on(device, value) for value in (tokens, embedding, hidden, norms, weight)]
        row_count = torch.tensor([count], dtype=torch.int32, device=device)
        pair_linear(*given, out, joined, hidden_first=hidden_first, row_count=row_count, plan=plan, backend=TRITON)
        if count:
            error = float((out.cpu() - expected).norm())
            assert error <= (TOLERANCE if block == 32 else 5 * TOLERANCE) * float(expected.norm())
        else:
            assert bool(out.isnan().all())


def test_without_a_gpu_the_references_run():
    weights, x = [random(8, 64, seed=1), random(4, 64, seed=2)], random(3, 64)
    out = unwritten(3, 12)
    linear_joined(x, weights, out)
    torch.testing.assert_close(out, x @ torch.cat(weights).T)
    norms = PairNorms(torch.ones(16), torch.ones(48), 1e-6)
    pair = (torch.tensor([1, 0, -1]), random(5, 16), random(3, 48), norms)
    out, joined = unwritten(3, 8), unwritten(3, 64)
    pair_linear(*pair, weights[0], out, joined)
    torch.testing.assert_close(joined, fuse_pair_reference(*pair))
    torch.testing.assert_close(out, joined @ weights[0].T)


def test_one_row_has_kernels_of_its_own_where_they_can_read_the_weight():
    def meta(columns, dtype=torch.bfloat16):
        return torch.empty(64, columns, dtype=dtype, device="meta")

    assert plan_linear(meta(64), 1).is_vector
    assert not plan_linear(meta(64), 2).is_vector
    assert not plan_linear(meta(64, torch.float32), 1).is_vector
    assert plan_linear(stored("nvfp4", random(16, 64)), 1).is_vector
    assert not plan_linear(stored("nvfp4", random(16, 64)), 2).is_vector


def test_what_does_not_fit_is_refused():
    weight, plan = stored("bfloat16", random(16, 64)), plan_for("bfloat16")
    with pytest.raises(ValueError, match="one row"):
        linear(random(2, 64).to(torch.bfloat16), weight, unwritten(2, 16), plan=plan, backend=TRITON)
    with pytest.raises(ValueError, match="out is"):
        linear_joined(random(1, 64), [weight, weight], unwritten(1, 31))
    norms = PairNorms(torch.ones(32), torch.ones(32), 1e-6)
    pair = (torch.tensor([1]), random(5, 32), random(1, 32), norms)
    given = replace(plan, block_columns=32)
    with pytest.raises(ValueError, match="out is"):
        pair_linear(*pair, weight, unwritten(1, 15), unwritten(1, 64), plan=given, backend=TRITON)
