import math

import pytest
import torch

from drafter_kernels.paged_attention import paged_attention

# Both sides are float32 and differ in summation order only; the outputs are of size 1.
FLOAT32 = {"rtol": 1e-5, "atol": 2e-6}
# One rounding of the result to 8 bits of mantissa.
BFLOAT16 = {"rtol": 2**-8, "atol": 2**-8}

POISON = [math.nan, math.inf, -math.inf]


def plain(q, k_rows, v_rows, scale):
    """One sequence, head by head: q [Hq, D], rows [n, Hkv, D]."""
    group = q.shape[0] // k_rows.shape[1]
    outputs = []
    for head in range(q.shape[0]):
        k, v = k_rows[:, head // group].float(), v_rows[:, head // group].float()
        outputs.append((scale * (k @ q[head].float())).softmax(0) @ v)
    return torch.stack(outputs)


def filled(counts, *, page_rows, heads, kv_heads, width, dtype=torch.float32, poison=math.nan, seed=0):
    """Sequences of the given row counts on shuffled pages; everything that they did not write is poison."""
    generator = torch.Generator().manual_seed(seed)
    pages_of = [-(-count // page_rows) for count in counts]
    num_pages = sum(pages_of) + 3
    order = torch.randperm(num_pages, generator=generator).tolist()
    k_pages = torch.full((num_pages, page_rows, kv_heads, width), poison, dtype=dtype)
    v_pages = k_pages.clone()
    table = torch.full((len(counts), max(pages_of) + 1), -1, dtype=torch.int32)
    rows = []
    for index, count in enumerate(counts):
        k, v = torch.randn(2, count, kv_heads, width, generator=generator).to(dtype)
        for page in range(pages_of[index]):
            table[index, page] = order.pop()
            part = slice(page * page_rows, min((page + 1) * page_rows, count))
            k_pages[table[index, page], : part.stop - part.start] = k[part]
            v_pages[table[index, page], : part.stop - part.start] = v[part]
        rows.append((k, v))
    q = torch.randn(len(counts), heads, width, generator=generator).to(dtype)
    return q, k_pages, v_pages, table, torch.tensor(counts), rows


@pytest.mark.parametrize("poison", POISON)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "page_rows"), [(4, 2, 16, 4), (3, 3, 7, 5), (6, 1, 33, 16), (1, 1, 1, 1)]
)
def test_each_sequence_attends_to_its_own_rows_only(poison, heads, kv_heads, width, page_rows):
    counts = [1, 17, 4, 9]
    *inputs, rows = filled(counts, page_rows=page_rows, heads=heads, kv_heads=kv_heads, width=width, poison=poison)
    out = paged_attention(*inputs, width**-0.5)
    assert out.shape == inputs[0].shape
    for index, (k, v) in enumerate(rows):
        torch.testing.assert_close(out[index], plain(inputs[0][index], k, v, width**-0.5), **FLOAT32)


@pytest.mark.parametrize("padding", [-1, -(2**31), 2**31 - 1, 0])
def test_table_entries_past_the_last_row_are_never_followed(padding):
    *inputs, _ = filled([3, 11], page_rows=4, heads=4, kv_heads=2, width=8)
    expected = paged_attention(*inputs, 0.3)
    inputs[3][inputs[3] == -1] = padding
    assert torch.equal(paged_attention(*inputs, 0.3), expected)
    assert bool(expected.isfinite().all())


def test_bf16_is_summed_in_float32():
    *inputs, rows = filled([129, 5], page_rows=16, heads=4, kv_heads=2, width=32, dtype=torch.bfloat16)
    out = paged_attention(*inputs, 32**-0.5)
    assert out.dtype is torch.bfloat16
    for index, (k, v) in enumerate(rows):
        torch.testing.assert_close(out[index].float(), plain(inputs[0][index], k, v, 32**-0.5), **BFLOAT16)


def test_scores_of_any_size_stay_finite():
    *inputs, rows = filled([7], page_rows=4, heads=2, kv_heads=1, width=8)
    out = paged_attention(*inputs, 1e6)
    torch.testing.assert_close(out[0], plain(inputs[0][0], *rows[0], 1e6), **FLOAT32)


def test_an_empty_batch_gives_an_empty_result():
    q = torch.zeros(0, 4, 8)
    pages = torch.zeros(2, 4, 2, 8)
    table = torch.zeros(0, 1, dtype=torch.int32)
    assert paged_attention(q, pages, pages, table, torch.zeros(0, dtype=torch.int32), 1.0).shape == (0, 4, 8)
