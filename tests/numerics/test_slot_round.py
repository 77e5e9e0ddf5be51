"""Device-resident rounds: what a slot says is copied, checked and used; every refusal leaves rows and others alone."""

from __future__ import annotations

import struct
from functools import partial

import pytest
import torch

from checkpoints import write_tiny_checkpoint
from drafter_kernels import Backend
from drafter_service.engine import slot_round
from drafter_service.engine.operations import Stop
from drafter_service.engine.round_core import RoundShape
from drafter_service.engine.slot_round import SlotPlace, SlotRound, StatusNumbers
from drafter_service.heads import BodyPrecision, LmHeadPrecision, MtpHead, load_head, oracle_draft
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.state.pool import KvPool, PoolShape
from specdraft.memory.lane_protocol import RELEASED

WIDTH, VOCAB, PAIRS, DRAFTS, PAGES, PAGE_ROWS, SLOTS = 64, 128, 4, 3, 8, 4, 4
NUMBERS = StatusNumbers(44, 4, 3, 11, 20, 60, 70, 110)
# Top-2 margin, as a part of the largest |logit|, below which rounding may decide.
MARGINS = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
NVFP4 = {"quantization": BodyPrecision.NVFP4, "lm_head": LmHeadPrecision.NVFP4, "draft_vocab": "first:100"}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    allowed, torch.backends.cuda.matmul.allow_tf32 = torch.backends.cuda.matmul.allow_tf32, False
    yield request.param
    torch.backends.cuda.matmul.allow_tf32 = allowed


@pytest.fixture(params=["plain", "plain, compiled slots", "kernels", "nvfp4 kernels"])
def world(request, tmp_path, device, monkeypatch):
    """With the plain forward in float32, or with kernels in bf16: on a CPU their references, or interpreted."""
    if "compiled" in request.param:
        pytest.importorskip("triton")
        monkeypatch.setattr(slot_round, "take_slots", partial(slot_round.take_slots, backend=Backend.TRITON))
        monkeypatch.setattr(slot_round, "leave_slots", partial(slot_round.leave_slots, backend=Backend.TRITON))
    if request.param.startswith("plain"):
        return World(load_head(write_tiny_checkpoint(tmp_path, seed=5), device=device))
    monkeypatch.setattr(MtpHead, "runs_kernels", True)
    levers = NVFP4 if request.param.startswith("nvfp4") else {}
    write_tiny_checkpoint(tmp_path, seed=5, dtype="bfloat16")
    return World(load_head(tmp_path, device=device, packed=True, **levers))


class World:
    """A lane's arena, states and pool, with two sequences and one that nobody may touch."""

    def __init__(self, head, batch=4, dtype="float32"):
        self.head = head
        layout = head.kv_layout()
        shape = PoolShape(layout.num_layers, PAGE_ROWS, layout.num_kv_heads, layout.head_dim, layout.dtype)
        self.pool = KvPool(shape, 3 * PAGES, head.device)
        self.pool.poison(range(3 * PAGES))
        size = torch.empty(0, dtype=getattr(torch, dtype)).itemsize
        wish = ArenaWish(SLOTS, PAIRS - 1, WIDTH * size, WIDTH * size, VOCAB, 0, with_masks=False)
        self.layout = lay_out(wish)
        self.arena = torch.full((self.layout.size,), 0xEE, dtype=torch.uint8, device=head.device)
        whole = {"dtype": torch.int64, "device": head.device}
        self.fence, self.ready = torch.zeros(1, **whole), torch.ones(1, **whole)
        self.states = torch.tensor([[0, 0, -1]] * 4, **whole)
        place = SlotPlace(self.arena, self.layout, dtype, WIDTH, self.fence, self.ready, self.states, NUMBERS)
        self.dtype = getattr(torch, dtype)
        self.round = SlotRound(head, self.pool, RoundShape(batch, PAIRS, DRAFTS, PAGES), place)
        self.pairs = [{}, {}]
        self.generator = torch.Generator().manual_seed(2)
        self.ticket = 0

    def put(self, slot, name, data):
        begin = self.layout.slots + slot * self.layout.fields.stride + getattr(self.layout.fields, name)
        self.arena[begin : begin + len(data)] = torch.tensor(list(data), dtype=torch.uint8, device=self.head.device)

    def write_slot(self, slot, first_key, tokens, hiddens):
        self.put(slot, "first_key", struct.pack("<q", first_key))
        self.put(slot, "pair_count", struct.pack("<i", len(tokens)))
        self.put(slot, "tokens", struct.pack(f"<{len(tokens)}i", *tokens))
        rows = hiddens.to(self.dtype).contiguous().view(torch.uint8).flatten().tolist()
        self.put(slot, "hidden", rows)  # the rows' stride is their size here
        assert self.layout.row_stride * len(tokens) == len(rows)

    def run(self, slots, **changes):
        """A round of sequence i with slot slots[i]; the rest of the batch pads."""
        self.ticket += 1
        batch, inputs = self.round.shape.batch, self.round.inputs
        real = len(slots)
        values = {
            "ticket": [self.ticket],
            "slot": [*slots, *[slots[0]] * (batch - real)],
            "state_index": [*range(real), *[3] * (batch - real)],
            "is_real": [True] * real + [False] * (batch - real),
            "op": [100 + self.ticket] * batch,
            "planned": [DRAFTS] * batch,
            "planned_stop": [Stop.COMPLETE.value] * batch,
            "max_keys": [PAGES * PAGE_ROWS - 2] * batch,
            "num_rows_max": [PAGES * PAGE_ROWS] * batch,
            "min_logprob": [-float("inf")] * batch,
        } | changes
        for name, value in values.items():
            target = getattr(inputs, name)
            target.copy_(torch.tensor(value, dtype=target.dtype))
        for index in range(real):
            inputs.page_table[index] = torch.arange(PAGES) + index * PAGES
        self.ready.fill_(max(self.ticket, int(self.ready)))
        self.round.run()
        return self.round.mirror.tolist()

    def outputs(self, slot):
        fields = self.layout.fields
        begin = self.layout.slots + slot * fields.stride
        data = bytes(self.arena[begin : begin + fields.first_key].tolist())
        status, count, stop = (
            struct.unpack_from("<i", data, at)[0] for at in (fields.status, fields.draft_count, fields.stop_reason)
        )
        drafts = struct.unpack_from(f"<{max(count, 0)}i", data, fields.drafts)
        rows = (
            struct.unpack_from("<i", data, fields.row_count)[0],
            struct.unpack_from("<q", data, fields.last_pair_key)[0],
        )
        return status, struct.unpack_from("<Q", data, fields.op)[0], drafts, stop, rows

    def expect_oracle(self, index, drafts):
        pairs = self.pairs[index]
        keys = sorted(pairs)
        tokens = torch.tensor([pairs[key][0] for key in keys], device=self.head.device)
        hiddens = torch.stack([pairs[key][1] for key in keys]).to(self.head.device)
        expected = oracle_draft(self.head, tokens, hiddens, torch.tensor(keys, device=self.head.device), len(drafts))
        for draft, best, margin in zip(drafts, expected.ids, expected.margins, strict=True):
            if margin < MARGINS[self.head.dtype]:
                return 0
            assert draft == best
        return len(drafts)

    def step(self, index, slot, count, back=0):
        """The next pairs of a sequence, written into a slot."""
        first_key = max(self.pairs[index], default=-1) + 1 - back
        tokens = torch.randint(VOCAB, (count,), generator=self.generator).tolist()
        hiddens = torch.randn(count, WIDTH, generator=self.generator)
        self.pairs[index] = {key: pair for key, pair in self.pairs[index].items() if key < first_key}
        self.pairs[index] |= {first_key + i: (token, hiddens[i]) for i, token in enumerate(tokens)}
        self.write_slot(slot, first_key, tokens, hiddens)
        return first_key, tokens


def test_rounds_with_counts_and_keys_that_only_the_device_knows_draft_like_the_oracle(world):
    compared = 0
    for turn, (counts, backs) in enumerate(
        [((3, 1), (0, 0)), ((4, 2), (2, 0)), ((1, 4), (0, 1)), ((2, 3), (1, 3)), ((4, 1), (0, 0))]
    ):
        asked = [world.step(index, slot, counts[index], backs[index]) for index, slot in ((0, 2), (1, 0))]
        mirror = world.run([2, 0])
        for index, slot in ((0, 2), (1, 0)):
            first_key, tokens = asked[index]
            status, op, drafts, stop, rows = world.outputs(slot)
            assert (status, op, stop, len(drafts)) == (0, 101 + turn, Stop.COMPLETE.value, DRAFTS)
            assert rows == (len(world.pairs[index]), max(world.pairs[index]))
            assert mirror[index][:5] == [0, first_key, len(tokens), DRAFTS, Stop.COMPLETE.value]
            assert mirror[index][5 : 5 + len(tokens)] == tokens
            assert tuple(mirror[index][5 + PAIRS :]) == drafts
            compared += world.expect_oracle(index, drafts)
    assert compared > (20 if world.head.dtype is torch.float32 else 5)


def broken_slots():
    nan = torch.full((1, WIDTH), float("nan"))
    yield "no pairs", NUMBERS.pair_count, {"pair_count": struct.pack("<i", 0)}
    yield "too many pairs", NUMBERS.pair_count, {"pair_count": struct.pack("<i", PAIRS + 1)}
    yield "a wild count", NUMBERS.pair_count, {"pair_count": struct.pack("<i", -(1 << 31))}
    yield "a token beyond", NUMBERS.token, {"tokens": struct.pack("<i", VOCAB)}
    yield "a negative token", NUMBERS.token, {"tokens": struct.pack("<i", -1)}
    yield "a gap", NUMBERS.missing_rows, {"first_key": struct.pack("<q", 7)}
    yield "a wild key", NUMBERS.missing_rows, {"first_key": struct.pack("<q", (1 << 63) - 1)}
    yield "a negative key", NUMBERS.missing_rows, {"first_key": struct.pack("<q", -(1 << 63))}
    yield "NaN", NUMBERS.not_finite, {"hidden": nan.view(torch.uint8).flatten().tolist()}
    yield (
        "infinity",
        NUMBERS.not_finite,
        {"hidden": (nan * 0 + 1).div(0).nan_to_num(nan=float("inf")).view(torch.uint8).flatten().tolist()},
    )


@pytest.mark.parametrize("case", list(broken_slots()), ids=lambda case: case[0])
def test_a_slot_that_says_nonsense_is_refused_and_its_neighbour_goes_on(world, case):
    _, number, changes = case
    for index, slot in ((0, 0), (1, 1)):
        world.step(index, slot, 3)
    world.run([0, 1])
    before, pairs = rows_of(world, 0), dict(world.pairs[0])
    world.step(0, 0, 2)
    world.step(1, 1, 2)
    for name, data in changes.items():
        world.put(0, name, data)
    mirror = world.run([0, 1])
    status, op, drafts, stop, rows = world.outputs(0)
    assert (status, op, drafts, stop, rows) == (number, 102, (), 0, (3, 2))
    assert (mirror[0][0], mirror[1][0]) == (number, 0)
    assert torch.equal(rows_of(world, 0), before)
    world.pairs[0] = pairs
    assert world.outputs(1)[4] == (5, 4)
    world.expect_oracle(1, world.outputs(1)[2])
    world.step(0, 0, 1)
    world.run([0, 1], state_index=[0, 3, 3, 3], is_real=[True, False, False, False], slot=[0, 0, 0, 0])
    world.expect_oracle(0, world.outputs(0)[2])


def rows_of(world, index):
    """The pages of a sequence up to its rows."""
    count = int(world.states[index, 2]) + 1
    return torch.stack(
        [store[index * PAGES : (index + 1) * PAGES].flatten(0, 1)[:count] for store in world.pool.pages(0)]
    )


@pytest.mark.parametrize(("fence", "ready"), [(1, None), (0, RELEASED), (0, 1)])
def test_a_round_whose_lane_was_given_up_writes_nothing(world, fence, ready):
    world.step(0, 0, 2)
    world.run([0])
    before = rows_of(world, 0)
    world.step(0, 0, 2)
    world.fence.fill_(fence)
    world.ready.fill_(ready or 2)
    world.ticket = 1 if ready != 1 else 5
    if ready == 1:
        world.ready = torch.zeros(1, dtype=torch.int64)  # `run` would set it: the counter stays behind the ticket
    mirror = world.run([0])
    assert mirror[0][0] == world.outputs(0)[0] == NUMBERS.fenced
    assert torch.equal(rows_of(world, 0), before)


def test_positions_and_pages_limit_drafts_and_then_refuse(world):
    limit = 6
    world.step(0, 0, 4)
    world.run([0], max_keys=[limit] * 4)
    world.step(0, 0, 1)
    world.run([0], max_keys=[limit] * 4)
    status, _, drafts, stop, _ = world.outputs(0)
    assert (status, len(drafts), stop) == (0, 2, Stop.POSITION_LIMIT.value)
    world.step(0, 0, 2)
    assert world.run([0], max_keys=[limit] * 4)[0][0] == NUMBERS.position
    assert world.run([0], num_rows_max=[6] * 4)[0][0] == NUMBERS.pages
    assert world.run([0], num_rows_max=[7] * 4, planned=[1] * 4, planned_stop=[Stop.PAGES.value] * 4)[0][0] == 0
    assert world.outputs(0)[3] == Stop.PAGES.value


def test_padding_touches_no_slot_no_state_and_no_page_of_anybody(world):
    before = {slot: world.arena_slot(slot) for slot in (1, 2, 3)} if hasattr(world, "arena_slot") else slots_of(world)
    world.step(0, 0, 3)
    world.run([0])
    after = slots_of(world)
    assert all(torch.equal(before[slot], after[slot]) for slot in (1, 2, 3))
    assert world.states[1:3].tolist() == [[0, 0, -1]] * 2
    assert world.pool.pages(0)[0][PAGES : 3 * PAGES].isnan().all(), "pages of others hold what they held"


def slots_of(world):
    stride = world.layout.fields.stride
    begin = world.layout.slots
    return [world.arena[begin + slot * stride : begin + (slot + 1) * stride].clone() for slot in range(SLOTS)]


def test_a_head_that_computes_nan_is_told_and_its_rows_are_given_up(world, monkeypatch):
    world.step(0, 0, 3)
    world.run([0])
    if world.head.device.type == "cuda":
        return
    world.step(0, 0, 2, back=1)
    with monkeypatch.context() as patch:
        patch.setattr(type(world.head), "_logits", lambda self, y: torch.full((len(y), VOCAB), float("nan")))
        if world.head.joined is not None:
            weight = world.head.weights.lm_head
            (weight if torch.is_tensor(weight) else weight.tensor_scale).fill_(torch.nan)
        mirror = world.run([0])
    assert mirror[0][0] == NUMBERS.internal
    assert world.states[0].tolist() == [0, 0, 1], "rows from the first key on are gone"


def test_a_batch_of_one_leaves_the_same_as_a_padded_one(tmp_path, device):
    write_tiny_checkpoint(tmp_path, seed=5)
    found = []
    for batch in (1, 4):
        world = World(load_head(tmp_path, device=device), batch=batch)
        world.step(0, 0, 3)
        world.run([0])
        found.append(world.outputs(0))
    assert found[0] == found[1]


def test_bfloat16_rows_and_embeddings_keep_their_bits(tmp_path, device):
    write_tiny_checkpoint(tmp_path, seed=5)
    head = load_head(tmp_path, device=device)
    world = World(head, dtype="bfloat16")
    world.step(0, 0, 3)
    world.run([0])
    _, _, drafts, _, _ = world.outputs(0)
    begin = world.layout.slots + world.layout.fields.last_embedding
    found = world.arena[begin : begin + 2 * WIDTH].clone().view(torch.bfloat16)
    assert torch.equal(found, head.embed(torch.tensor([drafts[-1]], device=device))[0].bfloat16())
