"""Propose over Drive from the Go and the Python client, beside each language's bare echo: `make bench-clients`.

All cases take turns, block by block, against the same service process and the same echo process (a Python server, as
the service is). What is quoted is the median over the rounds.
"""

import argparse
import itertools
import json
import random
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from pathlib import Path

import torch

from conformance.drivers import build_go, go_tool
from drafter_service.bench.echo import Echo, request_of
from drafter_service.bench.forward import NUM_DRAFTS, NUM_ROWS
from drafter_service.bench.report import make_report
from drafter_service.bench.rpc import MODELS
from drafter_service.config import MIB, ServiceConfig
from drafter_service.server.process import ServiceProcess
from specdraft import Client

BLOCK_CALLS = 25
WARM_UP_CALLS = 5
REQUEST_BYTES, ANSWER_BYTES = 80, 60
"""About a Propose over shared memory with one pair, and its answer."""


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--calls", type=int, default=300, help="timed calls of each case in a round")
    parser.add_argument("--json", type=Path, help="write the result here")
    said = parser.parse_args()
    with ExitStack() as stack:
        cases = open_cases(stack)
        rounds = [measure_round(cases, said.calls, number) for number in range(said.rounds)]
    figures = {name: summary([one[name] for one in rounds]) for name in cases}
    print(f"{'':<16}{'p50 us':>9}{'p99 us':>9}   medians over {said.rounds} rounds")
    for name, figure in figures.items():
        print(f"{name:<16}{figure['p50_us']:>9.0f}{figure['p99_us']:>9.0f}")
    if said.json:
        command = f"make bench-clients ROUNDS={said.rounds} CALLS={said.calls}"
        plan = {"num_rounds": said.rounds, "num_calls": said.calls, "num_drafts": NUM_DRAFTS, "num_rows": NUM_ROWS}
        report = make_report("drive-clients", command, {"plan": plan, "cases": figures})
        fields = json.loads(report.as_json())
        fields["versions"]["go"] = subprocess.check_output([go_tool(), "env", "GOVERSION"], text=True).strip()
        said.json.write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")


def open_cases(stack):
    """Case -> a function that times so many calls and returns microseconds."""
    enter = stack.enter_context
    config = ServiceConfig(
        checkpoint=MODELS / "head", target_checkpoint=MODELS / "target", kv_bytes=64 * MIB, torch_threads=1,
        log_level="warning",
    )  # fmt: skip
    target = enter(ServiceProcess(config)).target
    directory = Path(enter(tempfile.TemporaryDirectory(prefix="sd-")))
    echo = enter(Echo(directory / "echo.sock"))
    tool = build_go("./internal/benchdrive", directory / "benchdrive")
    arguments = [target, f"unix://{directory / 'echo.sock'}", str(REQUEST_BYTES), str(ANSWER_BYTES)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    process = enter(subprocess.Popen([str(tool), *arguments], **pipes))
    stack.callback(process.stdin.close)
    client = enter(Client(target, max_drafts=NUM_DRAFTS))
    return {
        "go echo": by_process(process, "echo"),
        "go propose": by_process(process, "propose"),
        "python echo": by_calls(echo.stream(request_of(REQUEST_BYTES, ANSWER_BYTES))),
        "python propose": by_calls(python_propose(client)),
    }


def by_process(process, name):
    def run(count):
        process.stdin.write(f"{name} {count}\n")
        process.stdin.flush()
        return json.loads(process.stdout.readline())

    return run


def by_calls(call):
    def run(count):
        times = []
        for _ in range(count):
            began = time.perf_counter_ns()
            call()
            times.append((time.perf_counter_ns() - began) / 1000)
        return times

    return run


def python_propose(client):
    """The same as the Go program's: proposals at one key after the other, hidden rows in shared memory."""
    chance = random.Random(0)
    tokens = [chance.randrange(100) for _ in range(NUM_ROWS)]
    hiddens = torch.randn(NUM_ROWS, client.hidden_width, generator=torch.Generator().manual_seed(0))
    sequence, keys = client.open_sequence(), itertools.cycle(range(NUM_ROWS))
    sequence.catchup(0, tokens, hiddens)

    def propose():
        row = next(keys)
        return sequence.propose(NUM_ROWS + row, [tokens[row]], hiddens[row : row + 1], NUM_DRAFTS)

    return propose


def measure_round(cases, num_calls, number):
    """p50 and p99 of each case; every turn begins with another one."""
    print(f"round {number + 1}", file=sys.stderr)
    names, samples = list(cases), {name: [] for name in cases}
    for turn in range(-(-num_calls // BLOCK_CALLS)):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            samples[name] += cases[name](WARM_UP_CALLS + BLOCK_CALLS)[WARM_UP_CALLS:]
    return {name: percentiles(sorted(times)) for name, times in samples.items()}


def percentiles(ordered):
    return ordered[len(ordered) // 2], ordered[min(len(ordered) * 99 // 100, len(ordered) - 1)]


def summary(rounds):
    p50s, p99s = zip(*rounds, strict=True)
    return {"p50_us": round(statistics.median(p50s), 1), "p99_us": round(statistics.median(p99s), 1)}


if __name__ == "__main__":
    main()
