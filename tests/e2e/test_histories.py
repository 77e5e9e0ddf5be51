"""Two thousand histories of two clients, compared with a plain model of what the service promises."""

import pytest

from checkpoints import write_tiny_checkpoint
from drafter_service.engine.batch import Ledger
from drafter_service.engine.runner import EagerRunner
from drafter_service.state import PageAllocator, Rows, Sequence, SequenceTable
from drafter_service.state.pool import KvPool
from fake_service import OPERATIONS
from histories import History
from histories_world import SIZES, World
from serving import temporary_directory

NUM_BLOCKS, BLOCK_SIZE = 20, 100
LENGTHS = range(5, 16)
RESTART_EVERY = 100


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("small"), **SIZES)


@pytest.fixture(scope="module")
def world(checkpoint):
    with temporary_directory() as directory:
        made = World(checkpoint, directory)
        yield made
        made.close()


def play(world, seeds):
    for seed in seeds:
        history = History(world, seed)
        history.run(LENGTHS[seed % len(LENGTHS)], restart=seed % RESTART_EVERY == 0)


@pytest.mark.parametrize("block", range(NUM_BLOCKS))
def test_every_answer_is_the_one_that_the_model_gives(world, block):
    play(world, range(block * BLOCK_SIZE, (block + 1) * BLOCK_SIZE))
    if world.tally.events["history"] == NUM_BLOCKS * BLOCK_SIZE:
        check_reach(world.tally)


def check_reach(tally):
    """What all histories together have to have met, so that agreement means something."""
    tally.check()
    assert all(tally.rpcs[rpc] > 20 for rpc in [*OPERATIONS, "OpenSession", "CloseSession"]), tally.rpcs
    reasons = (
        "SESSION_UNKNOWN SEQUENCE_UNKNOWN CARRY_UNKNOWN OP_OUT_OF_ORDER OP_REUSED PAGES_EXHAUSTED POSITION_LIMIT "
        "MISSING_ROWS DRAFT_MISMATCH SEQUENCE_NOT_EMPTY TOKEN_OUT_OF_RANGE DUPLICATE_SEQUENCE"
    )
    assert all(tally.reasons[reason] > 10 for reason in reasons.split()), tally.reasons
    events = (
        "replayed",
        "over a stream",
        "lease lost",
        "carry evicted",
        "retry_after_a_cut",
        "restarted",
        "stop PAGES",
    )
    assert all(tally.events[event] > 10 for event in events), tally.events


def off_by_one(monkeypatch):
    below = Rows.below
    monkeypatch.setattr(Rows, "below", lambda rows, key: below(rows, key + 1 if key > 2 else key))


def every_operation_is_new(monkeypatch):
    monkeypatch.setattr(Sequence, "is_replay", lambda sequence, op, digest: False)


def a_page_leaks(monkeypatch):
    release = PageAllocator.release
    monkeypatch.setattr(PageAllocator, "release", lambda pages, some: release(pages, list(some)[:2]))


def shared_pages_are_written(monkeypatch):
    monkeypatch.setattr(PageAllocator, "is_shared", lambda pages, page, num_leaving=0: False)


def copies_are_empty(monkeypatch):
    monkeypatch.setattr(KvPool, "copy_page", lambda pool, source, destination: None)


def the_last_draft_has_no_row(monkeypatch):
    monkeypatch.setattr(EagerRunner, "_keep_last_drafts", lambda runner, chains, recycled: None)


def pages_are_kept(monkeypatch):
    monkeypatch.setattr(Ledger, "settle", lambda ledger, sequence: None)


def foreign_sequences_are_found(monkeypatch):
    find = SequenceTable.find

    def find_anybodys(table, session_id, sequence_id):
        return table._by_id.get(sequence_id) or find(table, session_id, sequence_id)

    monkeypatch.setattr(SequenceTable, "find", find_anybodys)


FAULTS = (
    off_by_one,
    every_operation_is_new,
    a_page_leaks,
    shared_pages_are_written,
    copies_are_empty,
    the_last_draft_has_no_row,
    pages_are_kept,
    foreign_sequences_are_found,
)


@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.__name__)
def test_a_broken_service_is_found_out(checkpoint, monkeypatch, fault):
    with temporary_directory() as directory:
        broken = World(checkpoint, directory)
        fault(monkeypatch)
        try:
            with pytest.raises(AssertionError, match="the history:"):
                play(broken, range(1, 400))
        finally:
            monkeypatch.undo()
            broken.close()
