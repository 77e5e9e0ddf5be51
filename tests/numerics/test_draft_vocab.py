"""Draft vocabularies: what is drafted is the best of the ids allowed, and control ids are always among them."""

import json
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from books import Books, write
from checkpoints import random_pairs, write_tiny_checkpoint
from drafter_service.engine import operations as ops
from drafter_service.heads import CheckpointError, LmHeadPrecision, load_head, oracle_draft, plan_head
from drafter_service.heads.control_ids import find_control_ids
from plain_kv import draft_steps

# Two float32 computations of a few hundred roundings, relative to the largest |logit|. The contract allows 1e-4.
FLOAT32_ERROR = 2e-5
NUM_PAIRS = 6


def list_of(directory, *lines):
    file = directory / "list.txt"
    file.write_text("\n".join(map(str, lines)))
    return f"ids:{file}"


def pairs_of(head, seed=0):
    tokens, hiddens = random_pairs(head.config, NUM_PAIRS, seed=seed)
    return tokens, hiddens, torch.arange(NUM_PAIRS)


def refusal(directory, draft_vocab):
    with pytest.raises(CheckpointError) as caught:
        plan_head(directory, draft_vocab=draft_vocab)
    text = str(caught.value)
    assert "\n" not in text
    assert text.startswith("--draft-vocab ")
    return text


@torch.inference_mode()
@pytest.mark.parametrize("tied", [False, True])
def test_logits_of_kept_ids_are_those_of_the_whole_head_and_the_others_cannot_win(tmp_path, tied):
    write_tiny_checkpoint(tmp_path, lm_head=not tied)
    ids = [3, 127, 64, 5, 90]
    whole, cut = load_head(tmp_path), load_head(tmp_path, draft_vocab=list_of(tmp_path, *ids))
    assert cut.weights.lm_head.shape == (5, 64)
    (ours,), (theirs,) = (list(draft_steps(head, *pairs_of(head), 1)) for head in (cut, whole))
    assert (ours[ids] - theirs[ids]).abs().max() < FLOAT32_ERROR * theirs.abs().max()
    assert torch.equal(ours.isinf().nonzero().flatten(), torch.tensor(sorted(set(range(128)) - set(ids))))


@torch.inference_mode()
@pytest.mark.parametrize("draft_vocab", ["first:9", "first:17", "first:127"])
@pytest.mark.parametrize("precision", [LmHeadPrecision.AS_STORED, LmHeadPrecision.NVFP4, LmHeadPrecision.FP8])
def test_the_oracle_follows_the_lever(tmp_path, draft_vocab, precision):
    head = load_head(write_tiny_checkpoint(tmp_path, seed=3), draft_vocab=draft_vocab, lm_head=precision)
    for seed in range(5):
        oracle = oracle_draft(head, *pairs_of(head, seed), 3)
        assert max(oracle.ids) < head.draft_vocab_size
        for step, logits in enumerate(draft_steps(head, *pairs_of(head, seed), 3)):
            if oracle.margins[step] < 1e-4:  # the contract's: rounding decides such a draft
                break
            assert int(logits.argmax()) == oracle.ids[step]
            kept = slice(head.draft_vocab_size)
            error = (logits[kept] - oracle.logits[step, kept]).abs().max() / oracle.logits[step, kept].abs().max()
            assert error < FLOAT32_ERROR


def test_margins_of_a_cut_vocabulary_are_numbers(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path), draft_vocab="first:17")
    assert all(0 < margin < 2 for margin in oracle_draft(head, *pairs_of(head), 3).margins)


def test_the_engine_drafts_kept_ids_with_log_probabilities_over_them_after_masking(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path, seed=5), draft_vocab=list_of(tmp_path, 7, 40, 41, 99))
    tokens, hiddens, _ = pairs_of(head)
    books = Books(head)
    try:
        for allowed, expected in (([7, 40, 41, 99], None), ([40, 98], 40), ([41], 41), ([0, 98], None)):
            mask = torch.zeros(1, 128, dtype=torch.bool)
            mask[0, allowed] = True
            sequence_id = books.open(20)
            operation = write(sequence_id, 1, 0, tokens.tolist(), hiddens, 1)
            masked = ops.Write(operation.session_id, sequence_id, 1, b"", operation.pairs, ops.DraftWish(1, masks=mask))
            (outcome,) = books.ask(masked)
            if not set(allowed) & {7, 40, 41, 99}:
                assert (outcome.drafts, outcome.stop) == ((), ops.Stop.GRAMMAR)
                continue
            (draft,), (logprob,) = outcome.drafts, outcome.logprobs
            assert draft in ({expected} if expected is not None else {7, 40, 41, 99})
            logits = oracle_draft(head, tokens, hiddens, torch.arange(NUM_PAIRS), 1).logits[0]
            wanted = logits.masked_fill(~mask[0], -math.inf).log_softmax(-1)[draft]
            assert logprob == pytest.approx(float(wanted), abs=1e-4)
    finally:
        books.close()


def test_padded_rows_never_win(tmp_path):
    write_tiny_checkpoint(tmp_path, padded_vocab=160, padding_value=50.0)
    head = load_head(tmp_path, draft_vocab="first:100")
    assert head.draft_vocab_size == 100
    assert max(oracle_draft(head, *pairs_of(head), 3).ids) < 100
    assert "expected a number from 1 to the vocabulary's 128" in refusal(tmp_path, "first:150")


def test_all_of_the_vocabulary_however_it_is_said_is_no_cut(tmp_path):
    write_tiny_checkpoint(tmp_path)
    whole = load_head(tmp_path)
    for text in ("all", "first:128", list_of(tmp_path, *range(128))):
        head = load_head(tmp_path, draft_vocab=text)
        assert head.weights.draft_ids is None
        assert head.fingerprint == whole.fingerprint
        assert head.levers["draft_vocab"] == "all"


def test_control_ids_of_every_file_are_added(tmp_path):
    head, target = tmp_path / "head", tmp_path / "target"
    changes = {"eos_token_id": 100, "image_token_id": 101, "pad_token_id": None, "bos_token_id": -1}
    write_tiny_checkpoint(head, own_embedding=False, lm_head=False, config_changes=changes)
    write_tiny_checkpoint(target, mtp=False, lm_head=False, nested_text_config=True)
    (target / "generation_config.json").write_text(json.dumps({"eos_token_id": [102, 103], "do_sample": False}))
    tokenizer = {"added_tokens": [{"id": 104, "content": "<|im_end|>"}], "model": {"vocab": {"a": 1, "</s>": 105}}}
    (target / "tokenizer.json").write_text(json.dumps(tokenizer))
    tokenizer_config = {
        "added_tokens_decoder": {"106": {"content": "<tool>"}, "5000": {"content": "beyond the vocabulary"}},
        "eos_token": {"content": "</s>"},
        "additional_special_tokens": ["a", "unknown"],
        "model_max_length": 10,
    }
    (target / "tokenizer_config.json").write_text(json.dumps(tokenizer_config))
    plan = plan_head(head, target, draft_vocab="first:1")
    assert plan.draft_vocab.ids == (0, 1, 100, 101, 102, 103, 104, 105, 106)
    assert any("9 ids, 8 of them control ids" in note for note in plan.notes)
    loaded = load_head(head, target, draft_vocab="first:1")
    assert loaded.draft_vocab_size == 9
    assert loaded.weight_bytes() == plan.weight_bytes


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("config.json", {"eos_token_id": "</s>"}, ["eos_token_id", "'</s>'"]),
        ("generation_config.json", {"eos_token_id": [1, None]}, ["eos_token_id", "None"]),
        ("tokenizer.json", {"added_tokens": {}}, []),
        ("tokenizer.json", {"added_tokens": [{"content": "x"}]}, ["added_tokens"]),
        ("tokenizer.json", {"added_tokens": 3}, ["added_tokens"]),
        ("tokenizer_config.json", {"added_tokens_decoder": {"x": {}}}, ["added_tokens_decoder", "'x'"]),
    ],
    ids=str,
)
def test_files_that_name_control_ids_wrongly_are_refused_rather_than_overlooked(tmp_path, name, content, words):
    (tmp_path / name).write_text(json.dumps(content))
    if not words:
        assert find_control_ids([tmp_path], 100) == set()
        return
    with pytest.raises(CheckpointError) as caught:
        find_control_ids([tmp_path], 100)
    assert all(word in str(caught.value) for word in [name, *words])


def test_lists_may_repeat_ids_and_have_empty_lines(tmp_path):
    write_tiny_checkpoint(tmp_path)
    assert plan_head(tmp_path, draft_vocab=list_of(tmp_path, 5, "", " 3 ", 5, "")).draft_vocab.ids == (3, 5)


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", ["holds no token id"]),
        (b"\n \n", ["holds no token id"]),
        (b"1\ntwo\n", ["line 2", "'two'"]),
        (b"1\n-2\n", ["line 2", "'-2'"]),
        (b"1.0\n", ["line 1"]),
        (b"1_0\n", ["line 1"]),
        (b"1 2\n", ["line 1"]),
        (b"128\n", ["line 1", "128", "vocabulary of 128"]),
        (b"1" * 5000, ["line 1", "outside"]),
        (b"\xff\xfe1\n", ["not a text"]),
        ("\u0663\n".encode(), ["not a text"]),
    ],
    ids=repr,
)
def test_lists_that_cannot_be_used_are_refused_in_one_line(tmp_path, content, words):
    write_tiny_checkpoint(tmp_path)
    file = tmp_path / "list.txt"
    file.write_bytes(content)
    text = refusal(tmp_path, f"ids:{file}")
    assert str(file) in text
    assert len(text) < 200 + len(str(file))
    assert all(word in text for word in words)


@pytest.mark.parametrize(
    "text", ["first:0", "first:129", "first:x", "first:", "first:" + "9" * 5000, "ids:", "some", ""]
)
def test_words_that_mean_nothing_are_refused(tmp_path, text):
    write_tiny_checkpoint(tmp_path)
    refusal(tmp_path, text)


def test_a_list_that_is_not_there_is_named(tmp_path):
    write_tiny_checkpoint(tmp_path)
    assert "No such file" in refusal(tmp_path, f"ids:{tmp_path / 'absent'}")
    assert "directory" in refusal(tmp_path, f"ids:{tmp_path}").lower()


@given(st.binary(max_size=40))
def test_whatever_a_list_holds_it_is_read_or_refused(tmp_path_factory, content):
    directory = tmp_path_factory.getbasetemp() / "any list"
    if not directory.exists():
        write_tiny_checkpoint(directory)
    (directory / "list.txt").write_bytes(content)
    try:
        plan = plan_head(directory, draft_vocab=f"ids:{directory / 'list.txt'}")
    except CheckpointError:
        return
    assert plan.draft_vocab is None or set(plan.draft_vocab.ids) <= set(range(128))
