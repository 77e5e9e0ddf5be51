"""The cases as data."""

import re

import yaml

from repository import ROOT

FOLDER = ROOT / "tests/conformance"
PREFIX = "ERROR_REASON_"


def load_cases():
    """Every case, file by file."""
    cases = []
    for path in sorted((FOLDER / "cases").glob("*.yaml")):
        cases += yaml.safe_load(path.read_text(encoding="utf-8"))
    return cases


def load_unreachable():
    """Reasons that no case reaches, and why."""
    return yaml.safe_load((FOLDER / "unreachable.yaml").read_text(encoding="utf-8"))


def expected_reasons(steps):
    """Reasons that these steps expect for certain: not those of a choice."""
    found = set()
    for step in steps:
        inner = step.get("each", {})
        found |= expected_reasons(inner.get("steps", []))
        found |= set(re.findall(rf"{PREFIX}(\w+)", str(inner.get("values", ""))))
        for expect in (step.get("expect") or {}, *(step.get("expect") or {}).get("results", [])):
            found |= {word for word in [expect.get("error")] if isinstance(word, str)}
            found |= set(re.findall(rf"{PREFIX}(\w+)", str(expect)))
    return found
