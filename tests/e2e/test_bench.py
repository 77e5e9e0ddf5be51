"""Every benchmark runs, at sizes too small to mean anything, and gives its result in the form that is committed."""

import json

import pytest

from drafter_service.bench.tiny_head import write_tiny_head
from drafter_service.cli import main
from drafter_service.config import LEVERS
from drafter_service.heads import plan_head
from repository import ROOT

FORM = {"name", "device", "versions", "date", "command", "figures"}


def run(capsys, *arguments):
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


def test_rpc_measures_service_echo_and_forward_in_one_run(capsys):
    report = json.loads(run(capsys, "rpc", "--rounds", "1", "--calls", "4", "--json"))
    assert set(report) == FORM
    assert report["command"] == "drafter-service bench rpc --rounds 1 --calls 4 --json"
    figures = report["figures"]
    ways = ("unary", "drive")
    assert set(figures["cases"]) == {"forward", "client drive"} | {
        f"{case} {way}" for case in ("echo", "empty", "floor", "propose") for way in ways
    }
    assert all(case["p99_us"] >= case["p50_us"] > 0 for case in figures["cases"].values())
    assert set(figures["tax_us"]) == set(ways)
    assert all(isinstance(met, bool) for met in figures["goals"].values())


def test_carry_measures_both_sizes(capsys):
    arguments = ("carry", "--rows", "20", "3000", "--rounds", "1", "--calls", "3")
    figures = json.loads(run(capsys, *arguments, "--json"))["figures"]
    assert set(figures["p50_us"]) == {"TakeKV", "InstallKV"} == set(figures["ratio"])
    assert set(figures["p50_us"]["TakeKV"]) == {"20", "3000"}
    assert "TakeKV: within 1.5 x" in figures["goals"]


def test_acceptance_asks_the_running_service(capsys):
    report = json.loads(run(capsys, "acceptance", "--positions", "3", "--num-drafts", "2", "--prompts", "1", "--json"))
    assert set(report) == FORM
    figures = report["figures"]
    assert figures["rounds"] == 3
    assert len(figures["accepted_by_draft_index"]) == 2
    assert 1 <= figures["mean_accept_length"] <= 3


def test_trimming_loses_a_row_a_verify_and_the_other_policies_lose_none(capsys):
    arguments = ("acceptance", "--positions", "1", "--prompts", "1", "--json")
    policies = json.loads(run(capsys, *arguments))["figures"]["rows_policies"]
    assert policies["exact"]["share_of_decoded_rows_seen"] == 1.0
    assert policies["approximate"]["share_of_decoded_rows_seen"] == 1.0
    assert policies["trim"]["share_of_decoded_rows_seen"] < 0.9


def test_levers_are_compared_on_the_same_positions(capsys):
    report = json.loads(run(capsys, "acceptance", "--levers", "--positions", "9", "--num-drafts", "2", "--json"))
    assert set(report) == FORM
    assert report["command"] == "drafter-service bench acceptance --levers --positions 9 --num-drafts 2 --json"
    cases = report["figures"]["cases"]
    assert cases[0]["lever"] == "default"
    assert {case["lever"] for case in cases} == {"default", *LEVERS, "min_logprob"}
    assert all(case["rounds"] == 9 for case in cases)
    assert (cases[0]["first_won"], cases[0]["first_lost"], cases[0]["offered"]) == (0, 0, 18)
    assert all(case["first_won"] == 0 for case in cases if case["lever"] == "min_logprob")


@pytest.mark.parametrize("count", ["0", "-1", "1000000"])
def test_positions_that_the_texts_do_not_have_are_refused(capsys, count):
    assert main(["bench", "acceptance", "--levers", "--positions", count]) == 2
    assert "--positions" in capsys.readouterr().err


def test_sessions_measures_both_ways_of_asking(capsys):
    figures = json.loads(run(capsys, "sessions", "--sequences", "50", "--rounds", "1", "--json"))["figures"]
    assert figures["together_us_p50"] > 0 < figures["one_call_us_p50"]
    assert len(figures["goals"]) == 1


def test_table_is_for_people_and_names_the_device(capsys):
    text = run(capsys, "acceptance", "--positions", "2", "--prompts", "1")
    assert "mean accept length" in text
    assert "cores" in text.splitlines()[-1]


def test_tiny_head_is_a_checkpoint_like_any_other(tmp_path):
    plan = plan_head(write_tiny_head(tmp_path, 5000))
    assert plan.config.max_position == 5000


@pytest.mark.parametrize("path", sorted((ROOT / "tests/benchmarks/results").glob("*.json")), ids=lambda path: path.name)
def test_committed_results_have_the_form_and_are_quoted(path):
    report = json.loads(path.read_text(encoding="utf-8"))
    assert set(report) == FORM
    assert path.name in (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
    assert report["command"] in (ROOT / "BENCHMARKS.md").read_text(encoding="utf-8")
