"""The demo's service under the demo's load, scraped by a real Prometheus. For the tests and for the pictures."""

from __future__ import annotations

import contextlib
import json
import shutil
import socket
import subprocess
import tempfile
import threading
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import grpc
import torch

from drafter_service.demo.demo import service_config
from drafter_service.demo.prompts import pick_prompts
from drafter_service.demo.target import HEAD, TEXTS, load_target
from drafter_service.server.process import ServiceProcess
from specdraft import Client
from specdraft.integrations.transformers import speculative_generate
from specdraft.v1 import drafter_pb2_grpc, session_pb2

CHART = Path(__file__).resolve().parent.parent / "drafter-service"
RULES = CHART / "alerts" / "rules.yaml"
DASHBOARD = CHART / "dashboards" / "specdraft.json"
START_S = 30.0
SCRAPE_S = 1.0
NUM_DRAFTS = 3


@dataclass(frozen=True, slots=True)
class Query:
    """One query of a panel: PromQL as it is in the dashboard, and its legend."""

    expr: str
    legend: str


@dataclass(frozen=True, slots=True)
class Panel:
    """A panel of the dashboard."""

    title: str
    text: str
    kind: str
    unit: str
    stacked: bool
    queries: tuple[Query, ...]


def read_panels() -> list[Panel]:
    """The dashboard's panels, in their order."""
    stored = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    return [
        Panel(
            item["title"],
            item["description"],
            item["type"],
            item["fieldConfig"]["defaults"]["unit"],
            "normal" in str(item["fieldConfig"]["defaults"].get("custom", {}).get("stacking")),
            tuple(Query(target["expr"], target["legendFormat"]) for target in item["targets"]),
        )
        for item in stored["panels"]
    ]


def as_grafana_asks(expr: str, rate_interval: str) -> str:
    """The query with Grafana's variables filled in: all jobs, all instances."""
    return expr.replace("$__rate_interval", rate_interval).replace("$job", ".*").replace("$instance", ".*")


class Prometheus:
    """A Prometheus of one's own that scrapes one target; for use in a `with` block.

    Args:
        target: host:port.
        directory: for its configuration and data.
    """

    def __init__(self, target: str, directory: Path) -> None:
        binary = shutil.which("prometheus")
        assert binary is not None, "prometheus is not installed"
        self.url = f"http://127.0.0.1:{_free_port()}"
        config = {
            "global": {"scrape_interval": f"{int(SCRAPE_S * 1000)}ms", "evaluation_interval": "500ms"},
            "rule_files": [str(RULES)],
            "scrape_configs": [{"job_name": "specdraft", "static_configs": [{"targets": [target]}]}],
        }
        path = directory / "prometheus.yml"
        path.write_text(json.dumps(config), encoding="utf-8")  # JSON is YAML
        self._log = (directory / "log").open("w+", encoding="utf-8")
        self._process = subprocess.Popen(
            [
                binary,
                f"--config.file={path}",
                f"--storage.tsdb.path={directory / 'data'}",
                f"--web.listen-address={self.url.removeprefix('http://')}",
                "--log.level=warn",
            ],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )

    def __enter__(self) -> Self:
        try:
            wait_for(self._is_ready, START_S, "Prometheus")
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._end()

    def ask(self, path: str, **parameters: Any) -> Any:
        """`data` of an answer of its API."""
        url = f"{self.url}/api/v1/{path}?{urllib.parse.urlencode(parameters)}"
        with urllib.request.urlopen(url, timeout=10) as answer:
            return json.load(answer)["data"]

    def value(self, expr: str) -> float:
        """The value of a query that has one."""
        (item,) = self.ask("query", query=expr)["result"]
        return float(item["value"][1])

    def series(self, expr: str, begin: float, end: float, step: float) -> list[tuple[dict[str, str], list[Any]]]:
        """Labels and (time, value) of every series of a query over a range."""
        found = self.ask("query_range", query=expr, start=begin, end=end, step=step)["result"]
        return [(item["metric"], [(at, float(value)) for at, value in item["values"]]) for item in found]

    def _is_ready(self) -> bool:
        assert self._process.poll() is None, Path(self._log.name).read_text(encoding="utf-8")
        with contextlib.suppress(OSError), urllib.request.urlopen(f"{self.url}/-/ready", timeout=1) as answer:
            return bool(answer.status == 200)
        return False

    def _end(self) -> None:
        self._process.terminate()
        self._process.wait(30)
        self._log.close()


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


def wait_for(condition: Callable[[], Any], timeout_s: float, what: str) -> Any:
    """Polls until `condition` holds."""
    until = time.monotonic() + timeout_s
    while not (found := condition()):
        if time.monotonic() > until:
            raise TimeoutError(f"{what}: not within {timeout_s:g} s")
        time.sleep(0.05)
    return found


@dataclass(frozen=True, slots=True)
class Watched:
    """What runs.

    Attributes:
        prometheus: watches.
        service: gRPC target of what is watched.
        metrics: URL of its metrics.
        load: generates with the demo's target until so many seconds have gone by.
    """

    prometheus: Prometheus
    service: str
    metrics: str
    load: Callable[[float], None]


@contextlib.contextmanager
def watched_demo() -> Iterator[Watched]:
    """The demo's service, a Prometheus that scrapes it, and the demo's load to put on it."""
    torch.set_num_threads(1)
    target = load_target()
    prompts = pick_prompts(TEXTS, target.tokenizer, 8, 160, 0)
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="watched-")))
        reached = stack.enter_context(ServiceProcess(service_config(HEAD)))
        scraped = urllib.parse.urlsplit(reached.metrics).netloc
        prometheus = stack.enter_context(Prometheus(scraped, directory))

        def load(seconds: float) -> None:
            until = time.monotonic() + seconds
            for index in range(1000):
                if time.monotonic() > until:
                    return
                prompt = prompts[index % len(prompts)]
                # Every generation is a session of its own: it shows that they come and go.
                with Client(reached.target, max_drafts=NUM_DRAFTS, client_name="watched") as client:
                    decoding = speculative_generate(client, num_drafts=NUM_DRAFTS)
                    target.generate(prompt.tokens, 32, decoding)
                    _carry(client)
                _be_refused(reached.target)

        yield Watched(prometheus, reached.target, reached.metrics, load)


def _carry(client: Client) -> None:
    """One sequence's rows go to another."""
    with client.open_sequence() as turn, client.open_sequence() as next_turn:
        turn.prefill([1, 2, 3, 4, 5], torch.zeros(5, client.hidden_width))
        next_turn.install_kv(turn.take_kv())


def _be_refused(target: str) -> None:
    """A call without a session."""
    with grpc.insecure_channel(target) as channel, contextlib.suppress(grpc.RpcError):
        drafter_pb2_grpc.DrafterStub(channel).KeepAlive(session_pb2.KeepAliveRequest(), timeout=5)


def run_in_background(action: Callable[[], None]) -> threading.Thread:
    """Starts `action` in a thread."""
    thread = threading.Thread(target=action, daemon=True)
    thread.start()
    return thread
