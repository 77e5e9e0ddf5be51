"""Drivers as processes: one JSON object a line, each request answered by its id."""

import base64
import itertools
import json
import os
import queue
import shutil
import subprocess
import sys
import threading
from pathlib import Path

from repository import ROOT

ANSWER_TIMEOUT_S = 60.0
LANGUAGES = ("python", "go", "python-asyncio")
GO_MODULE = ROOT / "clients/go"


def go_tool():
    """The Go that the Makefile chose, else the one on PATH; None where there is none."""
    return os.environ.get("GO") or shutil.which("go")


def build_go(package, output):
    """Builds a command of the Go module."""
    command = [go_tool(), "build", "-o", str(output), package]
    environment = os.environ | {"CGO_ENABLED": "0"}
    built = subprocess.run(command, cwd=GO_MODULE, env=environment, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return Path(output)


def command_of(language, directory):
    """The command line of a driver; what has to be built is built into `directory`."""
    if language != "go":
        return [sys.executable, str(Path(__file__).with_name("python_driver.py")), *language.split("-")[1:]]
    return [str(build_go("./internal/conformance", directory / "conformance"))]


class Waiting:
    """An answer that has not come yet."""

    def __init__(self, line):
        self.line = line
        self._answers = queue.SimpleQueue()

    def put(self, answer):
        self._answers.put(answer)

    def get(self, timeout=ANSWER_TIMEOUT_S):
        try:
            answer = self._answers.get(timeout=timeout)
        except queue.Empty:
            raise AssertionError(f"no answer within {timeout} s to {self.line}") from None
        assert answer is not None, f"the driver ended before it answered {self.line}"
        return answer


class Driver:
    """A driver process."""

    def __init__(self, command, name):
        parts = [*(str(ROOT / part) for part in ("clients/python", "tests")), os.environ.get("PYTHONPATH", "")]
        path = os.pathsep.join(part for part in parts if part)
        self.name = name
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=os.environ | {"PYTHONPATH": path}
        )
        self._ids = itertools.count(1)
        self._waiting = {}
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def begin(self, do, **arguments):
        """Sends a request; its answer is waited for later."""
        one = next(self._ids)
        line = json.dumps({"id": one, "do": do} | arguments, default=_as_base64)
        self._waiting[one] = waiting = Waiting(line[:300])
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()
        return waiting

    def ask(self, do, **arguments):
        """The answer to a request: {"ok": ...} or {"error": ...}."""
        return self.begin(do, **arguments).get()

    def close(self):
        self._process.stdin.close()
        try:
            self._process.wait(20)
        finally:
            self._process.kill()
            self._process.wait()
        self._reader.join(20)
        self._process.stdout.close()
        assert self._process.returncode == 0, f"the {self.name} driver ended with {self._process.returncode}"

    def _read(self):
        for line in self._process.stdout:
            answer = json.loads(line)
            self._waiting.pop(answer["id"]).put(answer)
        for waiting in list(self._waiting.values()):
            waiting.put(None)


def _as_base64(value):
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    raise TypeError(f"{type(value)} is no JSON")
