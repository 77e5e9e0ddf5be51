import contextlib
import json
import math
import random
import struct
import subprocess
import sys
import textwrap
import time

import pytest
import torch
from safetensors.torch import load_file, save_file

from checkpoints import (
    EMBEDDING,
    LAYOUTS,
    LM_HEAD,
    TinyShape,
    tiny_mtp_tensors,
    tiny_tables,
    write_tensors,
    write_tiny_checkpoint,
)
from drafter_service.heads import Checkpoint, CheckpointError, load_head, plan_head

INDEX = "model.safetensors.index.json"


def refusal(directory, target=None):
    with pytest.raises(CheckpointError) as caught:
        plan_head(directory, target)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def rewrite(directory, change):
    """Applies `change` to the dictionary of stored tensors."""
    tensors = load_file(directory / "model.safetensors")
    change(tensors)
    save_file(tensors, directory / "model.safetensors", metadata={"format": "pt"})
    return directory


def raw_file(path, header, data=b""):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("nested", [False, True])
def test_every_layout_of_the_same_tensors_is_the_same_head(tmp_path, layout, nested):
    plain = write_tiny_checkpoint(tmp_path / "plain", seed=5)
    other = write_tiny_checkpoint(tmp_path / "other", seed=5, layout=layout, nested_text_config=nested)
    assert load_head(other).fingerprint == load_head(plain).fingerprint


def test_tensors_that_the_index_omits_are_used_with_a_note(tmp_path):
    plan = plan_head(write_tiny_checkpoint(tmp_path, layout="sharded_index_omits_mtp"))
    omitted = [note for note in plan.notes if "index omits" in note]
    assert omitted
    assert "mtp." in omitted[0]
    assert "-of-00002.safetensors" in omitted[0]


def test_a_sidecar_file_that_no_index_names_is_used_with_a_note(tmp_path):
    write_tiny_checkpoint(tmp_path, mtp=False)
    save_file(tiny_mtp_tensors(TinyShape(), 0), tmp_path / "mtp.safetensors")
    assert any("no index" in note for note in plan_head(tmp_path).notes)


def test_a_config_that_promises_a_head_without_its_tensors_is_refused_naming_the_prefix(tmp_path):
    assert "mtp.*" in refusal(write_tiny_checkpoint(tmp_path, mtp=False))


def test_an_index_that_names_a_missing_file_is_refused_naming_it(tmp_path):
    write_tiny_checkpoint(tmp_path, layout="sharded")
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    text = refusal(tmp_path)
    assert "model-00002-of-00002.safetensors" in text
    assert "does not exist" in text


@pytest.mark.parametrize("name", sorted(tiny_mtp_tensors(TinyShape(), 0)))
def test_a_missing_tensor_is_refused_by_name(tmp_path, name):
    assert f"missing {name}" in refusal(rewrite(write_tiny_checkpoint(tmp_path), lambda tensors: tensors.pop(name)))


@pytest.mark.parametrize("kept", [0, 7, 8, 100, 5000, -1])
def test_a_file_cut_short_is_refused_by_name(tmp_path, kept):
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    text = refusal(tmp_path)
    assert str(file) in text
    assert "cut short" in text


def test_bytes_after_the_last_tensor_are_refused(tmp_path):
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    file.write_bytes(file.read_bytes() + b"x")
    assert "1 bytes after the last tensor" in refusal(tmp_path)


def test_an_unknown_extra_head_tensor_is_refused_by_name(tmp_path):
    def add(tensors):
        tensors["mtp.layers.0.self_attn.sinks"] = torch.zeros(4)

    assert "mtp.layers.0.self_attn.sinks" in refusal(rewrite(write_tiny_checkpoint(tmp_path), add))


def test_tensors_of_the_target_beside_the_head_are_none_of_its_business(tmp_path):
    def add(tensors):
        tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(4, 4).to(torch.float8_e4m3fn)

    plan_head(rewrite(write_tiny_checkpoint(tmp_path), add))


def test_a_misshapen_tensor_is_refused_by_name_and_both_shapes(tmp_path):
    def change(tensors):
        tensors["mtp.fc.weight"] = torch.zeros(64, 64)

    text = refusal(rewrite(write_tiny_checkpoint(tmp_path), change))
    assert "mtp.fc.weight is (64, 64), expected (64, 128)" in text


@pytest.mark.parametrize(
    ("dtype", "stored"), [(torch.float8_e5m2, "F8_E5M2"), (torch.float16, "F16"), (torch.uint8, "U8")]
)
def test_a_stored_type_that_is_not_supported_is_refused_by_tensor(tmp_path, dtype, stored):
    def change(tensors):
        tensors["mtp.layers.0.mlp.up_proj.weight"] = tensors["mtp.layers.0.mlp.up_proj.weight"].to(dtype)
        # What a quantised export adds: the reason must still be the weight, not its scale.
        tensors["mtp.layers.0.mlp.up_proj.weight_scale_inv"] = torch.ones(1, 1)

    text = refusal(rewrite(write_tiny_checkpoint(tmp_path), change))
    assert "mtp.layers.0.mlp.up_proj.weight" in text
    assert stored in text


def test_a_quantised_target_whose_head_is_not_quantised_loads_as_stored(tmp_path):
    changes = {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["mtp*"]}}
    head = load_head(write_tiny_checkpoint(tmp_path, dtype="bfloat16", config_changes=changes))
    assert head.dtype is torch.bfloat16


@pytest.mark.parametrize(
    "header",
    [
        b"not json",
        b"\xff\xfe",
        b"[" * 100_000,
        [],
        {"t": 1},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [0]}},
        {"t": {"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2], "data_offsets": [8, 0]}},
        {"t": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}},
        {"t": {"dtype": "F32", "shape": [10**30], "data_offsets": [0, 4 * 10**30]}},
    ],
)
def test_a_damaged_header_is_refused_naming_the_file(tmp_path, header):
    raw_file(tmp_path / "model.safetensors", header, bytes(8))
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        Checkpoint.open(tmp_path)


def test_damage_anywhere_in_the_header_is_refused_or_harmless(tmp_path):
    file = write_tiny_checkpoint(tmp_path) / "model.safetensors"
    whole = file.read_bytes()
    header_bytes = 8 + struct.unpack("<Q", whole[:8])[0]
    generator = random.Random(1)
    refused = 0
    for _ in range(300):
        damaged = bytearray(whole)
        damaged[generator.randrange(header_bytes)] = generator.randrange(256)
        file.write_bytes(damaged)
        # Any other exception fails the test.
        with contextlib.suppress(CheckpointError):
            plan_head(tmp_path)
            refused -= 1
        refused += 1
    assert refused > 200


def test_a_header_longer_than_its_file_is_refused_without_reading_it(tmp_path):
    (tmp_path / "model.safetensors").write_bytes(struct.pack("<Q", 2**63) + b"{}")
    with pytest.raises(CheckpointError, match="cannot hold its header"):
        Checkpoint.open(tmp_path)


@pytest.mark.parametrize(
    "index",
    [
        {},
        {"weight_map": []},
        {"weight_map": {"t": 1}},
        {"weight_map": {"t": "../model.safetensors"}},
        {"weight_map": {"t": "/etc/passwd"}},
        {"weight_map": {"elsewhere": "model.safetensors"}},
    ],
)
def test_a_damaged_index_is_refused_naming_it(tmp_path, index):
    write_tiny_checkpoint(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"index\.json"):
        Checkpoint.open(tmp_path)


def test_a_name_in_two_files_is_the_indexs_to_decide(tmp_path):
    write_tiny_checkpoint(tmp_path)
    save_file({LM_HEAD: torch.zeros(128, 64)}, tmp_path / "old.safetensors")
    assert LM_HEAD in refusal(tmp_path)
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {LM_HEAD: "model.safetensors"}}))
    assert Checkpoint.open(tmp_path).tensors[LM_HEAD].file.name == "model.safetensors"


def test_a_file_written_for_another_norm_convention_is_refused(tmp_path):
    write_tiny_checkpoint(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "mlx"})
    assert "MLX" in refusal(tmp_path)


def test_a_directory_without_weights_or_at_all_is_refused(tmp_path):
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "nowhere")
    with pytest.raises(CheckpointError, match=r"no \*\.safetensors"):
        Checkpoint.open(tmp_path)
    assert "config.json" in refusal(tmp_path)


def test_a_head_without_tables_takes_the_targets(tmp_path):
    own = write_tiny_checkpoint(tmp_path / "own", seed=3)
    head = write_tiny_checkpoint(tmp_path / "head", seed=3, own_embedding=False, lm_head=False)
    target = write_tiny_checkpoint(tmp_path / "target", seed=3, mtp=False, nested_text_config=True)
    loaded = load_head(head, target)
    assert torch.equal(loaded.weights.embedding, load_head(own).weights.embedding)
    assert loaded.fingerprint == load_head(own).fingerprint
    assert "--target-checkpoint" in refusal(head)


def test_the_heads_own_tables_come_before_the_targets(tmp_path):
    head = write_tiny_checkpoint(tmp_path / "head", seed=3)
    target = write_tiny_checkpoint(tmp_path / "target", seed=4, mtp=False)
    assert load_head(head, target).fingerprint == load_head(head).fingerprint


def test_a_stored_lm_head_wins_over_a_tie_flag(tmp_path):
    write_tiny_checkpoint(tmp_path, seed=2, nested_text_config=True)
    document = json.loads((tmp_path / "config.json").read_text())
    document["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(document))
    plan = plan_head(tmp_path)
    assert not plan.tied
    document["text_config"]["tie_word_embeddings"] = True
    (tmp_path / "config.json").write_text(json.dumps(document))
    plan = plan_head(tmp_path)
    assert not plan.tied
    assert any("the tensor is used" in note for note in plan.notes)
    stored = load_file(tmp_path / "model.safetensors")[LM_HEAD]
    assert torch.equal(load_head(tmp_path).weights.lm_head, stored)


def test_a_tied_head_shares_one_table(tmp_path):
    head = load_head(write_tiny_checkpoint(tmp_path, lm_head=False))
    assert head.weights.lm_head is head.weights.embedding
    assert head.weight_bytes() == plan_head(tmp_path).weight_bytes


def test_the_targets_tie_flag_speaks_for_the_targets_tables(tmp_path):
    head = write_tiny_checkpoint(
        tmp_path / "head", own_embedding=False, lm_head=False, config_changes={"tie_word_embeddings": False}
    )
    target = write_tiny_checkpoint(tmp_path / "target", mtp=False, lm_head=False)
    plan = plan_head(head, target)
    assert plan.tied
    assert any("target's config" in note for note in plan.notes)


def test_an_lm_head_that_is_nowhere_and_not_tied_is_refused(tmp_path):
    changes = {"tie_word_embeddings": False}
    assert LM_HEAD in refusal(write_tiny_checkpoint(tmp_path, lm_head=False, config_changes=changes))


def test_another_target_is_refused_with_both_sizes(tmp_path):
    head = write_tiny_checkpoint(tmp_path / "head", own_embedding=False, lm_head=False)
    target = write_tiny_checkpoint(tmp_path / "target", mtp=False, vocab_size=131)
    text = refusal(head, target)
    assert "131" in text
    assert "128" in text


def test_rows_beyond_the_vocabulary_are_noted_and_not_loaded(tmp_path):
    padded = write_tiny_checkpoint(tmp_path / "padded", seed=1, padded_vocab=160, padding_value=math.nan)
    exact = write_tiny_checkpoint(tmp_path / "exact", seed=1)
    assert any("32 rows beyond the vocabulary of 128" in note for note in plan_head(padded).notes)
    head = load_head(padded)
    assert head.weights.embedding.shape == head.weights.lm_head.shape == (128, 64)
    assert head.fingerprint == load_head(exact).fingerprint


def test_fewer_rows_than_the_vocabulary_are_refused(tmp_path):
    write_tiny_checkpoint(tmp_path)
    tables = tiny_tables(TinyShape(), 0, 128, 0.0)
    short = {EMBEDDING: tables[EMBEDDING], LM_HEAD: tables[LM_HEAD][:127].contiguous()}
    write_tensors(tmp_path, tiny_mtp_tensors(TinyShape(), 0) | short)
    text = refusal(tmp_path)
    assert LM_HEAD in text
    assert "(127, 64), expected at least 128 rows of 64" in text


def test_the_fingerprint_changes_with_any_byte_value_or_type_that_matters(tmp_path):
    def nudge(tensors):
        tensors["mtp.norm.weight"][0] += 1e-6

    base = load_head(write_tiny_checkpoint(tmp_path / "base"))
    others = [
        load_head(rewrite(write_tiny_checkpoint(tmp_path / "nudged"), nudge)),
        load_head(write_tiny_checkpoint(tmp_path / "rope", rope_theta=20000.0)),
        load_head(tmp_path / "base", dtype=torch.bfloat16),
    ]
    assert len({base.fingerprint, *(other.fingerprint for other in others)}) == 4
    assert len(base.fingerprint) == 32
    longer = write_tiny_checkpoint(tmp_path / "longer", max_position=8192)
    assert load_head(longer).fingerprint == base.fingerprint


def test_the_stored_type_is_kept_unless_another_is_asked_for(tmp_path):
    write_tiny_checkpoint(tmp_path, dtype="bfloat16")
    assert load_head(tmp_path).dtype is torch.bfloat16
    assert plan_head(tmp_path).weight_bytes == load_head(tmp_path).weight_bytes()
    widened = load_head(tmp_path, dtype=torch.float32)
    assert widened.dtype is torch.float32
    assert any("cast to float32" in note for note in plan_head(tmp_path, dtype="float32").notes)
    with pytest.raises(CheckpointError, match="float16"):
        load_head(tmp_path, dtype=torch.float16)


def test_a_bad_checkpoint_is_refused_before_torch_starts(tmp_path):
    script = textwrap.dedent("""
        import sys
        from pathlib import Path
        from drafter_service.heads import CheckpointError, describe, plan_head
        try:
            plan_head(Path(sys.argv[1]))
        except CheckpointError as error:
            print(error)
        assert "torch" not in sys.modules
    """)
    write_tiny_checkpoint(tmp_path, mtp=False)
    begin = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", script, str(tmp_path)],
        check=True,
        capture_output=True,
        text=True,
        env={"PYTHONPATH": ":".join(sys.path)},
    )
    assert "mtp.*" in done.stdout
    # Importing torch alone takes longer than this on the machines in use.
    assert time.monotonic() - begin < 5
