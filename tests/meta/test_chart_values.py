"""The chart's values, its schema, its README and the service's settings tell the same."""

import dataclasses
import json
import re
import subprocess
import sys

import pytest
import yaml

from drafter_service.config import COUNT_MAX, ConfigError, ServiceConfig, parse_bytes, parse_port
from repository import ROOT

CHART = ROOT / "helm" / "drafter-service"
SCHEMA = json.loads((CHART / "values.schema.json").read_text(encoding="utf-8"))
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))

# Settings that the chart derives from other values.
DERIVED = {
    "checkpoint",
    "target_checkpoint",
    "socket",
    "listen",
    "tls_cert",
    "tls_key",
    "tls_client_ca",
    "insecure",
    "probe_host",
    "metrics_port",
    "health_port",
    "tracing",
    "simulated_gpu",  # for tests and dry runs
}
FIELDS = {item.name: item for item in dataclasses.fields(ServiceConfig)}


def snake_case(name):
    return re.sub(r"[A-Z]", lambda match: "_" + match[0].lower(), name)


def settings():
    """The schema of every setting, by the service's name for it."""
    return {snake_case(name): schema for name, schema in SCHEMA["properties"]["config"]["properties"].items()}


def test_every_setting_of_the_service_is_a_value_and_no_other():
    assert set(settings()) == set(FIELDS) - DERIVED
    assert {snake_case(name) for name in VALUES["config"]} == set(settings())
    assert set(VALUES["config"].values()) == {None}  # the service's defaults stand in config.py alone


@pytest.mark.parametrize("name", [name for name, schema in settings().items() if "enum" in schema])
def test_the_schema_offers_the_choices_that_the_service_takes(name):
    with pytest.raises(ConfigError) as caught:
        ServiceConfig(checkpoint=".", **{name: "nothing of the kind"}).check()
    offered = [choice for choice in settings()[name]["enum"] if choice is not None]
    assert str(caught.value).endswith("is none of " + ", ".join(offered))


@pytest.mark.parametrize("name", [name for name, item in FIELDS.items() if name not in DERIVED])
def test_the_schema_and_the_service_have_one_opinion_about_zero(name):
    schema = settings()[name]
    if FIELDS[name].metadata["parse"] not in {int, float, parse_bytes}:
        assert "minimum" not in schema
        return
    try:
        ServiceConfig(checkpoint=".", **{name: 0}).check()
    except ConfigError:
        refuses = True
    else:
        refuses = False
    assert (schema.get("minimum") == 1 or schema.get("exclusiveMinimum") == 0) == refuses


@pytest.mark.parametrize("name", [name for name, item in FIELDS.items() if item.metadata["parse"] is int])
def test_the_schema_bounds_counts_as_the_service_does(name):
    assert settings()[name]["maximum"] == COUNT_MAX


@pytest.mark.parametrize("name", [name for name, item in FIELDS.items() if item.metadata["parse"] is parse_bytes])
@pytest.mark.parametrize("text", ["4GiB", "0.5MiB", "1KiB", "12", "4Gi", "4G", "GiB", "-1", "1e3", ""])
def test_the_schema_takes_the_sizes_that_the_service_can_read(name, text):
    try:
        parse_bytes(text)
    except ValueError:
        can_be_read = False
    else:
        can_be_read = True
    takes = re.search(settings()[name]["pattern"], text) is not None
    assert takes == (can_be_read and text != "-1")


def test_ports_are_the_services_own():
    assert VALUES["metrics"]["port"] == FIELDS["metrics_port"].default
    assert VALUES["probes"]["port"] == FIELDS["health_port"].default
    assert FIELDS["health_port"].metadata["parse"] is parse_port
    assert f"{VALUES['socket']['directory']}/specdraft.sock" == str(FIELDS["socket"].default)


def schemas(schema, path="$"):
    """Every object's schema, by its place."""
    if "properties" in schema:
        yield path, schema
        for name, inner in schema["properties"].items():
            yield from schemas(inner, f"{path}.{name}")


def test_every_object_of_ours_is_closed_to_unknown_keys():
    assert [path for path, schema in schemas(SCHEMA) if schema.get("additionalProperties") is not False] == []


def paths(values, schema, path=""):
    """Every value's path, as deep as the schema has properties."""
    for name, value in values.items():
        yield f"{path}{name}"
        inner = schema.get("properties", {}).get(name)
        if inner and "properties" in inner and isinstance(value, dict):
            yield from paths(value, inner, f"{path}{name}.")


def schema_paths(schema, path=""):
    for name, inner in schema.get("properties", {}).items():
        yield f"{path}{name}"
        yield from schema_paths(inner, f"{path}{name}.")


def test_the_schema_knows_the_values_and_no_other():
    # Requests and limits are Kubernetes' own; `global` is Helm's.
    known = {path for path in schema_paths(SCHEMA) if path != "global" and not path.startswith("target.resources.")}
    assert set(paths(VALUES, SCHEMA)) == known


def test_the_readme_is_what_the_values_give():
    done = subprocess.run([sys.executable, ROOT / "helm/tools/readme.py", "--check"], check=False)
    assert done.returncode == 0, "run: python helm/tools/readme.py"


def test_every_value_has_a_text():
    leaves = {
        path for path in paths(VALUES, SCHEMA) if not any(p.startswith(f"{path}.") for p in paths(VALUES, SCHEMA))
    }
    page = (CHART / "README.md").read_text(encoding="utf-8")
    told = set(re.findall(r"^\| `([\w.]+)` \|", page, flags=re.MULTILINE))
    of_kubernetes = {path for path in leaves if path.startswith("resources.")}
    assert leaves - told - of_kubernetes == set()
