"""Pair arithmetic and hidden rows of the Python client: pure, no service."""

import array
import random

import numpy as np
import pytest
import torch

from specdraft import DType, HiddenRows, next_pairs
from specdraft.hiddens import read_rows
from specdraft.pairs import PairRun, prompt_pairs

WIDTH = 6


def rows(count, width=WIDTH):
    return np.arange(count * width, dtype=np.float32).reshape(count, width)


def test_pairs_of_a_prompt_shift_the_tokens_by_one():
    prompt, hiddens = [10, 11, 12, 13], rows(4)
    run = prompt_pairs(prompt, read_rows(hiddens, DType.FLOAT32, WIDTH))
    assert (run.first_key, list(run.tokens)) == (0, [11, 12, 13])
    assert bytes(run.hiddens.data) == hiddens[:3].tobytes()


def test_a_prompt_of_one_token_has_no_pairs():
    assert prompt_pairs([10], read_rows(rows(1), DType.FLOAT32, WIDTH)) is None


@pytest.mark.parametrize(("tokens", "count"), [([1, 2], 1), ([1], 2), ([], 0)])
def test_prompts_and_rows_that_do_not_pair_up_are_refused(tokens, count):
    with pytest.raises(ValueError, match=str(count)):
        prompt_pairs(tokens, read_rows(rows(count), DType.FLOAT32, WIDTH))


@pytest.mark.parametrize("cut", range(1, 8))
def test_a_cut_keeps_each_hidden_with_the_token_after_it(cut):
    prompt, hiddens = list(range(100, 108)), rows(8)
    run = prompt_pairs(prompt, read_rows(hiddens, DType.FLOAT32, WIDTH))
    seen = {}
    while run is not None:
        part = run.first(cut)
        for index, token in enumerate(part.tokens):
            seen[part.first_key + index] = token, bytes(part.hiddens.rows(index, index + 1).data)
        run = run.after(cut)
    assert seen == {key: (prompt[key + 1], hiddens[key].tobytes()) for key in range(7)}


def test_only_the_first_part_may_leave_a_gap_or_judge_a_round():
    run = PairRun(9, [1, 2, 3], read_rows(rows(3), DType.FLOAT32, WIDTH), allow_gap=True, accepted_drafts=2)
    first, rest = run.first(2), run.after(2)
    assert (first.allow_gap, first.accepted_drafts) == (True, 2)
    assert (rest.first_key, rest.allow_gap, rest.accepted_drafts) == (11, False, None)


def test_rounds_write_every_pair_once_with_its_own_hidden():
    """Contract 2.1, simulated: whatever is accepted, the pairs follow each other."""
    rng = random.Random(0)
    sequence = [rng.randrange(50) for _ in range(2000)]
    hidden_of = {key: [float(key)] for key in range(2100)}
    stored, position = {}, 5
    while position < 1900:
        k = rng.randrange(5)
        accepted = rng.randrange(k + 1)
        right = sequence[position + 1 : position + 1 + accepted]
        drafts = right + [99] * (k - accepted)
        bonus = sequence[position + 1 + accepted]
        hiddens = [hidden_of[position + index] for index in range(k + 1)]
        step = next_pairs(position, drafts, accepted, bonus, hiddens)
        assert step.first_key == position
        for index, token in enumerate(step.tokens):
            assert position + index not in stored
            stored[position + index] = token, step.hiddens[index]
        position = step.position
    assert stored == {key: (sequence[key + 1], hidden_of[key]) for key in range(5, position)}


@pytest.mark.parametrize("accepted", [-1, 3])
def test_more_accepted_than_drafted_is_refused(accepted):
    with pytest.raises(ValueError, match="of 2"):
        next_pairs(4, [1, 2], accepted, 3, rows(3))


def test_next_pairs_keeps_the_callers_type():
    assert isinstance(next_pairs(4, [1, 2], 1, 3, torch.zeros(3, 4)).hiddens, torch.Tensor)
    assert isinstance(next_pairs(4, [1, 2], 1, 3, read_rows(rows(3), DType.FLOAT32, WIDTH)).hiddens, HiddenRows)


BITS = torch.arange(12, dtype=torch.float32).reshape(2, WIDTH).to(torch.bfloat16)


@pytest.mark.parametrize(
    ("value", "dtype"),
    [
        (rows(2), DType.FLOAT32),
        (rows(4)[::2], DType.FLOAT32),
        (np.asfortranarray(rows(2)), DType.FLOAT32),
        (rows(2).tobytes(), DType.FLOAT32),
        (bytearray(rows(2).tobytes()), DType.FLOAT32),
        (memoryview(rows(2).tobytes()), DType.FLOAT32),
        (torch.from_numpy(rows(2)), DType.FLOAT32),
        (torch.from_numpy(rows(4))[::2], DType.FLOAT32),
        (torch.from_numpy(rows(2)).requires_grad_(), DType.FLOAT32),
        (BITS, DType.BFLOAT16),
        (BITS.view(torch.uint16).numpy(), DType.BFLOAT16),
        (BITS.view(torch.uint16).numpy().tobytes(), DType.BFLOAT16),
    ],
)
def test_rows_are_read_from_whatever_the_caller_has(value, dtype):
    read = read_rows(value, dtype, WIDTH)
    expected = value
    if isinstance(value, torch.Tensor):
        bits = {DType.FLOAT32: torch.int32, DType.BFLOAT16: torch.int16}[dtype]
        expected = value.detach().contiguous().view(bits).numpy()
    expected = expected.tobytes() if hasattr(expected, "tobytes") else bytes(expected)
    assert (read.row_count, bytes(read.data)) == (2, expected)
    assert bytes(read.rows(1, 2).data) == expected[len(expected) // 2 :]


def test_dense_rows_are_not_copied():
    for value in (rows(2), torch.zeros(2, WIDTH)):
        read = read_rows(value, DType.FLOAT32, WIDTH)
        value[1, 0] = 42.0
        assert np.frombuffer(read.data, dtype=np.float32)[WIDTH] == 42.0


@pytest.mark.parametrize(
    ("value", "named"),
    [
        (rows(2).astype(np.float64), "float64"),
        (rows(2, 7), r"\[2, 7\]"),
        (rows(2)[0], r"\[6\]"),
        (rows(2).tobytes()[:-1], "47 bytes"),
        (torch.zeros(2, 7), r"\[2, 7\]"),
        (torch.zeros(2, WIDTH, dtype=torch.bfloat16), "bfloat16"),
        (torch.zeros(2, WIDTH, device="meta"), "meta"),
        (torch.zeros(1, 2, WIDTH), r"\[1, 2, 6\]"),
        (array.array("i", range(12)), "format 'i'"),
        ([[0.0] * WIDTH], "list"),
        (None, "NoneType"),
        (HiddenRows(memoryview(bytes(24)), DType.BFLOAT16, 2, WIDTH), "BFLOAT16"),
    ],
)
def test_rows_that_do_not_fit_are_refused_naming_both(value, named):
    with pytest.raises(ValueError, match=named) as caught:
        read_rows(value, DType.FLOAT32, WIDTH)
    assert "float32 [rows, 6]" in str(caught.value)


def test_no_rows_are_read_as_none():
    assert read_rows(torch.zeros(0, WIDTH), DType.FLOAT32, WIDTH).row_count == 0


def test_hidden_rows_check_their_size():
    with pytest.raises(ValueError, match="47 bytes"):
        HiddenRows(memoryview(bytes(47)), DType.FLOAT32, 2, WIDTH)
