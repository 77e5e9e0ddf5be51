"""The scheduler: operations of one sequence keep their order, everything else shares steps."""

from __future__ import annotations

import random

from drafter_service.engine import Scheduler
from drafter_service.engine import operations as ops


def call(*operations: ops.Operation) -> ops.Call:
    return ops.Call(operations, 0.0, 1.0, lambda _: None)


def write(sequence: int, op: int = 1, rows: int = 1, session: bytes = b"s") -> ops.Write:
    pairs = ops.WriteWish(0, tuple(range(rows)), None, allow_gap=False, accepted_drafts=None)
    return ops.Write(session, bytes([sequence]), op, b"", pairs, None)


def taken(step) -> list[ops.Operation]:
    return [job.operation for job in [*step.bookkeeping, *step.writes]]


def test_different_sequences_share_a_forward_and_one_sequence_never_does() -> None:
    scheduler = Scheduler(max_batch=8, max_rows=100)
    scheduler.add(call(write(1, 1), write(2, 1)))
    scheduler.add(call(write(1, 2), write(3, 1)))
    first, second = scheduler.next_step(), scheduler.next_step()
    assert taken(first) == [write(1, 1), write(2, 1), write(3, 1)]
    assert taken(second) == [write(1, 2)]
    assert len(scheduler) == 0


def test_a_batch_ends_at_its_entries_or_rows_whichever_comes_first() -> None:
    scheduler = Scheduler(max_batch=2, max_rows=10)
    scheduler.add(call(write(1), write(2), write(3, rows=12), write(4, rows=6), write(5, rows=5)))
    steps = [taken(scheduler.next_step()) for _ in range(4)]
    sizes = [[len(operation.pairs.tokens) for operation in step] for step in steps]
    assert sizes == [[1, 1], [12], [6], [5]]


def test_bookkeeping_waits_for_an_earlier_write_of_its_sequence_only() -> None:
    scheduler = Scheduler(max_batch=3, max_rows=10)
    get_1, get_2 = ops.Get(b"s", bytes([1])), ops.Get(b"s", bytes([2]))
    scheduler.add(call(write(9), write(1), get_1, get_2))
    assert taken(scheduler.next_step()) == [get_2, write(9), write(1)]
    assert taken(scheduler.next_step()) == [get_1]


def test_a_flooding_session_delays_others_by_no_more_than_a_step() -> None:
    scheduler = Scheduler(max_batch=4, max_rows=100)
    scheduler.add(call(*(write(number % 250, number // 250 + 1) for number in range(1000))))
    quiet = [write(1, session=b"quiet"), write(2, session=b"quiet")]
    scheduler.add(call(*quiet))
    first = taken(scheduler.next_step())
    assert [operation in first for operation in quiet] == [True, True]
    scheduler.add(call(write(3, session=b"quiet")))
    assert write(3, session=b"quiet") in taken(scheduler.next_step())


def test_sessions_take_turns_when_a_step_has_no_room_for_all() -> None:
    scheduler = Scheduler(max_batch=1, max_rows=100)
    sessions = [bytes([number]) for number in range(5)]
    for session in sessions:
        scheduler.add(call(write(1, 1, session=session), write(2, 1, session=session)))
    served = [taken(scheduler.next_step())[0].session_id for _ in range(10)]
    assert sorted(served[:5]) == sessions
    assert sorted(served[5:]) == sessions


def test_the_end_of_a_session_waits_for_what_came_before_and_holds_what_comes_after() -> None:
    scheduler = Scheduler(max_batch=8, max_rows=10)
    end = ops.CloseSession(b"s", b"")
    late, foreign = write(2), write(3, session=b"other")
    scheduler.add(call(write(1)))
    scheduler.add(call(end))
    scheduler.add(call(late))
    scheduler.add(call(foreign))
    assert taken(scheduler.next_step()) == [write(1), foreign]
    assert taken(scheduler.next_step()) == [end]
    assert taken(scheduler.next_step()) == [late]


def test_random_traffic_keeps_each_sequences_order_and_loses_nothing() -> None:
    random_source = random.Random(4)
    scheduler = Scheduler(max_batch=3, max_rows=12)
    expected: dict[bytes, list[int]] = {}
    done: dict[bytes, list[int]] = {}
    for number in range(1, 2001):
        operation = write(random_source.randrange(8), number, random_source.randrange(1, 6))
        scheduler.add(call(operation))
        expected.setdefault(operation.sequence_id, []).append(number)
        if random_source.random() < 0.4:
            collect(scheduler, done)
    while len(scheduler):
        collect(scheduler, done)
    assert done == expected


def collect(scheduler: Scheduler, done: dict[bytes, list[int]]) -> None:
    step = scheduler.next_step()
    ids = [job.operation.sequence_id for job in step.writes]
    assert len(set(ids)) == len(ids) <= 3
    for job in step.writes:
        done.setdefault(job.operation.sequence_id, []).append(job.operation.op)
