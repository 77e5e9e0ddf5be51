"""Hidden rows and masks as they arrive."""

import math
import struct

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.memory.hiddens import (
    DTYPES,
    FEW_BYTES,
    PackedRows,
    embedding_bytes,
    hidden_rows,
    mask_rows,
    tensor_of,
)
from specdraft.errors import SpecdraftError

WIDTH = 6


def read_rows(data, dtype, width, head_dtype):
    return tensor_of(hidden_rows(data, dtype, width, head_dtype))


def packed(rows):
    return rows.contiguous().view(torch.uint8).numpy().tobytes()


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_read_as_they_were_packed_and_are_private(dtype):
    rows = torch.randn(5, WIDTH, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    data = packed(rows)
    read = read_rows(data, dtype, WIDTH, dtype)
    assert read.dtype == DTYPES[dtype]
    assert torch.equal(read, rows)
    read.zero_()
    assert data == packed(rows)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("is_few", [True, False])
def test_few_rows_become_a_tensor_where_they_are_used(dtype, is_few):
    num_rows = FEW_BYTES // (WIDTH * DTYPES[dtype].itemsize) + (not is_few)
    rows = torch.randn(num_rows, WIDTH, generator=torch.Generator().manual_seed(0)).to(DTYPES[dtype])
    read = hidden_rows(packed(rows), dtype, WIDTH, dtype)
    assert isinstance(read, PackedRows) is is_few
    assert tensor_of(read).dtype == DTYPES[dtype]
    assert torch.equal(tensor_of(read), rows)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_every_number_of_two_bytes_is_read_or_refused(dtype):
    numbers = torch.arange(1 << 16, dtype=torch.int32).to(torch.uint16).view(DTYPES[dtype])
    finite, others = numbers[numbers.isfinite()], numbers[~numbers.isfinite()]
    for part in finite.split(256):
        assert torch.equal(read_rows(packed(part), dtype, 1, dtype).flatten(), part)
    for number in others.split(1):
        with pytest.raises(SpecdraftError, match="row 1"):
            hidden_rows(packed(torch.cat((finite[:1], number))), dtype, 1, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("row", [0, 4])
def test_a_row_that_is_not_finite_is_named(dtype, value, row):
    rows = torch.ones(5, WIDTH).to(DTYPES[dtype])
    rows[row:, 3] = value
    with pytest.raises(SpecdraftError) as caught:
        read_rows(packed(rows), dtype, WIDTH, dtype)
    assert (caught.value.reason, caught.value.details) == ("HIDDEN_NOT_FINITE", {"row": str(row)})


@pytest.mark.parametrize("dtype", DTYPES)
def test_infinities_that_cancel_out_are_found(dtype):
    rows = torch.zeros(2, WIDTH).to(DTYPES[dtype])
    rows[1, 0], rows[1, 1] = math.inf, -math.inf
    with pytest.raises(SpecdraftError, match="row 1"):
        read_rows(packed(rows), dtype, WIDTH, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_largest_numbers_are_finite(dtype):
    largest = torch.finfo(DTYPES[dtype]).max
    rows = torch.full((1000, WIDTH), largest).to(DTYPES[dtype])
    assert torch.equal(read_rows(packed(rows), dtype, WIDTH, dtype), rows)


@given(st.binary(min_size=4 * WIDTH, max_size=4 * WIDTH * 3).map(lambda data: data[: len(data) // 24 * 24]))
def test_any_bytes_are_read_or_refused(data):
    numbers = struct.unpack(f"<{len(data) // 4}f", data)
    if all(map(math.isfinite, numbers)):
        assert read_rows(data, "float32", WIDTH, "float32").flatten().tolist() == list(numbers)
    else:
        with pytest.raises(SpecdraftError):
            read_rows(data, "float32", WIDTH, "float32")


@given(
    st.integers(1, 200).flatmap(
        lambda size: st.tuples(st.just(size), st.lists(st.sets(st.integers(0, size - 1)), min_size=1, max_size=3))
    )
)
def test_bit_id_mod_32_of_word_id_div_32_allows_an_id(case):
    vocab_size, rows = case
    words = []
    for allowed in rows:
        row = [0] * -(-vocab_size // 32)
        for token in allowed:
            row[token // 32] |= 1 << token % 32
        words += row
    mask = mask_rows(torch.tensor(words, dtype=torch.int64), vocab_size)
    assert mask.shape == (len(rows), vocab_size)
    assert [set(row.nonzero().flatten().tolist()) for row in mask] == rows


def test_bits_beyond_the_vocabulary_are_nothing():
    assert mask_rows(torch.tensor([0xFFFFFFFF, 0xFFFFFFFF]), 33).tolist() == [[True] * 33]


@pytest.mark.parametrize("dtype", DTYPES)
def test_an_embedding_is_packed_little_endian(dtype):
    embedding = torch.tensor([1.0, -2.5, 0.0])
    assert embedding_bytes(embedding, dtype) == packed(embedding.to(DTYPES[dtype]))


def test_a_number_too_large_for_the_heads_type_is_refused_where_it_arrives():
    rows = torch.zeros(3, WIDTH)
    rows[1, 2] = 3.4e38  # finite in float32, infinite in bfloat16
    assert torch.equal(read_rows(packed(rows), "float32", WIDTH, "float32"), rows)
    with pytest.raises(SpecdraftError) as caught:
        read_rows(packed(rows), "float32", WIDTH, "bfloat16")
    assert (caught.value.reason, caught.value.details["row"]) == ("HIDDEN_NOT_FINITE", "1")


def test_rows_come_in_the_heads_type():
    rows = torch.randn(3, WIDTH)
    assert torch.equal(read_rows(packed(rows), "float32", WIDTH, "bfloat16"), rows.bfloat16())
