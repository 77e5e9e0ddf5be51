"""Hidden states through GPU memory, with a simulated GPU: arenas, regions, the handshake, and what is left behind."""

import ctypes
import logging
import time

import pytest
import torch

from cuda_session import PIDS, gpu_service
from drafter_service.memory.cuda_arena import GRANULE
from serving import wait_until
from specdraft import AsyncClient
from specdraft.errors import Reason, SpecdraftError
from specdraft.memory import ClientGpu, DeviceRange
from specdraft.memory.simulated import SimulatedDriver
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import session_pb2, tensor_pb2
from specdraft.words import MemoryKind
from wire import BOOT_ID, VOCAB, WIDTH, Story, in_slot, refusal, refused_entry

STORY = Story(11)


@pytest.fixture(scope="module")
def clients(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, max_sessions=64) as made:
        yield made


def rounds(client, rows, num_rounds=4):
    """Drafts of a prompt and some rounds, whose rows `rows` hands over."""
    found = []
    with client.open_sequence() as sequence:
        sequence.catchup(0, STORY.tokens[:9], rows(0, 9))
        keys = range(9, 9 + 2 * num_rounds, 2)
        found += [sequence.propose(key, STORY.tokens[key : key + 2], rows(key, 2), num_drafts=3) for key in keys]
    return [(one.drafts, one.logprobs, one.state.row_count) for one in found]


def host_rows(key, count):
    return STORY.rows[key : key + count]


def test_drafts_through_gpu_memory_are_those_through_messages(clients):
    client = clients.client()
    assert client.memory_kind is MemoryKind.CUDA
    inline = clients.server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_INLINE)
    sequence = inline.sequence(STORY)
    sequence.catchup(0, 9)
    expected = [sequence.propose(key, 2) for key in range(9, 17, 2)]
    found = rounds(client, host_rows)
    assert [list(drafts) for drafts, _, _ in found] == [list(one.drafts) for one in expected]


def device_rows(gpu, pointer):
    """Hands rows over from where they lie on the client's GPU."""
    ctypes.memmove(pointer, STORY.rows.data_ptr(), STORY.rows.nbytes)
    return lambda key, count: DeviceRange(pointer + key * WIDTH * 4, count * WIDTH * 4, gpu)


def test_rows_on_the_client_s_gpu_are_copied_on_it(clients):
    gpu = clients.gpu_of_client()
    client = clients.client(gpu)
    rows = device_rows(gpu, gpu.driver.allocate(STORY.rows.nbytes))
    assert rounds(client, rows) == rounds(client, host_rows)


class Slow(SimulatedDriver):
    """A device that takes its time for a copy."""

    def copy(self, stream, target, source, size):
        self.launch(stream, lambda: time.sleep(0.03))
        super().copy(stream, target, source, size)


def test_nothing_is_asked_for_before_the_rows_are_there(clients):
    driver = Slow(clients.directory, pid=next(PIDS))
    driver.make_current(0)
    gpu = ClientGpu(driver, pid=driver.pid)
    client = clients.client(gpu)
    rows = device_rows(gpu, driver.allocate(STORY.rows.nbytes))
    assert rounds(client, rows, 2) == rounds(clients.client(), host_rows, 2)
    client.close()
    clients.forget(client)
    driver.close()


def test_rows_in_a_region_are_read_where_they_are(clients):
    gpu = clients.gpu_of_client()
    client = clients.client(gpu, slot_count=1)
    pointer = gpu.driver.allocate(1 << 17)
    rows = device_rows(gpu, pointer + 4096)
    region = client.register_region(DeviceRange(pointer + 4096, STORY.rows.nbytes))
    before = len(gpu.driver._own), clients.driver.num_imports
    assert rounds(client, rows) == rounds(client, host_rows)
    assert before == (1, 1)
    region.close()
    region.close()
    clients.settle()
    assert clients.driver.num_imports == 0
    assert rounds(client, rows) == rounds(client, host_rows), "they are copied again"


def test_outputs_are_in_the_slot_and_its_fields_can_be_viewed(clients):
    client = clients.client(with_masks=True)
    session = client.session
    arena = session._arena
    with client.open_sequence() as sequence:
        placed = session.placement.place(read(host_rows(0, 3)))
        assert placed.kind == "slot"
        session.placement.release(placed)
        mask = [0] * (VOCAB // 32)
        mask[1] = 1 << 5
        proposal = sequence.propose(0, STORY.tokens[:3], host_rows(0, 3), num_drafts=2, mask=mask)
        assert proposal.drafts == (37, 37)
    field = arena.slot_field(0, "hidden", 3 * WIDTH * 4)
    assert field.__cuda_array_interface__["data"] == (field.pointer, False)
    assert torch.equal(view(field)[0], STORY.rows[0])


def read(rows):
    from specdraft.hiddens import read_rows
    from specdraft.words import DType

    return read_rows(rows, DType.FLOAT32, WIDTH)


def view(memory):
    return torch.frombuffer(bytearray(ctypes.string_at(memory.pointer, memory.nbytes)), dtype=torch.float32).view(
        -1, WIDTH
    )


def refused(reason, call, *arguments, **options):
    with pytest.raises(SpecdraftError) as caught:
        call(*arguments, **options)
    assert caught.value.reason is reason
    return caught.value


def open_request(clients, **changes):
    fields = {
        "memory_kind": tensor_pb2.MEMORY_KIND_CUDA,
        "boot_id": BOOT_ID,
        "pid": 77,
        "device_uuid": clients.gpu.uuid,
    }
    return fields | changes


def test_the_handshake_names_gpus_by_uuid_and_refuses_what_cannot_work(clients):
    raw = clients.server.client()
    info = raw.stub.GetServerInfo(session_pb2.GetServerInfoRequest(), timeout=5)
    assert list(info.device_uuids) == [clients.gpu.uuid]
    assert tensor_pb2.MEMORY_KIND_CUDA in info.memory_kinds
    for reason, changes in (
        ("SAME_PID", {"pid": clients.gpu._pid}),
        ("GPU_UUID_NOT_VISIBLE", {"device_uuid": b"another gpu 0000"}),
        ("OTHER_HOST", {"boot_id": "elsewhere"}),
    ):
        assert refusal(raw.open, **open_request(clients, **changes)).reason == reason
    opened = raw.open(**open_request(clients, memory_kind=tensor_pb2.MEMORY_KIND_UNSPECIFIED))
    assert opened.answer.memory_kind == tensor_pb2.MEMORY_KIND_CUDA
    assert opened.answer.arena.device_uuid == opened.answer.device_uuid == clients.gpu.uuid
    assert not opened.answer.arena.descriptor_token
    opened.close()


def test_an_arena_is_refused_until_its_mapping_is_proven(clients):
    raw = clients.server.client()
    opened = raw.open(**open_request(clients))
    entry = opened.sequence(STORY).propose_entry(0, 1)
    entry.pairs.hiddens.CopyFrom(in_slot(0, 1))
    (result,) = opened.call("Propose", pb.ProposeRequest(entries=[entry])).results
    assert refused_entry(result.status).reason == "MAPPING_NOT_PROVEN"
    opened.close()


def test_regions_are_refused_where_they_are_not_allowed(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, allow_client_regions=False) as clients:
        gpu = clients.gpu_of_client()
        client = clients.client(gpu)
        buffer = DeviceRange(gpu.driver.allocate(4096), 4096)
        error = refused(Reason.TRANSPORT_UNAVAILABLE, client.register_region, buffer)
        assert error.details["kind"] == "region"


def test_memory_that_cannot_be_exported_is_told_by_the_client_itself(clients):
    gpu = clients.gpu_of_client()
    client = clients.client(gpu)
    buffer = DeviceRange(gpu.driver.allocate_virtual(4096), 4096)
    assert "expandable_segments" in str(refused(Reason.MEMORY_NOT_SHAREABLE, client.register_region, buffer))


def test_a_session_has_only_so_many_regions_and_never_another_s(clients):
    gpu = clients.gpu_of_client()
    first, second = clients.client(gpu), clients.client()
    buffer = DeviceRange(gpu.driver.allocate(1 << 16), 1 << 16)
    before = clients.server.metric("regions_open")
    made = [first.register_region(buffer[n * 64 : n * 64 + 64]) for n in range(16)]
    assert clients.server.metric("regions_open") == before + 16
    refused(Reason.REGIONS_EXHAUSTED, first.register_region, buffer)
    made[0].close()
    assert clients.server.metric("regions_open") == before + 15
    whole = first.register_region(buffer)
    second.session.regions._open.append(whole)  # its id is all that anybody needs to ask
    with second.open_sequence() as sequence:
        refused(Reason.REGION_UNKNOWN, sequence.propose, 0, [1], DeviceRange(buffer.pointer, 64 * 4), num_drafts=1)


def test_a_client_that_dies_leaves_nothing(tiny_checkpoint):
    with gpu_service(tiny_checkpoint, lease_s=0.3, grace_s=0.1) as clients:
        gpu = clients.gpu_of_client()
        client = clients.client(gpu)
        client.register_region(DeviceRange(gpu.driver.allocate(4096), 4096))
        assert clients.driver.num_imports == 1
        client._session._lease.close()
        client._channel.close()
        wait_until(lambda: clients.driver.num_imports == 0, text="the end of the lease")
        wait_until(lambda: clients.driver.num_bytes <= GRANULE, text="only the spare one is left")
        clients.forget(client)


def test_handles_are_in_no_log(clients, caplog):
    caplog.set_level(logging.DEBUG)
    client = clients.client()
    handle = client.session._arena._handle.rstrip(b"\0").decode()
    client.close()
    assert handle not in caplog.text


def test_a_client_without_a_gpu_is_told(clients):
    from specdraft import Client

    with pytest.raises(SpecdraftError, match="no CUDA memory"):
        Client(f"unix:{clients.server.config.socket}", memory="cuda")


@pytest.mark.parametrize("kind", ["sync", "asyncio"])
async def test_a_client_s_context_is_there_before_its_session_so_that_no_lease_runs_out_meanwhile(clients, kind):
    gpu, before = clients.gpu_of_client(), clients.server.metric("sessions")
    sessions, make_current = [], gpu.driver.make_current

    def slow(device):
        sessions.append(clients.server.metric("sessions"))
        make_current(device)

    gpu.driver.make_current = slow
    if kind == "sync":
        clients.client(gpu)
    else:
        async with AsyncClient(f"unix:{clients.server.config.socket}", memory="cuda", gpu=gpu) as client:
            await client.open_sequence()
    assert sessions[0] == before
