"""The demo: what it says when all is well, when the head is useless, and when the verify is wrong."""

import io
import json
import re
import shutil
import urllib.error
import urllib.request

import pytest
import torch
from safetensors.torch import load_file, save_file

from drafter_service.demo.acceptance import AcceptancePlan, measure_acceptance
from drafter_service.demo.demo import DemoPlan, run_demo
from drafter_service.demo.page import side_by_side
from drafter_service.demo.painting import Ink, Painter, inks, paint_generation, wants_color
from drafter_service.demo.prompts import pick_prompts
from drafter_service.demo.race import DRAFTED, GENERATE, LOOP, Outcome, Run
from drafter_service.demo.tally import tally
from drafter_service.demo.target import HEAD, TARGET, TEXTS
from repository import ROOT
from specdraft.integrations.transformers import RoundRecord, speculative_generate
from specdraft.integrations.transformers.target import Target

LAST_LINE = re.compile(
    r"demo: lossless=(yes|no) accept_length=\d\.\d\d first=[01]\.\d\d rounds=\d+/\d+ speedup=\d+\.\d\dx"
)
SHORT = {"num_prompts": 1, "num_prompt_tokens": 48, "num_new": 16, "num_turns": 1}


@pytest.fixture(scope="module")
def random_head(tmp_path_factory):
    """The trained head's layout with random weights."""
    folder = tmp_path_factory.mktemp("random-head")
    shutil.copy(HEAD / "config.json", folder)
    generator = torch.Generator().manual_seed(0)
    weights = {
        name: (torch.randn(weight.shape, generator=generator) * weight.shape[-1] ** -0.5).to(weight.dtype)
        for name, weight in load_file(HEAD / "model.safetensors").items()
    }
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def demo(decoding=speculative_generate, *, in_color=False, **plan):
    said = []

    def tell(text):
        said.append(f"({text})")

    is_lossless = run_demo(DemoPlan(**SHORT | plan), Painter(in_color=in_color), said.append, decoding, tell)
    return is_lossless, said


def test_demo_ends_with_its_one_line_and_is_lossless():
    is_lossless, said = demo(in_color=True)
    assert is_lossless
    assert LAST_LINE.fullmatch(said[-1]), said[-1]
    assert "lossless=yes" in said[-1]
    text = "\n".join(said)
    assert f"{Ink.FIRST.value}" in text
    assert "the service counted" in text
    url = re.search(r"http://127\.0\.0\.1:\d+/metrics", text).group()
    with pytest.raises(urllib.error.URLError):  # the service has ended with the demo
        urllib.request.urlopen(url, timeout=5)


@pytest.mark.gpu
@pytest.mark.timeout(170)
def test_on_a_gpu_the_drafts_come_through_cuda_ipc_as_good_as_on_a_cpu():
    is_lossless, said = demo()
    assert is_lossless
    assert "lossless=yes" in said[-1]
    assert any("CUDA IPC" in line for line in said)
    expected = json.loads((ROOT / "tests/benchmarks/results/acceptance-cpu.json").read_text(encoding="utf-8"))[
        "figures"
    ]
    figures = measure_acceptance(AcceptancePlan(**expected["plan"]))
    shares = zip(figures["accepted_by_draft_index"], expected["accepted_by_draft_index"], strict=True)
    assert all(abs(found - on_cpu) <= 0.01 for found, on_cpu in shares), figures


def test_text_is_shown_before_the_timed_turns_and_every_turn_is_announced(random_head):
    _, said = demo(head=random_head, num_turns=2)
    (shown,) = (index for index, text in enumerate(said) if ", from line " in text)
    assert said.index("(warming up: with drafts)") < shown < said.index("(turn 1/2)") < said.index("(turn 2/2)")


def test_random_head_costs_time_but_no_token(random_head):
    is_lossless, said = demo(head=random_head)
    assert is_lossless
    assert "lossless=yes" in said[-1]
    assert "\x1b" not in "".join(said)


def test_verify_that_accepts_blindly_is_found_out(random_head, monkeypatch):
    honest = Target.verify

    def blind(self, ids, count):
        logits = honest(self, ids, count)
        for index, draft in enumerate(ids[0, ids.shape[1] - count + 1 :].tolist()):
            logits[0, index, draft] = torch.inf
        return logits

    def blind_generate(client, num_drafts, on_round):
        monkeypatch.setattr(Target, "verify", blind if num_drafts else honest)
        return speculative_generate(client, num_drafts, on_round=on_round)

    is_lossless, said = demo(blind_generate, head=random_head)
    assert not is_lossless
    assert LAST_LINE.fullmatch(said[-1]), said[-1]
    assert "lossless=no" in said[-1]


def test_rounds_are_counted_without_the_prompts_forward():
    rounds = [
        RoundRecord(5, (), 0, (1,)),
        RoundRecord(5, (2, 3, 4), 3, (2, 3, 4, 9)),
        RoundRecord(9, (7, 8, 6), 1, (7, 5)),
        RoundRecord(11, (), 0, (1,)),
    ]
    counted = tally([rounds], 3)
    assert (counted.num_rounds, counted.num_tokens) == (3, 7)
    assert counted.offered == (2, 2, 2)
    assert counted.accepted == (2, 1, 1)
    assert counted.acceptance == (1.0, 0.5, 0.5)
    assert counted.accept_length == pytest.approx(7 / 3)
    kinds = [ink for _, ink in inks(rounds)]
    assert kinds == [Ink.FIRST, *[Ink.ACCEPTED] * 3, Ink.BONUS, Ink.ACCEPTED, Ink.CORRECTION, Ink.BONUS]


def test_speedup_is_against_the_faster_way_without_drafts():
    outcome = Outcome(
        shown=Run(1.0, ((1,),), ([],)),
        seconds={GENERATE: (4.0, 4.0, 4.0), LOOP: (3.0, 3.0, 3.3), DRAFTED: (2.0, 1.5, 3.0)},
        num_plain_forwards=1,
        num_compared=1,
        num_different=0,
    )
    assert outcome.baseline == LOOP
    assert outcome.speedup == pytest.approx(1.5)


def test_table_and_speedup_are_of_the_turn_with_the_median_speedup():
    outcome = Outcome(
        shown=Run(1.0, ((1,) * 60,), ([],)),
        # Medians of each column would say 3.0 s against 3.0 s.
        seconds={GENERATE: (3.0, 9.0, 2.0), LOOP: (4.0, 9.0, 2.5), DRAFTED: (2.0, 3.0, 4.0)},
        num_plain_forwards=60,
        num_compared=1,
        num_different=0,
    )
    assert (outcome.median_turn, outcome.baseline, outcome.speedup) == (0, GENERATE, 1.5)
    lines = side_by_side(outcome, tally([], 3)).splitlines()
    assert [line.split()[-1] for line in lines[1:4]] == ["3.00", "4.00", "2.00"]
    assert "speedup 1.50x" in lines[4]
    assert "turn 1, the median of 3 (0.50x to 3.00x)" in lines[4]


def test_a_single_turn_is_not_called_a_median():
    seconds = {GENERATE: (3.0,), LOOP: (4.0,), DRAFTED: (2.0,)}
    outcome = Outcome(Run(1.0, ((1,),), ([],)), seconds, num_plain_forwards=1, num_compared=1, num_different=0)
    text = side_by_side(outcome, tally([], 3))
    assert text.endswith("one turn")
    assert "median" not in text


class Terminal(io.StringIO):
    def isatty(self):
        return True


@pytest.mark.parametrize(
    ("choice", "stream", "environment", "expected"),
    [
        ("auto", Terminal(), {}, True),
        ("auto", Terminal(), {"NO_COLOR": "1"}, False),
        ("auto", Terminal(), {"TERM": "dumb"}, False),
        ("auto", io.StringIO(), {}, False),
        ("always", io.StringIO(), {"NO_COLOR": "1"}, True),
        ("never", Terminal(), {}, False),
    ],
)
def test_color_follows_flag_then_no_color_then_terminal(choice, stream, environment, expected):
    assert wants_color(choice, stream, environment) is expected


def test_uncolored_generation_has_marks_for_its_begin_and_for_every_kind_of_token():
    class Letters:
        def decode(self, ids, skip_special_tokens):
            return "".join(map(chr, ids))

    rounds = [
        RoundRecord(1, (), 0, (97,)),
        RoundRecord(2, (98, 99), 1, (98, 100)),
        RoundRecord(4, (101,), 1, (101, 10)),
    ]
    assert paint_generation(rounds, Letters(), Painter(in_color=False)) == "<|>a[+b+]{!d!}[+e+](*\n*)"
    assert paint_generation(rounds, Letters(), Painter(in_color=True)).count("\x1b[0m") == 4
    assert ";4m" in Ink.CORRECTION.value  # underlined: red and green are not enough


def test_prompts_begin_at_lines_of_held_out_code_and_are_the_same_every_time():
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    prompts = pick_prompts(TEXTS, tokenizer, 3, 40, seed=1)
    assert prompts == pick_prompts(TEXTS, tokenizer, 3, 40, seed=1)
    for prompt in prompts:
        lines = (TEXTS / prompt.name).read_text(encoding="utf-8").splitlines(keepends=True)
        text = tokenizer.decode(list(prompt.tokens), skip_special_tokens=False)
        assert "".join(lines[prompt.line - 1 :]).startswith(text)
        assert len(prompt.tokens) == 40
