"""What a round of a lane waits for before it touches pages: rows that another stream may still be writing."""

from types import SimpleNamespace

import pytest
import torch

from drafter_service.engine.lane_plan import PlannedSlot, plan_slot
from drafter_service.engine.lane_rounds import LaneDesk
from drafter_service.engine.ledger import HeadIdentity, Ledger
from drafter_service.engine.operations import Fork, LaneWrite, Open
from drafter_service.engine.vault import CarryLimits, Vault
from drafter_service.state import PageAllocator

PAIRS, DRAFTS, PAGE_ROWS = 4, 3, 4


class Desk:
    """The part of a desk that plans one sequence's rounds, on a GPU that only counts what is waited for."""

    def __init__(self, monkeypatch):
        observer = SimpleNamespace()
        self.allocator = PageAllocator(16)
        vault = Vault(self.allocator, CarryLimits(60.0, 16), observer, lambda: 0.0)
        self.ledger = Ledger(self.allocator, HeadIdentity("head", PAGE_ROWS), vault, observer, lambda *_: None)
        self.context = SimpleNamespace(followers={})
        monkeypatch.setattr(torch.cuda, "current_stream", lambda _: SimpleNamespace(record_event=lambda: "written"))
        self._head = SimpleNamespace(device=torch.device("cuda"))
        self.sequence = self.opened(b"s")

    def opened(self, name):
        self.ledger.apply(Open(b"session", name, name, 64, False, 8))
        return self.ledger.sequences.find(b"session", name)

    def waits(self, num_pairs):
        """Plans a round and enters it with so many pairs; whether it waited."""
        sequence = self.sequence
        write = LaneWrite(b"session", sequence.sequence_id, sequence.last_op + 1, b"", 0, DRAFTS, None, None)
        planned = plan_slot(self.ledger, write, 0, PAIRS)
        assert isinstance(planned, PlannedSlot)
        waited = LaneDesk._rows_written(self, self.context, [planned])
        sequence.last_op += 1
        sequence.rows = sequence.rows.written(sequence.rows.last_key + 1, num_pairs)
        self.ledger.settle(sequence)
        return waited == "written"


def test_rounds_that_follow_each_other_on_the_pages_that_the_sequence_had_wait_for_nothing(monkeypatch):
    desk = Desk(monkeypatch)
    desk.sequence.reserved_pages = 16
    desk.sequence.pages.extend(desk.allocator.allocate(16))
    assert [desk.waits(1) for _ in range(6)] == [True, False, False, False, False, False]
    desk.sequence.last_op += 1  # a call without a ticket
    assert [desk.waits(1) for _ in range(2)] == [True, False]


def test_a_round_on_pages_that_the_sequence_gave_back_and_took_again_waits_for_who_had_them_meanwhile(monkeypatch):
    desk = Desk(monkeypatch)
    assert desk.waits(1)
    others = desk.allocator.allocate(2)
    desk.allocator.release(reversed(others))
    assert desk.waits(1), "as many pages as before, and the same ones: a catch-up may still be writing there"


def test_a_round_waits_for_the_copy_that_a_fork_takes_of_its_last_page(monkeypatch):
    desk = Desk(monkeypatch)
    desk.sequence.reserved_pages = 4
    desk.sequence.pages.extend(desk.allocator.allocate(4))
    assert [desk.waits(1) for _ in range(2)] == [True, False]
    desk.ledger.apply(Fork(b"session", b"s", b"fork", b"fork", 2, 64, 8))
    assert [desk.waits(1) for _ in range(2)] == [True, False], "it may write a row again that is still to be copied"


@pytest.mark.parametrize("kept", [2, 4])
def test_a_round_waits_for_the_copy_of_a_page_that_is_shared(monkeypatch, kept):
    desk = Desk(monkeypatch)
    desk.sequence.reserved_pages = 4
    desk.sequence.pages.extend(desk.allocator.allocate(4))
    assert [desk.waits(4) for _ in range(2)] == [True, False]
    desk.allocator.retain(desk.sequence.pages[:2])
    desk.sequence.rows = desk.sequence.rows.below(kept)
    assert desk.waits(1)
    assert desk.allocator.num_shared == kept // PAGE_ROWS
    assert not desk.waits(1)
