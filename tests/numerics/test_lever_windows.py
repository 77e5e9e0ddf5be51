"""The lever comparison's foundations: the target's continuation, the halves, and the drafts at a position."""

import pytest
import torch

from drafter_service.demo.lever_ab.cases import make_cases
from drafter_service.demo.lever_ab.drafting import draft_at_positions
from drafter_service.demo.lever_ab.windows import CONTEXT_TOKENS, WINDOW_TOKENS, Window, read_halves, read_windows
from drafter_service.demo.target import HEAD, TARGET, load_target
from drafter_service.heads import HiddenSource, RecycleSource, load_head, oracle_draft

NUM_POSITIONS = 7
NUM_DRAFTS = 3


@pytest.fixture(scope="module")
def target():
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield load_target()
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def windows(target):
    return read_windows(target, read_halves(target), NUM_POSITIONS, NUM_DRAFTS, seed=3)


def test_the_truth_is_what_the_target_generates_from_each_position_alone(target, windows):
    (window,) = windows
    assert len(window.positions) == NUM_POSITIONS
    assert window.positions[0] == CONTEXT_TOKENS
    for position, truth in zip(window.positions, window.truth, strict=True):
        assert truth == target.generate(window.tokens[:position], NUM_DRAFTS + 1)


def test_the_state_after_the_norm_is_the_norm_of_the_state_before(target, windows):
    hiddens = windows[0].hiddens
    assert hiddens["pre_norm"].shape == (WINDOW_TOKENS, target.model.config.hidden_size)
    with torch.inference_mode():
        assert torch.equal(target.model.model.norm(hiddens["pre_norm"]), hiddens["post_norm"])


@pytest.mark.parametrize("source", list(HiddenSource))
@pytest.mark.parametrize("recycle", list(RecycleSource))
def test_drafts_at_a_position_are_the_oracle_s_over_the_real_text(windows, source, recycle):
    head = load_head(HEAD, TARGET, dtype=torch.float32, hidden_source=source, recycle=recycle)
    results = draft_at_positions(head, windows, NUM_DRAFTS, None)
    (window,) = windows
    for position, truth, result in zip(window.positions, window.truth, results, strict=True):
        tokens = torch.tensor([*window.tokens[1:position], truth[0]])
        hiddens = window.hiddens[source.value][:position]
        oracle = oracle_draft(head, tokens, hiddens, torch.arange(position), NUM_DRAFTS)
        for draft, expected, margin in zip(result.drafts, oracle.ids, oracle.margins, strict=True):
            if margin < 1e-4:  # the contract's: rounding decides such a draft
                break
            assert draft == expected


def test_windows_of_any_number_of_positions_are_drafted_together(windows):
    head = load_head(HEAD, TARGET, dtype=torch.float32)
    (window,) = windows
    short = Window(window.tokens, window.hiddens, window.positions[:2], window.truth[:2])
    together, alone = (
        draft_at_positions(head, [short, window], NUM_DRAFTS, None),
        draft_at_positions(head, [window], NUM_DRAFTS, None),
    )
    assert [result.drafts for result in together] == [result.drafts for result in (*alone[:2], *alone)]


def test_no_subject_is_both_counted_and_measured(target):
    halves = read_halves(target)
    assert not set(halves.counted) & set(halves.measured)
    sizes = sum(map(len, halves.counted)), sum(map(len, halves.measured))
    assert 0.7 < sizes[0] / sizes[1] < 1.4
    ids = halves.frequent_ids(50)
    counts = [sum(tokens.count(token) for tokens in halves.counted) for token in ids]
    assert counts == sorted(counts, reverse=True)


def test_every_case_but_the_default_changes_one_lever(target, tmp_path):
    default, *others = make_cases(read_halves(target), tmp_path)
    levers = ("hidden_source", "recycle", "quantization", "lm_head", "draft_vocab", "min_logprob")
    for case in others:
        assert [name for name in levers if getattr(case, name) != getattr(default, name)] == [case.lever]
    assert len({(case.lever, case.value) for case in others}) == len(others)


def test_more_positions_than_there_are_are_refused(target):
    with pytest.raises(ValueError, match="1000000 positions"):
        read_windows(target, read_halves(target), 10**6, NUM_DRAFTS, seed=0)
