"""Weights as others store them come out with the values that they mean, and what cannot be read is refused by name."""

import pytest
import torch

from drafter_kernels.quantize import (
    Fp8BlockWeight,
    Fp8Weight,
    Nvfp4Weight,
    dequantize_fp8,
    dequantize_fp8_blocks,
    dequantize_nvfp4,
    quantize_nvfp4,
    read_stored_weight,
)

E4M3 = torch.float8_e4m3fn


def random(*shape, seed=0):
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def modelopt(weight):
    """As modelopt writes NVFP4, from its definition and without our packing."""
    rows, columns = weight.shape
    scale_2 = weight.abs().max() / (6 * 448)
    blocks = weight.view(rows, columns // 16, 16)
    scales = (blocks.abs().amax(-1) / 6 / scale_2).to(E4M3)
    values = blocks / (scales.float() * scale_2)[..., None]
    levels = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    index = (values.abs()[..., None] - levels).abs().argmin(-1) + 8 * (values < 0)
    codes = index.view(rows, columns).to(torch.uint8)
    stored = {"weight": codes[:, 0::2] | codes[:, 1::2] << 4, "weight_scale": scales, "weight_scale_2": scale_2}
    meant = torch.cat((levels, -levels))[index] * scales.float()[..., None] * scale_2
    return stored, meant.view(rows, columns)


def test_nvfp4_of_modelopt_and_of_compressed_tensors_mean_the_same():
    stored, meant = modelopt(random(5, 48))
    ours = read_stored_weight(stored | {"input_scale": torch.tensor(3.0)})
    assert isinstance(ours, Nvfp4Weight)
    torch.testing.assert_close(dequantize_nvfp4(ours), meant, rtol=1e-6, atol=0)
    packed = {
        "weight_packed": stored["weight"],
        "weight_scale": stored["weight_scale"],
        "weight_global_scale": (1 / stored["weight_scale_2"]).reshape(1),
        "input_global_scale": torch.tensor([7.0]),
    }
    # The reciprocal of a reciprocal: two roundings.
    torch.testing.assert_close(dequantize_nvfp4(read_stored_weight(packed)), meant, rtol=1e-6, atol=0)


def test_what_we_quantise_is_read_back_to_the_bit():
    weight = quantize_nvfp4(random(4, 32))
    tensors = {"weight": weight.codes, "weight_scale": weight.block_scales, "weight_scale_2": weight.tensor_scale}
    assert torch.equal(dequantize_nvfp4(read_stored_weight(tensors)), dequantize_nvfp4(weight))


@pytest.mark.parametrize("shape", [(), (1,), (5,), (5, 1)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fp8_with_a_scale_for_the_tensor_or_for_each_row(shape, dtype):
    values, scales = random(5, 24).to(E4M3), (random(*shape, seed=1).abs() + 0.1).to(dtype)
    read = read_stored_weight({"weight": values, "weight_scale": scales})
    assert isinstance(read, Fp8Weight)
    assert torch.equal(dequantize_fp8(read), values.float() * scales.float().reshape(-1, 1))


@pytest.mark.parametrize("name", ["weight_scale", "weight_scale_inv"])
def test_fp8_with_a_scale_for_blocks_of_128_by_128(name):
    values, scales = random(130, 257).to(E4M3), random(2, 3, seed=1).abs() + 0.1
    read = read_stored_weight({"weight": values, name: scales})
    assert isinstance(read, Fp8BlockWeight)
    weight = dequantize_fp8_blocks(read)
    for row, column in ((0, 0), (127, 128), (128, 127), (129, 256)):
        assert weight[row, column] == values[row, column].float() * scales[row // 128, column // 128]


def test_a_plain_weight_is_itself():
    weight = random(3, 5).to(torch.bfloat16)
    assert read_stored_weight({"weight": weight}) is weight


def nvfp4(**changes):
    tensors = modelopt(random(4, 32))[0] | changes
    return {name: tensor for name, tensor in tensors.items() if tensor is not None}


FP8 = torch.ones(4, 32).to(E4M3)
NAN = torch.tensor(float("nan"))


@pytest.mark.parametrize(
    ("tensors", "words"),
    [
        ({}, ["weight is missing"]),
        ({"weight_scale": torch.ones(1)}, ["weight is missing", "weight_scale"]),
        ({"weight": FP8}, ["weight_scale is missing"]),
        ({"weight": FP8, "weight_scale_2": torch.ones(1)}, ["weight_scale is missing"]),
        ({"weight": FP8, "weight_scale": NAN}, ["weight_scale", "NaN"]),
        ({"weight": FP8, "weight_scale": torch.zeros(4)}, ["weight_scale", "zero"]),
        ({"weight": FP8, "weight_scale": torch.ones(3)}, ["weight_scale is [3]", "[1, 1]"]),
        ({"weight": FP8, "weight_scale": torch.ones(1, dtype=torch.int32)}, ["int32"]),
        ({"weight": FP8, "weight_scale_inv": torch.ones(2, 1)}, ["weight_scale_inv is [2, 1]"]),
        ({"weight": torch.ones(4, 32), "weight_scale": torch.ones(1)}, ["weight_scale", "not known"]),
        ({"weight": torch.ones(4, 32, dtype=torch.int8)}, ["int8"]),
        (nvfp4(weight_scale_2=None), ["weight_scale_2 is missing"]),
        (nvfp4(weight_scale=None), ["weight_scale is missing"]),
        (nvfp4(weight_zero_point=FP8), ["weight_zero_point", "not known"]),
        (nvfp4(weight_scale=torch.ones(4, 2)), ["weight_scale is float32"]),
        (nvfp4(weight_scale=torch.ones(4, 3).to(E4M3)), ["[4, 3]", "[4, 2]"]),
        (nvfp4(weight_scale=torch.full((4, 2), -1.0).to(E4M3)), ["weight_scale", "negative"]),
        (nvfp4(weight_scale_2=torch.ones(2)), ["weight_scale_2", "[2]"]),
        (nvfp4(weight_scale_2=torch.tensor(float("inf"))), ["weight_scale_2", "infinite"]),
        (nvfp4(weight=torch.ones(4, 15, dtype=torch.uint8)), ["[4, 15]"]),
    ],
    ids=str,
)
def test_what_cannot_be_read_is_refused_by_name(tensors, words):
    with pytest.raises(ValueError) as caught:
        read_stored_weight(tensors)
    assert all(word in str(caught.value) for word in words), caught.value
