"""`drafter-service`: serve, inspect, health, bench, demo."""

from __future__ import annotations

import argparse
import json
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from drafter_service import __version__
from drafter_service.arguments import count, seconds
from drafter_service.bench.flags import add_step_flags, add_tax_flags
from drafter_service.config import WATCH_STDIN_FLAG, ConfigError, ServiceConfig, add_flags, read_config

if TYPE_CHECKING:
    from drafter_service.server import Addresses

    _Commands = argparse._SubParsersAction["_Parser"]  # noqa: SLF001  # argparse has no public name for it

# Run as `python -m`, this module has another name, and its log lines would go nowhere.
_log = logging.getLogger("drafter_service.cli")

EXIT_USAGE = 2
EXIT_FAILED = 1
EXIT_SIGNAL = 128
"""Added to a signal's number, as shells do."""

COLOR_CHOICES = ("auto", "always", "never")
ALL_INTERFACES = ("", "0.0.0.0", "::", "[::]")  # noqa: S104  # compared with, not bound
DRAFTS_MAX = ServiceConfig().max_drafts
POSITIONS = 500
LEVER_POSITIONS = 6000
OF_THE_DEMO = ("tokenizers", "transformers")
ASK_AGAIN_S = 0.2
LOOK_S = 1.0
"""How often `serve` looks whether the engine lives."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        code = int(flags.run(flags))
        sys.stdout.flush()  # here, where a reader who has gone can still be told from a fault
    except ConfigError as error:
        return _failed(str(error), EXIT_USAGE)
    except KeyboardInterrupt:
        return _failed("interrupted", EXIT_SIGNAL + signal.SIGINT)
    except BrokenPipeError:
        # What is left in the buffer goes nowhere, or the interpreter would complain about it at the end.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_SIGNAL + signal.SIGPIPE
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] not in OF_THE_DEMO:
            raise
        return _failed(f"{error.name} is not installed: demo and benchmarks need the extra demo", EXIT_USAGE)
    except Exception as error:
        if not _is_of_the_service(error):
            raise
        return _failed(str(error), EXIT_FAILED)
    return code


def _failed(text: str, code: int) -> int:
    print(f"drafter-service: {text}", file=sys.stderr)
    return code


def _is_of_the_service(error: Exception) -> bool:
    """Whether the service that demo and benchmarks start is the reason: a traceback of ours would say less."""
    from drafter_service.server.child import ProcessError
    from specdraft.errors import SpecdraftError

    return isinstance(error, ProcessError | SpecdraftError)


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """SIGTERM unwinds the stack, so that the service that was started is ended and its directory removed."""

    def end(number: int, _frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # what is being cleared away must not be interrupted
        sys.exit(EXIT_SIGNAL + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _tell(text: str) -> None:
    """Progress, beside what is asked for: standard output stays what can be read by programs."""
    print(text, file=sys.stderr, flush=True)


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no abbreviations: what they mean changes with every new flag."""

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings, allow_abbrev=False)

    def error(self, message: str) -> NoReturn:
        """Ends the process."""
        self.exit(EXIT_USAGE, f"drafter-service: {message} (see {self.prog} --help)\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="drafter-service", description="The drafting half of speculative decoding, as a gRPC service."
    )
    parser.add_argument("--version", action="version", version=f"drafter-service {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a head")
    add_flags(serve)
    serve.add_argument(WATCH_STDIN_FLAG, dest="watches_stdin", action="store_true", help=argparse.SUPPRESS)
    serve.set_defaults(run=_serve)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, or what is wrong with it")
    inspect.add_argument("checkpoint", type=Path, help="directory of the head's checkpoint")
    inspect.add_argument(
        "--target-checkpoint",
        type=Path,
        help="directory of the target's checkpoint, for the embedding and LM head that the head does not bring",
    )
    inspect.add_argument("--json", action="store_true", help="print JSON; needs the embedding and LM head too")
    inspect.set_defaults(run=_inspect)
    health = commands.add_parser("health", help="exit 0 if the service is SERVING: an exec probe")
    health.add_argument(
        "--target",
        default=f"unix://{ServiceConfig().socket}",
        help="gRPC address, or the socket's path (default %(default)s)",
    )
    health.add_argument("--service", default="", help="health service: empty = ready, specdraft.live = alive")
    health.add_argument("--timeout-s", type=seconds, default=2.0, help="most time for an answer (default %(default)s)")
    health.add_argument(
        "--wait-s", type=seconds, default=0.0, help="ask until it is SERVING, for so long at most (default: once)"
    )
    health.set_defaults(run=_health)
    _add_demo(commands)
    _add_bench(commands)
    return parser


def _add_demo(commands: _Commands) -> None:
    demo = commands.add_parser("demo", help="generate held-out code with and without drafts, side by side")
    demo.add_argument(
        "--color", choices=COLOR_CHOICES, default="auto", help="auto = on a terminal, unless NO_COLOR is set"
    )
    demo.add_argument("--head", type=Path, help="another checkpoint of the head (default: the trained one)")
    demo.add_argument(
        "--num-drafts", type=count(1, DRAFTS_MAX), default=3, help="drafts of a round (default %(default)s)"
    )
    demo.add_argument("--prompts", type=count(1, 1000), default=4, help="generations of a run (default %(default)s)")
    demo.add_argument(
        "--new-tokens", type=count(1, 800), default=72, help="length of a generation (default %(default)s)"
    )
    demo.add_argument("--turns", type=count(1, 1000), default=5, help="timed turns (default %(default)s)")
    demo.add_argument("--seed", type=int, default=0, help="chooses the prompts (default %(default)s)")
    demo.set_defaults(run=_demo)


def _add_bench(commands: _Commands) -> None:
    bench = commands.add_parser("bench", help="measure: rpc, acceptance, carry, sessions, metrics, tax, step")
    kinds = bench.add_subparsers(title="benchmarks", required=True, metavar="BENCHMARK")
    rpc = kinds.add_parser("rpc", help="round trips beside a bare gRPC echo and the head's own forward")
    rpc.add_argument("--rounds", type=count(1, 10_000), default=7, help="rounds (default %(default)s)")
    rpc.add_argument(
        "--calls", type=count(1, 1_000_000), default=300, help="calls of each case in a round (default %(default)s)"
    )
    rpc.set_defaults(run=_bench, measure=_bench_rpc)
    acceptance = _add_acceptance(kinds)
    carry = kinds.add_parser("carry", help="TakeKV and InstallKV of few and of many rows")
    carry.add_argument(
        "--rows",
        type=count(1, 1_000_000),
        nargs=2,
        default=(100, 100_000),
        metavar=("FEW", "MANY"),
        help="rows of a short and a long sequence (default 100 100000)",
    )
    carry.add_argument("--rounds", type=count(1, 10_000), default=7, help="rounds (default %(default)s)")
    carry.add_argument(
        "--calls", type=count(1, 1_000_000), default=100, help="calls of each case in a round (default %(default)s)"
    )
    carry.set_defaults(run=_bench, measure=_bench_carry)
    sessions = kinds.add_parser("sessions", help="many clients at once")
    sessions.add_argument(
        "--sequences",
        type=count(1, 4000),
        default=1000,
        help="open sequences that do nothing meanwhile (default %(default)s)",
    )
    sessions.add_argument("--rounds", type=count(1, 10_000), default=15, help="rounds (default %(default)s)")
    sessions.set_defaults(run=_bench, measure=_bench_sessions)
    metrics = kinds.add_parser("metrics", help="what counting costs beside the head's forward")
    metrics.add_argument("--rounds", type=count(1, 10_000), default=7, help="rounds (default %(default)s)")
    metrics.set_defaults(run=_bench, measure=_bench_metrics)
    for kind in (rpc, acceptance, carry, sessions, metrics, *_add_gpu_benches(kinds)):
        kind.add_argument("--json", action="store_true", help="print the result as it is committed")


def _add_gpu_benches(kinds: _Commands) -> tuple[_Parser, _Parser]:
    tax = kinds.add_parser("tax", help="GPU: what drafting in another process adds to a target's step")
    add_tax_flags(tax)
    tax.set_defaults(run=_bench, measure=_bench_tax)
    step = kinds.add_parser("step", help="GPU: the time of one Propose, eager and as a CUDA graph")
    add_step_flags(step)
    step.set_defaults(run=_bench, measure=_bench_step)
    return tax, step


def _add_acceptance(kinds: _Commands) -> _Parser:
    acceptance = kinds.add_parser("acceptance", help="acceptance of the trained head on held-out files")
    acceptance.add_argument("--levers", action="store_true", help="compare the levers with the default instead")
    acceptance.add_argument(
        "--positions",
        type=count(1, 1_000_000),
        help=f"positions (default {POSITIONS}; with --levers {LEVER_POSITIONS})",
    )
    acceptance.add_argument(
        "--num-drafts", type=count(1, DRAFTS_MAX), default=3, help="drafts of a position (default %(default)s)"
    )
    acceptance.add_argument(
        "--prompts",
        type=count(1, 1000),
        default=16,
        help="generations that the rows policies are compared on (default %(default)s)",
    )
    acceptance.set_defaults(run=_bench, measure=_bench_acceptance)
    return acceptance


def _serve(flags: argparse.Namespace) -> int:
    config = read_config(flags, os.environ)
    # Each lane's wait holds a hardware queue; CUDA reads this when it starts.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    # gRPC writes lines of its own about what we say in ours. Read when it is imported.
    os.environ.setdefault("GRPC_VERBOSITY", "NONE")
    from drafter_service.server import Service
    from drafter_service.server.process import keep_what_was_loaded
    from drafter_service.telemetry import set_up_logging

    set_up_logging(config.log_level)
    stop = _Stop()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, stop.at_signal)
    if flags.watches_stdin:
        threading.Thread(target=stop.at_end_of_stdin, name="stdin", daemon=True).start()
    service = Service(config)
    try:
        addresses = service.start()
        stop.unwinds = False
    except SystemExit:
        service.close()
        _log.info("%s: ended before it was ready", stop.why)
        return 0
    try:
        keep_what_was_loaded()
        _say_where(addresses, config)
        while not stop.given.wait(LOOK_S) and not service.has_failed:
            pass
        failure = service.failure
        _log.info("%s: draining, at most %g s", failure or stop.why, config.drain_s)
        service.drain()
    finally:
        service.close()
    if service.is_stuck:
        _log.error("the device does not come back: ending without it")
        logging.shutdown()
        os._exit(EXIT_FAILED)
    _log.info("ended")
    return _failed(failure, EXIT_FAILED) if failure else 0


class _Stop:
    """The wish that `serve` ends, and where it came from. While it `unwinds`, a signal ends the load, however long."""

    def __init__(self) -> None:
        self.given = threading.Event()
        self.why = ""
        self.unwinds = True

    def at_signal(self, number: int, _frame: object) -> None:
        self.give(signal.Signals(number).name)
        if self.unwinds:
            self.unwinds = False  # what is being cleared away must not be interrupted
            sys.exit(0)

    def give(self, why: str) -> None:
        self.why = self.why or why
        self.given.set()

    def at_end_of_stdin(self) -> None:
        while os.read(sys.stdin.fileno(), 1 << 10):
            pass
        self.give("who started us has ended")


def _say_where(addresses: Addresses, config: ServiceConfig) -> None:
    """One line for whoever waits for it; the log says what can be reached from other hosts."""
    ports = {"tcp": addresses.listen_port, "metrics": addresses.metrics_port, "health": addresses.health_port}
    places = {"socket": addresses.socket} | ports
    text = " ".join(f"{name}={place}" for name, place in places.items() if place is not None)
    print(f"serving {text}", flush=True)
    hosts = {"tcp": config.listen.rpartition(":")[0], "metrics": config.probe_host, "health": config.probe_host}
    for name, port in ports.items():
        if port is not None and hosts[name] in ALL_INTERFACES:
            _log.info("%s listens on all interfaces, port %d", name, port)


def _inspect(flags: argparse.Namespace) -> int:
    from drafter_service.heads import CheckpointError, as_json, describe, plan_head
    from drafter_service.heads.inspect import describe_alone, missing_tables

    try:
        if not flags.target_checkpoint and not flags.json and missing_tables(flags.checkpoint):
            print(describe_alone(flags.checkpoint))
            return 0
        plan = plan_head(flags.checkpoint, flags.target_checkpoint)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    print(json.dumps(as_json(plan), indent=2) if flags.json else describe(plan))
    return 0


def _health(flags: argparse.Namespace) -> int:
    from drafter_service.server import ask_health

    until = time.monotonic() + flags.wait_s
    while True:
        status, why = ask_health(flags.target, flags.timeout_s, flags.service)
        if status == "SERVING" or time.monotonic() >= until:
            break
        time.sleep(ASK_AGAIN_S)
    print(status)
    return 0 if status == "SERVING" else _failed(f"{flags.target}: {why or status}", EXIT_FAILED)


def _demo(flags: argparse.Namespace) -> int:
    from drafter_service.demo.demo import DemoPlan, run_demo
    from drafter_service.demo.painting import Painter, wants_color

    plan = DemoPlan(
        head=flags.head or DemoPlan().head,
        num_drafts=flags.num_drafts,
        num_prompts=flags.prompts,
        num_new=flags.new_tokens,
        num_turns=flags.turns,
        seed=flags.seed,
    )
    painter = Painter(in_color=wants_color(flags.color, sys.stdout, os.environ))
    with _ended_by_sigterm():
        return 0 if run_demo(plan, painter, tell=_tell) else 1


def _bench(flags: argparse.Namespace) -> int:
    with _ended_by_sigterm():
        return int(flags.measure(flags))


def _bench_rpc(flags: argparse.Namespace) -> int:
    from drafter_service.bench import rpc
    from drafter_service.bench.samples import Plan

    figures = rpc.measure_rpc(Plan(flags.rounds, flags.calls), tell=_tell)
    command = f"drafter-service bench rpc --rounds {flags.rounds} --calls {flags.calls} --json"
    return _report("rpc", command, figures, rpc.describe, as_json=flags.json)


def _bench_acceptance(flags: argparse.Namespace) -> int:
    if flags.levers:
        return _bench_levers(flags)
    from drafter_service.demo import acceptance, policies

    plan = acceptance.AcceptancePlan(POSITIONS if flags.positions is None else flags.positions, flags.num_drafts)
    try:
        figures = acceptance.measure_acceptance(plan, tell=_tell)
    except ValueError as error:
        raise ConfigError(f"--positions: {error}") from error
    rounds = policies.PolicyPlan(num_prompts=flags.prompts, num_drafts=flags.num_drafts)
    figures["rows_policies"] = policies.measure_policies(rounds, tell=_tell)
    command = (
        f"drafter-service bench acceptance --positions {plan.num_positions} --num-drafts {plan.num_drafts} "
        f"--prompts {flags.prompts} --json"
    )

    def describe(measured: dict[str, Any]) -> str:
        return f"{acceptance.describe(measured)}\n\n{policies.describe(measured['rows_policies'])}"

    return _report("acceptance", command, figures, describe, as_json=flags.json)


def _bench_levers(flags: argparse.Namespace) -> int:
    from drafter_service.demo.lever_ab import figures

    plan = figures.LeverPlan(LEVER_POSITIONS if flags.positions is None else flags.positions, flags.num_drafts)
    _tell(f"comparing levers at {plan.num_positions} positions: some minutes without a word")
    try:
        measured = figures.measure_levers(plan)
    except ValueError as error:
        raise ConfigError(f"--positions: {error}") from error
    command = (
        f"drafter-service bench acceptance --levers --positions {plan.num_positions} --num-drafts {plan.num_drafts}"
    )
    return _report("levers", f"{command} --json", measured, figures.describe, as_json=flags.json)


def _bench_carry(flags: argparse.Namespace) -> int:
    from drafter_service.bench import carry
    from drafter_service.bench.samples import Plan

    few, many = flags.rows
    figures = carry.measure_carry(few, many, Plan(flags.rounds, flags.calls), tell=_tell)
    command = f"drafter-service bench carry --rows {few} {many} --rounds {flags.rounds} --calls {flags.calls} --json"
    return _report("carry", command, figures, carry.describe, as_json=flags.json)


def _bench_tax(flags: argparse.Namespace) -> int:
    from drafter_service.bench import tax
    from drafter_service.bench.tax_measure import TaxRun

    run = TaxRun(
        tuple(flags.verify_ms), flags.steps, flags.turns, flags.checks, vocab_size=flags.vocab_size, dry=flags.dry
    )
    plan = tax.TaxPlan(("peer",) if flags.drafter_device else tuple(flags.modes), run, flags.drafter_device or 1)
    try:
        figures = tax.measure_tax(plan, tell=_tell)
    except tax.TaxError as error:
        raise ConfigError(str(error)) from error
    words = ["--modes", *plan.modes, "--verify-ms", *(f"{one:g}" for one in flags.verify_ms)]
    words += ["--steps", str(flags.steps), "--turns", str(flags.turns), "--vocab-size", str(flags.vocab_size)]
    words += ["--checks", str(flags.checks)] if flags.checks else []
    words += ["--drafter-device", str(plan.drafter_device)] if "peer" in plan.modes else []
    command = f"drafter-service bench tax {' '.join(words)}{' --dry' if flags.dry else ''} --json"
    return _report("tax", command, figures, tax.describe, as_json=flags.json)


def _bench_step(flags: argparse.Namespace) -> int:
    from drafter_service.bench import step

    plan = step.StepPlan(
        tuple(flags.batches),
        tuple(flags.drafts),
        rows=8 if flags.dry else step.StepPlan().rows,
        num_steps=flags.steps,
        vocab_size=flags.vocab_size,
        dry=flags.dry,
    )
    try:
        figures = step.measure_step(plan, tell=_tell)
    except step.StepError as error:
        raise ConfigError(str(error)) from error
    sizes = f"--batches {' '.join(map(str, flags.batches))} --drafts {' '.join(map(str, flags.drafts))}"
    command = f"drafter-service bench step {sizes} --steps {flags.steps}{' --dry' if flags.dry else ''} --json"
    return _report("step", command, figures, step.describe, as_json=flags.json)


def _bench_sessions(flags: argparse.Namespace) -> int:
    from drafter_service.bench import sessions

    plan = sessions.SessionsPlan(num_sequences=flags.sequences, num_rounds=flags.rounds)
    figures = sessions.measure_sessions(plan, tell=_tell)
    command = f"drafter-service bench sessions --sequences {flags.sequences} --rounds {flags.rounds} --json"
    return _report("sessions", command, figures, sessions.describe, as_json=flags.json)


def _bench_metrics(flags: argparse.Namespace) -> int:
    from drafter_service.bench import metrics
    from drafter_service.bench.samples import Plan

    figures = metrics.measure_metrics(Plan(flags.rounds), tell=_tell)
    command = f"drafter-service bench metrics --rounds {flags.rounds} --json"
    return _report("metrics", command, figures, metrics.describe, as_json=flags.json)


def _report(
    name: str, command: str, figures: dict[str, Any], describe: Callable[[dict[str, Any]], str], *, as_json: bool
) -> int:
    from drafter_service.bench.report import make_report

    report = make_report(name, command, figures)
    print(report.as_json() if as_json else f"{describe(figures)}\n\n{report.device}, {report.date}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
