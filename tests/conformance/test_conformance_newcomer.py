"""What a newcomer reads and runs: the Go README's example from a module of their own, and specdraftctl."""

import json
import os
import re
import subprocess
from pathlib import Path

import pytest

from conformance.drivers import GO_MODULE, build_go
from processes import environment, flags, serving
from repository import ROOT
from serving import temporary_directory
from wire import WIDTH, Client, Story

README = (ROOT / "clients/go/README.md").read_text(encoding="utf-8")
SOCKET = "unix:///tmp/specdraft/specdraft.sock"


@pytest.fixture(scope="module")
def reached(checkpoint):
    """A service process with metrics and an admin socket."""
    with temporary_directory() as directory:
        socket = directory / "s.sock"
        arguments = flags(checkpoint, socket, metrics_port="0", max_drafts=4)
        with serving(arguments) as (_, places):
            yield f"unix://{socket}", places


def code_blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)


def test_the_readmes_example_runs_in_a_module_of_its_own(reached, go, tmp_path):
    target, _ = reached
    (example,) = [code for code in code_blocks("go") if "package main" in code]
    (commands,) = [code for code in code_blocks("") if "go mod init" in code]
    body = example[example.index("func main") : example.index("func must")].strip().splitlines()
    assert len(body) <= 20
    assert example.count(SOCKET) == 1
    (tmp_path / "main.go").write_text(example.replace(SOCKET, target), encoding="utf-8")
    script = commands.replace("/path/to/checkout/clients/go", str(GO_MODULE))
    path = f"{Path(go).parent}{os.pathsep}{os.environ['PATH']}"
    ran = subprocess.run(
        ["bash", "-ec", script], cwd=tmp_path, env=os.environ | {"CGO_ENABLED": "0", "PATH": path}, capture_output=True,
        text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.strip() == "3 drafts, 4 rows"


@pytest.fixture(scope="module")
def ctl(reached, go, tmp_path_factory):
    """Runs specdraftctl; what it printed and its exit code."""
    tool = build_go("./cmd/specdraftctl", tmp_path_factory.mktemp("ctl") / "specdraftctl")

    def run(*arguments, target=reached[0]):
        command = [str(tool), *map(str, arguments)]
        variables = environment(SPECDRAFT_TARGET=target)
        ran = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60, check=False)
        return ran.stdout + ran.stderr, ran.returncode

    return run


def test_ctl_says_what_the_service_is(ctl):
    text, code = ctl("info")
    assert code == 0
    assert re.search(r"^hidden states +post_norm, 64 elements$", text, re.MULTILINE)
    assert re.search(r"^lever lm_head +as-stored$", text, re.MULTILINE)
    told, code = ctl("info", "--json")
    assert code == 0
    assert json.loads(told)["head"]["vocab_size"] == 128


def test_ctl_says_whether_the_service_serves(ctl):
    assert ctl("health") == ("SERVING\n", 0)
    text, code = ctl("health", "--timeout", "300ms", target="unix:///nowhere/s.sock")
    assert (code, "SERVING" in text) == (1, False)


def test_ctl_lists_sessions_without_secrets(ctl, reached):
    with Client(reached[0]) as client:
        session = client.open(client_name="vllm-0")
        session.sequence()
        text, code = ctl("sessions")
        assert code == 0
        (line,) = [line for line in text.splitlines() if "vllm-0" in line]
        assert line.split()[2] == "1"
        assert session.token.hex() not in text
        session.close()


def test_ctl_drafts_for_a_file(ctl, reached, tmp_path):
    story = Story(3)
    rows = story.rows[:6].tolist()
    (tmp_path / "prompt.json").write_text(json.dumps({"tokens": [9, *story.tokens[:6]], "hiddens": rows}))
    text, code = ctl("propose", "--drafts", 4, "--json", tmp_path / "prompt.json")
    assert code == 0, text
    with Client(reached[0]) as client:
        session = client.open()
        expected = session.sequence(story)
        expected.catchup(0, 5)
        assert json.loads(text)["drafts"] == list(expected.propose(5, 1, 4).drafts)
        session.close()
    assert len(rows[0]) == WIDTH


def test_ctl_watches_acceptance(ctl, reached):
    port = reached[1]["metrics"].rpartition(":")[2].partition("/")[0]
    text, code = ctl("watch", "--metrics", f"http://127.0.0.1:{port}/metrics", "--every", "10ms", "--times", 2)
    assert code == 0, text
    assert text.splitlines()[0].split()[:4] == ["rounds", "drafts", "accepted", "share"]
    assert len(text.splitlines()) == 3
