"""The fused LM head finds the reference's ids and log-probabilities, whatever the weights are stored in."""

import pytest
import torch

from drafter_kernels import Backend
from drafter_kernels.lm_head import GrammarMasks, LmHeadPlan, lm_head, lm_head_reference
from drafter_kernels.quantize import widen
from drafter_kernels.rms_norm import RowNorm
from kernel_backends import DEVICES, random, unwritten
from lm_head_runs import expect, masks_of, run, stored

pytest.importorskip("triton")

KINDS = ["float32", "bfloat16", "fp8", "nvfp4"]

# Tiles small enough that odd sizes have a remainder in each direction and every program more than one step.
PLANS = {
    "float32": LmHeadPlan(16, 32, 4, 2),
    "bfloat16": LmHeadPlan(16, 32, 4, 2),
    "fp8": LmHeadPlan(16, 32, 4, 2),
    "nvfp4": LmHeadPlan(32, 16, 4, 2),
    "vector": LmHeadPlan(8, 8, 4, 2, is_vector=True, tiles=3),
}


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("batch", [1, 3])
def test_ids_and_logprobs_are_the_reference_s(device, kind, batch):
    columns = 272 if kind == "nvfp4" else 80
    weight = stored(kind, random(77, columns, seed=1))
    x = random(batch, columns, dtype=torch.bfloat16)
    expect(run(x, weight, plan=PLANS[kind], device=device), lm_head_reference(x, weight), x, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("columns", [48, 64])
def test_one_row_without_tensor_cores(device, columns):
    weight = stored("nvfp4", random(45, columns, seed=1))
    for scale in (1e-30, 1.0, 1e30):
        x = random(1, columns, scale=scale)
        expect(run(x, weight, plan=PLANS["vector"], device=device), lm_head_reference(x, weight), x, weight)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "vector"])
def test_padded_rows_never_win_even_if_all_logits_are_negative(device, kind):
    weight = -random(40, 32, seed=1).abs()
    x = random(1 if kind == "vector" else 2, 32).abs()
    padded = torch.cat((weight, torch.zeros(8, 32)))
    made = stored("nvfp4" if kind == "vector" else kind, padded)
    found = run(x, made, plan=PLANS[kind], device=device, num_rows=40)
    assert 0 <= int(found[0].min()) <= int(found[0].max()) < 40
    expect(found, lm_head_reference(x, made, num_rows=40), x, made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
def test_nan_never_wins_and_has_no_share(device, kind):
    weight = stored(kind, random(50, 32, seed=1))
    x = random(2, 32)
    best = lm_head_reference(x, weight)[0]
    weight[best] = torch.nan
    weight[7, 3] = torch.inf  # infinity minus infinity, or infinity: decided by x
    weight[7] = weight[7].abs()
    x[:, 3] = -1.0
    ids, logprobs = run(x, weight, plan=PLANS[kind], device=device)
    keep = torch.tensor([row for row in range(50) if row not in {*best.tolist(), 7}])
    expected_ids, expected = lm_head_reference(x, weight[keep])
    expect((ids, logprobs), (keep[expected_ids], expected), x, weight[keep])
    nothing = run(torch.full((1, 32), torch.nan), weight, plan=PLANS[kind], device=device)
    assert (int(nothing[0]), float(nothing[1])) == (-1, -torch.inf)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "vector"])
def test_of_equal_logits_the_lowest_id_wins(device, kind):
    weight = random(90, 32, seed=1, scale=0.1)
    x = random(1, 32)
    weight[[71, 30, 15, 33]] = x[0]  # in different tiles, and twice in one
    made = stored("nvfp4" if kind == "vector" else kind, weight)
    found = run(x, made, plan=PLANS[kind], device=device)
    assert found[0].tolist() == [15]
    expect(found, lm_head_reference(x, made), x, made)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", [*KINDS, "vector"])
@pytest.mark.parametrize("is_cut", [False, True])
def test_masks_and_a_draft_vocabulary(device, kind, is_cut):
    vocab, batch = 150, 1 if kind == "vector" else 4
    draft_ids = torch.arange(3, 150, 2, dtype=torch.int32) if is_cut else None
    count = vocab if draft_ids is None else len(draft_ids)
    made = stored("nvfp4" if kind == "vector" else kind, random(count, 32, seed=1))
    x = random(batch, 32)
    allowed = torch.rand(3, vocab, generator=torch.Generator().manual_seed(3)) < 0.2
    allowed[0] = False
    masks = masks_of(allowed, [2, 0, -1, 1][:batch])
    on_device = None if draft_ids is None else draft_ids.to(device)
    for chosen in (masks, None):
        moved = None if chosen is None else GrammarMasks(chosen.words.to(device), chosen.rows.to(device))
        found = run(x, made, plan=PLANS[kind], device=device, draft_ids=on_device, masks=moved)
        expected = lm_head_reference(x, made, draft_ids=draft_ids, masks=chosen)
        expect(found, expected, x, made)
        if batch > 1:
            assert (int(found[0][1]) == -1) == (chosen is masks)


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bfloat16", "nvfp4", "vector"])
def test_the_final_norm_is_written_and_used(device, kind):
    made = stored("nvfp4" if kind == "vector" else kind, random(60, 48, seed=1))
    x = random(1 if kind == "vector" else 2, 48, scale=30.0).to(torch.bfloat16)
    scale = random(48, seed=4) + 1.0
    out = unwritten(*x.shape, dtype=torch.bfloat16, device=device)
    ids, logprobs = run(x, made, plan=PLANS[kind], device=device, norm=RowNorm(scale.to(device), 1e-6, out))
    normed = torch.empty_like(x)
    lm_head_reference(x, made, norm=RowNorm(scale, 1e-6, normed))
    # A step of bfloat16: the interpreter cuts off where a GPU rounds.
    torch.testing.assert_close(out.cpu(), normed, rtol=2**-7, atol=0)
    expect((ids, logprobs), lm_head_reference(out.cpu(), made), out.cpu(), made)


def test_the_reference_agrees_with_plain_pytorch():
    weight, x = random(50, 32, seed=1), random(4, 32)
    ids, logprobs = lm_head_reference(x, weight)
    logits = x @ weight.T
    assert torch.equal(ids, logits.argmax(-1))
    torch.testing.assert_close(logprobs, logits.log_softmax(-1).amax(-1), rtol=1e-5, atol=1e-5)
    assert widen(weight) is weight


def test_without_a_gpu_the_reference_runs():
    weight, x = random(50, 32, seed=1), random(2, 32)
    ids, logprobs = unwritten(2, dtype=torch.int64), unwritten(2)
    lm_head(x, weight, ids, logprobs)
    assert torch.equal(ids, lm_head_reference(x, weight)[0])


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"x": torch.zeros(65, 32)}, "65 rows"),
        ({"x": torch.zeros(2, 31)}, r"x is \[2, 31\]"),
        ({"out_ids": torch.zeros(2, dtype=torch.int32)}, "out_ids holds torch.int32"),
        ({"num_rows": 51}, "51 rows"),
        ({"draft_ids": torch.zeros(49, dtype=torch.int32)}, "draft_ids"),
        (
            {"masks": GrammarMasks(torch.zeros(1, 2, dtype=torch.int64), torch.zeros(2, dtype=torch.int32))},
            "masks.words",
        ),
        ({"backend": Backend.TRITON}, "workspace"),
    ],
)
def test_what_does_not_fit_is_refused(changes, words):
    call = {
        "x": random(2, 32),
        "weight": random(50, 32, seed=1),
        "out_ids": unwritten(2, dtype=torch.int64),
        "out_logprobs": unwritten(2),
    } | changes
    with pytest.raises(ValueError, match=words):
        lm_head(**call)
