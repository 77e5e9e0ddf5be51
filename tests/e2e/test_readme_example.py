"""The examples of the pages run as they stand, but for the path of the socket."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from drafter_service.cli import main
from drafter_service.config import ServiceConfig
from drafter_service.demo.target import HEAD, TARGET
from drafter_service.server.process import ServiceProcess
from repository import ROOT
from specdraft import Client

README = (ROOT / "README.md").read_text(encoding="utf-8")
(SOCKET,) = set(re.findall(r"unix:///\S+?\.sock", README))


def example():
    (code,) = re.findall(r"^```python\n(.*?)^```$", README, re.DOTALL | re.MULTILINE)
    return code


def test_service_is_started_where_health_and_example_look_for_it():
    (served,) = re.findall(r"--socket (\S+)", README)
    assert f"unix://{served}" == SOCKET


def test_models_that_the_service_is_started_with_are_the_demos():
    (given,) = re.findall(r"serve --checkpoint (\S+) --target-checkpoint (\S+) ", README)
    assert [(ROOT / path).samefile(there) for path, there in zip(given, (HEAD, TARGET), strict=True)] == [True, True]


def test_example_is_about_twenty_lines():
    assert len(example().splitlines()) <= 20


def test_example_runs_against_a_real_service():
    config = ServiceConfig(checkpoint=HEAD, target_checkpoint=TARGET, torch_threads=1, log_level="warning")
    code = example()
    assert code.count(SOCKET) == 1
    with ServiceProcess(config) as reached:
        command = [sys.executable, "-c", code.replace(SOCKET, reached.target)]
        path = ":".join(sys.path)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path}, check=False)
    assert ran.returncode == 0, ran.stderr
    # Four tokens make three pairs; the first round adds one, each of the two that follow its accepted draft and bonus.
    assert ran.stdout.strip() == "8 exact rows, the next drafts follow token 17"


TARGET_IN_ITS_PLACE = """
import torch
from specdraft import Sequence, SpecdraftError

class Target:
    num_verified = 0
    is_done = property(lambda self: self.num_verified == 6)

    def prefill(self, prompt):
        return self.rows(len(prompt)), 5

    def verify(self, token, drafts):
        print(len(drafts))
        self.num_verified += 1
        return self.rows(1 + len(drafts)), min(1, len(drafts)), 17

    def rows(self, count):
        return torch.randn(count, client.hidden_width).bfloat16()

target, prompt, propose = Target(), [11, 42, 7, 99], Sequence.propose

def propose_but_for_the_third(*args, **kwargs):
    if target.num_verified == 2:
        raise SpecdraftError(None, "lost")
    return propose(*args, **kwargs)

Sequence.propose = propose_but_for_the_third
"""


def test_the_python_clients_loop_drafts_again_after_a_round_that_failed():
    page = (ROOT / "clients/python/README.md").read_text(encoding="utf-8")
    (code,) = (
        one for one in re.findall(r"^```python\n(.*?)^```$", page, re.DOTALL | re.MULTILINE) if "while not" in one
    )
    config = ServiceConfig(checkpoint=HEAD, target_checkpoint=TARGET, torch_threads=1, log_level="warning")
    with ServiceProcess(config) as reached:
        code = TARGET_IN_ITS_PLACE + code.replace("unix:///run/specdraft/specdraft.sock", reached.target)
        command, path = [sys.executable, "-c", code], ":".join(sys.path)
        ran = subprocess.run(command, capture_output=True, text=True, timeout=60, env={"PYTHONPATH": path}, check=False)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.split() == ["3", "3", "0", "3", "3", "3"]


def test_draining_as_the_upgrade_page_does_it_counts_the_open_sessions():
    page = (ROOT / "helm/drafter-service/docs/upgrades.md").read_text(encoding="utf-8")
    (code,) = re.findall(r"^kubectl exec .*<<'END'\n(.*?)^END$", page, re.DOTALL | re.MULTILINE)
    config = ServiceConfig(checkpoint=HEAD, target_checkpoint=TARGET, torch_threads=1, log_level="warning")
    said = []
    with ServiceProcess(config) as reached:
        command = [sys.executable, "-c", code.replace("unix:///run/specdraft/specdraft.sock", reached.target)]
        with Client(reached.target):
            said.append(subprocess.check_output(command, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}))
        said.append(subprocess.check_output(command, text=True, timeout=60, env={"PYTHONPATH": ":".join(sys.path)}))
    assert said == ["sessions still open: 1\n", "sessions still open: 0\n"]


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\((?!http)([^)#]+)\)", README))))
def test_links_lead_somewhere(path):
    assert (ROOT / path).exists()


@pytest.mark.parametrize("target", sorted(set(re.findall(r"make ([a-z-]+)", README))))
def test_make_targets_exist(target):
    assert re.search(rf"^{target}:", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE)


def test_commands_exist(capsys):
    for command in sorted(set(re.findall(r"drafter-service ((?:bench )?[a-z]+)", README))):
        with pytest.raises(SystemExit) as ended:
            main([*command.split(), "--help"])
        assert ended.value.code == 0, command
    assert "usage" in capsys.readouterr().out


def test_what_is_said_to_be_missing_is_what_answers_unimplemented():
    sources = "".join(path.read_text(encoding="utf-8") for path in Path(ROOT / "drafter_service/server").glob("*.py"))
    for name in re.findall(r'not_implemented\("([^"]+)"\)', sources):
        assert f"`{name}`" in README, name
    for name in ("ForkSequence", "ReadDrafts", "RegisterRegion", "UnregisterRegion"):
        assert f"`{name}`" in README, name
