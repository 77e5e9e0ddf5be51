"""The side socket: descriptors for tokens, and peers that misbehave."""

import os
import socket
import stat
import threading
import time
from contextlib import suppress

import pytest

from drafter_service.memory import DescriptorServer, descriptors
from serving import num_descriptors, temporary_directory, wait_until
from wire import fetch


@pytest.fixture
def server():
    with temporary_directory() as directory:
        made = DescriptorServer(directory / "s.fd", 0o660)
        yield made
        made.close()
        assert list(directory.iterdir()) == []


@pytest.fixture
def offered(server):
    """Something to offer: a memfd with known content."""
    descriptor = os.memfd_create("offered")
    os.write(descriptor, b"content")
    yield lambda: server.offer(descriptor)
    os.close(descriptor)


def content(descriptor):
    try:
        return os.pread(descriptor, 100, 0)
    finally:
        os.close(descriptor)


def test_a_token_buys_its_descriptor_once(server, offered):
    token = offered()
    answer, descriptor = fetch(str(server.path), token)
    assert (answer, content(descriptor)) == (b"\x00", b"content")
    assert fetch(str(server.path), token) == (b"\x01", None)


@pytest.mark.parametrize("token", [bytes(16), os.urandom(16)], ids=["zeros", "random"])
def test_a_token_that_was_not_given_is_refused(server, offered, token):
    offered()
    assert fetch(str(server.path), token) == (b"\x01", None)


def test_an_offer_withdrawn_is_refused_and_may_be_withdrawn_again(server, offered):
    before = num_descriptors()
    token = offered()
    server.withdraw(token)
    server.withdraw(token)
    assert num_descriptors() == before
    assert fetch(str(server.path), token) == (b"\x01", None)


def test_the_socket_is_for_owner_and_group(server):
    assert stat.S_IMODE(server.path.stat().st_mode) == 0o660


def connect(server):
    peer = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    peer.settimeout(20)
    peer.connect(str(server.path))
    return peer


def test_peers_that_go_away_at_any_point_leave_nothing(server, offered):
    before = num_descriptors()
    for size in (0, 1, 15):
        with connect(server) as peer:
            peer.sendall(bytes(size))
    token = offered()
    with connect(server) as peer:
        peer.sendall(token)
    wait_until(lambda: num_descriptors() == before)
    answer, descriptor = fetch(str(server.path), offered())
    assert (answer, content(descriptor)) == (b"\x00", b"content")


def test_a_peer_that_says_nothing_or_dribbles_is_let_go(server, monkeypatch):
    monkeypatch.setattr(descriptors, "PEER_TIMEOUT_S", 0.2)
    with connect(server) as silent, connect(server) as slow:
        began = time.monotonic()
        for _ in range(6):
            slow.sendall(b"x")
            time.sleep(0.02)
        assert silent.recv(1) == b""
        assert slow.recv(1) == b""
        assert time.monotonic() - began < 2


def test_more_peers_than_places_wait_for_their_turn(server, offered, monkeypatch):
    monkeypatch.setattr(descriptors, "PEER_TIMEOUT_S", 0.3)
    silent = [connect(server) for _ in range(descriptors.MAX_PEERS + 8)]
    began = time.monotonic()
    answer, descriptor = fetch(str(server.path), offered())
    assert (answer, content(descriptor)) == (b"\x00", b"content")
    assert time.monotonic() - began < 3
    for peer in silent:
        peer.close()


def test_peers_for_whom_no_thread_could_be_started_keep_no_place(server, offered, monkeypatch):
    monkeypatch.setattr(descriptors, "PEER_TIMEOUT_S", 0.05)

    def no_more(_):
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as exhausted:
        exhausted.setattr(threading.Thread, "start", no_more)
        for _ in range(descriptors.MAX_PEERS + 1):
            with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as peer, suppress(ConnectionResetError):
                peer.connect(str(server.path))
                assert peer.recv(1) == b""
    answer, descriptor = fetch(str(server.path), offered())
    assert (answer, content(descriptor)) == (b"\x00", b"content")


def test_forty_peers_at_once_get_what_is_theirs(server, offered):
    tokens = [offered() for _ in range(40)]
    answers, barrier = [], threading.Barrier(40)

    def ask(token):
        barrier.wait()
        answer, descriptor = fetch(str(server.path), token)
        answers.append((answer, content(descriptor)))

    threads = [threading.Thread(target=ask, args=(token,)) for token in tokens]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [(b"\x00", b"content")] * 40


def test_closing_drops_what_nobody_fetched():
    before = num_descriptors()
    with temporary_directory() as directory:
        server = DescriptorServer(directory / "s.fd", 0o600)
        descriptor = os.memfd_create("offered")
        for _ in range(5):
            server.offer(descriptor)
        os.close(descriptor)
        server.close()
    assert num_descriptors() == before
