"""Checks and measures the kernels. Nothing that is wrong is timed.

python kernels/bench/run.py --out DIR              on a GPU: everything, JSON into DIR
python kernels/bench/run.py --compile-only         without one: compiles all of it for Hopper, says what it takes
TRITON_INTERPRET=1 python kernels/bench/run.py --toy    without one: runs all of it at toy sizes; times mean nothing
"""

from __future__ import annotations

import argparse
import json
import sys
import time
import traceback
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

import cases
import torch
import triton
from chain import Bf16Head, ChainSettings, KernelChain, TorchChain
from heads import DENSE, TOY, Weights
from measure import copy_bandwidth, time_side_by_side
from projected_cases import projected_cases
from result import figures_of, write_result

_ROUND_LAUNCHES = 4
GROUPS = ("lm_head", "linear", "rows", "attention", "absorb", "round")


def main() -> int:
    """Runs what was asked for; 1 if anything was wrong or failed."""
    arguments = _parse()
    if arguments.compile_only:
        return _compile_only(arguments)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and not arguments.toy:
        sys.exit("no GPU: --compile-only or --toy (with TRITON_INTERPRET=1)")
    torch.manual_seed(arguments.seed)
    report: dict[str, Any] = {"device": _describe(device), "toy": arguments.toy, "results": [], "failures": []}
    report["copy_gbps"] = copy_bandwidth(device, 2**20 if arguments.toy else 2**31)
    print(f"copy {report['copy_gbps']:.0f} GB/s", flush=True)
    for group in arguments.groups:
        begin = time.monotonic()
        _run_group(group, _bench(arguments, device), arguments, report)
        print(f"-- {group}: {time.monotonic() - begin:.1f} s", flush=True)
        _write(arguments.out, report)
    _summary(report)
    if arguments.json and not report["failures"]:
        write_result(arguments.json, report)
    return 1 if report["failures"] else 0


def _parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, help="folder for kernels.json")
    parser.add_argument("--json", type=Path, help="file for the result as it is committed, if nothing failed")
    parser.add_argument("--groups", nargs="+", choices=GROUPS, default=list(GROUPS))
    parser.add_argument("--toy", action="store_true", help="small sizes")
    parser.add_argument("--compile-only", action="store_true", help="compile for Hopper, run nothing")
    parser.add_argument("--no-candidates", action="store_true", help="only the plans in use")
    parser.add_argument("--rounds", type=int, default=5, help="times that each side is measured, in turn")
    parser.add_argument("--seed", type=int, default=int(time.time()), help="of the random inputs")
    return parser.parse_args()


def _bench(arguments: argparse.Namespace, device: torch.device, *, empty: bool = False) -> cases.Bench:
    weights = Weights(device, empty=empty, seed=arguments.seed)
    return cases.Bench(TOY if arguments.toy else DENSE, weights, arguments.toy or empty)


def _cases(group: str, bench: cases.Bench) -> Iterator[cases.Case]:
    toy = bench.size is TOY
    batches = (1, 3) if toy else (1, 8, 64)
    if group == "lm_head":
        return cases.lm_head_cases(bench, batches)
    if group == "linear":
        return cases.linear_cases(bench, batches)
    if group == "rows":
        return cases.row_cases(bench, (1, 2) if toy else (1, 64))
    if group == "attention":
        shapes = ((1, 9), (2, 5)) if toy else ((1, 1024), (64, 1024), (1, 200_000))
        return chain(cases.attention_cases(bench, shapes), projected_cases(bench, shapes))
    return cases.absorb_cases(bench, (1, 5) if toy else (1, 8, 64, 1024, 8192))


def _run_group(group: str, bench: cases.Bench, arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    try:
        if group == "round":
            _run_rounds(bench, arguments, report)
            return
        for case in _cases(group, bench):
            _run_case(case, bench.device, arguments, report)
    except Exception as error:  # noqa: BLE001  # told at the end; the other groups go on
        traceback.print_exc()
        report["failures"].append(f"{group}: {error!r}")


def _run_case(case: cases.Case, device: torch.device, arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    """Checks first; then the call and its peer in turn, and then the candidates."""
    error = case.error()
    if not error <= case.tolerance:
        report["failures"].append(f"{case.name}: error {error:.2e}, at most {case.tolerance:.0e}")
        print(f"{case.name:34} WRONG: error {error:.2e}", flush=True)
        return
    timings = time_side_by_side({"kernel": case.calls, "torch": case.peer}, device, arguments.rounds)
    result = _result(case, error, timings["kernel"].us, report["copy_gbps"])
    result |= {"spread_us": timings["kernel"].spread_us, "torch_us": timings["torch"].us, "candidates": {}}
    _print(result)
    report["results"].append(result)
    for key, calls in case.candidates.items() if not arguments.no_candidates else ():
        try:
            wrong = calls[0].error()
            if not wrong <= case.tolerance:
                raise ArithmeticError(f"error {wrong:.2e}")  # noqa: TRY301  # told like any other failure
            taken = time_side_by_side({key: calls}, device, 2)[key].us
        except Exception as failure:  # noqa: BLE001  # told at the end; the next candidate
            report["failures"].append(f"{case.name} [{key}]: {failure!r}"[:300])
            continue
        result["candidates"][key] = taken
        print(f"    {key:30} {taken:9.1f} us  {case.floor_bytes / taken / 1e3 / report['copy_gbps']:.2f}", flush=True)


def _result(case: cases.Case, error: float, taken: float, copy_gbps: float) -> dict[str, Any]:
    gbps = case.floor_bytes / taken / 1e3
    return {
        "name": case.name,
        "error": error,
        "us": taken,
        "floor_us": case.floor_bytes / copy_gbps / 1e3,
        "floor_bytes": case.floor_bytes,
        "gbps": gbps,
        "fraction_of_copy": gbps / copy_gbps,
    }


def _print(result: dict[str, Any]) -> None:
    fraction, error = f"{result['fraction_of_copy']:.2f} of copy", f"error {result['error']:.1e}"
    taken = f"{result['us']:9.1f} us  floor {result['floor_us']:8.1f}  {fraction}  torch {result['torch_us']:9.1f}"
    print(f"{result['name']:34} {taken}  {error}", flush=True)


# rounds


def _settings(*, toy: bool) -> dict[str, ChainSettings]:
    if toy:
        return {
            "nvfp4_head": ChainSettings(1, 2, 5),
            "vocab_64k": ChainSettings(1, 2, 5, body="nvfp4", is_cut=True),
            "bf16": ChainSettings(3, 2, 5, head="bf16"),
        }
    return {
        "nvfp4_head": ChainSettings(1, 4, 1024),
        "nvfp4_head_apart": ChainSettings(1, 4, 1024, overlaps=False),
        "nvfp4_body": ChainSettings(1, 4, 1024, body="nvfp4"),
        "vocab_64k": ChainSettings(1, 4, 1024, body="nvfp4", is_cut=True),
        "bf16": ChainSettings(1, 4, 1024, head="bf16"),
        "k1": ChainSettings(1, 1, 1024),
        "b8": ChainSettings(8, 4, 1024),
        "b64": ChainSettings(64, 4, 1024),
    }


def _run_rounds(bench: cases.Bench, arguments: argparse.Namespace, report: dict[str, Any]) -> None:
    rounds: dict[str, Any] = {}
    report["rounds"] = rounds
    settings = _settings(toy=bench.toy)
    head = Bf16Head(bench.size, bench.weights, 1, settings["bf16"].num_rows)
    for name, wish in settings.items():
        head.state(wish.batch, wish.num_rows)
        chain, plain = KernelChain(head, wish), TorchChain(head, wish)
        wrong = _compare_rounds(chain, plain)
        if wrong is not None:
            report["failures"].append(f"round/{name}: {wrong}")
            print(f"round/{name:28} WRONG: {wrong}", flush=True)
            continue
        sides = {"kernel": [chain.run], "torch": [plain.run]}
        timings = time_side_by_side(sides, bench.device, arguments.rounds, launches=_ROUND_LAUNCHES)
        floors = [wish.num_drafts * side.num_bytes / report["copy_gbps"] / 1e3 for side in (chain, plain)]
        mine, theirs = timings["kernel"].us, timings["torch"].us
        rounds[name] = {"us": mine, "floor_us": floors[0], "torch_us": theirs, "torch_floor_us": floors[1]}
        rounds[name]["num_drafts"] = wish.num_drafts
        print(
            f"round/{name:28} {mine:9.1f} us  floor {floors[0]:8.1f} ({floors[0] / mine:.2f})  torch {theirs:9.1f}"
            f" (floor {floors[1]:.1f})  {theirs / mine:.2f}x",
            flush=True,
        )


def _compare_rounds(chain: KernelChain, plain: TorchChain) -> str | None:
    """What is wrong with a round. Against PyTorch's the first draft is compared, where the formats are the same."""
    chain.run()
    plain.run()
    if not bool(chain.logprobs.isfinite().all()):
        return "a log-probability is not finite"
    if bool((chain.ids < 0).any()):
        return "an id is missing"
    if chain.settings.head != "bf16" or chain.settings.body != "bf16":
        return None
    off = float((chain.logprobs[0] - plain.logprobs[0]).abs().max())
    # Both sides round every step to bf16, PyTorch more often; logits are of size 1 and log-probabilities near -10.
    return None if off < 0.25 else f"the first log-probability is off by {off:.3f}"


def _summary(report: dict[str, Any]) -> None:
    """The goals' figures, as far as they were measured."""
    report["figures"] = figures_of(report)
    for name, value in report["figures"].items():
        print(f"{name:32} {value:.3f}")
    for failure in report["failures"]:
        print("FAILED", failure)


def _describe(device: torch.device) -> dict[str, str]:
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu, interpreted: no measurement"
    return {"name": name, "torch": torch.__version__, "triton": triton.__version__}


def _write(folder: Path | None, report: dict[str, Any]) -> None:
    if folder is not None:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "kernels.json").write_text(json.dumps(report, indent=1) + "\n")


# compiling without a GPU


def _compile_only(arguments: argparse.Namespace) -> int:
    """Makes every call of every group, candidates too, with launches that compile and do nothing."""
    from hopper import compiling_for_hopper, examine

    found: dict[int, dict[str, Any]] = {}
    with compiling_for_hopper() as launched:
        for group in arguments.groups:
            bench = _bench(arguments, torch.device("cpu"), empty=True)
            for case, call in _all_calls(group, bench, arguments):
                count = len(launched)
                call()
                for kernel in launched[count:]:
                    found.setdefault(id(kernel), {"kernel": kernel, "case": case})
    report = []
    for entry in found.values():
        compiled = examine(entry["kernel"])
        is_wgmma, has_local = "HGMMA" in compiled.sass, "STL" in compiled.sass
        figures = f"{compiled.num_registers:3} registers, stack {compiled.stack_bytes}, shared {compiled.shared_bytes}"
        print(f"{compiled.name:24} {entry['case']:44} {figures}{', HGMMA' if is_wgmma else ''}", flush=True)
        report.append(
            {
                "kernel": compiled.name,
                "case": entry["case"],
                "registers": compiled.num_registers,
                "stack": compiled.stack_bytes,
                "shared": compiled.shared_bytes,
                "hgmma": is_wgmma,
                "spills": has_local,
            }
        )
    _write(arguments.out, {"target": "sm_90", "kernels": report})
    print(f"{len(report)} kernels")
    return 0


def _all_calls(group: str, bench: cases.Bench, arguments: argparse.Namespace) -> Iterator[tuple[str, Any]]:
    if group == "round":
        settings = _settings(toy=arguments.toy)
        head = Bf16Head(bench.size, bench.weights, 1, settings["bf16"].num_rows)
        for name, wish in settings.items():
            head.state(wish.batch, wish.num_rows)
            yield f"round/{name}", KernelChain(head, wish).run
        return
    for case in _cases(group, bench):
        yield case.name, case.calls[0]
        if not arguments.no_candidates:
            for key, calls in case.candidates.items():
                yield f"{case.name} [{key}]", calls[0]


if __name__ == "__main__":
    sys.exit(main())
