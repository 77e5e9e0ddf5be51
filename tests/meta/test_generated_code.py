"""The generated code is what the protos give, and loads with what is installed."""

import importlib
import os
import subprocess

import pytest
from google.protobuf import descriptor_pool

from repository import ROOT, files

PROTOS = [path.split("/")[-1].removesuffix(".proto") for path in files() if path.endswith(".proto")]
WITH_SERVICES = {"admin", "drafter"}
PYTHON = "clients/python/specdraft/v1/"
GO = "clients/go/specdraft/v1/"
# What a `make` that runs the tests hands down; the inner one starts afresh.
OF_MAKE = {"MAKEFLAGS", "MAKELEVEL", "MFLAGS", "MAKEOVERRIDES"}


def test_generated_code_is_fresh():
    if not (ROOT / ".venv-proto" / ".stamp").exists():
        pytest.skip("the proto tools are missing: `make proto-check` installs them")
    environment = {name: value for name, value in os.environ.items() if name not in OF_MAKE}
    check = subprocess.run(
        ["make", "--silent", "proto-check"],
        cwd=ROOT, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert check.returncode == 0, f"run `make proto`\n{check.stdout}{check.stderr}"


def test_every_proto_has_its_files_and_no_others():
    python = {f"{proto}_pb2{suffix}" for proto in PROTOS for suffix in (".py", ".pyi")}
    python |= {f"{proto}_pb2_grpc{suffix}" for proto in WITH_SERVICES for suffix in (".py", ".pyi")}
    go = {f"{proto}.pb.go" for proto in PROTOS} | {f"{proto}_grpc.pb.go" for proto in WITH_SERVICES}
    assert {path.removeprefix(PYTHON) for path in files() if path.startswith(PYTHON)} == python | {"__init__.py"}
    assert {path.removeprefix(GO) for path in files() if path.startswith(GO)} == go


@pytest.mark.parametrize("proto", PROTOS)
def test_generated_modules_load(proto):
    importlib.import_module(f"specdraft.v1.{proto}_pb2")
    assert descriptor_pool.Default().FindFileByName(f"specdraft/v1/{proto}.proto").package == "specdraft.v1"


@pytest.mark.parametrize("proto", sorted(WITH_SERVICES))
def test_generated_stubs_load(proto):
    importlib.import_module(f"specdraft.v1.{proto}_pb2_grpc")


def test_generated_code_says_so():
    for path in files():
        if path.startswith((PYTHON, GO)) and not path.endswith("_pb2.pyi"):  # protoc marks its stubs by their name only
            head = (ROOT / path).read_text(encoding="utf-8")[:400].lower()
            assert "do not edit" in head, path
