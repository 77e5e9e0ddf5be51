"""Sessions of the Python client: handshake, lease, deadlines, ends."""

import gc
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

import specdraft
from fake_service import FakeService, wait_until
from specdraft import (
    Client,
    DeadlineError,
    FailedPreconditionError,
    HiddenSource,
    MemoryKind,
    NotFoundError,
    ProposeItem,
    Reason,
    SessionOptions,
    UnavailableError,
)
from specdraft.errors import make_error

ROW = np.ones((1, 8), dtype=np.float32)


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path) as service:
        yield service


def test_the_handshake_says_what_the_client_will_send(service):
    with Client(
        service.target,
        hidden_source=HiddenSource.LAYERS,
        hidden_dtype="bfloat16",
        layer_ids=(3, 1),
        vocab_size=77,
        slot_count=5,
        max_drafts=3,
        prefill_rows=9,
        client_name="me",
        carry_key=b"k" * 16,
    ) as client:
        assert client.hidden_width == 8
        assert client.max_drafts == 3
    (request,) = service.requests("OpenSession")
    assert request.protocol_version == 1
    assert (request.hidden_source, request.hidden_dtype, request.hidden_width) == (3, 2, 8)
    assert (list(request.layer_ids), request.vocab_size, request.slot_count) == ([3, 1], 77, 5)
    assert (request.max_drafts, request.prefill_row_count, request.client_name) == (3, 9, "me")
    assert (request.pid, request.carry_key) == (os.getpid(), b"k" * 16)
    assert len(request.boot_id) == 36


@pytest.mark.parametrize(
    ("memory", "offered", "expected"),
    [
        ("auto", True, MemoryKind.HOST),
        ("auto", False, MemoryKind.INLINE),
        ("inline", True, MemoryKind.INLINE),
        ("host", True, MemoryKind.HOST),
    ],
)
def test_memory_is_shared_where_that_is_possible(tmp_path, memory, offered, expected):
    with FakeService(tmp_path, host_memory=offered) as service, Client(service.target, memory=memory) as client:
        assert client.memory_kind is expected


@pytest.mark.parametrize(
    "options",
    [
        {"hidden_source": "post_norm"},
        {"hidden_source": 0},
        {"hidden_dtype": "float64"},
        {"memory": "gpu"},
        {"timeout_s": 0},
        {"timeout_s": math.nan},
        {"timeout_s": math.inf},
        {"timeout_s": 5e6},
    ],
    ids=str,
)
def test_options_that_are_wrong_by_themselves_are_refused_at_once(options):
    (name,) = options
    with pytest.raises(ValueError, match=name):
        Client("unix:///nowhere", **options)


def test_options_do_not_tell_the_carry_key():
    assert "secret" not in repr(SessionOptions(carry_key=b"secret, secret, secret"))


def test_a_refused_handshake_names_the_field(service):
    with pytest.raises(FailedPreconditionError) as caught:
        Client(service.target, hidden_width=9)
    assert caught.value.reason is Reason.HANDSHAKE_MISMATCH
    assert caught.value.details["field"] == "hidden_width"


def test_no_service_is_unavailable_without_a_reason(tmp_path):
    with pytest.raises(UnavailableError) as caught:
        Client(f"unix://{tmp_path}/nothing.sock", timeout_s=1.0)
    assert caught.value.reason is None


@pytest.mark.parametrize("use_drive", [True, False])
def test_every_call_has_a_deadline_and_the_token(service, use_drive):
    with Client(service.target, timeout_s=3.0, use_drive=use_drive) as client:
        client.server_info()
        with client.open_sequence() as sequence:
            sequence.prefill([1, 2, 3], np.zeros((3, 8), dtype=np.float32))
            sequence.propose(2, [4], ROW, 2)
            client.propose_batch([ProposeItem(sequence, 3, [4], ROW, 2)])
            sequence.state()
            sequence.truncate(1)
            carry = sequence.take_kv("mine")
            sequence.install_kv(carry)
            client.free_kv(sequence.take_kv())
            sequence.fork(0).close()
    called = {call.rpc for call in service.calls}
    assert called == {
        *("GetServerInfo", "OpenSession", "KeepAlive", "CloseSession", "OpenSequence", "Catchup", "Propose"),
        *("GetSequence", "Truncate", "TakeKV", "InstallKV", "FreeKV", "ForkSequence", "CloseSequence"),
    }
    for call in service.calls:
        assert 2.0 < call.timeout_s <= 3.01, call.rpc
        if call.rpc not in {"GetServerInfo", "OpenSession"}:
            assert len(call.metadata["specdraft-token-bin"]) == 16


def test_the_first_keepalive_proves_the_mapping_and_the_others_renew(tmp_path):
    with FakeService(tmp_path, lease_ms=300) as service, Client(service.target):
        wait_until(lambda: len(service.requests("KeepAlive")) >= 4)
        first, *others = service.requests("KeepAlive")
        assert first.arena_nonce == service.arena.nonce
        assert not any(one.arena_nonce for one in others)


def test_keepalive_goes_on_after_an_error_and_ends_with_the_session(tmp_path):
    with FakeService(tmp_path, lease_ms=150) as service, Client(service.target) as client:
        service.faults["KeepAlive"] = [make_error(Reason.DRAINING, "later")]
        wait_until(lambda: len(service.requests("KeepAlive")) >= 4)
        service.token = b"another session"
        wait_until(lambda: client.session.lost)
        count = len(service.requests("KeepAlive"))
        time.sleep(0.2)
        assert len(service.requests("KeepAlive")) == count


def test_a_mapping_that_is_not_proven_ends_the_session(service):
    service.faults["KeepAlive"] = [make_error(Reason.MAPPING_NOT_PROVEN, "no")]
    with pytest.raises(FailedPreconditionError):
        Client(service.target)
    assert len(service.requests("CloseSession")) == 1


def test_a_closed_client_says_so(service):
    client = Client(service.target)
    sequence = client.open_sequence()
    client.close()
    client.close()
    for use in (client.open_sequence, client.server_info, sequence.state, client.reopen):
        with pytest.raises(UnavailableError, match="closed"):
            use()
    sequence.close()
    assert len(service.requests("CloseSession")) == 1


def test_closing_does_not_need_the_service(tmp_path):
    service = FakeService(tmp_path, grace_ms=200)
    client = Client(service.target, timeout_s=1.0)
    sequence = client.open_sequence()
    service.stop()
    started = time.monotonic()
    sequence.close()
    client.close()
    assert time.monotonic() - started < 5


@pytest.mark.parametrize("use_drive", [True, False])
def test_a_restart_that_nobody_has_noticed_yet_is_no_error_of_the_next_sequence(tmp_path, use_drive):
    with FakeService(tmp_path) as service, Client(service.target, use_drive=use_drive, timeout_s=10.0) as client:
        before = client.session
        service.token = b"restarted"
        service.cut()
        assert client.open_sequence().propose(0, [1], ROW, 1).drafts == (7,)
        assert client.session is not before
        service.token = b"restarted again"
        service.cut()
        assert client.conversations.resume([1, 2, 3]).num_keys_kept == 0


@pytest.mark.parametrize("use_drive", [True, False])
def test_after_a_restart_the_next_sequence_opens_a_new_session(tmp_path, use_drive):
    service = FakeService(tmp_path)
    with Client(service.target, use_drive=use_drive, timeout_s=10.0) as client:
        sequence = client.open_sequence()
        sequence.propose(0, [1], ROW, 1)
        service.stop()
        service.forget()
        service.start()
        deadline = time.monotonic() + 10
        while True:
            with pytest.raises((NotFoundError, UnavailableError)) as caught:
                sequence.state()
            if caught.value.reason is Reason.SESSION_UNKNOWN or time.monotonic() > deadline:
                break
        assert caught.value.reason is Reason.SESSION_UNKNOWN
        again = client.open_sequence()
        assert again.propose(0, [1], ROW, 1).drafts == (7,)
        with pytest.raises(NotFoundError):
            sequence.state()
    service.stop()


def test_a_session_can_be_reopened_by_hand(service):
    with Client(service.target) as client:
        client.reopen()
        assert client.open_sequence().propose(0, [1], ROW, 2).drafts == (7, 7)
    assert len(service.requests("CloseSession")) == 2


def test_after_a_reopening_that_failed_the_next_sequence_tries_again(service):
    with Client(service.target) as client:
        service.faults["GetServerInfo"] = [make_error(Reason.STARTING, "not yet")]
        with pytest.raises(UnavailableError, match="not yet"):
            client.reopen()
        assert client.open_sequence().propose(0, [1], ROW, 2).drafts == (7, 7)
    with pytest.raises(UnavailableError, match="this client is closed"):
        client.open_sequence()


def test_threads_that_wait_for_a_new_session_together_are_told_together(service):
    go_on, errors = threading.Event(), []
    with Client(service.target, timeout_s=0.5) as client:
        sequence = client.open_sequence()
        service.token = b"restarted"
        service.cut()
        with pytest.raises(NotFoundError):
            sequence.state()
        service.faults["GetServerInfo"] = [lambda: go_on.wait(20)] * 6
        num_before = len(service.requests("GetServerInfo"))

        def ask():
            try:
                client.open_sequence()
            except DeadlineError as error:
                errors.append(error)

        threads = [threading.Thread(target=ask) for _ in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        go_on.set()
        assert len(errors) == 6
        # One tries. Their deadlines do not add up; a thread that is late may find nobody who tries any more.
        assert len(service.requests("GetServerInfo")) - num_before <= 2
        service.faults.clear()
        assert client.open_sequence().propose(0, [1], ROW, 1).drafts == (7,)


def settled_counts():
    gc.collect()
    return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))


@pytest.mark.parametrize("options", [{}, {"use_drive": False}, {"memory": "inline"}])
def test_closing_leaves_no_thread_and_no_descriptor(service, options):
    def use():
        with Client(service.target, **options) as client:
            sequence = client.open_sequence()
            sequence.prefill(list(range(9)), np.zeros((9, 8), dtype=np.float32))
            sequence.propose(8, [1], ROW, 2)

    use()  # what gRPC starts once
    wait_until(lambda: not service.streams or service.cut() is None)
    before = settled_counts()
    for _ in range(5):
        use()

    def is_back():
        now = settled_counts()
        return now[0] <= before[0] and now[1] <= before[1]

    wait_until(is_back, timeout_s=10)


def test_failed_openings_leave_nothing(service):
    with pytest.raises(FailedPreconditionError):
        Client(service.target, hidden_width=9)
    before = settled_counts()
    for _ in range(5):
        with pytest.raises(FailedPreconditionError):
            Client(service.target, hidden_width=9)
    wait_until(lambda: settled_counts() <= before, timeout_s=10)


def test_importing_the_client_pulls_in_neither_torch_nor_numpy():
    code = (
        "import sys, specdraft, specdraft.errors, specdraft.memory\n"
        "assert 'grpc' not in sys.modules, 'errors and memory need no gRPC'\n"
        "[getattr(specdraft, name) for name in specdraft.__all__]\n"
        "import specdraft.integrations\n"
        "assert not {'torch', 'numpy', 'transformers'} & set(sys.modules)\n"
    )
    path = os.pathsep.join(sys.path)
    subprocess.run([sys.executable, "-c", code], check=True, env={**os.environ, "PYTHONPATH": path})


def test_the_door_is_complete():
    for name in specdraft.__all__:
        assert getattr(specdraft, name).__name__ == name
    assert set(specdraft.__all__) == set(dir(specdraft))
    with pytest.raises(AttributeError, match="nothing"):
        _ = specdraft.nothing


def test_tcp_and_tls_targets_use_inline_memory(service):
    with Client(f"localhost:{service.port}") as client:
        assert client.memory_kind is MemoryKind.INLINE
        assert client.open_sequence().propose(0, [1], ROW, 1).drafts == (7,)
    with pytest.raises(UnavailableError):
        Client(f"localhost:{service.port}", credentials=grpc.ssl_channel_credentials(), timeout_s=2.0)


FORKING = """
import os, sys
from specdraft import Client, UnavailableError

with Client(sys.argv[1]) as client:
    with client.open_sequence() as sequence:
        child = os.fork()
        if child == 0:
            for use in (client.open_sequence, sequence.state, client.server_info, client.reopen):
                try:
                    use()
                except UnavailableError as error:
                    print(error)
            sys.exit(7)  # unwinds both blocks
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
        print(sequence.state().row_count)
"""


def test_a_forked_process_neither_uses_nor_ends_what_its_parent_has_open(service):
    done = subprocess.run(
        [sys.executable, "-c", FORKING, service.target], capture_output=True, text=True, timeout=30, check=True
    )
    *refused, code, rows = done.stdout.splitlines()
    assert len(refused) == 4
    assert all("belongs to the process that it was opened in" in text for text in refused)
    assert (code, rows) == ("7", "0")
    assert len(service.requests("CloseSession")) == len(service.requests("CloseSequence")) == 1
