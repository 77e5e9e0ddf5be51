"""`drafter-service`: serve, inspect, health, bench, demo."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import threading
from collections.abc import Sequence
from pathlib import Path

from drafter_service import __version__
from drafter_service.config import ConfigError, ServiceConfig, add_flags, read_config

EXIT_USAGE = 2


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command and returns the exit code."""
    flags = _parser().parse_args(arguments)
    try:
        return int(flags.run(flags))
    except ConfigError as error:
        print(f"drafter-service: {error}", file=sys.stderr)
        return EXIT_USAGE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="drafter-service", description="The drafting half of speculative decoding, as a gRPC service."
    )
    parser.add_argument("--version", action="version", version=f"drafter-service {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = commands.add_parser("serve", help="serve a head")
    add_flags(serve)
    serve.set_defaults(run=_serve)
    inspect = commands.add_parser("inspect", help="say what a checkpoint holds, or what is wrong with it")
    inspect.add_argument("checkpoint", type=Path)
    inspect.add_argument("--target-checkpoint", type=Path)
    inspect.add_argument("--json", action="store_true")
    inspect.set_defaults(run=_inspect)
    health = commands.add_parser("health", help="exit 0 if the service is SERVING: an exec probe")
    health.add_argument(
        "--target", default=f"unix://{ServiceConfig().socket}", help="gRPC address (default %(default)s)"
    )
    health.add_argument("--timeout-s", type=float, default=2.0)
    health.set_defaults(run=_health)
    return parser


def _serve(flags: argparse.Namespace) -> int:
    config = read_config(flags, os.environ)
    from drafter_service.server import Service
    from drafter_service.telemetry import set_up_logging

    set_up_logging(config.log_level)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    service = Service(config)
    addresses = service.start()
    places = {
        "socket": addresses.socket,
        "tcp": addresses.listen_port,
        "metrics": addresses.metrics_port,
        "health": addresses.health_port,
    }
    text = " ".join(f"{name}={place}" for name, place in places.items() if place is not None)
    print(f"serving {text}", flush=True)
    stop.wait()
    service.drain()
    service.close()
    return 0


def _inspect(flags: argparse.Namespace) -> int:
    from drafter_service.heads import CheckpointError, as_json, describe, plan_head

    try:
        plan = plan_head(flags.checkpoint, flags.target_checkpoint)
    except CheckpointError as error:
        raise ConfigError(str(error)) from error
    print(json.dumps(as_json(plan), indent=2) if flags.json else describe(plan))
    return 0


def _health(flags: argparse.Namespace) -> int:
    from drafter_service.server import ask_health

    status = ask_health(flags.target, flags.timeout_s)
    print(status)
    return 0 if status == "SERVING" else 1


if __name__ == "__main__":
    sys.exit(main())
