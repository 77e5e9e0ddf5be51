"""Projections of few rows agree with the reference: every kind of weight, every epilogue, odd sizes."""

from dataclasses import replace

import pytest
import torch

from drafter_kernels.linear import (
    InputNorm,
    LinearPlan,
    LinearWorkspace,
    PackedRows,
    linear,
    linear_reference,
    plan_linear,
)
from drafter_kernels.quantize import Fp8BlockWeight, pack_nvfp4, quantize_fp8, quantize_nvfp4
from kernel_backends import DEVICES, TRITON, on, random, relative_error, unwritten

pytest.importorskip("triton")

KINDS = ["float32", "bfloat16", "fp8", "fp8_blocks", "nvfp4"]
# Operands of the product are bfloat16 with float32 sums; what is rounded is x, and the normalised x.
TOLERANCE = 5e-3


def stored(kind, weight):
    match kind:
        case "nvfp4":
            return pack_nvfp4(quantize_nvfp4(weight))
        case "fp8":
            return quantize_fp8(weight)
        case "fp8_blocks":
            shape = Fp8BlockWeight.scale_shape(*weight.shape)
            return Fp8BlockWeight((weight * 8).to(torch.float8_e4m3fn), random(*shape, seed=9).abs() + 0.1)
        case _:
            return weight.to(getattr(torch, kind))


def plan_for(kind, *, split=1, batch=16):
    """Small tiles, so that small odd sizes have remainders and several steps."""
    return LinearPlan(16, batch, 16 if kind == "nvfp4" else 32, split, 4, 2)


def run(x, weight, device, *, plan, swiglu=False, packed_out=False, out=None, **options):
    """The kernel's output, float32 on the CPU."""
    weight, x = on(device, weight), on(device, x)
    rows = (weight.values if hasattr(weight, "values") and not torch.is_tensor(weight) else weight).shape[0]
    num_out = rows // 2 if swiglu else rows
    batch = len(x.values if isinstance(x, PackedRows) else x)
    columns = (x.values if isinstance(x, PackedRows) else x)[0].numel()
    out = unwritten(batch, num_out, dtype=torch.bfloat16, device=device) if out is None else out.to(device)
    target = PackedRows(out.view(batch, 8, -1)) if packed_out else out
    workspace = LinearWorkspace([(plan, batch, num_out, columns)], torch.device(device))
    workspace.partials.fill_(torch.nan)
    workspace.packed.fill_(torch.nan)
    moved = {name: on(device, value) for name, value in options.items()}
    linear(x, weight, target, workspace, swiglu=swiglu, plan=plan, backend=TRITON, **moved)
    assert not workspace.counters.any()
    return (target.unpack() if packed_out else out).float().cpu()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("batch", "split"), [(1, 1), (3, 2), (17, 1), (20, 3)])
def test_the_product_is_the_reference_s(device, kind, batch, split):
    columns = 400 if kind == "nvfp4" else 150
    weight, x = stored(kind, random(37, columns, seed=1)), random(batch, columns, dtype=torch.bfloat16)
    found = run(x, weight, device, plan=plan_for(kind, split=split))
    assert relative_error(found, linear_reference(x, weight)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("split", [1, 2])
def test_gate_and_residual_follow_the_product(device, kind, split):
    weight, x = stored(kind, random(24, 64, seed=1)), random(5, 64, dtype=torch.bfloat16)
    residual = random(5, 24, seed=2, scale=8.0).to(torch.bfloat16)
    for gate in (random(5, 24, seed=3), random(5, 1, seed=3)):
        options = {"gate": gate.to(torch.bfloat16), "residual": residual}
        found = run(x, weight, device, plan=plan_for(kind, split=split), **options)
        assert relative_error(found, linear_reference(x, weight, **options)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
def test_norm_and_swiglu_in_one_kernel(device, kind):
    half, columns = 128 if kind == "fp8_blocks" else 24, 48
    weight = stored(kind, random(2 * half, columns, seed=1, scale=0.2))
    x = random(3, columns, scale=50.0, dtype=torch.bfloat16)
    norm = InputNorm(random(columns, seed=4) + 1.0, 1e-6)
    for chosen in (norm, None):
        plan = plan_for(kind)
        scaled = x if chosen else (x / 50).to(torch.bfloat16)
        found = run(scaled, weight, device, plan=plan, swiglu=True, norm=chosen)
        assert relative_error(found, linear_reference(scaled, weight, norm=chosen, swiglu=True)) < 2 * TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bfloat16", "fp8"])
def test_rows_normalised_first_may_be_split(device, kind):
    weight, x = stored(kind, random(24, 96, seed=1)), random(20, 96, scale=50.0, dtype=torch.bfloat16)
    norm = InputNorm(random(96, seed=4) + 1.0, 1e-6)
    for split in (1, 2):
        plan = replace(plan_for(kind, split=split), norms_first=True)
        found = run(x, weight, device, plan=plan, norm=norm)
        # x is rounded once more, and the interpreter cuts off where a GPU rounds.
        assert relative_error(found, linear_reference(x, weight, norm=norm)) < 2 * TOLERANCE
    with pytest.raises(ValueError, match="norm"):
        run(x, weight, device, plan=plan_for(kind, split=2), norm=norm)


@pytest.mark.parametrize("device", DEVICES)
def test_packed_rows_go_from_one_product_to_the_next(device):
    weight, x = stored("nvfp4", random(32, 48, seed=1)), random(3, 48, dtype=torch.bfloat16)
    packed = PackedRows.pack(x)
    assert torch.equal(packed.unpack(), x)
    found = run(packed, weight, device, plan=plan_for("nvfp4"), packed_out=True)
    assert relative_error(found, linear_reference(x, weight)) < TOLERANCE


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bfloat16", "nvfp4"])
@pytest.mark.parametrize("split", [1, 2])
def test_rows_behind_the_count_keep_what_they_hold(device, kind, split):
    weight, x = stored(kind, random(24, 64, seed=1)), random(40, 64, dtype=torch.bfloat16)
    for count in (0, 1, 16, 23, 40, 99):
        x[count:] = torch.nan
        held = torch.full((40, 24), 7.0, dtype=torch.bfloat16)
        row_count = torch.tensor([count], dtype=torch.int32)
        found = run(x, weight, device, plan=plan_for(kind, split=split), out=held, row_count=row_count)
        assert torch.equal(found[count:], held.float()[count:])
        if count:
            assert relative_error(found[:count], linear_reference(x[:count], weight)) < TOLERANCE
        x = random(40, 64, dtype=torch.bfloat16)


def test_without_a_gpu_the_reference_runs():
    weight, x = random(24, 64, seed=1), random(5, 64)
    out = unwritten(5, 24)
    linear(x, weight, out, row_count=torch.tensor([3], dtype=torch.int32))
    torch.testing.assert_close(out[:3], x[:3] @ weight.T)
    assert bool(out[3:].isnan().all())


def test_plans_depend_on_the_bucket_and_split_where_the_output_is_too_little():
    weight = torch.empty(4096, 4096, dtype=torch.bfloat16, device="meta")
    assert plan_linear(weight, 1) != plan_linear(weight, 2) == plan_linear(weight, 16) != plan_linear(weight, 17)
    assert plan_linear(weight, 65) == plan_linear(weight, 8192)
    assert plan_linear(weight, 2).split > 1
    assert plan_linear(weight, 2, swiglu=True).split == 1
    for batch in (2, 17):  # a kernel of its own normalises x first
        split = plan_linear(weight, batch, normed=True)
        assert split.norms_first
        assert split.split > 1
    wide = torch.empty(10_240, 4096, dtype=torch.bfloat16, device="meta")
    whole = plan_linear(wide, 2, normed=True)
    assert not whole.norms_first
    assert whole.split == 1
    assert plan_linear(wide, 17, normed=True).norms_first


def test_33_to_64_rows_take_one_program_a_multiprocessor_with_many_steps_ahead():
    for rows, columns, options in (
        (4096, 8192, {}),
        (4096, 4096, {}),
        (2048, 4096, {"normed": True}),
        (10_240, 4096, {"normed": True}),
        (22_016, 4096, {"normed": True, "swiglu": True}),
    ):
        plan = plan_linear(torch.empty(rows, columns, dtype=torch.bfloat16, device="meta"), 33, **options)
        is_pair = options.get("swiglu", False)
        step = 2 * plan.block_columns * (plan.block_batch + (2 if is_pair else 1) * plan.block_rows)
        assert 90_000 < step * plan.num_stages < 120_000  # of the 227 kB of a multiprocessor
        assert plan.split == 1 or plan.split * plan.num_tiles(64, rows) <= 132
        assert plan.norms_first == options.get("normed", False)


@pytest.mark.parametrize("batch", [1, 8, 64, 200])
def test_kernels_whose_programs_do_not_all_run_at_once_never_overlap(batch):
    for kind in (torch.bfloat16, torch.float32):
        weight = torch.empty(4096, 4096, dtype=kind, device="meta")
        assert not plan_linear(weight, batch, overlaps=True).overlaps


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(5, 63)}, "63 columns"),
        ({"out": torch.zeros(5, 23)}, r"out is \[5, 23\]"),
        ({"swiglu": True, "weight": torch.zeros(25, 64)}, "even"),
        ({"gate": torch.zeros(5, 2)}, "gate"),
        ({"residual": torch.zeros(4, 24)}, "residual"),
        ({"row_count": torch.zeros(1)}, "row_count"),
        ({"norm": InputNorm(torch.zeros(63), 1e-6)}, "norm.scale"),
        ({"x": PackedRows(torch.zeros(5, 8, 8))}, "packed"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    call = {"x": random(5, 64), "weight": random(24, 64), "out": unwritten(5, 24)} | changes
    with pytest.raises(ValueError, match=words):
        linear(**call)
