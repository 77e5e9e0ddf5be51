"""The service as a process: how it refuses to start, what it leaves alone, how it ends."""

import json
import shutil
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import pytest

from drafter_service.config import ConfigError
from drafter_service.server import Service
from processes import begin, failing, flags, places, serving
from serving import temporary_directory, tiny_config
from specdraft.v1 import drafter_pb2 as pb
from wire import Client, Story, refusal, refused, refused_entry

QUICK_S = 10.0  # 5 s of its own, and as much for an interpreter on a busy machine


@pytest.fixture
def directory():
    with temporary_directory() as made:
        yield made


@pytest.fixture
def socket_path(directory):
    return directory / "s.sock"


def fails(arguments, **variables):
    code, line, seconds = failing(arguments, **variables)
    assert seconds < QUICK_S
    assert code == 2
    return line


SETTINGS = {
    "no page fits": ({"kv_bytes": 100}, ["--kv-bytes 100", "1024"]),
    "more memory than there is": ({"kv_bytes": 900_000 << 30}, ["--kv-bytes"]),
    "a device that is none": ({"device": "abacus"}, ["--device 'abacus'"]),
    "a device that is not there": ({"device": "cuda:9"}, ["--device cuda:9"]),
    "a host that is none": ({"listen": "no such host:1", "insecure": True}, ["--listen no such host:1"]),
    "TLS files that are not there": (
        {"listen": "127.0.0.1:0", "tls_cert": Path("/no/c"), "tls_key": Path("/no/k"), "tls_client_ca": Path("/no/a")},
        ["--tls-key /no/k cannot be read", "No such file"],
    ),
    "a probe host that is none": ({"probe_host": "no such host", "health_port": 0}, ["--health-port 0"]),
    "a metrics host that is none": ({"probe_host": "no such host", "metrics_port": 0}, ["--metrics-port 0"]),
}


def cannot_start(checkpoint, directory, **changes):
    service = Service(tiny_config(checkpoint, directory, **changes))
    before = sorted(directory.iterdir())
    with pytest.raises(ConfigError) as caught:
        service.start()
    assert sorted(directory.iterdir()) == before, "files were left behind"
    text = str(caught.value)
    assert "\n" not in text
    return text


@pytest.mark.parametrize("name", SETTINGS)
def test_settings_that_cannot_work_are_named_and_leave_nothing(tiny_checkpoint, directory, name):
    changes, words = SETTINGS[name]
    text = cannot_start(tiny_checkpoint, directory, **changes)
    for word in words:
        assert word in text


@pytest.mark.parametrize("name", ["metrics_port", "health_port", "listen"])
def test_a_port_in_use_is_named_and_leaves_no_socket(tiny_checkpoint, directory, name):
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen()
        port = listener.getsockname()[1]
        changes = {"listen": f"127.0.0.1:{port}", "insecure": True} if name == "listen" else {name: port}
        text = cannot_start(tiny_checkpoint, directory, **changes)
    assert f"--{name.replace('_', '-')}" in text
    assert str(port) in text


def test_a_health_port_of_another_service_is_not_shared_with_it(tiny_checkpoint, directory, start):
    live = start(health_port=0)
    assert "--health-port" in cannot_start(tiny_checkpoint, directory, health_port=live.addresses.health_port)


def test_what_is_wrong_ends_the_process_at_once_with_one_line(tiny_checkpoint, socket_path, directory, start):
    assert "--max-draughts=3" in fails([*flags(tiny_checkpoint, socket_path), "--max-draughts=3"])
    assert "--lease-s inf" in fails(flags(tiny_checkpoint, socket_path, lease_s="inf"))
    port = start(health_port=0).addresses.health_port
    line = fails(flags(tiny_checkpoint, socket_path, listen=f"127.0.0.1:{port}", insecure="true"))
    assert f"--listen 127.0.0.1:{port} cannot be bound" in line
    assert "--kv-bytes 100 holds no page" in fails(flags(tiny_checkpoint, socket_path, kv_bytes=100))
    without_gpus = flags(tiny_checkpoint, socket_path, device="cuda:0")
    assert "--device cuda:0: 0 GPUs are visible" in fails(without_gpus, CUDA_VISIBLE_DEVICES="")
    assert list(directory.iterdir()) == []


def test_a_checkpoint_that_is_missing_or_broken_is_named(tiny_checkpoint, socket_path, directory):
    broken = directory / "broken"
    shutil.copytree(tiny_checkpoint, broken)
    weights = broken / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    assert "model.safetensors" in fails(flags(broken, socket_path))
    assert "/no/such/place" in cannot_start(Path("/no/such/place"), directory)
    config = json.loads((broken / "config.json").read_text())
    (broken / "config.json").write_text(json.dumps(config | {"model_type": "another"}))
    assert "another" in cannot_start(broken, directory)


def test_a_socket_path_that_the_kernel_cannot_bind_is_refused_and_the_longest_is_not(tiny_checkpoint, directory):
    longest = directory / ("s" * (107 - len(".admin") - len(str(directory)) - 1))
    line = fails(flags(tiny_checkpoint, f"{longest}s"))
    assert "107" in line
    assert "108" in line
    with serving(flags(tiny_checkpoint, longest)), Client(f"unix:{longest}") as client:
        assert client.check() == "SERVING"


def test_the_socket_of_a_live_server_is_left_alone(tiny_checkpoint, start):
    live = start()
    session = live.client().open()
    line = fails(flags(tiny_checkpoint, live.config.socket))
    assert f"{live.config.socket}: a live server owns it" in line
    session.sequence(Story(1)).propose(0, 2)
    with Client(f"unix:{live.config.socket}") as client:
        assert client.check() == "SERVING"


@pytest.mark.parametrize("suffix", ["", ".fd", ".admin"])
def test_somebody_elses_listener_is_left_alone(tiny_checkpoint, socket_path, directory, suffix):
    path = f"{socket_path}{suffix}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind(path)
        listener.listen()
        assert f"{path}: a live server owns it" in cannot_start(tiny_checkpoint, directory)
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as caller:
            caller.connect(path)


def test_a_file_in_the_place_of_the_socket_is_left_alone(tiny_checkpoint, socket_path, directory):
    socket_path.write_text("precious")
    text = cannot_start(tiny_checkpoint, directory)
    assert f"{socket_path}: something that is no socket is there" in text
    text = cannot_start(tiny_checkpoint, directory, socket=socket_path / "below")
    assert str(socket_path / "below") in text
    assert socket_path.read_text() == "precious"


def test_a_stale_socket_is_replaced(tiny_checkpoint, socket_path, directory):
    for suffix in ("", ".fd", ".admin"):
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as dead:
            dead.bind(f"{socket_path}{suffix}")
    (directory / "s.sock.lock").touch()
    with serving(flags(tiny_checkpoint, socket_path)), Client(f"unix:{socket_path}") as client:
        assert client.check() == "SERVING"
        client.open().sequence(Story(1)).propose(0, 2)
    assert list(directory.iterdir()) == []


def test_of_two_servers_that_start_at_once_exactly_one_wins(tiny_checkpoint, directory):
    path = directory / "new" / "s.sock"
    processes = [begin(flags(tiny_checkpoint, path)) for _ in range(2)]
    try:
        loser = wait_for_one(processes)
        winner = processes[1 - processes.index(loser)]
        assert loser.returncode == 2
        assert "a live server owns it" in loser.stderr.read()
        assert places(winner)["socket"] == str(path)
        with Client(f"unix:{path}") as client:
            client.open().sequence(Story(1)).propose(0, 2)
    finally:
        for process in processes:
            process.terminate()
            process.communicate(timeout=30)
    assert winner.returncode == 0
    assert list(path.parent.iterdir()) == []


def wait_for_one(processes):
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for process in processes:
            if process.poll() is not None:
                return process
        time.sleep(0.01)
    raise AssertionError("both servers run on one path")


def test_flags_come_before_the_environment_and_the_environment_before_the_defaults(tiny_checkpoint, directory):
    ours, theirs = directory / "flag.sock", directory / "environment.sock"
    variables = {"SPECDRAFT_SOCKET": str(theirs), "SPECDRAFT_MAX_DRAFTS": "3", "SPECDRAFT_MAX_BATCH": "5"}
    with serving(flags(tiny_checkpoint, ours, max_batch=7), **variables) as (_, reached):
        assert reached == {"socket": str(ours)}
        with Client(f"unix:{ours}") as client:
            limits = client.info().limits
    assert (limits.max_drafts, limits.propose_batch_max, limits.prefill_rows_max) == (3, 7, 1024)
    assert "SPECDRAFT_MAX_DRAFTS '0.5'" in fails(flags(tiny_checkpoint, ours), SPECDRAFT_MAX_DRAFTS="0.5")


def test_socket_and_directory_are_for_owner_and_group_alone(tiny_checkpoint, directory):
    path = directory / "made" / "s.sock"
    with serving(flags(tiny_checkpoint, path)):
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750
        for suffix in ("", ".fd", ".admin"):
            assert stat.S_IMODE(path.with_name(f"s.sock{suffix}").stat().st_mode) == 0o660


def propose_until_the_end(target, outcome):
    """Rounds over the stream, as fast as they are answered; counts what was accepted and what was answered."""
    with Client(target) as client:
        session = client.open()
        sequence = session.sequence(Story(1))
        with session.drive() as drive:
            try:
                while True:
                    request = pb.ProposeRequest(entries=[sequence.propose_entry(sequence.op % 200, 1)])
                    answer = drive.ask(propose=request)
                    if answer.status.code:
                        outcome.append(refused_entry(answer.status).kind)
                        break
                    (result,) = answer.propose.results
                    if result.status.code:
                        outcome.append(refused_entry(result.status).kind)
                        break
                    sequence.op = result.state.last_op
            except grpc.RpcError as error:
                outcome.append(refused(error).kind)
        outcome.append(sequence.op)


def test_sigterm_under_load_answers_what_was_accepted_and_ends_well(tiny_checkpoint, socket_path, directory):
    with serving(flags(tiny_checkpoint, socket_path, drain_s=10, health_port=0, kv_bytes="1MiB")) as (process, reached):
        target = f"unix:{socket_path}"
        outcomes = [[] for _ in range(3)]
        threads = [threading.Thread(target=propose_until_the_end, args=(target, outcome)) for outcome in outcomes]
        for thread in threads:
            thread.start()
        with Client(f"127.0.0.1:{reached['health']}") as probe:
            assert probe.check() == "SERVING"
            time.sleep(0.5)  # some rounds go by
            began = time.monotonic()
            process.send_signal(signal.SIGTERM)
            assert process.wait(15) == 0
        assert time.monotonic() - began < 10
        for thread in threads:
            thread.join(10)
        out, err = process.communicate()
    assert (out, err) == ("", "")
    for why, num_rounds in outcomes:
        assert why == ("UNAVAILABLE", "DRAINING")
        assert num_rounds > 0
    assert list(directory.iterdir()) == []


HANGS = """
import sys, threading
from drafter_service.engine.runner import EagerRunner
from drafter_service.cli import main
run = EagerRunner.run

def hang(self, entries):
    if any(entry.num_drafts == 1 for entry in entries):  # the test's, not the self-test's
        print("hangs", flush=True)
        threading.Event().wait()
    return run(self, entries)

EagerRunner.run = hang
sys.exit(main(sys.argv[1:]))
"""


def test_a_device_that_hangs_does_not_keep_the_process(tiny_checkpoint, socket_path):
    arguments = flags(tiny_checkpoint, socket_path, drain_s=1)
    with serving(arguments, command=[sys.executable, "-c", HANGS, "serve"]) as (process, _):
        with Client(f"unix:{socket_path}") as client:
            session = client.open()
            sequence = session.sequence(Story(1))
            request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 2, 1)])
            call = session.begin("Propose", request, timeout=600)
            assert process.stdout.readline() == "hangs\n"
            process.send_signal(signal.SIGTERM)
            assert process.wait(20) == 1
            assert call.code() is not grpc.StatusCode.OK
        assert "does not come back" in process.stderr.read()


TELLS_WHAT_IS_COLLECTED = """
import gc, sys
from drafter_service import cli
say = cli._say_where

def tell(*arguments):
    say(*arguments)
    print(len(gc.get_objects()), gc.get_freeze_count(), flush=True)

cli._say_where = tell
sys.exit(cli.main(sys.argv[1:]))
"""


def test_a_collection_of_garbage_looks_at_nothing_that_was_loaded(tiny_checkpoint, socket_path):
    command = [sys.executable, "-c", TELLS_WHAT_IS_COLLECTED, "serve"]
    with serving(flags(tiny_checkpoint, socket_path), command=command) as (process, _):
        num_looked_at, num_frozen = map(int, process.stdout.readline().split())
    assert num_frozen > 10_000
    assert num_looked_at < num_frozen // 50


LOADS_FOREVER = """
import sys, threading
from drafter_service import cli
from drafter_service.server import assembly

def assemble(*arguments):
    print("loading", flush=True)
    threading.Event().wait(25)
    raise AssertionError("nobody ended the load")

assembly.assemble = assemble
sys.exit(cli.main(["serve", *sys.argv[1:]]))
"""


def test_sigterm_ends_a_load_and_leaves_nothing(tiny_checkpoint, socket_path, directory):
    process = begin(flags(tiny_checkpoint, socket_path), [sys.executable, "-c", LOADS_FOREVER])
    try:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=30)
    finally:
        process.kill()
    assert (process.returncode, err) == (0, "")
    assert list(directory.iterdir()) == []


def test_an_interrupt_ends_it_as_well(tiny_checkpoint, socket_path, directory):
    with serving(flags(tiny_checkpoint, socket_path)) as (process, _):
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
    assert list(directory.iterdir()) == []


def test_a_killed_server_is_replaced_and_its_sessions_are_unknown(tiny_checkpoint, socket_path):
    arguments = flags(tiny_checkpoint, socket_path)
    with Client(f"unix:{socket_path}") as client:
        with serving(arguments) as (process, _):
            session = client.open()
            sequence = session.sequence(Story(1))
            drive = session.drive().attached()
            process.kill()
            assert drive.ending().kind == ("UNAVAILABLE", "")
            assert refusal(sequence.state).kind == ("UNAVAILABLE", "")
            process.wait(10)
        with serving(arguments):
            grpc.channel_ready_future(client.channel).result(20)
            assert refusal(sequence.state).kind == ("NOT_FOUND", "SESSION_UNKNOWN")
            assert client.info().incarnation != session.answer.incarnation
            client.open().sequence(Story(1)).propose(0, 2)


@pytest.fixture(scope="module")
def certificates(tmp_path_factory):
    if shutil.which("openssl") is None:
        pytest.skip("openssl is not installed")
    made = tmp_path_factory.mktemp("tls")

    def openssl(*arguments):
        subprocess.run(["openssl", *arguments], cwd=made, check=True, capture_output=True)

    key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    for authority in ("ca", "other"):
        names = ["-subj", f"/CN={authority}", "-keyout", f"{authority}.key", "-out", f"{authority}.pem"]
        openssl("req", "-x509", *key, *names, "-days", "2")
    for name, authority in (("server", "ca"), ("client", "ca"), ("stranger", "other")):
        names = ["-subj", f"/CN={name}", "-addext", "subjectAltName=DNS:localhost"]
        openssl("req", *key, *names, "-keyout", f"{name}.key", "-out", f"{name}.csr")
        issuer = ["-CA", f"{authority}.pem", "-CAkey", f"{authority}.key", "-CAcreateserial"]
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            *issuer,
            "-days",
            "2",
            "-copy_extensions",
            "copy",
            "-out",
            f"{name}.pem",
        )
    return made


def credentials(certificates, name):
    key, chain = (
        ((certificates / f"{name}.key").read_bytes(), (certificates / f"{name}.pem").read_bytes())
        if name
        else (None, None)
    )
    return grpc.ssl_channel_credentials((certificates / "ca.pem").read_bytes(), key, chain)


def test_tcp_with_mutual_tls_lets_in_whom_the_authority_knows(start, certificates):
    server = start(
        listen="localhost:0",
        tls_cert=certificates / "server.pem",
        tls_key=certificates / "server.key",
        tls_client_ca=certificates / "ca.pem",
    )
    target = f"localhost:{server.addresses.listen_port}"
    with Client(target, credentials(certificates, "client")) as client:
        client.open().sequence(Story(1)).propose(0, 2)
    for name in ("stranger", None):
        with Client(target, credentials(certificates, name)) as client:
            assert refusal(client.info, timeout=2).code in {
                grpc.StatusCode.UNAVAILABLE,
                grpc.StatusCode.DEADLINE_EXCEEDED,
            }
    with Client(target) as client:
        assert refusal(client.info, timeout=2).code in {grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED}
    server.client().open().sequence(Story(1)).propose(0, 2)


def test_tls_files_that_are_no_certificates_are_refused(tiny_checkpoint, directory, certificates):
    files = {"tls_cert": "ca.key", "tls_key": "ca.pem", "tls_client_ca": "server.csr"}
    changes = {name: certificates / file for name, file in files.items()}
    assert "--listen localhost:0" in cannot_start(tiny_checkpoint, directory, listen="localhost:0", **changes)
