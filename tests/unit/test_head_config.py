import json
import math

import pytest

from checkpoints import TinyShape, tiny_config
from drafter_service.heads import CheckpointError, HiddenSource, RecycleSource, read_config


def write(directory, document):
    (directory / "config.json").write_text(json.dumps(document))
    return directory


def tiny(directory, changes=None, *, nested=False, shape=None, top=None):
    document = tiny_config(shape or TinyShape(), tied=False, nested=nested, changes=changes or {})
    return write(directory, document | (top or {}))


def source(reading, name):
    return next(value.source for value in reading.values if value.name == name)


def refusal(directory, changes=None, **more):
    with pytest.raises(CheckpointError) as caught:
        read_config(tiny(directory, changes, **more))
    text = str(caught.value)
    assert "\n" not in text
    assert "config.json" in text
    return text


def test_a_plain_config_resolves_to_its_values(tmp_path):
    config = read_config(tiny(tmp_path)).config
    assert (config.model_type, config.hidden_size, config.vocab_size) == ("qwen3_5_text", 64, 128)
    assert (config.num_heads, config.num_kv_heads, config.head_dim, config.rotary_dim) == (4, 2, 16, 8)
    assert (config.num_layers, config.max_position, config.rms_norm_eps) == (1, 4096, 1e-6)
    assert (config.hidden_source, config.recycle) == (HiddenSource.POST_NORM, RecycleSource.POST_NORM)
    assert config.kv_row_bytes == 2 * 2 * 16 * 4


def test_a_wrapper_config_resolves_from_its_text_config_and_says_so(tmp_path):
    reading = read_config(tiny(tmp_path, nested=True))
    assert reading.config.model_type == "qwen3_5"
    assert source(reading, "rope_theta") == "text_config.rope_parameters.rope_theta"
    assert source(reading, "hidden_size") == "text_config.hidden_size"
    assert reading.notes == ()


def test_an_absent_value_takes_the_familys_default_and_says_so(tmp_path):
    changes = {"head_dim": None, "rms_norm_eps": None, "rope_parameters": {"rope_theta": 5e6}}
    reading = read_config(tiny(tmp_path, changes))
    assert (reading.config.head_dim, reading.config.rotary_dim) == (256, 64)
    assert source(reading, "head_dim") == "default of qwen3_5_text"
    assert source(reading, "partial_rotary_factor") == "default of qwen3_5_text"


@pytest.mark.parametrize("key", ["vocab_size", "hidden_size", "num_attention_heads", "intermediate_size"])
def test_an_absent_size_is_refused_by_name(tmp_path, key):
    assert key in refusal(tmp_path, {key: None})


def test_an_absent_rope_base_is_refused_rather_than_guessed(tmp_path):
    text = refusal(tmp_path, {"rope_parameters": {"rope_type": "default"}}, nested=True)
    assert "rope_theta" in text
    assert "text_config.rope_parameters.rope_theta" in text


def test_levels_that_disagree_resolve_to_the_nested_one_with_a_note(tmp_path):
    top = {"tie_word_embeddings": True, "rope_theta": 10000.0}
    reading = read_config(tiny(tmp_path, {"rope_parameters": {"rope_theta": 5e6}}, nested=True, top=top))
    assert reading.config.tie_word_embeddings is False
    assert reading.config.rope_theta == 5e6
    notes = "\n".join(reading.notes)
    assert "text_config.tie_word_embeddings says False, tie_word_embeddings says True" in notes
    assert "text_config.rope_parameters.rope_theta is used" in notes


def test_a_wrappers_rope_section_never_outranks_the_text_configs_own_value(tmp_path):
    changes = {"rope_parameters": None, "rope_theta": 5e6}
    reading = read_config(tiny(tmp_path, changes, nested=True, top={"rope_parameters": {"rope_theta": 1e4}}))
    assert reading.config.rope_theta == 5e6


def test_one_level_that_contradicts_itself_is_refused(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0}
    text = refusal(tmp_path, {"rope_scaling": scaling})
    assert "rope_parameters.rope_type says 'default', rope_scaling.rope_type says 'yarn'" in text


def test_a_number_of_layers_only_in_text_config_is_the_one_that_counts(tmp_path):
    text = refusal(tmp_path, {"mtp_num_hidden_layers": 2}, nested=True)
    assert "text_config.mtp_num_hidden_layers is 2" in text
    assert "not supported yet" in text


@pytest.mark.parametrize("count", [0, None])
def test_a_config_without_mtp_layers_is_refused(tmp_path, count):
    assert "no MTP layers" in refusal(tmp_path, {"mtp_num_hidden_layers": count})


def test_the_layer_count_may_have_the_familys_older_name(tmp_path):
    changes = {"mtp_num_hidden_layers": None, "num_nextn_predict_layers": 1}
    assert source(read_config(tiny(tmp_path, changes)), "num_layers") == "num_nextn_predict_layers"


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("hidden_act", "gelu"),
        ("attention_bias", True),
        ("attn_output_gate", False),
        ("output_gate_type", "tanh"),
        ("mtp_use_dedicated_embeddings", True),
        ("use_sliding_window", True),
        ("sliding_window", 1024),
        ("num_experts", 8),
        ("final_logit_softcapping", 30.0),
        ("rms_norm_eps", 0),
        ("head_dim", "16"),
        ("hidden_size", 64.0),
        ("vocab_size", -1),
        ("vocab_size", 2**31),
        ("rms_norm_eps", 10**400),
        ("num_key_value_heads", 3),
        ("tie_word_embeddings", "yes"),
        ("rope_parameters", [1]),
    ],
)
@pytest.mark.parametrize("nested", [False, True])
def test_a_value_that_changes_the_computation_is_refused_by_name(tmp_path, key, value, nested):
    text = refusal(tmp_path, {key: value}, nested=nested)
    assert (f"text_config.{key}" if nested else key) in text or key == "num_key_value_heads"


def test_a_window_that_is_switched_off_is_no_window(tmp_path):
    read_config(tiny(tmp_path, {"sliding_window": 1024, "use_sliding_window": False}))


@pytest.mark.parametrize(
    ("rope", "named"),
    [
        ({"rope_type": "llama3", "rope_theta": 1e4, "factor": 8.0}, "rope_parameters.rope_type is 'llama3'"),
        ({"type": "dynamic", "rope_theta": 1e4}, "rope_parameters.type is 'dynamic'"),
        ({"rope_theta": 1.0}, "rope_parameters.rope_theta"),
        ({"rope_theta": 1e4, "spiral": 1}, "rope_parameters.spiral"),
        ({"full_attention": {"rope_theta": 1e4}}, "rope_parameters.full_attention"),
        ({"rope_theta": math.inf}, "rope_parameters.rope_theta"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 2.0}, "rope_parameters.partial_rotary_factor"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.2}, "rope_parameters.partial_rotary_factor"),
        ({"rope_theta": 1e4, "rope_type": "yarn"}, "factor"),
        ({"rope_theta": 1e4, "rope_type": "yarn", "factor": 0.5}, "rope_parameters.factor"),
    ],
)
def test_an_unknown_or_impossible_rope_setting_is_refused_by_name(tmp_path, rope, named):
    assert named in refusal(tmp_path, {"rope_parameters": rope})


def test_plain_frequencies_follow_the_formula(tmp_path):
    rope = read_config(
        tiny(tmp_path, {"rope_parameters": {"rope_theta": 5e6, "partial_rotary_factor": 0.5}})
    ).config.rope
    expected = [5e6 ** (-2 * i / 8) for i in range(4)]
    assert rope.inverse_frequencies() == pytest.approx(expected, rel=1e-12)
    assert rope.amplitude() == 1.0


def test_yarn_multiplies_the_position_limit(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 4096}
    config = read_config(tiny(tmp_path, {"rope_parameters": rope})).config
    assert config.max_position == 16384
    assert config.rope.amplitude() == pytest.approx(0.1 * math.log(4) + 1)


def test_yarn_scales_may_be_given_as_a_ratio(tmp_path):
    rope = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5}
    config = read_config(tiny(tmp_path, {"rope_parameters": rope})).config
    assert config.rope.amplitude() == pytest.approx((0.1 * math.log(4) + 1) / (0.05 * math.log(4) + 1))


@pytest.mark.parametrize("model_type", ["qwen3_next", "qwen3_5_moe"])
def test_a_family_that_is_still_to_come_is_refused_by_name(tmp_path, model_type):
    text = refusal(tmp_path, {"model_type": model_type})
    assert model_type in text
    assert "not supported yet" in text


@pytest.mark.parametrize(
    ("changes", "nested"),
    [({"model_type": "qwen3_5_moe_text"}, True), ({"model_type": "llama"}, False), ({"model_type": None}, False)],
)
def test_another_family_is_refused_at_either_level(tmp_path, changes, nested):
    assert "model_type" in refusal(tmp_path, changes, nested=nested)


def test_hidden_source_and_recycle_can_be_overridden_and_say_so(tmp_path):
    reading = read_config(tiny(tmp_path), hidden_source=HiddenSource.PRE_NORM, recycle=RecycleSource.PRE_NORM)
    assert reading.config.hidden_source is HiddenSource.PRE_NORM
    assert source(reading, "recycle") == "override"
    assert source(read_config(tmp_path), "recycle") == "record of qwen3_5"


@pytest.mark.parametrize("text", ["", "[]", "{", '{"a": 1, "a": 2}', "[" * 100_000])
def test_a_config_that_is_no_json_object_is_refused(tmp_path, text):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(CheckpointError, match=r"config\.json"):
        read_config(tmp_path)
