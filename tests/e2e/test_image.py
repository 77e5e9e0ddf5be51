"""The image as far as it can be checked without an engine that builds it: its recipe, its steps, its words."""

import fnmatch
import json
import re
import shlex
import shutil
import subprocess
import sys
import sysconfig
import venv

import pytest
import yaml

from chart import CHART, run, tool
from drafter_service.cli import _parser
from drafter_service.config import ServiceConfig
from processes import environment
from repository import ROOT, files
from serving import temporary_directory

DOCKERFILE = (ROOT / "Dockerfile").read_text(encoding="utf-8")
INSTRUCTIONS = re.sub(r"\\\n", " ", re.sub(r"^#.*\n", "", DOCKERFILE, flags=re.MULTILINE)).splitlines()
VALUES = yaml.safe_load((CHART / "values.yaml").read_text(encoding="utf-8"))


def instructions(name):
    return [line.partition(" ")[2].strip() for line in INSTRUCTIONS if line.startswith(f"{name} ")]


def sources():
    """What is copied from the repository."""
    words = [shlex.split(line) for line in instructions("COPY")]
    return [source for line in words if not line[0].startswith("--from") for source in line[:-1]]


def is_in_context(path):
    """Whether .dockerignore lets it in; the last line that fits decides."""
    kept = True
    for line in (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines():
        pattern = line.removeprefix("!")
        if not line or line.startswith("#"):
            continue
        parts = path.split("/")
        prefixes = ["/".join(parts[: index + 1]) for index in range(len(parts))]
        anywhere = pattern.removeprefix("**/")
        found = parts if pattern.startswith("**/") else prefixes
        if any(fnmatch.fnmatch(part, anywhere) for part in found):
            kept = line.startswith("!")
    return kept


def context():
    """Files that the build gets."""
    return [path for path in files() if is_in_context(path)]


def test_hadolint_has_nothing_to_say():
    done = run([tool("hadolint"), ROOT / "Dockerfile"])
    assert (done.returncode, done.stdout) == (0, "")


def test_hadolint_sees_what_is_wrong(tmp_path):
    wrong = tmp_path / "Dockerfile"
    wrong.write_text(DOCKERFILE.replace("--no-install-recommends ", ""), encoding="utf-8")
    assert run([tool("hadolint"), wrong]).returncode != 0


def test_everything_that_is_copied_is_there_and_reaches_the_build():
    assert sources()
    for source in sources():
        inside = [path for path in context() if path == source or path.startswith(f"{source}/")]
        assert inside, f"COPY {source}"


def test_the_build_gets_nothing_that_it_does_not_need():
    copied = sources()
    spare = [path for path in context() if not any(path == c or path.startswith(f"{c}/") for c in copied)]
    assert spare == []


def test_bases_are_exact_tags_with_a_digest_to_give():
    stages = set(re.findall(r" AS (\S+)$", DOCKERFILE, re.MULTILINE))
    bases = [line.split()[0] for line in instructions("FROM")]
    outside = [base for base in bases if base not in stages]
    assert outside
    assert all(re.fullmatch(r"python:\d+\.\d+\.\d+-slim-\w+\$\{BASE_DIGEST\}", base) for base in outside)
    assert {"cpu", "cuda"} <= stages
    assert instructions("FROM")[-1].endswith(" AS cuda")  # what is built where no target is named


def test_it_runs_under_an_init_as_a_user_that_is_not_root_and_that_the_chart_knows():
    assert json.loads(instructions("ENTRYPOINT")[-1])[:2] == ["tini", "--"]
    user, group = map(int, instructions("USER")[-1].split(":"))
    assert (user, group) == (VALUES["runAsUser"], VALUES["runAsGroup"])
    assert user != 0


def image_environment():
    pairs = [shlex.split(line) for line in instructions("ENV")]
    return dict(pair.split("=", 1) for line in pairs for pair in line)


def test_what_is_written_lies_in_volumes_and_the_chart_mounts_each_of_them():
    volumes = json.loads(instructions("VOLUME")[0])
    assert str(ServiceConfig().socket.parent) in volumes
    variables = image_environment()
    for name in ("HOME", "TRITON_CACHE_DIR", "XDG_CACHE_HOME"):
        assert variables[name].startswith(tuple(volumes))
    template = (CHART / "templates" / "_container.tpl").read_text(encoding="utf-8")
    mounted = [VALUES["socket"]["directory"], *re.findall(r"mountPath: (/[\w/]+)\}", template)]
    assert set(volumes) <= set(mounted)


def test_the_ports_that_it_names_are_the_services_defaults():
    ports = instructions("EXPOSE")[0].split()
    assert ports == [str(ServiceConfig().metrics_port), str(ServiceConfig().health_port)]


def test_its_commands_are_the_services():
    command, *arguments = json.loads(instructions("HEALTHCHECK")[0].partition("CMD ")[2])
    assert command == "drafter-service"
    assert _parser().parse_args(arguments).target == f"unix://{ServiceConfig().socket}"
    assert json.loads(instructions("CMD")[0]) == ["serve"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    """A clean environment into which the image's own step has installed what the build gets.

    Dependencies come from the tests' environment: the constraints that the image takes are the ones that it has.
    """
    source = tmp_path_factory.mktemp("source")
    for path in context():
        (source / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / path, source / path)
    target = tmp_path_factory.mktemp("opt") / "specdraft"
    venv.create(target, with_pip=True)
    places = [sysconfig.get_path("purelib"), *(path for path in sys.path if path.endswith("site-packages"))]
    site = next((target / "lib").glob("python*/site-packages"))
    (step,) = [line for line in instructions("RUN") if "./clients/python" in line]
    command, *arguments = shlex.split(step)
    assert (command, arguments[0]) == ("pip", "install")
    (site / "tests.pth").write_text("\n".join(dict.fromkeys(places)), encoding="utf-8")
    offline = ["--no-deps", "--no-build-isolation", "--no-index", "--quiet", "--force-reinstall"]
    python = target / "bin" / "python"
    for old in site.glob("setuptools*"):  # older Pythons bring one of their own
        shutil.rmtree(old)
    subprocess.run([python, "-m", "pip", "install", *offline, *arguments[1:]], cwd=source, check=True, timeout=240)
    return target


def in_the_image(installed, script, *arguments, **variables):
    """Runs Python code with what was installed, from a place where no source lies."""
    kept = {name: value for name, value in environment().items() if name != "PYTHONPATH"}
    command = [installed / "bin" / "python", "-c", script, *arguments]
    return run(command, env=kept | variables, cwd="/", timeout=60)


WHERE = """
import drafter_kernels, drafter_service, specdraft
print(*(package.__file__ for package in (drafter_kernels, drafter_service, specdraft)))
"""


def test_the_steps_of_the_build_install_the_service_its_kernels_and_the_client(installed):
    places = in_the_image(installed, WHERE).stdout.split()
    assert len(places) == 3
    assert all(place.startswith(str(installed)) for place in places)
    done = run([installed / "bin" / "drafter-service", "--version"], cwd="/")
    assert done.returncode == 0, done.stderr


# Serves, drafts once, drains; and notes down every file that Python code opens to write, makes or removes.
SERVE = """
import os, signal, sys, threading, time
written = set()
FLAGS = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
def note(event, arguments):
    if event == "open" and isinstance(arguments[0], (str, bytes)) and arguments[2] & FLAGS:
        written.add(os.path.abspath(os.fsdecode(arguments[0])))
    elif event in ("os.mkdir", "os.remove", "os.rename", "os.chmod", "os.rmdir", "socket.bind"):
        name = arguments[1] if event == "socket.bind" else arguments[0]
        if isinstance(name, (str, bytes)):
            written.add(os.path.abspath(os.fsdecode(name)))
sys.addaudithook(note)
from drafter_service.cli import main
def drive():
    try:
        from drafter_service.server import ask_health
        from specdraft import Client
        target = f"unix://{os.environ['SPECDRAFT_SOCKET']}"
        while ask_health(target, 1.0)[0] != "SERVING":
            time.sleep(0.05)
        with Client(target) as client, client.open_sequence() as sequence:
            import torch
            rows = torch.zeros(2, client.hidden_width)
            drafts.extend(sequence.propose(0, [1, 2], rows, num_drafts=2).drafts)
    finally:
        os.kill(os.getpid(), signal.SIGTERM)
drafts = []
threading.Thread(target=drive, daemon=True).start()
code = main(["serve"])
assert len(drafts) == 2
print("written", *sorted(path for path in written if not path.startswith(("/dev/", "/proc/"))))
sys.exit(code)
"""


def test_the_installed_service_writes_into_its_volumes_alone(installed, tiny_checkpoint):
    with temporary_directory() as volumes:
        variables = {
            "SPECDRAFT_CHECKPOINT": str(tiny_checkpoint),
            "SPECDRAFT_SOCKET": str(volumes / "run" / "s.sock"),
            "SPECDRAFT_DEVICE": "cpu",
            "SPECDRAFT_METRICS_PORT": "0",
            "SPECDRAFT_HEALTH_PORT": "0",
            "SPECDRAFT_PROBE_HOST": "127.0.0.1",
            "HOME": str(volumes / "cache"),
            "TMPDIR": str(volumes / "tmp"),
            "PYTHONDONTWRITEBYTECODE": image_environment()["PYTHONDONTWRITEBYTECODE"],
        }
        (volumes / "tmp").mkdir()
        done = in_the_image(installed, SERVE, **variables)
        assert done.returncode == 0, done.stderr
        said = done.stdout.splitlines()
        assert said[0].startswith("serving socket=")
        written = said[-1].split()[1:]
        assert str(volumes / "run" / "s.sock.lock") in written  # the notes are kept
        assert [path for path in written if not path.startswith(str(volumes))] == []
