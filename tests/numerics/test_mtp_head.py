import math
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import LM_HEAD, random_pairs, write_tiny_checkpoint
from drafter_service.heads import MtpHead, RecycleSource, load_head, oracle_draft
from drafter_service.heads.record import ConcatOrder, NormKind
from plain_kv import PlainKv, draft_steps

# Two float32 computations of a few hundred roundings, relative to the largest |logit|. The contract allows 1e-4.
FLOAT32_ERROR = 2e-5
# The contract's: a draft whose two best logits are closer than this is decided by rounding.
TIE = {torch.float32: 1e-4, torch.bfloat16: 2e-2}

SIZES = [
    {},
    {"vocab_size": 131, "hidden_size": 60, "num_heads": 3, "num_kv_heads": 1, "head_dim": 20, "intermediate_size": 77},
    {"num_heads": 2, "num_kv_heads": 2, "head_dim": 8, "partial_rotary_factor": 1.0},
]


def compare(head, tokens, hiddens, keys, num_drafts):
    """Follows one chain up to its first tie; returns how many positions that left out."""
    oracle = oracle_draft(head, tokens, hiddens, keys, num_drafts)
    for step, logits in enumerate(draft_steps(head, tokens, hiddens, keys, num_drafts)):
        if oracle.margins[step] < TIE[head.dtype]:
            return num_drafts - step
        assert int(logits.argmax()) == oracle.ids[step]
        if head.dtype is torch.float32:
            error = (logits - oracle.logits[step]).abs().max() / oracle.logits[step].abs().max()
            assert error < FLOAT32_ERROR
    return 0


@torch.inference_mode()
@pytest.mark.parametrize("sizes", SIZES)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_drafts_over_scattered_pages_equal_the_oracle(tmp_path, sizes, dtype):
    head = load_head(write_tiny_checkpoint(tmp_path, seed=1, dtype=dtype, **sizes))
    num_chains, num_drafts, skipped = 40, 3, 0
    for seed in range(num_chains):
        tokens, hiddens = random_pairs(head.config, 1 + seed, seed=seed)
        skipped += compare(head, tokens, hiddens, torch.arange(1 + seed), num_drafts)
    assert skipped <= 0.1 * num_chains * num_drafts


@torch.inference_mode()
def test_keys_with_gaps_attend_to_the_rows_present(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path, seed=2))
    tokens, hiddens = random_pairs(head.config, 9, seed=3)
    gapped = torch.tensor([0, 1, 2, 40, 41, 97, 98, 99, 100])
    assert compare(head, tokens, hiddens, gapped, 3) == 0
    dense = oracle_draft(head, tokens, hiddens, torch.arange(9), 1)
    assert not torch.allclose(oracle_draft(head, tokens, hiddens, gapped, 1).logits, dense.logits, atol=1e-3)


@torch.inference_mode()
def test_any_chunking_of_the_pairs_leaves_the_same_rows(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path))
    tokens, hiddens = random_pairs(head.config, 11)
    keys = torch.arange(11)
    oracle = oracle_draft(head, tokens, hiddens, keys, 1)
    for chunk in (1, 2, 5, 11):
        kv = PlainKv(head, page_rows=3)
        for part in torch.arange(11).split(chunk):
            x = head.absorb(tokens[part], hiddens[part], keys[part], kv)
        logits = head.finish(x[-1:], keys[-1:], kv).logits[0]
        assert (logits - oracle.logits[0]).abs().max() < FLOAT32_ERROR * oracle.logits.abs().max()


@torch.inference_mode()
@pytest.mark.parametrize("recycle", list(RecycleSource))
@pytest.mark.parametrize("concat", list(ConcatOrder))
@pytest.mark.parametrize("norm", list(NormKind))
def test_both_computations_follow_the_record(tmp_path, recycle, concat, norm):
    loaded = load_head(write_tiny_checkpoint(tmp_path, seed=4), recycle=recycle)
    record = replace(loaded.record, concat=concat, norm=norm, rope_position_offset=1)
    head = MtpHead(loaded.config, record, loaded.weights, "")
    tokens, hiddens = random_pairs(head.config, 6, seed=1)
    compare(head, tokens, hiddens, torch.arange(6), 3)
    changed = oracle_draft(head, tokens, hiddens, torch.arange(6), 3).logits
    as_loaded = oracle_draft(loaded, tokens, hiddens, torch.arange(6), 3).logits
    same = (concat, norm) == (ConcatOrder.EMBEDDING_HIDDEN, NormKind.ONE_PLUS_WEIGHT)
    # RoPE is relative: an offset of every key alone changes nothing but the rounding.
    assert torch.allclose(changed, as_loaded, rtol=0, atol=1e-3) == same


@torch.inference_mode()
def test_the_recycle_source_changes_the_second_draft_only(tmp_path):
    write_tiny_checkpoint(tmp_path, seed=4)
    tokens, hiddens = random_pairs(load_head(tmp_path).config, 6)
    post, pre = (
        oracle_draft(load_head(tmp_path, recycle=recycle), tokens, hiddens, torch.arange(6), 2).logits
        for recycle in (RecycleSource.POST_NORM, RecycleSource.PRE_NORM)
    )
    assert torch.equal(post[0], pre[0])
    assert not torch.allclose(post[1], pre[1], atol=1e-3)


@torch.inference_mode()
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
def test_hiddens_of_any_float_type_are_taken(tmp_path, rows):
    head = load_head(write_tiny_checkpoint(tmp_path))
    tokens, hiddens = random_pairs(head.config, rows)
    for dtype in (torch.bfloat16, torch.float16, torch.float64):
        given = hiddens.to(dtype)
        compare(head, tokens, given, torch.arange(rows), 2)


@torch.inference_mode()
def test_the_layout_and_the_embedding_are_the_checkpoints(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path, dtype="bfloat16"))
    layout = head.kv_layout()
    assert (layout.num_layers, layout.num_kv_heads, layout.head_dim, layout.dtype) == (1, 2, 16, torch.bfloat16)
    assert layout.row_bytes == head.config.kv_row_bytes == 128
    stored = load_file(tmp_path / "model.safetensors")["model.embed_tokens.weight"]
    assert torch.equal(head.embed(torch.tensor([0, 127, 3])), stored[[0, 127, 3]])


def with_only_negative_logits(directory, padding_value):
    """A head whose final state is all ones, so that id 17 has the logit -1 and every other id one in [-5, -2]."""
    write_tiny_checkpoint(directory, padded_vocab=160, padding_value=padding_value)
    tensors = load_file(directory / "model.safetensors")
    hidden = tensors["mtp.norm.weight"].numel()
    # One coordinate of the residual dwarfs the others: after the norm it is sqrt(hidden), whatever the pair.
    tensors["mtp.fc.weight"][0] = 0.0
    tensors["mtp.layers.0.mlp.down_proj.weight"].zero_()
    tensors["mtp.layers.0.self_attn.o_proj.weight"].zero_()
    tensors["mtp.fc.weight"].zero_()
    tensors["mtp.fc.weight"][:, hidden:] = torch.eye(hidden)
    tensors["mtp.pre_fc_norm_hidden.weight"].zero_()
    tensors["mtp.norm.weight"].zero_()
    logits = torch.linspace(-5, -2, 128)
    logits[17] = -1.0
    # The state is (sqrt(hidden), 0, 0, ...) for a hidden along the first axis.
    tensors[LM_HEAD][:128] = 0.0
    tensors[LM_HEAD][:128, 0] = logits / math.sqrt(hidden)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return load_head(directory)


@torch.inference_mode()
@pytest.mark.parametrize("padding_value", [0.0, math.nan])
def test_padding_rows_of_the_output_head_never_win(tmp_path, padding_value):
    head = with_only_negative_logits(tmp_path, padding_value)
    tokens, _ = random_pairs(head.config, 3)
    hiddens = torch.zeros(3, head.config.hidden_size)
    hiddens[:, 0] = 1.0
    keys = torch.arange(3)
    oracle = oracle_draft(head, tokens, hiddens, keys, 3)
    assert oracle.ids == [17, 17, 17]
    for logits in draft_steps(head, tokens, hiddens, keys, 3):
        assert logits.shape == (128,)
        assert bool(((logits >= -5.01) & (logits <= -0.99)).all())
        assert int(logits.argmax()) == 17
        assert logits.softmax(-1).sum() == pytest.approx(1, abs=1e-6)


@torch.inference_mode()
def test_the_oracle_reports_log_probabilities_and_margins_of_its_drafts(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path))
    tokens, hiddens = random_pairs(head.config, 5)
    draft = oracle_draft(head, tokens, hiddens, torch.arange(5), 3)
    for step, logits in enumerate(draft.logits):
        top = logits.sort(descending=True).values
        assert draft.ids[step] == int(logits.argmax())
        assert draft.logprobs[step] == pytest.approx(float(logits.log_softmax(-1).max()), abs=1e-5)
        assert draft.margins[step] == pytest.approx(float((top[0] - top[1]) / logits.abs().max()), rel=1e-5)
    assert oracle_draft(head, tokens, hiddens, torch.arange(5), 0).logits.shape == (0, 128)


@torch.inference_mode()
def test_a_row_that_is_missing_or_wrong_shows_in_the_drafts(tmp_path):
    # Guards the fixtures: with weak attention every cache fault would pass unseen.
    head = load_head(write_tiny_checkpoint(tmp_path))
    changed = 0
    for seed in range(20):
        tokens, hiddens = random_pairs(head.config, 8, seed=seed)
        keys = torch.arange(8)
        whole = oracle_draft(head, tokens, hiddens, keys, 3).ids
        changed += whole != oracle_draft(head, tokens[1:], hiddens[1:], keys[1:], 3).ids
    assert changed >= 5
