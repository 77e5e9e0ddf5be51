"""`AsyncClient` does what `Client` does."""

import asyncio
import gc
import inspect
import threading
import time
from pathlib import Path

import grpc
import numpy as np
import pytest

from fake_service import FakeService, wait_until
from specdraft import (
    AbortedError,
    AsyncClient,
    AsyncSequence,
    CatchupItem,
    Client,
    DeadlineError,
    FailedPreconditionError,
    MemoryKind,
    NotFoundError,
    ProposeItem,
    Reason,
    Sequence,
    UnavailableError,
)
from specdraft.aio.drive import AsyncDrive
from specdraft.drive import DriveUnsupported
from specdraft.errors import InternalError, ResourceExhaustedError, make_error
from specdraft.exchanges import Exchange
from specdraft.v1 import drafter_pb2
from tasks import in_client


def rows(count, width=8):
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


@pytest.fixture(params=["drive-host", "drive-inline", "unary-host"])
def options(request):
    drive, memory = request.param.split("-")
    return {"use_drive": drive == "drive", "memory": memory, "timeout_s": 2.0}


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path) as service:
        yield service


ONLY_FOR_THREADS = {"claim_slot", "open_lane", "register_region"}  # they go with a CUDA stream of the caller's thread


def test_the_words_are_those_of_the_threaded_client():
    for threaded, awaited in ((Client, AsyncClient), (Sequence, AsyncSequence)):
        for name, value in vars(threaded).items():
            if name.startswith("_") or name in ONLY_FOR_THREADS:
                continue
            assert hasattr(awaited, name), name
            if callable(value) and not isinstance(value, property):
                expected = [one.replace(annotation="") for one in inspect.signature(value).parameters.values()]
                actual = inspect.signature(getattr(awaited, name)).parameters.values()
                assert [one.replace(annotation="") for one in actual] == expected, name
                assert inspect.iscoroutinefunction(getattr(awaited, name)), name
    assert list(inspect.signature(Client.__init__).parameters) == list(
        inspect.signature(AsyncClient.__init__).parameters
    )


def test_a_whole_life(service, options):
    service.draft = lambda sequence, entry: [entry.pairs.tokens[-1]] * entry.draft_count

    async def scenario(client):
        assert (await client.server_info()).head.hidden_width == client.hidden_width == 8
        assert client.memory_kind is (MemoryKind.INLINE if options["memory"] == "inline" else MemoryKind.HOST)
        sequence = await client.open_sequence()
        hiddens = rows(40)
        state = await sequence.prefill(list(range(100, 140)), hiddens)
        assert (state.last_pair_key, state.last_op) == (38, 3)
        assert service.sequences[sequence.sequence_id].rows[30] == hiddens[30].tobytes()
        assert (await sequence.propose(39, [5], rows(1), 2)).drafts == (5, 5)
        assert (await sequence.truncate(39)).row_count == 39
        carry = await sequence.take_kv("mine")
        assert (await sequence.install_kv(carry)).row_count == 39
        fork = await sequence.fork(3)
        assert fork.known_state.row_count == 3
        results = await client.propose_batch(
            [ProposeItem(sequence, 39, [6], rows(1), 1), ProposeItem(fork, 9, [7], rows(1), 1)]
        )
        assert results[0].drafts == (6,)
        assert isinstance(results[1], FailedPreconditionError)
        states = await client.catchup_batch([CatchupItem(fork, 3, [1, 2], rows(2))])
        assert states[0].row_count == 5
        with pytest.raises(NotFoundError):
            await client.free_kv(carry)
        await fork.close()
        async with sequence:
            assert (await sequence.state()).last_op == 8
        assert client.is_driving == options["use_drive"]
        assert client.session.placement.in_use_count == 0

    in_client(service, scenario, **options)
    assert len(service.requests("CloseSession")) == 1
    for call in service.calls:
        assert 1.0 < call.timeout_s <= 2.01, call.rpc


def test_after_a_timeout_the_next_use_asks(service, options):
    release = threading.Event()

    async def scenario(client):
        sequence = await client.open_sequence()
        service.after["Propose"] = [lambda: release.wait(5)]
        with pytest.raises(DeadlineError):
            await sequence.propose(0, [1], rows(1), 1)
        release.set()
        assert (await sequence.propose(1, [1], rows(1), 1)).state.last_op == 2

    in_client(service, scenario, **options | {"timeout_s": 0.5})
    assert len(service.requests("GetSequence")) == 1


def test_a_cancelled_call_has_an_unknown_outcome(service, options):
    release = threading.Event()

    async def scenario(client):
        sequence = await client.open_sequence()
        service.after["Propose"] = [lambda: release.wait(5)]
        task = asyncio.create_task(sequence.propose(0, [1], rows(1), 1))
        await asyncio.to_thread(wait_until, lambda: service.requests("Propose"))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        release.set()
        assert (await sequence.propose(1, [1], rows(1), 1)).state.last_op == 2
        assert client.session.placement.in_use_count == 0

    in_client(service, scenario, **options)


@pytest.mark.parametrize("was_done", [True, False])
def test_a_cut_stream_is_mended_and_nothing_done_twice(service, was_done):
    async def scenario(client):
        sequence = await client.open_sequence()
        (service.after if was_done else service.faults)["Propose"] = [service.cut]
        assert (await sequence.propose(0, [1], rows(1), 2)).state.last_op == 1
        assert (await sequence.propose(1, [1], rows(1), 2)).state.last_op == 2

    in_client(service, scenario, timeout_s=5.0)
    first, second, _ = service.requests("Propose")
    assert first == second


def test_a_broken_connection_is_mended(service):
    async def scenario(client):
        sequence = await client.open_sequence()
        for key in range(3):
            await asyncio.to_thread(lambda: service.server.stop(None).wait())
            service.side.close()
            service.side_path.unlink()
            service.start()
            assert (await sequence.propose(key, [1], rows(1), 1)).state.last_op == key + 1

    in_client(service, scenario, timeout_s=5.0)


@pytest.mark.parametrize("later_s", [0.0, 0.3, 1.0])
def test_after_the_grace_the_next_use_tries_anew(tmp_path, later_s):
    with FakeService(tmp_path, grace_ms=300) as service:

        async def scenario(client):
            sequence = await client.open_sequence()
            await asyncio.to_thread(lambda: service.server.stop(None).wait())
            with pytest.raises(UnavailableError):
                await sequence.propose(0, [1], rows(1), 1)
            await asyncio.sleep(later_s)
            service.side.close()
            service.side_path.unlink()
            service.start()
            assert (await sequence.propose(0, [1], rows(1), 1)).state.last_op == 1

        in_client(service, scenario, timeout_s=5.0)


def test_when_nobody_listens_waiting_and_later_calls_are_told_at_once(tmp_path):
    with FakeService(tmp_path, grace_ms=60_000) as service:

        async def scenario(client):
            sequence = await client.open_sequence()
            service.faults["Propose"] = [lambda: service.server.stop(None)]
            started = time.monotonic()
            for _ in range(5):
                with pytest.raises(UnavailableError):
                    await sequence.propose(0, [1], rows(1), 1)
            assert time.monotonic() - started < 5
            service.side.close()
            service.side_path.unlink()
            service.start()
            assert (await sequence.propose(0, [1], rows(1), 1)).drafts == (7,)

        in_client(service, scenario, timeout_s=20.0)


def test_a_stream_whose_status_was_lost_is_not_attached_again(service):
    async def scenario(client):
        sequence = await client.open_sequence()
        service.faults["Propose"] = [lambda: service.cut(InternalError(None, "reset"))]
        assert (await sequence.propose(0, [1], rows(1), 1)).state.last_op == 1
        assert not client.is_driving
        assert not service.streams
        assert (await sequence.propose(1, [1], rows(1), 1)).state.last_op == 2

    in_client(service, scenario)


class SlowStream:
    """A stream whose writes wait, and which nothing answers."""

    def __init__(self):
        self.written, self.was_cut = asyncio.Semaphore(0), False
        self.is_writing, self.may_write = asyncio.Event(), asyncio.Event()

    async def write(self, frame):
        self.is_writing.set()
        try:
            await self.may_write.wait()
        except asyncio.CancelledError:
            self.was_cut = True
            raise
        self.written.release()

    def cancel(self):
        pass

    async def __aiter__(self):
        await asyncio.Event().wait()
        yield


def test_a_call_that_is_cancelled_while_it_writes_leaves_the_stream_to_the_others():
    async def main():
        stream = SlowStream()
        drive = AsyncDrive(lambda: stream, 1.0, "")
        await asyncio.sleep(0)  # the reader has attached
        exchange = Exchange("GetSequence", drafter_pb2.GetSequenceRequest(), 5.0)
        calls = [asyncio.create_task(drive.call(exchange)) for _ in range(2)]
        await stream.is_writing.wait()
        calls[0].cancel()
        await asyncio.wait(calls[:1])
        stream.may_write.set()
        for _ in calls:
            await stream.written.acquire()
        assert not stream.was_cut
        await drive.close()
        with pytest.raises(UnavailableError):
            await calls[1]

    asyncio.run(asyncio.wait_for(main(), 10))


def test_too_large_a_message_is_told_and_not_sent_again(tmp_path):
    with FakeService(tmp_path, message_bytes=4096) as service:

        async def scenario(client):
            sequence = await client.open_sequence()
            with pytest.raises(ResourceExhaustedError):
                await sequence.propose(0, [1], rows(1), 1, mask=[0] * 2000)
            assert (await sequence.propose(0, [1], rows(1), 1)).state.last_op == 1
            assert client.is_driving

        in_client(service, scenario, memory="inline", timeout_s=5.0)


class CutStream:
    """A stream that ended while somebody wrote: gRPC has lost its status."""

    async def write(self, frame):
        raise asyncio.InvalidStateError

    async def code(self):
        return grpc.StatusCode.INTERNAL

    async def details(self):
        return "Internal error from Core"

    async def trailing_metadata(self):
        return ()

    def cancel(self):
        pass

    async def __aiter__(self):
        return
        yield


@pytest.mark.parametrize(("is_connected", "error"), [(True, DriveUnsupported), (False, UnavailableError)])
def test_a_status_that_was_lost_with_the_connection_is_no_fence(tmp_path, is_connected, error):
    async def main():
        drive = AsyncDrive(CutStream, 1.0, f"unix:{tmp_path}/nobody", lambda: is_connected)
        with pytest.raises(error):
            await drive.call(Exchange("GetSequence", drafter_pb2.GetSequenceRequest(), 5.0))
        await drive.close()

    asyncio.run(asyncio.wait_for(main(), 10))


def test_a_fenced_stream_is_not_attached_again(service):
    async def scenario(client):
        sequence = await client.open_sequence()
        # A write that meets the very end of the stream makes gRPC lose the status for good: none is left over here.
        drive = client.session._transport._drive
        await asyncio.gather(*drive._writes)
        service.cut(make_error(Reason.SESSION_FENCED, "another"))
        await asyncio.to_thread(wait_until, lambda: drive._final is not None)
        for _ in range(2):
            with pytest.raises(AbortedError):
                await sequence.propose(0, [1], rows(1), 1)
        assert not service.streams

    in_client(service, scenario)


def test_without_drive_operations_are_unary(tmp_path):
    with FakeService(tmp_path, has_drive=False) as service:

        async def scenario(client):
            sequence = await client.open_sequence()
            assert (await sequence.propose(0, [1], rows(1), 1)).drafts == (7,)
            assert not client.is_driving

        in_client(service, scenario)


def test_a_restart_that_nobody_has_noticed_yet_is_no_error_of_the_next_sequence(service):
    async def scenario(client):
        service.token = b"restarted"
        service.cut()
        assert (await (await client.open_sequence()).propose(0, [1], rows(1), 1)).drafts == (7,)
        service.token = b"restarted again"
        service.cut()
        assert (await client.conversations.resume([1, 2, 3])).num_keys_kept == 0

    in_client(service, scenario)


def test_a_lost_session_is_opened_again_by_the_next_sequence(tmp_path):
    service = FakeService(tmp_path)

    async def scenario(client):
        sequence = await client.open_sequence()
        service.token = b"restarted"
        service.cut()
        with pytest.raises(NotFoundError):
            await sequence.state()
        again = await client.open_sequence()
        assert (await again.propose(0, [1], rows(1), 1)).drafts == (7,)
        with pytest.raises(NotFoundError):
            await sequence.state()

    with service:
        in_client(service, scenario)


def test_tasks_share_a_client_and_a_sequence(service, options):
    service.draft = lambda sequence, entry: [entry.pairs.tokens[-1]] * entry.draft_count

    async def work(client, shared, index):
        async with await client.open_sequence() as own:
            for step in range(20):
                assert (await own.propose(step, [index], rows(1), 3)).drafts == (index,) * 3
                await shared.propose(0, [index], rows(1), 1)

    async def scenario(client):
        shared = await client.open_sequence()
        await asyncio.gather(*(work(client, shared, index) for index in range(6)))
        assert (await shared.state()).last_op == 120

    in_client(service, scenario, **options)


def test_keepalive_proves_the_mapping_and_renews(tmp_path):
    with FakeService(tmp_path, lease_ms=300) as service:

        async def scenario(client):
            await asyncio.sleep(0.5)

        in_client(service, scenario)
        first, *others = service.requests("KeepAlive")
        assert first.arena_nonce == service.arena.nonce
        assert len(others) >= 3


def test_a_closed_or_unopened_client_says_so(service):
    async def scenario(client):
        sequence = await client.open_sequence()
        await client.close()
        for use in (client.open_sequence, client.server_info, sequence.state, client.reopen):
            with pytest.raises(UnavailableError, match="closed"):
                await use()
        await sequence.close()

    in_client(service, scenario)

    async def unopened():
        with pytest.raises(UnavailableError):
            await AsyncClient(service.target).open_sequence()
        with pytest.raises(FailedPreconditionError):
            await AsyncClient(service.target, hidden_width=9).open()

    asyncio.run(unopened())


def test_closing_wakes_those_who_wait(service):
    release = threading.Event()

    async def scenario(client):
        sequence = await client.open_sequence()
        service.after["Propose"] = [lambda: release.wait(5)]
        task = asyncio.create_task(sequence.propose(0, [1], rows(1), 1))
        await asyncio.to_thread(wait_until, lambda: service.requests("Propose"))
        started = time.monotonic()
        await client.close()
        with pytest.raises(UnavailableError):
            await task
        assert time.monotonic() - started < 3
        release.set()

    in_client(service, scenario, timeout_s=20.0)


def test_closing_leaves_no_task_thread_or_descriptor(service, options):
    async def scenario(client):
        sequence = await client.open_sequence()
        await sequence.prefill(list(range(9)), rows(9))
        await sequence.propose(8, [1], rows(1), 2)

    async def main():
        async with AsyncClient(service.target, **options) as client:
            await scenario(client)
        assert not [task for task in asyncio.all_tasks() if task.get_name().startswith("specdraft")]

    def counts():
        gc.collect()
        return threading.active_count(), len(list(Path("/proc/self/fd").iterdir()))

    asyncio.run(main())
    before = counts()
    for _ in range(4):
        asyncio.run(main())
    wait_until(lambda: all(now <= then for now, then in zip(counts(), before, strict=True)), timeout_s=10)
