"""NVFP4 and FP8: the formats bit by bit, how they round, and that a second round trip changes nothing."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from drafter_kernels.quantize import (
    Fp8Weight,
    Nvfp4Weight,
    dequantize_fp8,
    dequantize_nvfp4,
    nvfp4_tensor_scale,
    quantize_fp8,
    quantize_nvfp4,
)

MAGNITUDES = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
SMALLEST_E4M3 = 2.0**-9
FLOAT32 = torch.finfo(torch.float32)

# Relative Frobenius error of normal weights, measured over 2 million: 0.0950 and 0.0264. Elements scatter far less
# than the last digit.
NVFP4_ERROR = 0.0955
FP8_ERROR = 0.0270


def one_block(*values):
    """A weight of one block that begins with these values."""
    return torch.tensor([[*values, *[0.0] * (16 - len(values))]])


def scaled(*values):
    """One block whose tensor scale is 2^-6 and whose block scale is 64, so that an element is its own code's value."""
    weight = torch.zeros(2, 16)
    weight[0] = one_block(*values)[0]
    weight[0, 15] = 6  # block absmax / (6 * 2^-6) = 64
    weight[1, 15] = 6 * 448 * 2.0**-6
    return weight


def nibbles(weight):
    return torch.stack((weight.codes & 15, weight.codes >> 4), dim=-1).flatten(1)


def test_every_code_is_the_value_of_the_format_and_the_low_nibble_is_the_even_index():
    codes = torch.arange(16, dtype=torch.uint8).view(1, 8, 2)
    packed = codes[..., 0] | codes[..., 1] << 4
    assert packed[0, 0] == 0x10
    block_scales = torch.tensor([[2.0]]).to(torch.float8_e4m3fn)
    values = dequantize_nvfp4(Nvfp4Weight(packed, block_scales, torch.tensor(0.25)))
    expected = [0.5 * magnitude for magnitude in MAGNITUDES] + [-0.5 * magnitude for magnitude in MAGNITUDES]
    assert values[0].tolist() == expected


def test_values_of_the_format_are_stored_exactly():
    values = [*MAGNITUDES[1:], *[-magnitude for magnitude in MAGNITUDES[1:]]]
    quantized = quantize_nvfp4(scaled(*values))
    assert quantized.tensor_scale == 2.0**-6
    assert quantized.block_scales.float().tolist() == [[64.0], [448.0]]
    assert nibbles(quantized)[0].tolist() == [*range(1, 8), *range(9, 16), 0, 7]
    assert torch.equal(dequantize_nvfp4(quantized), scaled(*values))


@pytest.mark.parametrize(
    ("value", "stored"),
    [(0.25, 0), (0.75, 1), (1.25, 1), (1.75, 2), (2.5, 2), (3.5, 4), (5, 4)],
)
def test_halves_go_to_the_even_code_and_their_neighbours_to_the_nearest(value, stored):
    below, above = (float(torch.tensor(value).nextafter(torch.tensor(end))) for end in (0.0, 9.0))
    back = dequantize_nvfp4(quantize_nvfp4(scaled(value, below, above, -value)))[0]
    lower = max(magnitude for magnitude in MAGNITUDES if magnitude < value)
    upper = min(magnitude for magnitude in MAGNITUDES if magnitude > value)
    assert back[:4].tolist() == [stored, lower, upper, -stored]


def test_zeros_have_no_sign_and_a_block_of_zeros_no_scale():
    quantized = quantize_nvfp4(torch.cat((scaled(-0.0, -0.1, 1.0), torch.full((2, 16), -0.0))))
    assert nibbles(quantized)[0, :2].tolist() == [0, 0]
    assert quantized.block_scales.float()[2:].tolist() == [[0.0], [0.0]]
    assert not dequantize_nvfp4(quantized)[2:].any()
    assert not dequantize_nvfp4(quantized)[2:].signbit().any()


def test_a_tensor_of_zeros_stays_one():
    zeros = torch.zeros(3, 32)
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(zeros)), zeros)
    assert torch.equal(dequantize_fp8(quantize_fp8(zeros)), zeros)
    assert nvfp4_tensor_scale(zeros) > 0


@pytest.mark.parametrize("units", [0.01, 0.3, 0.51, 0.9, 1.0, 1.2, 1.5, 1.6, 1.7, 2.4, 2.5, 3.5, 7.5])
def test_blocks_with_subnormal_scales_keep_their_largest_element(units):
    """`units`: the block's ideal scale in steps of the smallest E4M3 number."""
    tensor_scale = 2.0**-3
    weight = torch.zeros(2, 16)
    weight[0, 0] = 6 * 448 * tensor_scale
    step = SMALLEST_E4M3 * tensor_scale
    weight[1] = torch.linspace(-6 * units * step, 6 * units * step, 16)
    quantized = quantize_nvfp4(weight)
    assert 0 < quantized.block_scales[1].float() <= 8 * SMALLEST_E4M3
    back = dequantize_nvfp4(quantized)
    # A code's neighbours are at most 2 apart: half of that, in scales of at most 8 steps; or what 6 cannot hold.
    assert (back[1] - weight[1]).abs().max() <= max(quantized.block_scales[1].float() * tensor_scale, 4 * step)
    assert torch.equal(dequantize_nvfp4(quantize_nvfp4(back)), back)


@given(st.integers(0, 2**32), st.floats(-45, 38), st.floats(0, 8))
def test_a_second_round_trip_changes_no_bit(seed, exponent, spread):
    generator = torch.Generator().manual_seed(seed)
    rows = torch.exp(spread * torch.randn(6, 1, generator=generator))
    weight = (torch.randn(6, 48, generator=generator) * rows * 10.0**exponent).clamp(-FLOAT32.max, FLOAT32.max)
    once, fp8_once = quantize_nvfp4(weight), quantize_fp8(weight)
    twice, fp8_twice = quantize_nvfp4(dequantize_nvfp4(once)), quantize_fp8(dequantize_fp8(fp8_once))
    assert torch.equal(dequantize_nvfp4(twice), dequantize_nvfp4(once))
    assert torch.equal(dequantize_fp8(fp8_twice), dequantize_fp8(fp8_once))
    assert dequantize_nvfp4(once).isfinite().all()
    assert dequantize_fp8(fp8_once).isfinite().all()


@pytest.mark.parametrize("largest", [FLOAT32.max, 1e30, 1e-30, FLOAT32.tiny, 1e-44])
def test_the_largest_element_survives_at_any_magnitude(largest):
    weight = one_block(largest, -largest, largest / 2)
    for back in (dequantize_nvfp4(quantize_nvfp4(weight)), dequantize_fp8(quantize_fp8(weight))):
        assert back.isfinite().all()
        # Below 3e-35 the scales stay normal numbers, and the elements' steps no longer shrink with them.
        tolerance = max(1e-6 * largest, 448 * FLOAT32.tiny)
        assert abs(float(back[0, 0]) - largest) <= tolerance
        assert back[0, 1] == -back[0, 0]


def test_fp8_is_e4m3_with_a_scale_a_row():
    weight = torch.tensor([[448.0, -17.0, 16.5, 2.0**-9], [0.0, 4.48, -1.0, 0.01]])
    quantized = quantize_fp8(weight)
    assert isinstance(quantized, Fp8Weight)
    assert quantized.values.dtype == torch.float8_e4m3fn
    assert torch.equal(quantized.row_scales, torch.tensor([448.0, 4.48]) / 448)
    # Between 16 and 32 E4M3 counts in twos: 17 is halfway, and 16 has the even mantissa.
    assert dequantize_fp8(quantized)[0].tolist() == [448.0, -16.0, 16.0, 2.0**-9]


def test_the_error_of_normal_weights_is_the_format_s():
    weight = torch.randn(200, 512, generator=torch.Generator().manual_seed(1))
    assert 0.9 * NVFP4_ERROR < (dequantize_nvfp4(quantize_nvfp4(weight)) - weight).norm() / weight.norm() < NVFP4_ERROR
    assert 0.9 * FP8_ERROR < (dequantize_fp8(quantize_fp8(weight)) - weight).norm() / weight.norm() < FP8_ERROR


def test_parts_with_the_scale_of_the_whole_are_parts_of_the_whole():
    weight = torch.randn(10, 64, generator=torch.Generator().manual_seed(2)).to(torch.bfloat16)
    whole, scale = quantize_nvfp4(weight), nvfp4_tensor_scale(weight)
    parts = [quantize_nvfp4(part, scale) for part in weight.split(3)]
    assert torch.equal(torch.cat([part.codes for part in parts]), whole.codes)
    assert torch.equal(torch.cat([dequantize_nvfp4(part) for part in parts]), dequantize_nvfp4(whole))


def test_nvfp4_takes_four_and_a_half_bits_and_fp8_eight():
    weight = torch.ones(8, 64)
    assert quantize_nvfp4(weight).num_bytes == 8 * 64 * 9 // 16 + 4
    assert quantize_fp8(weight).num_bytes == 8 * 64 + 8 * 4


@pytest.mark.parametrize(
    ("weight", "words"),
    [
        (torch.ones(3, 24), ["quantize_nvfp4", "24", "16"]),
        (torch.ones(16), ["quantize_nvfp4", "[16]"]),
        (torch.ones(0, 16), ["[0, 16]"]),
        (torch.ones(3, 16, dtype=torch.int32), ["int32"]),
        (one_block(float("nan")), ["NaN"]),
        (one_block(float("inf")), ["infinity"]),
    ],
    ids=str,
)
def test_what_cannot_be_quantised_is_refused_by_name(weight, words):
    with pytest.raises(ValueError) as caught:
        quantize_nvfp4(weight)
    assert all(word in str(caught.value) for word in words)
    if words[1:] != ["24", "16"]:
        with pytest.raises(ValueError, match="quantize_fp8"):
            quantize_fp8(weight)
