"""Catch-up: rows of any bucket become K/V, live rows alone, in pages that hold NaN otherwise."""

import pytest
import torch

from drafter_kernels.absorb import AbsorbWeights, AbsorbWorkspace, absorb, absorb_reference
from drafter_kernels.fuse_pair import PairNorms
from drafter_kernels.linear import InputNorm
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable
from drafter_kernels.quantize import pack_nvfp4, quantize_fp8, quantize_nvfp4
from kernel_backends import DEVICES, TRITON, on, random, relative_error, unwritten

pytest.importorskip("triton")

HIDDEN, VOCAB, DTYPE = 32, 40, torch.bfloat16
# Three roundings to bf16 on the way, each of 2^-9.
TOLERANCE = 1e-2


def head(kind, *, hidden_first=False):
    shape = HeadShape(0, 2, 16)
    stored = {
        "bfloat16": lambda weight: weight.to(DTYPE),
        "fp8": quantize_fp8,
        "nvfp4": lambda weight: pack_nvfp4(quantize_nvfp4(weight)),
    }[kind]
    return AbsorbWeights(
        embedding=random(VOCAB, HIDDEN, seed=1, dtype=DTYPE),
        pair_norms=PairNorms(random(HIDDEN, seed=2) + 1, random(HIDDEN, seed=3) + 1, 1e-6),
        join_proj=stored(random(HIDDEN, 2 * HIDDEN, seed=4, scale=0.2)),
        input_norm=InputNorm(random(HIDDEN, seed=5) + 1, 1e-6),
        kv_proj=stored(random(shape.width, HIDDEN, seed=6, scale=0.2)),
        shape=shape,
        head_norms=HeadNorms(None, random(16, seed=7) + 1, 1e-6),
        rope=RopeTable.of([1.0, 0.3, 0.01, 0.0001], torch.device("cpu"), position_offset=1),
        hidden_first=hidden_first,
    )


def moved(weights, device):
    return AbsorbWeights(
        **{
            name: part if isinstance(part, bool | HeadShape) else on(device, part)
            for name, part in vars(weights).items()
        }
    )


def expect_rows(pages, slots, rows, tolerance):
    flat = pages.flatten(0, 1).cpu()
    assert relative_error(flat[slots], rows) < tolerance
    others = sorted(set(range(len(flat))) - set(slots.tolist()))
    assert bool(flat[others].isnan().all())


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("kind", ["bfloat16", "fp8", "nvfp4"])
@pytest.mark.parametrize(("bucket", "count"), [(1, 1), (8, 5), (20, 20)])
def test_live_rows_are_written_and_no_others(device, kind, bucket, count):
    weights = head(kind, hidden_first=kind == "fp8")
    tokens = torch.arange(bucket) * 3 % VOCAB
    keys, slots = torch.arange(bucket) + 100, torch.randperm(24, generator=torch.Generator().manual_seed(1))[:bucket]
    hiddens = random(bucket, HIDDEN, seed=8, scale=20.0)
    tokens[count:], slots[count:], hiddens[count:] = 10**12, 23, torch.nan
    if count > 2:
        slots[2] = -1
    k_pages, v_pages = (unwritten(6, 4, 2, 16, dtype=DTYPE, device=device) for _ in "kv")
    x = unwritten(bucket, HIDDEN, dtype=DTYPE, device=device)
    on_device = moved(weights, device)
    workspace = AbsorbWorkspace(on_device, 24, DTYPE)
    given = [part.to(device) for part in (tokens, hiddens, keys, slots)]
    row_count = torch.tensor([count], dtype=torch.int32, device=device)
    absorb(*given, on_device, k_pages, v_pages, x, workspace, row_count=row_count, backend=TRITON)
    expected_x, k, v = absorb_reference(tokens[:count], hiddens[:count], keys[:count], weights)
    assert relative_error(x[:count], expected_x) < TOLERANCE
    assert bool(x[count:].isnan().all())
    kept = [row for row in range(count) if slots[row] >= 0]
    expect_rows(k_pages, slots[kept], k[kept], 2 * TOLERANCE)
    expect_rows(v_pages, slots[kept], v[kept], 2 * TOLERANCE)


def test_without_a_gpu_the_references_run():
    weights = head("bfloat16")
    tokens, hiddens, keys, slots = torch.arange(3), random(3, HIDDEN, seed=8), torch.arange(3), torch.arange(3)
    k_pages, v_pages, x = unwritten(1, 4, 2, 16), unwritten(1, 4, 2, 16), unwritten(3, HIDDEN)
    absorb(tokens, hiddens, keys, slots, weights, k_pages, v_pages, x, AbsorbWorkspace(weights, 4, torch.float32))
    expected_x, k, _ = absorb_reference(tokens, hiddens, keys, weights)
    torch.testing.assert_close(x, expected_x, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(k_pages[0, :3], k, rtol=1e-4, atol=1e-4)
    assert bool(k_pages[0, 3].isnan().all())


def test_more_rows_than_the_workspace_has_are_refused():
    weights = head("bfloat16")
    rows = torch.arange(5)
    pages = unwritten(2, 4, 2, 16)
    with pytest.raises(ValueError, match="5 rows"):
        absorb(
            rows,
            random(5, HIDDEN),
            rows,
            rows,
            weights,
            pages,
            pages,
            unwritten(5, HIDDEN),
            AbsorbWorkspace(weights, 4, DTYPE),
        )
