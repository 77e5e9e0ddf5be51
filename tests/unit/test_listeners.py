"""Who owns a socket path."""

import os
import socket
import stat
import threading
from concurrent import futures

import grpc
import pytest

from drafter_service.config import ConfigError, ServiceConfig
from drafter_service.server import listeners
from drafter_service.server.listeners import SocketOwnership, bind_tcp, bind_unix
from serving import temporary_directory


@pytest.fixture
def directory():
    with temporary_directory() as made:
        yield made


@pytest.fixture
def path(directory):
    return directory / "s.sock"


@pytest.fixture
def server():
    made = grpc.server(futures.ThreadPoolExecutor(1), options=[("grpc.so_reuseport", 0)])
    yield made
    made.stop(0).wait()


def test_a_path_has_one_owner_at_a_time(path, directory):
    first = SocketOwnership(path)
    with pytest.raises(ConfigError, match="a live server owns it"):
        SocketOwnership(path)
    first.close()
    SocketOwnership(path).close()
    assert list(directory.iterdir()) == []


def test_the_owner_alone_removes_the_lock(path, directory):
    owner = SocketOwnership(path)
    for _ in range(3):
        with pytest.raises(ConfigError):
            SocketOwnership(path)
    assert [item.name for item in directory.iterdir()] == ["s.sock.lock"]
    owner.close()


def test_a_lock_file_that_its_owner_removed_meanwhile_is_nobodys_lock(path, monkeypatch):
    before = SocketOwnership(path)
    real, calls = os.open, []

    def open_then_wait(*args):
        descriptor = real(*args)
        if not calls:
            before.close()  # between our opening and our locking
        calls.append(descriptor)
        return descriptor

    monkeypatch.setattr(listeners.os, "open", open_then_wait)
    ours = SocketOwnership(path)
    assert len(calls) == 2
    monkeypatch.undo()
    with pytest.raises(ConfigError, match="a live server owns it"):
        SocketOwnership(path)
    ours.close()


def test_of_many_that_start_at_once_exactly_one_owns_the_path(path):
    owners, barrier = [], threading.Barrier(8)

    def claim():
        barrier.wait()
        try:
            owners.append(SocketOwnership(path))
        except ConfigError:
            return

    for _ in range(20):
        threads = [threading.Thread(target=claim) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        (owner,) = owners
        owner.close()
        owners.clear()


def test_missing_directories_are_made_for_owner_and_group(directory):
    path = directory / "a" / "b" / "s.sock"
    SocketOwnership(path).close()
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o750


def test_stale_sockets_are_removed_and_a_link_to_one_too(path, directory):
    target = directory / "target"
    for stale in (target, directory / "s.sock.fd"):
        with socket.socket(socket.AF_UNIX) as dead:
            dead.bind(str(stale))
    path.symlink_to(target)
    owner = SocketOwnership(path)
    assert sorted(item.name for item in directory.iterdir()) == ["s.sock.lock", "target"]
    owner.close()


@pytest.mark.parametrize("make", ["file", "directory", "dangling link"])
def test_what_is_no_socket_stays(path, directory, make):
    if make == "file":
        path.write_text("precious")
    elif make == "directory":
        path.mkdir()
    else:
        path.symlink_to(directory / "nothing")
    with pytest.raises(ConfigError, match="something that is no socket is there"):
        SocketOwnership(path)
    assert [item.name for item in directory.iterdir()] == ["s.sock"]


def test_a_listener_that_accepts_nothing_is_alive_too(path):
    with socket.socket(socket.AF_UNIX) as busy:
        busy.bind(str(path))
        busy.listen(0)
        callers = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        try:
            for caller in callers:
                caller.setblocking(False)
                caller.connect_ex(str(path))
            with pytest.raises(ConfigError, match="a live server owns it"):
                SocketOwnership(path)
        finally:
            for caller in callers:
                caller.close()


def test_a_directory_that_cannot_be_made_is_named(directory):
    (directory / "file").touch()
    with pytest.raises(ConfigError, match=r"file/s\.sock"):
        SocketOwnership(directory / "file" / "s.sock")


def test_a_unix_socket_has_its_mode_from_the_start_and_the_mask_is_as_before(server, path):
    before = os.umask(0o022)
    try:
        bind_unix(server, path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o660
        assert os.umask(0o022) == 0o022
    finally:
        os.umask(before)


@pytest.mark.parametrize("name", ["a b", "a%41b", "100%", "a?b#c", "ä"])
def test_the_socket_is_where_it_was_asked_for_whatever_its_name(server, directory, name):
    bind_unix(server, directory / name)
    assert [item.name for item in directory.iterdir()] == [name]


def test_an_unusable_address_is_named(server, directory):
    with pytest.raises(ConfigError, match=r"missing/s\.sock cannot be bound"):
        bind_unix(server, directory / "missing" / "s.sock")
    with pytest.raises(ConfigError, match=r"--listen no such host:1 cannot be bound: .*[Nn]ame"):
        bind_tcp(server, ServiceConfig(listen="no such host:1", insecure=True))
    config = ServiceConfig(listen="localhost:0", **dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"), directory))
    with pytest.raises(ConfigError, match=f"--tls-key {directory} cannot be read: Is a directory"):
        bind_tcp(server, config)


def test_a_port_in_use_is_told_from_tls_files_that_are_none(server, directory):
    with socket.socket() as busy:
        busy.bind(("127.0.0.1", 0))
        busy.listen()
        config = ServiceConfig(listen=f"127.0.0.1:{busy.getsockname()[1]}", insecure=True)
        with pytest.raises(ConfigError, match="cannot be bound: Address already in use"):
            bind_tcp(server, config)
    (directory / "empty.pem").touch()
    files = dict.fromkeys(("tls_cert", "tls_key", "tls_client_ca"), directory / "empty.pem")
    with pytest.raises(ConfigError, match=r"empty\.pem is no PEM file of its kind"):
        bind_tcp(server, ServiceConfig(listen="localhost:0", **files))


def test_a_free_port_is_found(server):
    assert bind_tcp(server, ServiceConfig(listen="127.0.0.1:0", insecure=True)) > 0
