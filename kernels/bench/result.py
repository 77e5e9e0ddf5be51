"""The goals' figures of a run, and the form in which results are committed."""

from __future__ import annotations

import datetime as dt
import json
import platform
import shlex
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any, Final

_PACKAGES: Final = ("torch", "triton")
_BATCHES: Final = (1, 8, 64)


def figures_of(report: dict[str, Any]) -> dict[str, float]:
    """What the goals are about, as far as it was measured; all are ratios."""
    rounds, results = report.get("rounds", {}), {result["name"]: result for result in report["results"]}
    figures = _round_figures(rounds)
    for rows in (1, 8):
        if f"absorb/rows={rows}" in results and "k1" in rounds:
            figures[f"catchup{rows}_over_propose1"] = results[f"absorb/rows={rows}"]["us"] / rounds["k1"]["us"]
    if "lm_head/nvfp4/B=1" in results:
        figures["lm_head_bandwidth_fraction"] = results["lm_head/nvfp4/B=1"]["fraction_of_copy"]
    for batch, name in zip(_BATCHES, ("nvfp4_head", "b8", "b64"), strict=True):
        plain, masked = (results.get(f"lm_head/nvfp4/{mask}B={batch}") for mask in ("", "mask/"))
        if plain and masked and name in rounds:
            more = rounds[name]["num_drafts"] * (masked["us"] - plain["us"])
            figures[f"mask_share_of_round_b{batch}"] = more / rounds[name]["us"]
    return figures


def _round_figures(rounds: dict[str, Any]) -> dict[str, float]:
    figures = {
        f"speedup_{name}": rounds[name]["torch_us"] / rounds[name]["us"]
        for name in ("nvfp4_head", "nvfp4_body", "vocab_64k")
        if name in rounds
    }
    head = rounds.get("nvfp4_head")
    if not head:
        return figures
    fractions = [
        rounds[name]["floor_us"] / rounds[name]["us"] for name in ("nvfp4_head", "nvfp4_body") if name in rounds
    ]
    figures |= {
        "step_floor_fraction": min(fractions),
        "plain_torch_floor_ratio": head["torch_us"] / head["torch_floor_us"],
    }
    return figures | {f"{name}_over_b1": rounds[name]["us"] / head["us"] for name in ("b8", "b64") if name in rounds}


def write_result(path: Path, report: dict[str, Any]) -> None:
    """The figures and the times that they come from, with the device, the versions, the date and the command."""
    times = {
        name: {key: round(value, 1) for key, value in each.items()} for name, each in report.get("rounds", {}).items()
    }
    kernels = {result["name"]: round(result["us"], 1) for result in report["results"]}
    figures = {name: round(value, 3) for name, value in report["figures"].items()}
    result = {
        "name": "step",
        "device": report["device"]["name"],
        "versions": {"python": platform.python_version()} | {package: version(package) for package in _PACKAGES},
        "date": dt.datetime.now(tz=dt.UTC).date().isoformat(),
        "command": shlex.join(["python", "kernels/bench/run.py", *_portable_arguments()]),
        "figures": {"copy_gbps": round(report["copy_gbps"]), **figures, "rounds_us": times, "kernels_us": kernels},
    }
    path.write_text(json.dumps(result, indent=2) + "\n")


def _portable_arguments() -> list[str]:
    """The command's, with the last part of paths alone."""
    return [Path(argument).name if "/" in argument else argument for argument in sys.argv[1:]]
