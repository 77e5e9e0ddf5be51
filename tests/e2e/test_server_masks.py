"""Grammar masks in the arena: the same drafts as with masks in the message, bounded, and copied before use."""

import struct

import pytest

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import VOCAB, Story, mask_of, refused_entry

STORY = Story(8)
HOST = tensor_pb2.MEMORY_KIND_HOST
NUM_DRAFTS = 3
WORDS = VOCAB // 32
MASKS = [mask_of(*range(place * 20, place * 20 + 15)) for place in range(NUM_DRAFTS)]


def opened(server, **changes):
    return server.client().open(memory_kind=HOST, slot_count=2, **{"with_masks": True} | changes)


def put_mask(arena, slot, masks):
    layout = arena.layout
    start = layout.slots_offset_bytes + slot * layout.slot_stride_bytes + layout.slot.mask_offset_bytes
    words = [word for mask in masks for word in mask]
    arena.map[start : start + 4 * len(words)] = struct.pack(f"<{len(words)}I", *words)


def in_arena(slot, row_count):
    return pb.GrammarMask(arena_slot=slot, arena_row_count=row_count)


def refused(session, mask, draft_count=NUM_DRAFTS):
    sequence = session.sequence(STORY)
    request = pb.ProposeRequest(entries=[sequence.propose_entry(0, 4, draft_count, mask=mask)])
    (result,) = session.call("Propose", request).results
    assert sequence.state().last_op == 0
    return refused_entry(result.status)


@pytest.mark.parametrize("masks", [MASKS[:1], MASKS], ids=["one for all", "one a draft"])
def test_masks_in_the_arena_are_those_in_the_message(shared_server, masks):
    session = opened(shared_server)
    words = [word for mask in masks for word in mask]
    inline = session.sequence(STORY).propose(0, 4, NUM_DRAFTS, mask=pb.GrammarMask(words=words))
    with session.arena() as arena:
        put_mask(arena, 1, masks)
        put_mask(arena, 0, [mask_of(127)] * NUM_DRAFTS)
        result = session.sequence(STORY).propose(0, 4, NUM_DRAFTS, mask=in_arena(1, len(masks)))
    assert (list(result.drafts), list(result.logprobs)) == (list(inline.drafts), list(inline.logprobs))
    session.close()


def test_a_client_that_rewrites_the_arena_during_the_call_changes_nothing(start):
    server = start()
    session = opened(server)
    inline = session.sequence(STORY).propose(0, 4, NUM_DRAFTS, mask=pb.GrammarMask(words=MASKS[1]))
    sequence = session.sequence(STORY)
    with session.arena() as arena:
        put_mask(arena, 0, [MASKS[1]])
        entry = sequence.propose_entry(0, 4, NUM_DRAFTS, mask=in_arena(0, 1))
        before = len(server.runner.batches)
        with server.runner.held():
            call = session.begin("Propose", pb.ProposeRequest(entries=[entry]))
            server.runner.wait_for_batch(before)
            put_mask(arena, 0, [mask_of()])
        (result,) = call.result().results
    assert list(result.drafts) == list(inline.drafts)


def test_a_session_that_asked_for_no_masks_has_none_in_its_arena(shared_server):
    session = opened(shared_server, with_masks=False)
    with session.arena():
        said = refused(session, in_arena(0, 1))
    assert said.kind == ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE")
    assert said.details == {"kind": "mask"}
    session.close()


def test_a_session_without_an_arena_has_no_masks_there(shared_server):
    session = shared_server.client().open(with_masks=True)
    assert refused(session, in_arena(0, 1)).kind == ("FAILED_PRECONDITION", "TRANSPORT_UNAVAILABLE")
    session.close()


@pytest.mark.parametrize("row_count", [0, 2, 4, 2**32 - 1])
def test_another_number_of_masks_is_refused(shared_server, row_count):
    session = opened(shared_server)
    with session.arena():
        said = refused(session, in_arena(0, row_count))
    assert said.kind == ("INVALID_ARGUMENT", "MASK_SIZE_MISMATCH")
    assert said.details == {"words": str(row_count * WORDS), "expected": f"{WORDS} or {NUM_DRAFTS} x {WORDS}"}
    session.close()


def test_no_drafts_and_no_mask_rows_are_refused_as_no_mask(shared_server):
    session = opened(shared_server)
    with session.arena():
        said = refused(session, in_arena(0, 0), draft_count=0)
    assert said.kind == ("INVALID_ARGUMENT", "MASK_SIZE_MISMATCH")
    session.close()


def test_a_mask_in_a_slot_that_is_not_there_is_refused(shared_server):
    session = opened(shared_server)
    with session.arena():
        said = refused(session, in_arena(2, 1))
    assert said.kind == ("INVALID_ARGUMENT", "MEMORY_OUT_OF_BOUNDS")
    assert said.details == {"field": "slot", "value": "2", "limit": "2"}
    session.close()
