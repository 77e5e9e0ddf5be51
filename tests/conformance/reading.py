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


HOST_ONLY = {"memory that is not there"}
"""Cases about what a service without a GPU says."""


def in_gpu_memory(cases):
    """The cases of the shared service, with their rows in GPU memory wherever they do not have to be elsewhere."""
    return [_moved(case) for case in cases if "server" not in case and case["name"] not in HOST_ONLY]


def _moved(value):
    if isinstance(value, list):
        return ["cuda" if one == "host" else _moved(one) for one in value]
    if not isinstance(value, dict):
        return value
    moved = {name: "cuda" if (name, one) == ("memory", "host") else _moved(one) for name, one in value.items()}
    if "open" in moved:
        moved["open"] = {"memory": "cuda"} | moved["open"]
    return moved


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
