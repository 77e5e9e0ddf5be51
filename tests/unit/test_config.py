"""Settings: every one can come from a flag or the environment, and what cannot work is refused in one line."""

import argparse
from dataclasses import fields, replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.config import (
    GROUPS,
    ConfigError,
    ServiceConfig,
    add_flags,
    environment_of,
    flag_of,
    flags_for,
    parse_bool,
    parse_bytes,
    parse_port,
    read_config,
)

CHECKPOINT = "--checkpoint=/a/head"


def read(*arguments, **environment):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    return read_config(parser.parse_args([CHECKPOINT, *arguments]), environment)


def refusal(*arguments, **environment):
    with pytest.raises(ConfigError) as caught:
        read(*arguments, **environment)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_without_flags_the_defaults_hold():
    assert read() == ServiceConfig(checkpoint=Path("/a/head"))


def test_flags_come_before_the_environment_and_the_environment_before_the_defaults():
    environment = {"SPECDRAFT_MAX_DRAFTS": "3", "SPECDRAFT_LEASE_S": "12.5", "SPECDRAFT_SOCKET": "/run/other.sock"}
    config = read("--max-drafts", "5", **environment)
    assert (config.max_drafts, config.lease_s, config.socket) == (5, 12.5, Path("/run/other.sock"))
    assert config.max_batch == ServiceConfig().max_batch


def test_every_setting_has_a_flag_a_variable_and_a_help_text():
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = parser.format_help()
    for item in fields(ServiceConfig):
        assert flag_of(item) in text
        assert environment_of(item) in text.replace("\n", "").replace(" ", "")
        assert item.metadata["help"]
        assert item.metadata["parse"]


def test_every_setting_stands_in_one_group_and_what_has_no_default_is_unset():
    grouped = [name for _, _, names in GROUPS for name in names]
    assert sorted(grouped) == sorted(item.name for item in fields(ServiceConfig))
    parser = argparse.ArgumentParser()
    add_flags(parser)
    text = " ".join(parser.format_help().split())
    assert "default None" not in text
    assert "(default ;" not in text
    assert "(default 256MiB; $SPECDRAFT_ARENA_BYTES)" in text
    assert "(unset; $SPECDRAFT_LISTEN)" in text
    assert "(required; $SPECDRAFT_CHECKPOINT)" in text


# A value other than the default, as it is typed, for every setting.
OTHERS = {
    "target_checkpoint": "/a/target",
    "socket": "/run/x.sock",
    "listen": "localhost:1",
    "tls_cert": "/c",
    "tls_key": "/k",
    "tls_client_ca": "/ca",
    "insecure": "true",
    "allow_client_regions": "true",
    "simulated_gpu": "/a/directory",
    "probe_host": "::1",
    "metrics_port": "off",
    "health_port": "0",
    "device": "cpu",
    "dtype": "bfloat16",
    "runner": "graph",
    "hidden_source": "pre_norm",
    "recycle": "post_norm",
    "quantization": "fp8",
    "lm_head": "nvfp4",
    "draft_vocab": "ids:/a/list",
    "log_level": "debug",
    "carry_share": "0.25",
    "message_bytes": "64KiB",
    "tracing": "true",
}


@pytest.mark.parametrize("item", fields(ServiceConfig)[1:], ids=lambda item: item.name)
def test_a_configuration_comes_back_from_the_flags_made_of_it(item):
    typed = OTHERS.get(item.name, "7")
    needs = ["--insecure"] if item.name == "listen" else []
    config = read(flag_of(item), typed, *needs)
    assert config != read(*needs)
    assert read(*needs, **{environment_of(item): typed}) == config
    assert read(*[flag for flag in flags_for(config) if flag not in {"--checkpoint", "/a/head"}]) == config


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--max-drafts", "many"], ["--max-drafts", "many", "expected a whole number"]),
        (["--max-drafts", "0"], ["--max-drafts", "0", "at least 1"]),
        (["--max-drafts", "-1"], ["--max-drafts"]),
        (["--max-drafts", ""], ["--max-drafts"]),
        (["--max-batch", str(2**31)], ["--max-batch", str(2**31)]),
        (["--message-bytes", "2GiB"], ["--message-bytes"]),
        (["--message-bytes", "4095"], ["--message-bytes 4095", "at least 4096"]),
        (["--kv-bytes", "infGiB"], ["--kv-bytes", "infGiB"]),
        (["--kv-bytes", "nanMiB"], ["--kv-bytes"]),
        (["--kv-bytes", "much"], ["--kv-bytes", "in bytes"]),
        (["--kv-bytes", "muchGiB"], ["--kv-bytes", "in bytes"]),
        (["--kv-bytes", "-1"], ["--kv-bytes"]),
        (["--kv-bytes", "4GB"], ["--kv-bytes", "4GB", "in bytes, or with KiB, MiB or GiB, for example 4GiB"]),
        (["--socket", "unix:///run/x.sock"], ["--socket", "write the path alone, without unix:"]),
        (["--listen", "nowhere"], ["--listen", "nowhere", "host:port"]),
        (["--listen", ":9000"], ["--listen", "host:port"]),
        (["--listen", "::1:9000"], ["--listen", "[::1]:9000"]),
        (["--listen", "localhost:http"], ["--listen", "'http'", "65535"]),
        (["--listen", "localhost:65536"], ["--listen", "'65536'", "65535"]),
        (["--lease-s", "inf"], ["--lease-s", "inf"]),
        (["--lease-s", "nan"], ["--lease-s", "nan is no number"]),
        (["--lease-s", "long"], ["--lease-s", "long", "expected a number"]),
        (["--lease-s", "1e9"], ["--lease-s"]),
        (["--lease-s", "0"], ["--lease-s", "above 0"]),
        (["--grace-s", "-0.1"], ["--grace-s", "at least 0"]),
        (["--carry-share", "5"], ["--carry-share 5", "at most 1"]),
        (["--health-port", "65536"], ["--health-port", "65536"]),
        (["--health-port", ""], ["--health-port"]),
        (["--metrics-port", "on"], ["--metrics-port", "expected the number of a port, or off"]),
        (["--insecure", "perhaps"], ["--insecure", "perhaps"]),
        (["--dtype", "float8"], ["--dtype", "float8", "bfloat16"]),
        (["--device", ""], ["--device"]),
        (["--lm-head", "int4"], ["--lm-head", "int4", "nvfp4"]),
        (["--draft-vocab", "some"], ["--draft-vocab", "some", "first:N"]),
        (["--draft-vocab", "first:"], ["--draft-vocab", "first:N"]),
        (["--draft-vocab", "first:-1"], ["--draft-vocab"]),
        (["--draft-vocab", "ids:"], ["--draft-vocab", "ids:FILE"]),
        (["--log-level", "loud"], ["--log-level", "loud"]),
        (["--socket", ""], ["--socket", "--listen"]),
        (["--checkpoint", ""], ["--checkpoint is required"]),
        (["--socket", "/" + "x" * 101], ["--socket", "108", "107"]),
        (["--listen", "localhost:1"], ["--listen", "--tls-cert", "--insecure"]),
        (["--listen", "localhost:1", "--tls-cert", "c", "--tls-key", "k"], ["--tls-client-ca"]),
        (["--listen", "localhost:1", "--insecure", "--tls-cert", "c"], ["--insecure", "TLS"]),
    ],
    ids=" ".join,
)
def test_what_cannot_work_is_refused_by_name(arguments, words):
    text = refusal(*arguments)
    for word in words:
        assert word in text


def test_what_the_environment_says_wrong_is_named_as_the_environment():
    assert "SPECDRAFT_MAX_DRAFTS 'many'" in refusal(SPECDRAFT_MAX_DRAFTS="many")


@pytest.mark.parametrize("arguments", [["--grace-s", "0"], ["--drain-s", "0"], ["--max-seq-len", "0"]], ids=" ".join)
def test_where_zero_means_something_it_is_taken(arguments):
    read(*arguments)


def test_the_longest_socket_path_is_taken():
    longest = "/" + "x" * (107 - len(".admin") - 1)
    assert str(read("--socket", longest).socket) == longest
    assert "107" in refusal("--socket", f"{longest}x")
    assert "107" in refusal("--socket", longest[:-1] + "ä")


def test_without_a_unix_socket_tcp_is_enough():
    assert read("--socket", "", "--listen", "localhost:1", "--insecure").socket is None


def test_sizes_have_units():
    assert [parse_bytes(text) for text in ("17", "2KiB", "1.5MiB", "4GiB")] == [17, 2048, 3 << 19, 4 << 30]


def test_ports_and_truths_are_read():
    assert [parse_port(text) for text in ("off", "0", "65535")] == [None, 0, 65535]
    assert [parse_bool(text) for text in ("true", "TRUE", "1", "false", "0")] == [True, True, True, False, False]


@given(st.sampled_from([item for item in fields(ServiceConfig) if item.name != "checkpoint"]), st.text())
def test_whatever_a_setting_is_given_it_is_read_or_refused(item, text):
    parser = argparse.ArgumentParser()
    add_flags(parser)
    flags = parser.parse_args([CHECKPOINT])
    try:
        read_config(flags, {environment_of(item): text.replace("\x00", "")})
    except ConfigError:
        return


def test_a_configuration_is_frozen():
    config = ServiceConfig()
    with pytest.raises(AttributeError):
        config.max_drafts = 3
    assert replace(config, max_drafts=3).max_drafts == 3
