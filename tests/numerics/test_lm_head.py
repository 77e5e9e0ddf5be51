"""The LM head's precision: what it changes, what it must not change, and that it is told."""

import pytest
import torch

from checkpoints import random_pairs, write_tiny_checkpoint
from drafter_kernels.quantize import dequantize_nvfp4, quantize_nvfp4
from drafter_service.heads import CheckpointError, LmHeadPrecision, load_head, oracle_draft, plan_head
from drafter_service.heads import lm_head as lm_head_module
from drafter_service.heads.levers import resolve_lm_head
from drafter_service.heads.lm_head import make_lm_head
from plain_kv import draft_steps

AS_STORED, FLOAT32, BF16, FP8, NVFP4 = LmHeadPrecision

# Relative Frobenius errors of these tables, bounded by the formats: half a step of E2M1, E4M3 and bf16.
ERRORS = {BF16: (1e-3, 2**-8), FP8: (0.01, 2**-4), NVFP4: (0.05, 2**-2)}


@torch.inference_mode()
@pytest.mark.parametrize("precision", list(ERRORS))
@pytest.mark.parametrize("tied", [False, True])
def test_only_the_lm_head_is_rounded_and_the_error_is_told(tmp_path, precision, tied):
    write_tiny_checkpoint(tmp_path, lm_head=not tied)
    exact, rounded = load_head(tmp_path), load_head(tmp_path, lm_head=precision)
    assert torch.equal(rounded.weights.embedding, exact.weights.embedding)
    assert torch.equal(rounded.weights.join_proj, exact.weights.join_proj)
    error = (rounded.weights.lm_head - exact.weights.lm_head).norm() / exact.weights.lm_head.norm()
    low, high = ERRORS[precision]
    assert low < error < high
    assert float(rounded.levers["lm_head_error"]) == pytest.approx(float(error), rel=0.05)  # two digits are told
    assert rounded.levers["lm_head"] == precision
    assert rounded.weight_bytes() == plan_head(tmp_path, lm_head=precision).weight_bytes


@torch.inference_mode()
@pytest.mark.parametrize("precision", list(LmHeadPrecision))
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_forward_equals_the_oracle_at_every_precision(tmp_path, precision, dtype):
    head = load_head(write_tiny_checkpoint(tmp_path, seed=2, dtype=dtype), lm_head=precision)
    assert head.weights.lm_head.dtype == (torch.float32 if precision is FLOAT32 else head.dtype)
    tie = {"float32": 1e-4, "bfloat16": 2e-2}[dtype]  # the contract's: rounding decides such a draft
    compared = 0
    for seed in range(8):
        tokens, hiddens = random_pairs(head.config, 5, seed=seed)
        oracle = oracle_draft(head, tokens, hiddens, torch.arange(5), 2)
        for step, logits in enumerate(draft_steps(head, tokens, hiddens, torch.arange(5), 2)):
            if oracle.margins[step] < tie:
                break
            assert int(logits.argmax()) == oracle.ids[step]
            compared += 1
    assert compared >= 12


def test_nvfp4_is_the_specification_s_whatever_the_parts(tmp_path, monkeypatch):
    exact = load_head(write_tiny_checkpoint(tmp_path)).weights.lm_head
    expected = dequantize_nvfp4(quantize_nvfp4(exact))
    monkeypatch.setattr(lm_head_module, "_CHUNK_ROWS", 50)
    assert torch.equal(make_lm_head(exact, NVFP4, torch.float32).table, expected)


def test_a_stored_lm_head_that_the_head_s_type_cannot_hold_says_how_much_is_lost(tmp_path):
    write_tiny_checkpoint(tmp_path, dtype="float32")
    narrow = load_head(tmp_path, dtype=torch.bfloat16)
    assert 1e-3 < float(narrow.levers["lm_head_error"]) < 2**-8
    assert load_head(tmp_path, dtype=torch.bfloat16, lm_head=FLOAT32).levers["lm_head_error"] == "0"
    assert load_head(tmp_path).levers["lm_head_error"] == "0"


def test_as_stored_a_tied_lm_head_is_the_embedding_itself(tmp_path):
    weights = load_head(write_tiny_checkpoint(tmp_path, lm_head=False)).weights
    assert weights.lm_head.data_ptr() == weights.embedding.data_ptr()


def test_fingerprints_tell_heads_apart_that_draft_differently(tmp_path):
    write_tiny_checkpoint(tmp_path)
    heads = [load_head(tmp_path, lm_head=precision) for precision in (AS_STORED, FP8, NVFP4)]
    heads += [load_head(tmp_path, draft_vocab=text) for text in ("first:100", "first:101")]
    assert len({head.fingerprint for head in heads}) == 5
    assert load_head(tmp_path, lm_head=None).fingerprint == heads[0].fingerprint


@pytest.mark.parametrize(
    ("wish", "device", "hidden_size", "precision"),
    [
        (None, "cpu", 64, AS_STORED),
        (None, "cuda", 64, NVFP4),
        (None, "cuda", 60, AS_STORED),
        (FP8, "cuda", 64, FP8),
        (NVFP4, "cpu", 64, NVFP4),
    ],
)
def test_auto_is_nvfp4_on_a_gpu_and_as_stored_elsewhere(wish, device, hidden_size, precision):
    assert resolve_lm_head(wish, device, hidden_size) is precision


def test_a_hidden_size_that_blocks_do_not_divide_is_refused_before_a_tensor_is_read(tmp_path):
    write_tiny_checkpoint(tmp_path, hidden_size=60)
    with pytest.raises(CheckpointError, match="--lm-head nvfp4: hidden_size 60"):
        plan_head(tmp_path, lm_head=NVFP4)
    plan_head(tmp_path, lm_head=FP8)
    plan_head(tmp_path, lm_head=None)
