"""How demo and benchmarks end when they are not let finish: one line, no process and no directory left behind."""

import os
import signal
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from drafter_service.bench.echo import Echo
from drafter_service.bench.tiny_head import write_tiny_head
from drafter_service.cli import main
from drafter_service.config import ServiceConfig
from drafter_service.server.child import ProcessError
from processes import environment
from repository import ROOT
from serving import wait_until

TOOL = [sys.executable, "-m", "drafter_service.cli"]
CARRY = ["bench", "carry", "--rows", "10", "20", "--rounds", "10000", "--calls", "100"]
RPC = ["bench", "rpc", "--rounds", "1", "--calls", "1000000"]
TAX = ["bench", "tax", "--dry", "--verify-ms", "0.1", "--steps", "10000", "--turns", "100"]


@contextmanager
def listening_to_sigint():
    """What is started here is interrupted by SIGINT, although a shell's background job inherits it as ignored."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextmanager
def at_work(command, said, tmp_path):
    """A benchmark that has said so much, with a directory of its own for temporary files."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = environment(TMPDIR=str(tmp_path))
    with listening_to_sigint():
        process = subprocess.Popen([*TOOL, *command], env=variables, cwd=ROOT, start_new_session=True, **pipes)
    try:
        line = process.stderr.readline()
        while said not in line:
            assert line, "it has ended"
            line = process.stderr.readline()
        yield process
    finally:
        process.kill()
        process.communicate()


@pytest.fixture
def measuring(tmp_path):
    with at_work(CARRY, "round 1/", tmp_path) as process:
        yield process


def children(pid):
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def descendants(pid):
    found = children(pid)
    return found + [one for child in found for one in descendants(child)]


def ends(pid, within_s=20.0):
    deadline = time.monotonic() + within_s
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except FileNotFoundError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("number", "code", "last"), [(signal.SIGINT, 130, ["drafter-service: interrupted"]), (signal.SIGTERM, 143, [])]
)
def test_a_signal_ends_it_and_its_service_and_leaves_nothing(measuring, tmp_path, number, code, last):
    (service,) = children(measuring.pid)
    measuring.send_signal(number)
    _, err = measuring.communicate(timeout=60)
    assert measuring.returncode == code
    assert "Traceback" not in err
    assert [line for line in err.splitlines() if line.startswith("drafter-service: ")] == last
    assert ends(service)
    assert list(tmp_path.glob("specdraft-*")) == []


def test_a_service_ends_with_whoever_started_it_even_if_that_was_killed(measuring):
    (service,) = children(measuring.pid)
    measuring.kill()
    measuring.wait()
    try:
        assert ends(service)
    finally:
        if not ends(service, 0.1):
            os.kill(service, signal.SIGKILL)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL], ids=lambda number: number.name)
@pytest.mark.parametrize(
    ("command", "said", "num_others"), [(RPC, "round 1/", 1), (TAX, "turn 1/", 3)], ids=["rpc", "tax"]
)
def test_a_benchmark_of_several_processes_leaves_none_however_it_ends(tmp_path, command, said, num_others, number):
    with at_work(command, said, tmp_path) as process:
        wait_until(lambda: len(descendants(process.pid)) == num_others)
        others = descendants(process.pid)
        os.killpg(process.pid, number) if number == signal.SIGINT else process.send_signal(number)  # as a terminal does
        _, err = process.communicate(timeout=60)
        assert all(map(ends, others))
    assert "Traceback" not in err
    if number != signal.SIGKILL:
        assert list(tmp_path.glob("specdraft-*")) == []


def test_an_echo_that_does_not_come_up_says_so_at_once(tmp_path, capfd):
    with pytest.raises(ProcessError, match="the echo did not come up"):
        Echo(tmp_path / "echo.sock", ServiceConfig(checkpoint=tmp_path / "nothing", socket=tmp_path / "s.sock"))
    said = capfd.readouterr().err
    assert "nothing" in said
    assert "Traceback" not in said


def test_a_head_that_is_not_there_is_named_without_a_traceback(tmp_path):
    command = [*TOOL, "demo", "--head", "/nowhere"]
    variables = environment(TMPDIR=str(tmp_path))
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert "/nowhere" in done.stderr
    assert "the service did not come up" in done.stderr.splitlines()[-1]
    assert list(tmp_path.glob("specdraft-*")) == []


def test_a_reader_that_has_read_enough_is_no_fault(tmp_path):
    head = write_tiny_head(tmp_path, 100)
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [*TOOL, "inspect", str(head)],
        env=environment(),
        cwd=ROOT,
        stdout=writing,
        stderr=subprocess.PIPE,
        timeout=60,
        check=False,
    )
    os.close(writing)
    assert (done.returncode, done.stderr) == (141, b"")


@pytest.mark.parametrize("prefix", ["", "unix:"])
def test_health_of_nobody_names_the_target_and_the_reason(capsys, tmp_path, prefix):
    target = f"{prefix}{tmp_path}/s.sock"
    assert main(["health", "--target", target]) == 1
    said = capsys.readouterr()
    assert said.out == "UNAVAILABLE\n"
    assert said.err.startswith(f"drafter-service: {target}: ")
    assert "No such file" in said.err


def test_health_can_wait_until_somebody_serves_and_gives_up(capsys, monkeypatch, tmp_path):
    answers = iter([("UNAVAILABLE", "nobody"), ("NOT_SERVING", ""), ("SERVING", "")])
    monkeypatch.setattr("drafter_service.server.ask_health", lambda *_: next(answers))
    assert main(["health", "--wait-s", "30"]) == 0
    assert capsys.readouterr().out == "SERVING\n"
    monkeypatch.setattr("drafter_service.server.ask_health", lambda *_: ("NOT_SERVING", ""))
    assert main(["health", "--wait-s", "0.3"]) == 1
    assert capsys.readouterr().out == "NOT_SERVING\n"


def test_what_is_no_known_failure_is_not_hidden(monkeypatch):
    def broken(*_, **__):
        raise ZeroDivisionError

    monkeypatch.setattr("drafter_service.bench.rpc.measure_rpc", broken)
    with pytest.raises(ZeroDivisionError):
        main(["bench", "rpc"])


def test_a_demo_without_its_extra_says_so_in_one_line():
    code = (
        "import sys; sys.modules['transformers'] = None; from drafter_service.cli import main; sys.exit(main(['demo']))"
    )
    command = [sys.executable, "-c", code]
    ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment(), cwd=ROOT, check=False)
    assert ran.returncode == 2
    (line,) = ran.stderr.splitlines()
    assert line.startswith("drafter-service: transformers")
    assert line.endswith("is not installed: demo and benchmarks need the extra demo")
