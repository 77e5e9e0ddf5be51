"""One list of errors: the proto, the generated enum and `specdraft.errors` agree, and tests reach every reason."""

import re

import pytest

from repository import ROOT, files
from specdraft.errors import REASON_CODES, Code, Reason
from specdraft.v1 import error_reason_pb2

PREFIX = "ERROR_REASON_"
HEADING = re.compile(r"^\s*// --- ([A-Z_]+)\b")
VALUE = re.compile(rf"^\s*{PREFIX}([A-Z_]+) = (\d+);")

# Reasons that no test reaches yet. It only gets shorter.
UNREACHED: set[str] = {
    "NEEDS_LOOKBACK",
    "MULTIMODAL_UNSUPPORTED",
    "ROWS_POLICY_UNSUPPORTED",
}


def reasons_in_proto() -> dict[str, tuple[int, str]]:
    """Reason -> (number, the status code in the heading above it)."""
    reasons, code = {}, ""
    for line in (ROOT / "proto/specdraft/v1/error_reason.proto").read_text(encoding="utf-8").splitlines():
        if heading := HEADING.match(line):
            code = heading[1]
        elif value := VALUE.match(line):
            reasons[value[1]] = (int(value[2]), code)
    return reasons


def reasons_in_tests() -> set[str]:
    own = "tests/meta/test_error_reasons.py"
    paths = [
        p for p in files() if p.startswith("tests/") and p.endswith((".py", ".json", ".yaml", ".txtpb")) and p != own
    ]
    text = "\n".join((ROOT / path).read_text(encoding="utf-8") for path in paths)
    return {reason for reason in Reason if re.search(rf"(\bReason\.|\b{PREFIX}|[\"']){reason}\b", text)}


def test_python_has_every_reason_of_the_proto_and_no_other():
    assert set(Reason) == set(reasons_in_proto()) - {"UNSPECIFIED"}
    assert all(reason.name == reason.value for reason in Reason)


def test_the_generated_enum_has_the_numbers_of_the_proto():
    generated = {name.removeprefix(PREFIX): number for name, number in error_reason_pb2.ErrorReason.items()}
    assert generated == {reason: number for reason, (number, _) in reasons_in_proto().items()}


@pytest.mark.parametrize("reason", Reason)
def test_a_reason_has_the_code_of_its_heading(reason):
    assert REASON_CODES[reason] == Code[reasons_in_proto()[reason][1]]


def test_every_reason_is_reached_by_a_test_or_listed():
    reached = reasons_in_tests()
    assert not set(Reason) - reached - UNREACHED, "no test reaches these"
    assert not UNREACHED & reached, "tests reach these: take them out of UNREACHED"
    assert set(Reason) >= UNREACHED
