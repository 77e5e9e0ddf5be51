"""The host arena: side socket, seals, views, slots. Real memfds, real SCM_RIGHTS."""

import fcntl
import os
import socket
import struct
import threading
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from fake_service import FakeService, wait_until
from fake_side_socket import SLOT_FIELDS, FakeArena, FakeSideSocket
from specdraft import Client, FailedPreconditionError, ProposeItem, Reason
from specdraft.memory import (
    DESCRIPTOR_GRANTED,
    ArenaLayout,
    DeviceRange,
    HostArena,
    SlotLayout,
    SlotPool,
    StagingRows,
    check_descriptor,
    fetch_descriptor,
    side_socket_path,
)


def descriptors():
    """What open descriptors stand for; looking opens one too, whose number may be anybody's."""
    links = set()
    for entry in Path("/proc/self/fd").iterdir():
        with suppress(FileNotFoundError):
            links.add(str(entry.readlink()))
    return {link for link in links if link.startswith(("socket:", "/memfd:"))}


def layout_of(arena, row_bytes, max_drafts):
    message = arena.message("/nowhere")
    names = set(ArenaLayout.__slots__) - {"slot", "row_size_bytes", "max_drafts"}
    return ArenaLayout(
        **{name: getattr(message, name) for name in names},
        slot=SlotLayout(**{"mask_offset_bytes": 0, **SLOT_FIELDS}),
        row_size_bytes=row_bytes,
        max_drafts=max_drafts,
    )


@pytest.fixture
def file():
    arena = FakeArena(row_bytes=40, slot_count=3, max_drafts=4, prefill_rows=10)
    yield arena
    arena.close()


@pytest.fixture
def arena(file):
    with HostArena(os.dup(file.fd), layout_of(file, 40, 4)) as arena:
        yield arena


def test_both_sides_see_the_same_bytes(file, arena):
    assert arena.nonce() == file.nonce
    rows = os.urandom(3 * 40)
    arena.write_rows(memoryview(rows), arena.slot_rows(2, 3))
    arena.write_rows(memoryview(rows[:80]), arena.staging_rows(8, 2))
    start = 4096 + 2 * file.slot_stride + 1024
    assert b"".join(file.map[start + row * 64 : start + row * 64 + 40] for row in range(3)) == rows
    start = file.staging + 8 * 64
    assert file.map[start : start + 40] == rows[:40]
    assert file.map[start + 64 : start + 104] == rows[40:80]


def test_rows_are_views_and_not_copies(file, arena):
    view = arena.slot_rows(0, 1)
    view[0] = 99
    assert file.map[4096 + 1024] == 99


def test_outputs_of_a_slot_are_read(file, arena):
    start = 4096 + file.slot_stride

    def put(kind, name, *values):
        struct.pack_into(kind, file.map, start + SLOT_FIELDS[name], *values)

    put("<i", "status_offset_bytes", 75)
    put("<Q", "op_offset_bytes", 1 << 40)
    put("<i", "draft_count_offset_bytes", 2)
    put("<i", "stop_reason_offset_bytes", 3)
    put("<2i", "drafts_offset_bytes", 11, 12)
    put("<2f", "logprobs_offset_bytes", -0.5, -0.25)
    put("<i", "row_count_offset_bytes", 6)
    put("<q", "last_pair_key_offset_bytes", -1)
    outputs = arena.slot_outputs(1)
    assert (outputs.status, outputs.op, outputs.drafts) == (75, 1 << 40, (11, 12))
    assert (outputs.logprobs, outputs.stop_reason) == ((-0.5, -0.25), 3)
    assert (outputs.row_count, outputs.last_pair_key) == (6, -1)
    put("<i", "draft_count_offset_bytes", 1 << 30)
    assert len(arena.slot_outputs(1).drafts) == 4


@pytest.mark.parametrize(
    "use",
    [
        lambda arena: arena.slot_rows(3, 1),
        lambda arena: arena.slot_rows(-1, 1),
        lambda arena: arena.slot_rows(0, 6),
        lambda arena: arena.staging_rows(9, 2),
        lambda arena: arena.staging_rows(-1, 1),
        lambda arena: arena.slot_outputs(3),
    ],
)
def test_nothing_outside_the_arena_can_be_named(arena, use):
    with pytest.raises(IndexError):
        use(arena)


def test_rows_of_another_size_are_refused(arena):
    with pytest.raises(ValueError):
        arena.write_rows(memoryview(bytes(81)), arena.slot_rows(0, 2))
    with pytest.raises(ValueError):
        arena.write_rows(memoryview(bytes(120)), arena.slot_rows(0, 2))


def test_closing_with_living_views_does_not_crash(file):
    arena = HostArena(os.dup(file.fd), layout_of(file, 40, 4))
    view = arena.slot_rows(0, 2)
    arena.close()
    arena.close()
    view[0] = 1
    assert file.map[4096 + 1024] == 1
    with pytest.raises(ValueError):
        arena.nonce()


@pytest.mark.parametrize("seals", [0, fcntl.F_SEAL_GROW, fcntl.F_SEAL_SHRINK])
def test_a_file_without_both_seals_is_refused(tmp_path, seals):
    with FakeService(tmp_path, seals=seals) as service:
        with pytest.raises(FailedPreconditionError, match="sealed") as caught:
            Client(service.target)
        assert caught.value.reason is Reason.TRANSPORT_UNAVAILABLE
        assert len(service.requests("CloseSession")) == 1


def test_a_file_that_is_too_small_or_no_memfd_is_refused(file, tmp_path):
    with pytest.raises(FailedPreconditionError, match="holds"):
        check_descriptor(file.fd, file.size + 1)
    with (tmp_path / "plain").open("w+b") as plain, pytest.raises(FailedPreconditionError, match="memfd"):
        check_descriptor(plain.fileno(), 0)


def test_a_refused_mapping_closes_its_descriptor(file):
    layout = layout_of(file, 40, 4)
    descriptor = os.dup(file.fd)
    bad = FakeArena(40, 1, 4, 1, seals=0)
    copy = os.dup(bad.fd)
    with pytest.raises(FailedPreconditionError):
        HostArena(copy, layout)
    with pytest.raises(OSError, match="Bad file"):
        os.fstat(copy)
    os.close(descriptor)
    bad.close()


def test_a_token_is_good_once(tmp_path, file):
    side = FakeSideSocket(tmp_path / "s.fd")
    try:
        side.arenas[file.token] = file
        descriptor = fetch_descriptor(str(side.path), file.token, 2.0)
        assert os.fstat(descriptor).st_ino == os.fstat(file.fd).st_ino
        assert fcntl.fcntl(descriptor, fcntl.F_GETFD) & fcntl.FD_CLOEXEC
        os.close(descriptor)
        before = descriptors()
        with pytest.raises(FailedPreconditionError, match="refused"):
            fetch_descriptor(str(side.path), file.token, 2.0)
        wait_until(lambda: descriptors() <= before)  # the other side closes its own
    finally:
        side.close()


def test_a_side_socket_with_a_full_queue_is_waited_for(tmp_path):
    path = str(tmp_path / "full.fd")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as other:
        listener.bind(path)
        listener.listen(0)
        other.connect(path)
        with pytest.raises(FailedPreconditionError, match="Resource temporarily unavailable"):
            fetch_descriptor(path, bytes(16), 0.05)

        def serve():
            time.sleep(0.1)  # the client finds the queue full first
            listener.accept()[0].close()
            connection, _ = listener.accept()
            with connection:
                connection.recv(16)
                socket.send_fds(connection, [DESCRIPTOR_GRANTED], [listener.fileno()])

        thread = threading.Thread(target=serve)
        thread.start()
        os.close(fetch_descriptor(path, bytes(16), 5.0))
        thread.join()


def test_no_side_socket_is_said_by_path(tmp_path):
    with pytest.raises(FailedPreconditionError, match=r"none\.fd"):
        fetch_descriptor(str(tmp_path / "none.fd"), b"t" * 16, 1.0)


@pytest.mark.parametrize("behaviour", ["silent", "hangs up", "refuses with a descriptor", "two descriptors"])
def test_a_side_socket_that_misbehaves_is_refused(tmp_path, file, behaviour):
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    listener.bind(str(tmp_path / "odd.fd"))
    listener.listen()
    done = threading.Event()

    def serve():
        peer, _ = listener.accept()
        with peer:
            peer.recv(16)
            if behaviour == "silent":
                done.wait(5)
            if behaviour == "refuses with a descriptor":
                socket.send_fds(peer, [b"\x02"], [file.fd])
            if behaviour == "two descriptors":
                socket.send_fds(peer, [b"\x00"], [file.fd, file.fd])

    thread = threading.Thread(target=serve)
    thread.start()
    before = descriptors()
    with pytest.raises(FailedPreconditionError):
        fetch_descriptor(str(tmp_path / "odd.fd"), b"t" * 16, 0.3)
    done.set()
    thread.join()
    listener.close()
    wait_until(lambda: descriptors() <= before)


def test_the_side_socket_is_looked_for_beside_the_socket(tmp_path):
    assert side_socket_path("/service/sees/it.fd", "/client/sees.sock") == "/client/sees.sock.fd"
    assert side_socket_path("/service/sees/it.fd", "") == "/service/sees/it.fd"
    there = tmp_path / "x.fd"
    there.touch()
    assert side_socket_path(str(there), "/client/sees.sock") == str(there)


def test_a_client_with_another_view_of_the_folder_finds_it(tmp_path):
    with (
        FakeService(tmp_path, advertised_side_path="/other/mount/drafter.sock.fd") as service,
        Client(service.target) as client,
    ):
        assert client.session.placement.in_use_count == 0


def test_rows_go_to_a_slot_then_to_staging_then_into_the_message(tmp_path):
    with FakeService(tmp_path) as service, Client(service.target, slot_count=1) as client:
        sequence = client.open_sequence()
        one = np.ones((1, 8), dtype=np.float32)
        placement = client.session.placement
        sequence.propose(0, [1], one, 1)
        rows = client.session.placement.place(read(np.ones((2, 8), dtype=np.float32)))
        assert rows.kind == "slot"
        sequence.propose(1, [1], one, 1)
        staged = placement.place(read(np.ones((16, 8), dtype=np.float32)))
        assert staged.kind == "staging"
        sequence.propose(2, [1], one, 1)
        placement.release(staged)
        placement.release(rows)
        sequence.propose(3, [1], one, 1)
        kinds = [call.entries[0].pairs.hiddens.WhichOneof("memory") for call in service.requests("Propose")]
        assert kinds == ["arena_slot", "arena_staging", "inline", "arena_slot"]
        assert placement.in_use_count == 0


def read(rows):
    from specdraft import DType
    from specdraft.hiddens import read_rows

    return read_rows(rows, DType.FLOAT32, rows.shape[1])


def test_rows_of_a_batch_that_is_refused_before_it_is_sent_are_given_back(tmp_path):
    rows = np.ones((1, 8), dtype=np.float32)
    with FakeService(tmp_path) as service, Client(service.target, slot_count=2) as client:
        first, second = client.open_sequence(), client.open_sequence()
        on_a_gpu = DeviceRange(1 << 20, rows.nbytes)  # and this session shares no GPU memory
        for _ in range(3):
            with pytest.raises(ValueError, match="this session shares none"):
                client.propose_batch([ProposeItem(first, 0, [1], rows, 1), ProposeItem(second, 0, [1], on_a_gpu, 1)])
            assert client.session.placement.in_use_count == 0
        assert first.propose(0, [1], rows, 1).drafts == (7,)


def test_slots_and_staging_rows_are_given_back():
    pool = SlotPool(2)
    assert [pool.take(), pool.take(), pool.take()] == [0, 1, None]
    pool.give(1)
    assert pool.take() == 1
    staging = StagingRows(10)
    assert [staging.claim(4), staging.claim(6), staging.claim(1)] == [0, 4, None]
    staging.release()
    assert staging.claim(1) is None
    staging.release()
    assert staging.claim(10) == 0
