import json

from checkpoints import write_tiny_checkpoint
from drafter_service.cli import main
from drafter_service.heads import as_json, describe, load_head, plan_head


def test_the_text_names_every_value_with_its_source_and_every_tensor_with_its_file(tmp_path):
    plan = plan_head(write_tiny_checkpoint(tmp_path, nested_text_config=True, layout="sharded_index_omits_mtp"))
    text = describe(plan)
    assert "qwen3_5 head of" in text
    for value in plan.values:
        assert any(line.split()[0] == value.name and line.endswith(value.source) for line in text.splitlines() if line)
    for tensor in plan.tensors:
        assert tensor.stored.name in text
    assert "model-00001-of-00002.safetensors" in text
    assert "index omits" in text


def test_memory_is_what_loading_takes(tmp_path):
    plan = plan_head(write_tiny_checkpoint(tmp_path, dtype="bfloat16", padded_vocab=160))
    memory = as_json(plan)["memory_bytes"]
    head = load_head(tmp_path)
    assert memory["weights"] == head.weight_bytes()
    assert memory["kv_row"] == head.kv_layout().row_bytes == 2 * 2 * 16 * 2
    assert memory["kv_page_of_16_rows"] == 16 * memory["kv_row"]
    assert f"{head.weight_bytes():,} bytes" in describe(plan)


def test_the_json_form_is_json_with_the_same_facts(tmp_path):
    head = write_tiny_checkpoint(tmp_path / "head", own_embedding=False, lm_head=False)
    target = write_tiny_checkpoint(tmp_path / "target", mtp=False, lm_head=False, padded_vocab=160)
    plan = plan_head(head, target)
    document = json.loads(json.dumps(as_json(plan)))
    assert document["tied"] is True
    assert document["target_checkpoint"] == str(target)
    embedding = next(tensor for tensor in document["tensors"] if tensor["role"] == "embedding")
    assert (embedding["shape"], embedding["rows_used"]) == ([160, 64], 128)
    assert embedding["file"] == str(target / "model.safetensors")
    assert any("32 rows beyond" in note for note in document["notes"])
    assert {value["name"] for value in document["values"]} >= {"rope_theta", "hidden_source", "recycle", "dtype"}


def test_a_tied_head_says_so_and_without_notes_there_is_no_list_of_them(tmp_path):
    text = describe(plan_head(write_tiny_checkpoint(tmp_path, lm_head=False)))
    assert "tied" in text
    assert "notes" not in text


def test_bytes_are_told_as_stored_and_as_loaded(tmp_path):
    plan = plan_head(write_tiny_checkpoint(tmp_path, dtype="bfloat16", padded_vocab=160))
    rows = [line.split() for line in describe(plan).splitlines() if line.endswith(" bytes")]
    stored, loaded = (int(row[-2].replace(",", "")) for row in rows[:2])
    assert (rows[0][:3], rows[1][:4]) == (["weights", "as", "stored"], ["weights", "loaded", "as", "bfloat16"])
    assert loaded == plan.weight_bytes
    assert stored > loaded  # the rows beyond the vocabulary


def test_a_head_without_its_tables_is_described_and_what_is_missing_is_noted(tmp_path, capsys):
    head = write_tiny_checkpoint(tmp_path / "head", own_embedding=False, lm_head=False)
    assert main(["inspect", str(head)]) == 0
    text = capsys.readouterr().out
    assert "without its vocabulary tables" in text
    assert "no embedding here: to load it, give --target-checkpoint" in text or "LM head here" in text
    assert "mtp.fc.weight" in text


def test_a_head_that_lacks_its_own_tensors_is_an_error_with_or_without_tables(tmp_path, capsys):
    assert main(["inspect", str(write_tiny_checkpoint(tmp_path, mtp=False, own_embedding=False))]) == 2
    assert "no file holds mtp." in capsys.readouterr().err
