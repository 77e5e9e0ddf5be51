"""Projections are rounded once, at load: which ones, to which numbers, and what tells of it."""

from pathlib import Path

import pytest
import torch

from checkpoints import write_tiny_checkpoint
from drafter_kernels.quantize import dequantize_fp8, dequantize_nvfp4, quantize_fp8, quantize_nvfp4
from drafter_service.heads import BodyPrecision, MtpHead, load_head

ROUNDED = {
    BodyPrecision.FP8: {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
    BodyPrecision.NVFP4: {"q_proj", "o_proj", "gate_proj", "up_proj", "down_proj"},
}
ROUND = {
    BodyPrecision.FP8: lambda weight: dequantize_fp8(quantize_fp8(weight)),
    BodyPrecision.NVFP4: lambda weight: dequantize_nvfp4(quantize_nvfp4(weight)),
}


@pytest.fixture
def stored(tmp_path: Path) -> MtpHead:
    write_tiny_checkpoint(tmp_path, seed=3)
    return load_head(tmp_path)


@pytest.mark.parametrize("precision", list(ROUNDED))
def test_the_projections_of_a_precision_are_rounded_and_no_others(tmp_path, stored, precision):
    head = load_head(tmp_path, quantization=precision)
    layer, plain = vars(head.weights.layers[0]), vars(stored.weights.layers[0])
    for role, weight in plain.items():
        expected = ROUND[precision](weight) if role in ROUNDED[precision] else weight
        assert torch.equal(layer[role], expected), role
        assert (role in ROUNDED[precision]) == (not torch.equal(layer[role], weight)), role
    is_joined = precision is BodyPrecision.FP8
    join = stored.weights.join_proj
    assert torch.equal(head.weights.join_proj, ROUND[precision](join) if is_joined else join)
    assert torch.equal(head.weights.lm_head, stored.weights.lm_head)


def test_levers_and_fingerprint_tell_of_it(tmp_path, stored):
    heads = [stored, *(load_head(tmp_path, quantization=precision) for precision in ROUNDED)]
    assert [head.levers["quantization"] for head in heads] == ["as-stored", "fp8", "nvfp4"]
    assert len({head.fingerprint for head in heads}) == 3
    assert load_head(tmp_path).fingerprint == stored.fingerprint
