"""The host arena and its layout: what lies where, what may be read, and what is left afterwards."""

import fcntl
import mmap
import os
import struct
from dataclasses import fields
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from drafter_service.memory import ArenaWish, HostArena, SlotOutputs, lay_out
from drafter_service.memory.layout import ALIGNMENT, SlotFields
from serving import num_descriptors
from specdraft.errors import SpecdraftError
from specdraft.v1 import tensor_pb2

WISHES = st.builds(
    ArenaWish,
    num_slots=st.integers(1, 40),
    max_drafts=st.integers(1, 16),
    hidden_row_bytes=st.integers(1, 700),
    embedding_bytes=st.integers(1, 300),
    vocab_size=st.integers(1, 5000),
    num_prefill_rows=st.integers(0, 60),
    with_masks=st.booleans(),
)
WISH = ArenaWish(3, 4, 100, 50, 128, 6, with_masks=True)


class Offers:
    """Keeps what is offered, as the side socket would."""

    def __init__(self):
        self.descriptors = {}

    def offer(self, descriptor):
        token = os.urandom(16)
        self.descriptors[token] = os.dup(descriptor)
        return token

    def withdraw(self, token):
        os.close(self.descriptors.pop(token))


@pytest.fixture
def arena():
    made = HostArena(lay_out(WISH), Offers())
    yield made
    made.close()


def spans_of(layout):
    """(begin, end) of everything in the arena."""
    wish, slot = layout.wish, layout.fields
    sizes = {
        "first_key": 8,
        "pair_count": 4,
        "tokens": 4 * (wish.max_drafts + 1),
        "hidden": (wish.max_drafts + 1) * layout.row_stride,
        "status": 4,
        "op": 8,
        "draft_count": 4,
        "stop_reason": 4,
        "drafts": 4 * wish.max_drafts,
        "logprobs": 4 * wish.max_drafts,
        "last_embedding": wish.embedding_bytes,
        "row_count": 4,
        "last_pair_key": 8,
    }
    if wish.with_masks:
        sizes["mask"] = wish.max_drafts * -(-wish.vocab_size // 32) * 4
    yield layout.nonce, layout.nonce + 16
    yield layout.staging, layout.staging + wish.num_prefill_rows * layout.row_stride
    for index in range(wish.num_slots):
        start = layout.slots + index * slot.stride
        for name, size in sizes.items():
            yield start + getattr(slot, name), start + getattr(slot, name) + size


@given(WISHES)
def test_nothing_overlaps_everything_is_aligned_and_inside(wish):
    layout = lay_out(wish)
    spans = sorted(span for span in spans_of(layout) if span[0] < span[1])
    assert all(begin % ALIGNMENT == 0 for begin, _ in spans)
    assert all(end <= begin for (_, end), (begin, _) in pairwise(spans))
    assert spans[0][0] == 0
    assert spans[-1][1] <= layout.size
    assert layout.row_stride >= wish.hidden_row_bytes
    assert bool(layout.fields.mask) == wish.with_masks


def test_a_slot_has_every_field_of_the_contract():
    named = {f"{item.name}_offset_bytes" for item in fields(SlotFields) if item.name != "stride"}
    assert named == {field.name for field in tensor_pb2.SlotLayout.DESCRIPTOR.fields}


def test_rows_are_copied_packed_and_stay_as_they_were(arena):
    layout = arena.layout
    start = layout.slot_hidden(1)
    for row in range(5):
        arena._map[start + row * layout.row_stride : start + row * layout.row_stride + 100] = bytes([row + 1]) * 100
    copied = arena.copy_rows(start, layout.row_stride, 5, 100)
    arena._map[start : start + 100] = bytes(100)
    assert copied == b"".join(bytes([row + 1]) * 100 for row in range(5))


@given(
    offset=st.one_of(st.integers(-200, 10**5), st.integers(2**31, 2**64)),
    stride=st.integers(0, 2**33),
    num_rows=st.integers(1, 2**20),
)
def test_rows_outside_the_arena_are_never_read(offset, stride, num_rows):
    arena = HostArena(lay_out(WISH), Offers())
    size = arena.layout.size
    fits = offset >= 0 and stride >= 100 and offset + (num_rows - 1) * stride + 100 <= size
    if fits:
        assert len(arena.copy_rows(offset, stride, num_rows, 100)) == num_rows * 100
    else:
        with pytest.raises(SpecdraftError) as caught:
            arena.copy_rows(offset, stride, num_rows, 100)
        assert (caught.value.reason, caught.value.details["limit"]) == ("MEMORY_OUT_OF_BOUNDS", str(size))
    arena.close()


def test_outputs_lie_where_the_layout_says(arena):
    outputs = SlotOutputs(2**64 - 1, 7, 3, [1, 127], [-0.5, -1.25], b"\x05" * 50, 9, 2**40)
    arena.write_outputs(2, outputs)
    slot = arena.layout.fields
    base = arena.layout.slots + 2 * slot.stride

    def read(kind, name):
        return struct.unpack_from(kind, arena._map, base + getattr(slot, name))

    assert read("<Q", "op") == (2**64 - 1,)
    assert read("<i", "status") == (7,)
    assert read("<i", "stop_reason") == (3,)
    assert read("<i", "draft_count") == (2,)
    assert read("<2i", "drafts") == (1, 127)
    assert read("<2f", "logprobs") == (-0.5, -1.25)
    assert read("<i", "row_count") == (9,)
    assert read("<q", "last_pair_key") == (2**40,)
    assert read("<50s", "last_embedding") == (b"\x05" * 50,)
    assert arena._map[arena.layout.slots : arena.layout.slots + slot.stride] == bytes(slot.stride)


def test_the_memory_is_sealed_holds_the_nonce_and_outlives_the_service(arena):
    (descriptor,) = arena._offers.descriptors.values()
    seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    assert seals & (fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL) == seals
    assert os.fstat(descriptor).st_size == arena.layout.size
    with mmap.mmap(descriptor, arena.layout.size) as theirs:
        assert theirs[arena.layout.nonce : arena.layout.nonce + 16] == arena.nonce
        arena.close()
        theirs[0:16] = bytes(16)  # a mapping that is not ours stays


def test_an_arena_closed_gives_everything_back_and_refuses_use():
    before = num_descriptors()
    arena = HostArena(lay_out(WISH), Offers())
    arena.close()
    arena.close()
    assert num_descriptors() == before
    for use in (
        lambda: arena.copy_rows(0, 128, 1, 100),
        lambda: arena.write_outputs(0, SlotOutputs(1, 0, 0, (), (), b"", 0, -1)),
    ):
        with pytest.raises(SpecdraftError, match="the session has ended"):
            use()


def test_nonces_and_tokens_differ():
    arenas = [HostArena(lay_out(WISH), Offers()) for _ in range(4)]
    assert len({arena.nonce for arena in arenas} | {arena.token for arena in arenas}) == 8
    for arena in arenas:
        arena.close()
