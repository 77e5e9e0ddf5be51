"""Wrong entries of `Catchup` and `Propose`: refused by name, in the entry's own status, and nothing else happens."""

import math

import pytest
import torch

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import tensor_pb2
from wire import VOCAB, WIDTH, Story, mask_of, refused_entry

FLOAT32, BFLOAT16 = tensor_pb2.D_TYPE_FLOAT32, tensor_pb2.D_TYPE_BFLOAT16
STORY = Story(1)
BOTH = ("Catchup", "Propose")


def inline(data, rows, dtype=FLOAT32, **changes):
    return tensor_pb2.TensorRef(inline=data, dtype=dtype, row_count=rows, **changes)


def rows_with(value, row, count=3, dtype=torch.float32):
    rows = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(5)).to(dtype)
    rows[row, 7] = value
    return rows.view(torch.uint8).numpy().tobytes()


def tokens(*ids):
    return {"pairs": STORY.pairs(6, 3, tokens=list(ids))}


def hiddens(ref, count=3):
    return {"pairs": STORY.pairs(6, count, hiddens=ref)}


# name: (RPCs, changes of an entry, code, reason, details)
ENTRIES = {
    "token minus one": (
        BOTH,
        tokens(5, 4294967295, 7),
        "INVALID_ARGUMENT",
        "TOKEN_OUT_OF_RANGE",
        {"index": "1", "token": "4294967295", "vocab_size": "128"},
    ),
    "token at the vocabulary": (
        BOTH,
        tokens(5, VOCAB, 7),
        "INVALID_ARGUMENT",
        "TOKEN_OUT_OF_RANGE",
        {"index": "1", "token": "128", "vocab_size": "128"},
    ),
    "token beyond int32": (
        BOTH,
        tokens(5, 2147483653, 7),
        "INVALID_ARGUMENT",
        "TOKEN_OUT_OF_RANGE",
        {"index": "1", "token": "2147483653", "vocab_size": "128"},
    ),
    "fewer tokens than rows": (
        BOTH,
        tokens(5, 7),
        "INVALID_ARGUMENT",
        "PAIR_COUNT_MISMATCH",
        {"tokens": "2", "rows": "3"},
    ),
    "no pairs": (
        BOTH,
        {"pairs": STORY.pairs(6, 0)},
        "INVALID_ARGUMENT",
        "PAIR_COUNT_MISMATCH",
        {"tokens": "0", "rows": "0"},
    ),
    "pairs not set": (
        BOTH,
        {"pairs": pb.Pairs(tokens=[])},
        "INVALID_ARGUMENT",
        "PAIR_COUNT_MISMATCH",
        {"tokens": "0", "rows": "0"},
    ),
    "more pairs than a catch-up takes": (
        ("Catchup",),
        {"pairs": STORY.pairs(6, 33)},
        "INVALID_ARGUMENT",
        "TOO_MANY_PAIRS",
        {"pairs": "33", "limit": "32"},
    ),
    "more pairs than a proposal takes": (
        ("Propose",),
        {"pairs": STORY.pairs(6, 6)},
        "INVALID_ARGUMENT",
        "TOO_MANY_PAIRS",
        {"pairs": "6", "limit": "5"},
    ),
    "too many drafts": (
        ("Propose",),
        {"draft_count": 5},
        "INVALID_ARGUMENT",
        "TOO_MANY_DRAFTS",
        {"drafts": "5", "limit": "4"},
    ),
    "as many drafts as fit into the field": (
        ("Propose",),
        {"draft_count": 4294967295},
        "INVALID_ARGUMENT",
        "TOO_MANY_DRAFTS",
        {"drafts": "4294967295", "limit": "4"},
    ),
    "another element type": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, dtype=BFLOAT16)},
        "INVALID_ARGUMENT",
        "HIDDEN_DTYPE_MISMATCH",
        {"dtype": "bfloat16", "expected": "float32"},
    ),
    "no element type": (
        BOTH,
        hiddens(inline(STORY.hidden_bytes(6, 3), 3, dtype=0)),
        "INVALID_ARGUMENT",
        "HIDDEN_DTYPE_MISMATCH",
        {"dtype": "unspecified", "expected": "float32"},
    ),
    "an element type of the future": (
        BOTH,
        hiddens(inline(STORY.hidden_bytes(6, 3), 3, dtype=77)),
        "INVALID_ARGUMENT",
        "HIDDEN_DTYPE_MISMATCH",
        {"dtype": "unspecified", "expected": "float32"},
    ),
    "bytes of one row too few": (
        BOTH,
        hiddens(inline(STORY.hidden_bytes(6, 2), 3)),
        "INVALID_ARGUMENT",
        "HIDDEN_SIZE_MISMATCH",
        {"bytes": "512", "expected": "768"},
    ),
    "one byte too many": (
        BOTH,
        hiddens(inline(STORY.hidden_bytes(6, 3) + b"x", 3)),
        "INVALID_ARGUMENT",
        "HIDDEN_SIZE_MISMATCH",
        {"bytes": "769", "expected": "768"},
    ),
    "a stride between inline rows": (
        BOTH,
        hiddens(inline(STORY.hidden_bytes(6, 3), 3, row_stride_bytes=300)),
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        {"field": "hiddens.row_stride_bytes", "value": "300", "expected": "0 or 256"},
    ),
    "NaN": (BOTH, hiddens(inline(rows_with(math.nan, 2), 3)), "INVALID_ARGUMENT", "HIDDEN_NOT_FINITE", {"row": "2"}),
    "infinity": (
        BOTH,
        hiddens(inline(rows_with(math.inf, 0), 3)),
        "INVALID_ARGUMENT",
        "HIDDEN_NOT_FINITE",
        {"row": "0"},
    ),
    "minus infinity": (
        BOTH,
        hiddens(inline(rows_with(-math.inf, 1), 3)),
        "INVALID_ARGUMENT",
        "HIDDEN_NOT_FINITE",
        {"row": "1"},
    ),
    "nowhere": (
        BOTH,
        hiddens(tensor_pb2.TensorRef(dtype=FLOAT32, row_count=3)),
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        {"field": "hiddens.memory"},
    ),
    "a negative first key": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, first_key=-1)},
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        {"field": "pairs.first_key", "value": "-1"},
    ),
    "the most negative first key": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, first_key=-(2**63))},
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        {"field": "pairs.first_key"},
    ),
    "a mask of one word too few": (
        ("Propose",),
        {"mask": pb.GrammarMask(words=[1, 2, 3])},
        "INVALID_ARGUMENT",
        "MASK_SIZE_MISMATCH",
        {"words": "3", "expected": "4 or 3 x 4"},
    ),
    "an empty mask": (
        ("Propose",),
        {"mask": pb.GrammarMask()},
        "INVALID_ARGUMENT",
        "MASK_SIZE_MISMATCH",
        {"words": "0", "expected": "4 or 3 x 4"},
    ),
    "masks for another number of drafts": (
        ("Propose",),
        {"mask": pb.GrammarMask(words=mask_of(1) * 2)},
        "INVALID_ARGUMENT",
        "MASK_SIZE_MISMATCH",
        {"words": "8", "expected": "4 or 3 x 4"},
    ),
    "NaN as the least probability": (
        ("Propose",),
        {"min_logprob": math.nan},
        "INVALID_ARGUMENT",
        "INVALID_FIELD",
        {"field": "min_logprob"},
    ),
    "outputs into an arena that is not there": (
        ("Propose",),
        {"output_slot": 0},
        "FAILED_PRECONDITION",
        "TRANSPORT_UNAVAILABLE",
        {"kind": "arena"},
    ),
    "rows in a slot of an arena that is not there": (
        BOTH,
        hiddens(tensor_pb2.TensorRef(arena_slot=tensor_pb2.ArenaSlot(), dtype=FLOAT32, row_count=3)),
        "FAILED_PRECONDITION",
        "TRANSPORT_UNAVAILABLE",
        {"kind": "arena"},
    ),
    "rows in the staging area of an arena that is not there": (
        BOTH,
        hiddens(tensor_pb2.TensorRef(arena_staging=tensor_pb2.ArenaStaging(), dtype=FLOAT32, row_count=3)),
        "FAILED_PRECONDITION",
        "TRANSPORT_UNAVAILABLE",
        {"kind": "arena"},
    ),
    "a gap": (
        BOTH,
        {"pairs": STORY.pairs(8, 3)},
        "FAILED_PRECONDITION",
        "MISSING_ROWS",
        {"gap_begin": "6", "gap_end": "8", "last_pair_key": "5"},
    ),
    "a pair past the limit": (
        BOTH,
        {"pairs": STORY.pairs(198, 3, allow_gap=True)},
        "OUT_OF_RANGE",
        "POSITION_LIMIT",
        {"key": "200", "limit": "200"},
    ),
    "a pair past every limit": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, first_key=2**63 - 1, allow_gap=True)},
        "OUT_OF_RANGE",
        "POSITION_LIMIT",
        {"key": str(2**63 + 1), "limit": "200"},
    ),
    "an operation left out": (
        BOTH,
        {"op": 3},
        "ABORTED",
        "OP_OUT_OF_ORDER",
        {"op": "3", "last_op": "1", "row_count": "6", "last_pair_key": "5", "ranges": "0-6"},
    ),
    "the largest operation number": (
        BOTH,
        {"op": 2**64 - 1},
        "ABORTED",
        "OP_OUT_OF_ORDER",
        {"op": str(2**64 - 1), "last_op": "1"},
    ),
    "an operation again with another request": (
        BOTH,
        {"op": 1},
        "INVALID_ARGUMENT",
        "OP_REUSED",
        {},
    ),
    "a region": (
        BOTH,
        hiddens(tensor_pb2.TensorRef(region=tensor_pb2.RegionRange(region_id=bytes(16)), dtype=FLOAT32, row_count=3)),
        "FAILED_PRECONDITION",
        "TRANSPORT_UNAVAILABLE",
        {"kind": "region"},
    ),
    "rotary positions": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, rope_positions=[1, 2, 3])},
        "UNIMPLEMENTED",
        "NOT_IMPLEMENTED",
        {"name": "Pairs.rope_positions"},
    ),
    "embeddings": (
        BOTH,
        {"pairs": STORY.pairs(6, 3, embeddings=inline(b"", 0))},
        "UNIMPLEMENTED",
        "NOT_IMPLEMENTED",
        {"name": "Pairs.embeddings"},
    ),
}
CASES = [
    pytest.param(rpc, changes, (code, reason), details, id=f"{rpc}-{name.replace(' ', '-')}")
    for name, (rpcs, changes, code, reason, details) in ENTRIES.items()
    for rpc in rpcs
]


def request_of(sequence, rpc, changes, *others):
    if rpc == "Catchup":
        entries = [sequence.catchup_entry(6, 3, **changes), *(other.catchup_entry(0, 2) for other in others)]
        return pb.CatchupRequest(entries=entries)
    entries = [sequence.propose_entry(6, 3, **changes), *(other.propose_entry(0, 2) for other in others)]
    return pb.ProposeRequest(entries=entries)


def check(result, code, reason, details):
    said = refused_entry(result.status)
    assert said.kind == (code, reason)
    assert said.text
    assert details.items() <= said.details.items()


@pytest.mark.parametrize(("rpc", "changes", "kind", "details"), CASES)
def test_a_wrong_entry_is_refused_by_name_and_nothing_else_happens(scene, rpc, changes, kind, details):
    good = scene.session.sequence(Story(3))
    with scene.undisturbed():
        request = request_of(scene.sequence, rpc, changes, good)
        bad_result, good_result = scene.session.call(rpc, request).results
        check(bad_result, *kind, details)
        assert bad_result.state == scene.sequence.state()
        assert good_result.status.code == 0
        assert good_result.state.row_count == 2
        good.op += 1
        good.close()
        with scene.session.drive() as drive:
            answer = drive.ask(**{rpc.lower(): request_of(scene.sequence, rpc, changes)})
        assert answer.status.code == 0
        check(getattr(answer, rpc.lower()).results[0], *kind, details)
    # The number was not used up: the right request goes through under it.
    scene.sequence.propose(6, 3)


@pytest.mark.parametrize("rpc", BOTH)
def test_operation_zero_is_refused(scene, rpc):
    with scene.undisturbed():
        request = request_of(scene.sequence, rpc, {})
        request.entries[0].op = 0
        (result,) = scene.session.call(rpc, request).results
        check(result, "INVALID_ARGUMENT", "INVALID_FIELD", {"field": "op", "value": "0"})


@pytest.mark.parametrize("rpc", BOTH)
def test_a_sequence_twice_in_one_call_fails_both_entries_and_no_other(scene, rpc):
    good = scene.session.sequence(Story(3))
    with scene.undisturbed():
        request = request_of(scene.sequence, rpc, {}, good)
        request.entries.add().CopyFrom(request.entries[0])
        first, middle, last = scene.session.call(rpc, request).results
        for result in (first, last):
            check(result, "INVALID_ARGUMENT", "DUPLICATE_SEQUENCE", {})
        assert middle.status.code == 0
        good.op += 1
        good.close()
    for first_key in range(6, 10):
        scene.sequence.catchup(first_key, 1)


@pytest.mark.parametrize("rpc", BOTH)
def test_unknown_and_foreign_sequences_are_answered_alike(scene, rpc):
    own = scene.session.sequence(Story(3))
    own.close()
    said = []
    with scene.undisturbed():
        for sequence_id in (bytes(16), b"", b"short", bytes(5000), own.sequence_id, scene.bystander.sequence_id):
            request = request_of(scene.sequence, rpc, {})
            request.entries[0].sequence_id = sequence_id
            (result,) = scene.session.call(rpc, request).results
            assert not result.HasField("state")
            said.append(refused_entry(result.status))
    assert said[0].kind == ("NOT_FOUND", "SEQUENCE_UNKNOWN")
    assert set(said) == {said[0]}
    assert all(one.details == said[0].details for one in said)


def test_hidden_rows_that_are_not_finite_are_found_in_bfloat16_too(shared_server):
    session = shared_server.client().open(hidden_dtype=BFLOAT16)
    sequence = session.sequence(STORY)
    for value in (math.nan, math.inf, -math.inf):
        ref = inline(rows_with(value, 1, dtype=torch.bfloat16), 3, dtype=BFLOAT16)
        entry = sequence.catchup_entry(0, 3, pairs=STORY.pairs(0, 3, hiddens=ref))
        (result,) = session.call("Catchup", pb.CatchupRequest(entries=[entry])).results
        check(result, "INVALID_ARGUMENT", "HIDDEN_NOT_FINITE", {"row": "1"})
    sequence.catchup(0, 3, pairs=STORY.pairs(0, 3, dtype=BFLOAT16))
    session.close()


def test_the_largest_finite_rows_are_taken_and_stay_among_themselves(scene):
    rows = torch.full((3, WIDTH), torch.finfo(torch.float32).max)
    ref = inline(rows.view(torch.uint8).numpy().tobytes(), 3)
    wild = scene.session.sequence(Story(3))
    twins = [scene.session.sequence(Story(4)) for _ in range(4)]
    alone = twins.pop().propose(0, 2)
    entries = [wild.propose_entry(0, 3, pairs=STORY.pairs(0, 3, hiddens=ref))]
    entries += [twin.propose_entry(0, 2) for twin in twins[:2]]
    with scene.undisturbed():
        results = scene.session.call("Propose", pb.ProposeRequest(entries=entries)).results
        assert [result.status.code for result in results] == [0, 0, 0]
        assert list(results[1].drafts) == list(results[2].drafts) == list(alone.drafts)
        # Its pages hold whatever came of it; the next owner must not see that.
        wild.close(op=2)
        assert list(twins[2].propose(0, 2).drafts) == list(alone.drafts)
        twins[0].close(op=2)
        twins[1].close(op=2)
        twins[2].close()
