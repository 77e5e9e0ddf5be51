"""What makes rows: norms, the joining of a pair, and heads that are normed, turned and written into pages."""

import math

import pytest
import torch

from drafter_kernels.fuse_pair import PairNorms, fuse_pair, fuse_pair_reference
from drafter_kernels.qk_rope_write import HeadNorms, HeadShape, RopeTable, qk_rope_reference, qk_rope_write
from drafter_kernels.rms_norm import RowNorm, rms_norm, rms_norm_reference
from kernel_backends import DEVICES, TRITON, random, relative_error, unwritten

pytest.importorskip("triton")

# float32 in another order.
FLOAT32 = 1e-5
# One rounding to 8 bits of mantissa (the interpreter cuts off).
BFLOAT16 = 2**-7


def frequencies(rotary, theta=10000.0):
    return [theta ** (-2 * i / rotary) for i in range(rotary // 2)]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_rms_norm(device, dtype, tolerance):
    x, scale = random(3, 37, dtype=dtype, scale=20.0), random(37, seed=1) + 1
    out = unwritten(3, 37, dtype=dtype, device=device)
    rms_norm(x.to(device), RowNorm(scale.to(device), 1e-5, out), backend=TRITON)
    assert relative_error(out, rms_norm_reference(x, scale, 1e-5)) < tolerance


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("hidden_first", [False, True])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_a_pair_is_joined_in_either_order(device, hidden_first, dtype, tolerance):
    tokens = torch.tensor([4, 0, -1, 6, 2])
    embedding, hiddens = random(7, 24, seed=1, dtype=dtype), random(5, 40, scale=30.0)
    hiddens[2] = torch.nan  # no token, no pair
    norms = PairNorms(random(24, seed=2) + 1, random(40, seed=3) + 1, 1e-6)
    moved = PairNorms(norms.embedding.to(device), norms.hidden.to(device), norms.epsilon)
    for count in (None, 0, 4):
        out = unwritten(5, 64, dtype=dtype, device=device)
        row_count = None if count is None else torch.tensor([count], dtype=torch.int32, device=device)
        given = (tokens.to(device), embedding.to(device), hiddens.to(device), moved, out)
        fuse_pair(*given, hidden_first=hidden_first, row_count=row_count, backend=TRITON)
        written = 5 if count is None else count
        assert bool(out[written:].isnan().all())
        if written:
            expected = fuse_pair_reference(tokens, embedding, hiddens, norms, hidden_first=hidden_first)
            assert relative_error(out[:written], expected[:written]) < tolerance
            assert not out[2].any()


SHAPES = [
    (HeadShape(4, 2, 16, gated=True), 16),
    (HeadShape(3, 1, 24, gated=False), 8),
    (HeadShape(0, 2, 7), 6),
    (HeadShape(2, 2, 32, gated=True), 2),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("shape", "rotary"), SHAPES, ids=str)
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, FLOAT32), (torch.bfloat16, BFLOAT16)])
def test_heads_are_normed_turned_and_written(device, shape, rotary, dtype, tolerance):
    projected = random(6, shape.width, dtype=dtype, scale=3.0)
    keys = torch.tensor([0, 1, 17, 199_999, 5, 250_000])
    slots = torch.tensor([7, -1, 0, 3, -1, 11])
    norms = HeadNorms(
        None if rotary == 8 else random(shape.head_dim, seed=1) + 1, random(shape.head_dim, seed=2) + 1, 1e-6
    )
    rope = RopeTable.of(frequencies(rotary), torch.device("cpu"), amplitude=1.25, position_offset=1)
    expected = qk_rope_reference(projected, keys, shape, norms, rope)
    for count in (None, 4):
        k_pages, v_pages = (
            unwritten(4, 3, shape.num_kv_heads, shape.head_dim, dtype=dtype, device=device) for _ in "kv"
        )
        q_out = unwritten(6, shape.num_heads, shape.head_dim, dtype=dtype, device=device)
        qk_rope_write(
            projected.to(device),
            keys.to(device),
            slots.to(device),
            k_pages,
            v_pages,
            shape,
            HeadNorms(*(None if part is None else part.to(device) for part in (norms.q, norms.k)), norms.epsilon),
            RopeTable(rope.turns.to(device), rope.amplitude, rope.position_offset),
            q_out=q_out if shape.num_heads else None,
            row_count=None if count is None else torch.tensor([count], dtype=torch.int32, device=device),
            backend=TRITON,
        )
        rows = [row for row in range(count or 6) if slots[row] >= 0]
        kept = slots[rows]
        for pages, values in ((k_pages, expected[1]), (v_pages, expected[2])):
            flat = pages.flatten(0, 1).cpu()
            assert relative_error(flat[kept], values[rows]) < tolerance
            others = [slot for slot in range(12) if slot not in kept.tolist()]
            assert bool(flat[others].isnan().all())
        if shape.num_heads:
            assert relative_error(q_out[: count or 6], expected[0][: count or 6]) < tolerance
            assert bool(q_out[count or 6 :].isnan().all())


def test_the_angle_of_a_far_position_is_the_formula_s():
    rope = RopeTable.of(frequencies(8, 5e6), torch.device("cpu"))
    one = torch.ones(1, 1, 8)
    turned = qk_rope_reference(
        torch.cat((one, one), -1).view(1, 16),
        torch.tensor([200_000]),
        HeadShape(0, 1, 8),
        HeadNorms(None, None, 0.0),
        rope,
    )[1][0, 0]
    for i, frequency in enumerate(frequencies(8, 5e6)):
        cos, sin = math.cos(200_000 * frequency), math.sin(200_000 * frequency)
        assert abs(float(turned[i]) - (cos - sin)) < 1e-6
        assert abs(float(turned[i + 4]) - (cos + sin)) < 1e-6


def test_gates_are_a_view_of_the_projection():
    shape = HeadShape(2, 1, 3, gated=True)
    projected = torch.arange(18.0).view(1, 18)
    assert shape.gate_of(projected).tolist() == [[[3.0, 4.0, 5.0], [9.0, 10.0, 11.0]]]


def test_without_a_gpu_the_references_run():
    shape, rope = HeadShape(2, 1, 8), RopeTable.of(frequencies(8), torch.device("cpu"))
    projected, keys, slots = random(3, shape.width), torch.arange(3), torch.tensor([2, -1, 0])
    norms, q_out = HeadNorms(None, None, 1e-6), unwritten(3, 2, 8)
    k_pages, v_pages = unwritten(1, 4, 1, 8), unwritten(1, 4, 1, 8)
    count = torch.tensor([2], dtype=torch.int32)
    qk_rope_write(projected, keys, slots, k_pages, v_pages, shape, norms, rope, q_out=q_out, row_count=count)
    q, _, v = qk_rope_reference(projected, keys, shape, norms, rope)
    assert torch.equal(q_out[:2], q[:2])
    assert bool(q_out[2].isnan().all())
    assert torch.equal(v_pages[0, 2], v[0])
    assert bool(v_pages[0, [0, 1, 3]].isnan().all())
    with pytest.raises(ValueError, match="q_out"):
        qk_rope_write(projected, keys, slots, k_pages, v_pages, shape, norms, rope)
    with pytest.raises(ValueError, match="projected"):
        qk_rope_write(projected[:, 1:], keys, slots, k_pages, v_pages, shape, norms, rope)
