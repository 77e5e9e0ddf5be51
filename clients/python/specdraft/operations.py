"""The steps of everything but writing pairs: opening, asking, truncating, carrying, closing."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable
from typing import Any, Final

from specdraft.answers import Carry, SequenceState, StoredDrafts
from specdraft.errors import Reason, SpecdraftError
from specdraft.exchanges import Exchange, Steps
from specdraft.ledger import Ledger
from specdraft.statuses import is_uncertain
from specdraft.v1 import drafter_pb2
from specdraft.words import RowsPolicy, wire

__all__ = [
    "close_left",
    "close_sequence",
    "fork_sequence",
    "free_kv",
    "install_kv",
    "open_sequence",
    "read_drafts",
    "read_state",
    "take_kv",
    "truncate",
]

_OPEN_ID_SIZE_BYTES: Final = 16


def open_sequence(budget_tokens: int, rows_policy: RowsPolicy, *, reserve: bool, timeout_s: float) -> Steps[Ledger]:
    """Opens a sequence."""
    request = drafter_pb2.OpenSequenceRequest(
        open_id=os.urandom(_OPEN_ID_SIZE_BYTES),
        budget_tokens=budget_tokens,
        reserve=reserve,
        rows_policy=wire(rows_policy),
    )
    answer = yield from _open(Exchange("OpenSequence", request, timeout_s))
    return Ledger(answer.sequence_id, SequenceState.read(answer.state))


def fork_sequence(ledger: Ledger, keep_keys_below: int, budget_tokens: int, timeout_s: float) -> Steps[Ledger]:
    """Opens a sequence that shares a prefix."""
    request = drafter_pb2.ForkSequenceRequest(
        sequence_id=ledger.sequence_id,
        open_id=os.urandom(_OPEN_ID_SIZE_BYTES),
        keep_keys_below=keep_keys_below,
        budget_tokens=budget_tokens,
    )
    answer = yield from _open(Exchange("ForkSequence", request, timeout_s))
    return Ledger(answer.sequence_id, SequenceState.read(answer.state))


def _open(exchange: Exchange) -> Steps[Any]:
    # The open_id makes a second try return the sequence that a lost first answer left behind.
    try:
        return (yield exchange)
    except SpecdraftError as error:
        if not is_uncertain(error) or error.reason is not None:
            raise
    return (yield exchange)


def read_state(ledger: Ledger, timeout_s: float) -> Steps[SequenceState]:
    """Asks where the sequence stands, after everything sent before; ends any uncertainty."""
    request = drafter_pb2.GetSequenceRequest(sequence_id=ledger.sequence_id)
    answer = yield Exchange("GetSequence", request, timeout_s)
    ledger.settle(SequenceState.read(answer.state))
    return ledger.state


def read_drafts(ledger: Ledger, op: int | None, *, with_last_embedding: bool, timeout_s: float) -> Steps[StoredDrafts]:
    """Reads the drafts of the last round again."""
    if op is None and ledger.unsure:
        yield from read_state(ledger, timeout_s)
    request = drafter_pb2.ReadDraftsRequest(
        sequence_id=ledger.sequence_id,
        op=ledger.last_op if op is None else op,
        with_last_embedding=with_last_embedding,
    )
    answer = yield Exchange("ReadDrafts", request, timeout_s)
    return StoredDrafts.read(answer)


def truncate(ledger: Ledger, first_key: int, accepted_drafts: int | None, timeout_s: float) -> Steps[SequenceState]:
    """Drops the rows with keys >= first_key."""

    def build(op: int) -> drafter_pb2.TruncateRequest:
        return drafter_pb2.TruncateRequest(
            sequence_id=ledger.sequence_id, op=op, first_key=first_key, accepted_drafts=accepted_drafts
        )

    answer = yield from _operate(ledger, "Truncate", build, timeout_s)
    ledger.adopt(SequenceState.read(answer.state))
    return ledger.state


def take_kv(ledger: Ledger, label: str, timeout_s: float) -> Steps[Carry]:
    """Moves the rows out into a carry."""

    def build(op: int) -> drafter_pb2.TakeKVRequest:
        return drafter_pb2.TakeKVRequest(sequence_id=ledger.sequence_id, op=op, label=label)

    answer = yield from _operate(ledger, "TakeKV", build, timeout_s)
    ledger.adopt(SequenceState.read(answer.state))
    return Carry.read(answer.carry, answer.head_fingerprint)


def install_kv(ledger: Ledger, carry: Carry, keep_keys_below: int | None, timeout_s: float) -> Steps[SequenceState]:
    """Moves a carry into the empty sequence."""

    def build(op: int) -> drafter_pb2.InstallKVRequest:
        return drafter_pb2.InstallKVRequest(
            sequence_id=ledger.sequence_id,
            op=op,
            kv_id=carry.kv_id,
            keep_keys_below=keep_keys_below,
            head_fingerprint=carry.head_fingerprint,
        )

    answer = yield from _operate(ledger, "InstallKV", build, timeout_s)
    ledger.adopt(SequenceState.read(answer.state))
    return ledger.state


def free_kv(carry: Carry, timeout_s: float) -> Steps[None]:
    """Gives a carry up."""
    yield Exchange("FreeKV", drafter_pb2.FreeKVRequest(kv_id=carry.kv_id), timeout_s)


def close_sequence(ledger: Ledger, accepted_drafts: int | None, timeout_s: float) -> Steps[None]:
    """Gives the sequence up."""

    def build(op: int) -> drafter_pb2.CloseSequenceRequest:
        return drafter_pb2.CloseSequenceRequest(sequence_id=ledger.sequence_id, op=op, accepted_drafts=accepted_drafts)

    yield from _operate(ledger, "CloseSequence", build, timeout_s)
    ledger.release()


def close_left(left: deque[Ledger], timeout_s: float) -> Steps[None]:
    """Closes sequences that could not be closed when their time had come; what still cannot stays for the next time."""
    for _ in range(len(left)):
        try:
            ledger = left.popleft()
        except IndexError:  # another thread was quicker
            return
        try:
            yield from close_sequence(ledger, None, timeout_s)
        except SpecdraftError as error:
            if is_uncertain(error):
                left.append(ledger)
                return
            if error.reason is Reason.SESSION_UNKNOWN:
                left.clear()  # they ended with it
            ledger.release()


def _operate(ledger: Ledger, rpc: str, build: Callable[[int], Any], timeout_s: float) -> Steps[Any]:
    """One numbered operation, with the number put right at most once."""
    if ledger.unsure:
        yield from read_state(ledger, timeout_s)
    op = ledger.next_op
    try:
        return (yield from _numbered(ledger, Exchange(rpc, build(op), timeout_s)))
    except SpecdraftError as error:
        if not ledger.renumber(error, op):
            raise
    return (yield from _numbered(ledger, Exchange(rpc, build(ledger.next_op), timeout_s)))


def _numbered(ledger: Ledger, exchange: Exchange) -> Steps[Any]:
    settled = False
    try:
        answer = yield exchange
        settled = True
        return answer
    except SpecdraftError as error:
        settled = not is_uncertain(error)
        raise
    finally:
        ledger.unsure = ledger.unsure or not settled
