"""`AsyncClient` when the service does not answer: new sessions, sequences that are left, an end that is cancelled."""

import asyncio
import threading

import numpy as np
import pytest

from fake_service import FakeService
from specdraft import DeadlineError, NotFoundError, Reason, UnavailableError
from specdraft.errors import make_error
from tasks import in_client


def rows(count, width=8):
    return np.zeros((count, width), dtype=np.float32)


@pytest.fixture
def service(tmp_path):
    with FakeService(tmp_path) as service:
        yield service


@pytest.mark.parametrize("is_left", [False, True], ids=["closed", "left"])
def test_a_sequence_of_a_task_that_cannot_be_closed_now_is_closed_before_the_next_is_opened(service, is_left):
    go_on = threading.Event()

    async def scenario(client):
        sequence = await client.open_sequence()
        service.after["Propose"] = [lambda: go_on.wait(1)]
        with pytest.raises(DeadlineError):
            await sequence.propose(0, [1], rows(1), 1)
        await (sequence.leave if is_left else sequence.close)()
        go_on.set()
        await client.open_sequence()
        assert (len(service.sequences), client.session.placement.in_use_count) == (1, 0)

    in_client(service, scenario, timeout_s=0.3)


def test_tasks_that_wait_for_a_new_session_together_are_told_together(service):
    go_on = threading.Event()

    async def scenario(client):
        sequence = await client.open_sequence()
        service.token = b"restarted"
        service.cut()
        with pytest.raises(NotFoundError):
            await sequence.state()
        service.faults["GetServerInfo"] = [lambda: go_on.wait(20)] * 6
        num_before = len(service.requests("GetServerInfo"))
        told = await asyncio.gather(*[client.open_sequence() for _ in range(6)], return_exceptions=True)
        go_on.set()
        assert [type(one) for one in told] == 6 * [DeadlineError]
        assert len(service.requests("GetServerInfo")) - num_before == 1
        service.faults.clear()
        assert (await (await client.open_sequence()).propose(0, [1], rows(1), 1)).drafts == (7,)

    in_client(service, scenario, timeout_s=1.0)


def test_after_a_reopening_that_failed_the_next_sequence_of_tasks_tries_again(service):
    async def scenario(client):
        service.faults["GetServerInfo"] = [make_error(Reason.STARTING, "not yet")]
        with pytest.raises(UnavailableError, match="not yet"):
            await client.reopen()
        assert (await (await client.open_sequence()).propose(0, [1], rows(1), 1)).drafts == (7,)

    in_client(service, scenario)


def test_closing_that_is_cancelled_gives_the_arena_back(service):
    go_on = threading.Event()

    async def scenario(client):
        arena = client.session.placement._arena
        service.faults["CloseSession"] = [lambda: go_on.wait(20)]
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.2):
                await client.close()
        go_on.set()
        assert arena._mapping is None
        await client.close()

    in_client(service, scenario, memory="host", timeout_s=10.0)
