"""Sessions: found by their token, kept by their lease, fenced by a later stream."""

from __future__ import annotations

import pytest

from drafter_service.state import Agreement, SessionTable
from specdraft.errors import NotFoundError, Reason, ResourceExhaustedError

AGREEMENT = Agreement("float32", 64, 8, "test")


class Clock:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Stream:
    def __init__(self) -> None:
        self.fenced = 0

    def fence(self) -> None:
        self.fenced += 1


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def table(clock: Clock) -> SessionTable:
    return SessionTable(lease_s=30, grace_s=5, max_sessions=2, clock=clock)


def test_every_call_renews_the_lease(table: SessionTable, clock: Clock) -> None:
    session, token = table.open(AGREEMENT, None)
    for _ in range(5):
        clock.now += 29
        assert table.find(token) is session
    clock.now += 30
    with pytest.raises(NotFoundError):
        table.find(token)
    assert table.pop_expired() == [session]
    assert len(table) == 0


@pytest.mark.parametrize("ending", ["closed", "expired", "reaped", "all ended"])
def test_a_lease_is_renewed_until_its_session_ends(table: SessionTable, clock: Clock, ending: str) -> None:
    session, token = table.open(AGREEMENT, None)
    for _ in range(5):
        clock.now += 29
        table.renew(session)
    if ending in {"expired", "reaped"}:
        clock.now += 30
    if ending == "reaped":
        assert table.pop_expired() == [session]
        clock.now -= 30  # its lease is not what it has lost
    elif ending == "closed":
        table.close(token)
    elif ending == "all ended":
        table.pop_all()
    with pytest.raises(NotFoundError) as caught:
        table.renew(session)
    assert caught.value.reason == Reason.SESSION_UNKNOWN


def test_unknown_and_expired_tokens_get_one_answer(table: SessionTable, clock: Clock) -> None:
    _, token = table.open(AGREEMENT, None)
    clock.now += 31
    answers = []
    for asked in (token, b"x" * 16, b""):
        with pytest.raises(NotFoundError) as caught:
            table.find(asked)
        answers.append((caught.value.reason, caught.value.message))
    assert len(set(answers)) == 1


def test_a_broken_stream_shortens_the_lease_and_a_finished_one_does_not(table: SessionTable, clock: Clock) -> None:
    session, _ = table.open(AGREEMENT, None)
    stream = Stream()
    table.attach(session, stream)
    table.detach(session, stream, broken=False)
    assert session.expires_at == clock.now + 30
    table.attach(session, stream)
    table.detach(session, stream, broken=True)
    assert session.expires_at == clock.now + 5


def test_a_call_within_the_grace_keeps_the_session(table: SessionTable, clock: Clock) -> None:
    session, token = table.open(AGREEMENT, None)
    stream = Stream()
    table.attach(session, stream)
    table.detach(session, stream, broken=True)
    clock.now += 4
    table.find(token)
    clock.now += 29
    assert table.pop_expired() == []


def test_a_later_stream_fences_the_earlier_whose_end_then_means_nothing(table: SessionTable, clock: Clock) -> None:
    session, _ = table.open(AGREEMENT, None)
    first, second = Stream(), Stream()
    table.attach(session, first)
    table.attach(session, second)
    assert (first.fenced, second.fenced) == (1, 0)
    table.detach(session, first, broken=True)
    assert session.drive is second
    assert session.expires_at == clock.now + 30


def test_a_stream_that_comes_while_the_one_before_is_missed_brings_a_whole_lease(
    table: SessionTable, clock: Clock
) -> None:
    session, token = table.open(AGREEMENT, None)
    first, second = Stream(), Stream()
    table.attach(session, first)
    table.find(token)  # as the second stream's call does
    table.detach(session, first, broken=True)
    table.attach(session, second)
    assert session.expires_at == clock.now + 30


@pytest.mark.parametrize("ending", ["closed", "expired"])
def test_no_stream_comes_to_a_session_that_has_ended(table: SessionTable, clock: Clock, ending: str) -> None:
    session, token = table.open(AGREEMENT, None)
    if ending == "closed":
        table.close(token)
    else:
        clock.now += 30
    with pytest.raises(NotFoundError) as caught:
        table.attach(session, Stream())
    assert caught.value.reason == Reason.SESSION_UNKNOWN
    assert session.drive is None


def test_one_session_too_many_is_told_when_to_come_back(table: SessionTable) -> None:
    table.open(AGREEMENT, None)
    _, token = table.open(AGREEMENT, None)
    with pytest.raises(ResourceExhaustedError) as caught:
        table.open(AGREEMENT, None)
    assert caught.value.retry_delay_ms > 0
    table.close(token)
    table.open(AGREEMENT, None)
