"""Levers: all in one place of the settings, resolved at the start, and told to whoever asks."""

import argparse
from dataclasses import replace

import pytest

from checkpoints import write_tiny_checkpoint
from drafter_service.config import LEVERS, MIB, ConfigError, ServiceConfig, add_flags
from drafter_service.heads import load_head
from drafter_service.server import Service
from wire import Client


@pytest.fixture
def config(tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "head", config_changes={"eos_token_id": 127})
    return ServiceConfig(
        checkpoint=checkpoint,
        socket=tmp_path / "s",
        device="cpu",
        kv_bytes=MIB,
        metrics_port=None,
        health_port=None,
        torch_threads=1,
    )


def info_of(config):
    service = Service(config)
    service.start()
    try:
        with Client(f"unix:{config.socket}") as client:
            return client.info()
    finally:
        service.close()


def test_the_help_shows_all_levers_together():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    section = parser.format_help().split("\nlevers:")[1]
    for name in LEVERS:
        assert f"\n  --{name.replace('_', '-')} " in section


def test_a_head_tells_every_lever_of_the_settings(tmp_path):
    assert set(load_head(write_tiny_checkpoint(tmp_path)).levers) == {*LEVERS, "dtype", "lm_head_error"}


def test_server_info_has_every_lever_resolved(config):
    info = info_of(config)
    assert dict(info.levers) == {
        "hidden_source": "post_norm",
        "recycle": "post_norm",
        "dtype": "float32",
        "quantization": "as-stored",
        "lm_head": "as-stored",
        "lm_head_error": "0",
        "draft_vocab": "all",
    }
    assert info.head.draft_vocab_size == info.head.vocab_size == 128


def test_levers_that_are_set_are_told_and_the_service_passes_its_self_test(config, caplog):
    caplog.set_level("INFO")
    plain = info_of(config).head.fingerprint
    changed = replace(config, lm_head="nvfp4", draft_vocab="first:20", recycle="pre_norm")
    info = info_of(changed)
    assert info.levers["lm_head"] == "nvfp4"
    assert 0.03 < float(info.levers["lm_head_error"]) < 0.2
    assert info.levers["draft_vocab"] == "first:20"
    assert info.levers["recycle"] == "pre_norm"
    assert (info.head.draft_vocab_size, info.head.vocab_size) == (21, 128)
    assert info.head.fingerprint != plain
    assert "draft_vocab first:20; 21 of 128 ids can be drafted" in caplog.text


def test_a_list_of_ids_is_told_by_its_file_s_name_alone(config, tmp_path):
    (tmp_path / "frequent.txt").write_text("3\n5\n")
    info = info_of(replace(config, draft_vocab=f"ids:{tmp_path / 'frequent.txt'}"))
    assert info.levers["draft_vocab"] == "ids:frequent.txt"
    assert info.head.draft_vocab_size == 3


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_vocab": "first:129"}, ["--draft-vocab first:129", "128"]),
        ({"draft_vocab": "ids:/nowhere/list"}, ["--draft-vocab /nowhere/list", "No such file"]),
    ],
    ids=str,
)
def test_levers_that_do_not_fit_the_checkpoint_are_refused_in_one_line(config, changes, words):
    service = Service(replace(config, **changes))
    with pytest.raises(ConfigError) as caught:
        service.start()
    assert "\n" not in str(caught.value)
    assert all(word in str(caught.value) for word in words)
