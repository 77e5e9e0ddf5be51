"""What a call costs: round trips of the service beside a bare gRPC echo of the same size and the head's own forward.

The floor of a Propose is a bare gRPC service that runs the head's forward and does no more: the echo again, with the
forward in its handler, in the service's own process and over its head, since one process differs from the next by more
than a call costs. An echo followed by the forward in this process has a line of its own: there nobody waits for
milliseconds, and a process that has waited so long is slow to begin again, whatever it waited for. So has the forward
in a tight loop. The service is called with bare messages, as the echo is; what the client library adds has a line too.
"""

from __future__ import annotations

import statistics
import tempfile
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from drafter_service.bench.echo import Echo, request_of
from drafter_service.bench.forward import NUM_DRAFTS, NUM_ROWS, Pairs, in_turn, load_cpu_head, make_forward, make_pairs
from drafter_service.bench.samples import Case, Latency, Plan, joined, measure, median_of
from drafter_service.bench.wire import WireSession
from drafter_service.config import MIB, ServiceConfig
from specdraft import Client, Proposal, Sequence

TAX_GOAL_US = 250.0
TAIL_GOAL = 3.0
MODELS = Path(__file__).resolve().parent.parent / "demo" / "models"


def measure_rpc(plan: Plan, models: Path = MODELS, tell: Callable[[str], None] = lambda _text: None) -> dict[str, Any]:
    """Figures of every case, the tax over echo and forward, and which goals are met.

    Each round has processes of its own: one differs from the next by more than a call costs.
    """
    rounds = []
    for number in range(plan.num_rounds):
        tell(f"round {number + 1}/{plan.num_rounds}")
        with _cases(models) as cases:
            rounds.append(measure(cases, replace(plan, num_rounds=1)))
    latencies = joined(rounds)
    taxes = {way: _tax(latencies, way) for way in ("unary", "drive")}
    return {
        "plan": asdict(plan) | {"num_drafts": NUM_DRAFTS, "num_rows": NUM_ROWS},
        "cases": {name: _figures(latency) for name, latency in latencies.items()},
        "tax_us": taxes,
        "above_apart_us": {way: _tax(latencies, way, "apart") for way in taxes},
        "ratios": {f"empty {way}": _ratio(latencies[f"empty {way}"], latencies[f"echo {way}"]) for way in taxes},
        "goals": _goals(latencies, taxes),
    }


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    lines = [f"{'':<18}{'p50 us':>9}{'p99 us':>9}{'p99/p50':>9}   medians over the rounds"]
    for name, case in figures["cases"].items():
        lines.append(f"{name:<18}{case['p50_us']:>9.0f}{case['p99_us']:>9.0f}{case['tail']:>9.2f}")
    for name, ratio in figures["ratios"].items():
        lines.append(f"{name}: {ratio:.2f} x its echo")
    lines.append(
        f"Propose K={NUM_DRAFTS} above its floor (an echo that runs the forward); p50 less p50 within a round, median"
    )
    lines.append("of the rounds with the middle half of them; the difference of the table's p50s is another estimate:")
    lines += [_tax_line(way, tax) for way, tax in figures["tax_us"].items()]
    lines.append("and above echo and forward apart, one after the other and the forward in this process:")
    lines += [_tax_line(way, tax) for way, tax in figures["above_apart_us"].items()]
    lines += [f"goal {'met   ' if met else 'missed'} {goal}" for goal, met in figures["goals"].items()]
    return "\n".join(lines)


def _tax_line(way: str, tax: Mapping[str, float]) -> str:
    low, median, high = (tax[name] for name in ("quartile_1", "median", "quartile_3"))
    # What works cannot cost less than nothing.
    said = f"{median:.0f} us" if median > 0 else "within noise"
    return f"  {way:<6} {said} ({low:.0f} to {high:.0f}); of the p50s {tax['of_p50s']:.0f} us"


@contextmanager
def _cases(models: Path) -> Iterator[Mapping[str, Case]]:
    """Every case, with the processes that it needs running."""
    head, target = models / "head", models / "target"
    config = ServiceConfig(
        checkpoint=head,
        target_checkpoint=target,
        metrics_port=None,  # another service may have the usual ones
        health_port=None,
        device="cpu",  # where the forward beside it runs
        kv_bytes=64 * MIB,
        torch_threads=1,
        log_level="warning",
    )
    with ExitStack() as stack:
        enter = stack.enter_context
        folder = Path(enter(tempfile.TemporaryDirectory(prefix="specdraft-")))
        config = replace(config, socket=folder / "s.sock")
        echo, address = enter(Echo(folder / "echo.sock", config)), f"unix:{config.socket}"
        client = enter(Client(address, max_drafts=NUM_DRAFTS))
        info = client.server_info().head
        pairs = make_pairs(info.hidden_width, info.vocab_size)
        unary = enter(WireSession(address, pairs.tokens, pairs.hiddens, NUM_DRAFTS))
        drive = enter(WireSession(address, pairs.tokens, pairs.hiddens, NUM_DRAFTS))
        asked, answered = unary.sample()
        request, between = request_of(len(asked), len(answered)), unary.rehearsal(answered)
        forward = make_forward(load_cpu_head(head, target))
        echo_unary, echo_drive = echo.unary(request), echo.stream(request)
        yield {
            "forward": Case(forward),
            "echo unary": Case(echo_unary, between),
            "empty unary": unary.look_unary(),
            "apart unary": Case(lambda: (echo_unary(), forward()), between),
            "floor unary": Case(echo.unary(request, with_forward=True), between),
            "propose unary": unary.propose_unary(),
            "echo drive": Case(echo_drive, between),
            "empty drive": drive.look_drive(),
            "apart drive": Case(lambda: (echo_drive(), forward()), between),
            "floor drive": Case(echo.stream(request, with_forward=True), between),
            "propose drive": drive.propose_drive(),
            "client drive": Case(_by_client(enter(client.open_sequence()), pairs)),
        }


def _by_client(sequence: Sequence, pairs: Pairs) -> Callable[[], object]:
    """The same Propose through the client library, with hidden rows in shared memory."""
    sequence.catchup(0, pairs.tokens, pairs.hiddens)

    def propose(key: int) -> Proposal:
        row = key % NUM_ROWS
        return sequence.propose(key, [pairs.tokens[row]], pairs.hiddens[row : row + 1], NUM_DRAFTS)

    return in_turn(propose)


def _figures(latency: Latency) -> dict[str, float]:
    p50, p99 = median_of(latency.p50s_us), median_of(latency.p99s_us)
    return {"p50_us": p50, "p99_us": p99, "tail": round(p99 / p50, 2)}


def _ratio(latency: Latency, echo: Latency) -> float:
    pairs = zip(latency.p50s_us, echo.p50s_us, strict=True)
    return round(statistics.median(ours / theirs for ours, theirs in pairs), 2)


def _tax(latencies: Mapping[str, Latency], way: str, least: str = "floor") -> dict[str, float]:
    """Propose above its floor, or what else it is compared with, by two estimates.

    Round by round, p50 less p50: whatever the machine does in a round meets both, so this is the one that goals are
    judged by; its quartiles over the rounds say how sure it is. And the difference of the medians that are quoted.
    """
    propose, floor = latencies[f"propose {way}"], latencies[f"{least} {way}"]
    by_round = [ours - others for ours, others in zip(propose.p50s_us, floor.p50s_us, strict=True)]
    quartiles = statistics.quantiles(by_round, method="inclusive") if len(by_round) > 1 else by_round * 3
    names = ("quartile_1", "median", "quartile_3")
    taxes = {name: round(value, 1) for name, value in zip(names, quartiles, strict=True)}
    return taxes | {"of_p50s": round(median_of(propose.p50s_us) - median_of(floor.p50s_us), 1)}


def _goals(latencies: Mapping[str, Latency], taxes: Mapping[str, Mapping[str, float]]) -> dict[str, bool]:
    goals = {
        f"{way}: p50 <= echo + forward + {TAX_GOAL_US:.0f} us": tax["median"] <= TAX_GOAL_US
        for way, tax in taxes.items()
    }
    for way in taxes:
        latency = latencies[f"propose {way}"]
        goals[f"{way}: p99 <= {TAIL_GOAL:.0f} x p50"] = latency.p99_us <= TAIL_GOAL * latency.p50_us
    return goals
