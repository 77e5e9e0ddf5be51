"""Every benchmark runs, at sizes too small to mean anything, and gives its result in the form that is committed."""

import json
import socket
from contextlib import ExitStack, suppress

import pytest
from prometheus_client import CollectorRegistry

from drafter_service.bench import rpc, tax
from drafter_service.bench.metrics import count_round
from drafter_service.bench.samples import Latency
from drafter_service.bench.tax_measure import TaxRun
from drafter_service.bench.tax_steps import NUM_VARIANTS
from drafter_service.bench.tiny_head import write_tiny_head
from drafter_service.cli import main
from drafter_service.config import LEVERS, ServiceConfig
from drafter_service.heads import plan_head
from drafter_service.telemetry import Metrics
from repository import ROOT
from serving import wait_until
from wire import Story

FORM = {"name", "device", "versions", "date", "command", "figures"}


def run(capsys, *arguments):
    assert main(["bench", *arguments]) == 0
    return capsys.readouterr().out


@pytest.fixture
def usual_ports_taken():
    """As beside a service that runs with the default settings."""
    with ExitStack() as stack:
        for port in (ServiceConfig().metrics_port, ServiceConfig().health_port):
            listener = stack.enter_context(socket.socket())
            with suppress(OSError):  # somebody has it: as good
                listener.bind(("0.0.0.0", port))
                listener.listen()
        yield


@pytest.mark.usefixtures("usual_ports_taken")
def test_rpc_measures_service_echo_and_forward_in_one_run(capsys):
    report = json.loads(run(capsys, "rpc", "--rounds", "1", "--calls", "4", "--json"))
    assert set(report) == FORM
    assert report["command"] == "drafter-service bench rpc --rounds 1 --calls 4 --json"
    figures = report["figures"]
    ways = ("unary", "drive")
    assert set(figures["cases"]) == {"forward", "client drive"} | {
        f"{case} {way}" for case in ("echo", "empty", "apart", "floor", "propose") for way in ways
    }
    assert all(case["p99_us"] >= case["p50_us"] > 0 for case in figures["cases"].values())
    for name, least in (("tax_us", "floor"), ("above_apart_us", "apart")):
        assert set(figures[name]) == set(ways)
        for way, measured in figures[name].items():
            assert set(measured) == {"quartile_1", "median", "quartile_3", "of_p50s"}
            propose, other = (figures["cases"][f"{case} {way}"]["p50_us"] for case in ("propose", least))
            assert measured["of_p50s"] == pytest.approx(propose - other, abs=0.1)
    assert set(figures["ratios"]) == {"empty unary", "empty drive"}  # a multiple says nothing of a forward
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


def latency(*p50s_us):
    return Latency(p50s_us, p50s_us)


def test_tax_is_taken_round_by_round_and_has_its_spread():
    latencies = {"propose unary": latency(12.0, 25.0, 30.0), "floor unary": latency(10.0, 20.0, 29.0)}
    measured = rpc._tax(latencies, "unary")
    assert measured == {"quartile_1": 1.5, "median": 2.0, "quartile_3": 3.5, "of_p50s": 5.0}
    assert "2 us (2 to 4); of the p50s 5 us" in rpc._tax_line("unary", measured)


def test_tax_below_nothing_is_called_noise():
    measured = rpc._tax({"propose unary": latency(9.0), "floor unary": latency(10.0)}, "unary")
    assert "within noise (-1 to -1)" in rpc._tax_line("unary", measured)


@pytest.mark.parametrize("levers", [[], ["--levers"]], ids=["rounds", "levers"])
def test_positions_that_the_texts_do_not_have_are_refused(capsys, levers):
    assert main(["bench", "acceptance", *levers, "--positions", "1000000"]) == 2
    assert "--positions: 1000000 positions" in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments",
    [
        ("demo", "--prompts", "0"),
        ("demo", "--num-drafts", "99"),
        ("demo", "--turns", "0"),
        ("demo", "--new-tokens", "many"),
        ("bench", "rpc", "--rounds", "0"),
        ("bench", "rpc", "--calls", "-1"),
        ("bench", "acceptance", "--positions", "0"),
        ("bench", "acceptance", "--levers", "--positions", "-1"),
        ("bench", "carry", "--rows", "0", "5"),
        ("bench", "sessions", "--sequences", "5000"),
    ],
    ids=" ".join,
)
def test_sizes_that_cannot_be_are_refused_in_one_line(capsys, arguments):
    with pytest.raises(SystemExit) as ended:
        main(arguments)
    assert ended.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    assert next(word for word in arguments if word.startswith("--") and word != "--levers") in line
    assert "is no whole number from 1 to" in line


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


TAX_FIGURES = {
    "verify_ms",
    "single_process_us_p50",
    "added_us_p50_mps",
    "added_us_p50_timesliced",
    "added_us_p50_mps_verify_2ms",
    "late_added_us_p50_mps",
    "host_result_us_p50",
    "echo_us_p50",
    "gpu_us_p50",
}


def test_the_tax_is_measured_by_two_processes_that_share_a_gpu(capsys):
    arguments = ("tax", "--dry", "--verify-ms", "0.1", "--steps", "2", "--turns", "1", "--checks", "60", "--json")
    report = json.loads(run(capsys, *arguments))
    assert set(report) == FORM
    figures = report["figures"]
    assert set(figures) >= TAX_FIGURES
    assert set(figures["runs"]) == {"timesliced", "mps"}
    for one in figures["runs"].values():
        (verify,) = one["verifies"]
        assert verify["single_us_p50"] > 0
        assert verify["single_us_p99"] >= verify["single_us_p50"]
        assert one["gpu_us_p50"] > 0
        assert one["rounds_checked"] == 60
        assert one["service_device"] == "cuda:0"
    assert "drafter_device" not in figures["plan"]
    assert figures["goals"] == {}
    assert report["command"].startswith("drafter-service bench tax --modes timesliced mps --verify-ms 0.1")


def one_run(*verify_ms):
    verifies = [
        {
            "wanted_ms": wanted,
            "verify_ms": wanted + 0.1,
            "single_us_p50": 1000.0,
            "single_us_p99": 1100.0,
            "early_added_us_p50": 5.0,
            "late_added_us_p50": 9.0,
            "early_us_p99": 1110.0,
        }
        for wanted in verify_ms
    ]
    names = ("host_result_us_p50", "echo_us_p50", "gpu_us_p50", "echo_then_gpu_us_p50", "early_host_us_p50")
    others = dict.fromkeys(names, 1.0)
    return {"verifies": verifies, "rounds_checked": 10, "rounds_wrong": 0} | others


@pytest.mark.parametrize(("verify_ms", "num_long"), [((2.0,), 0), ((2.0, 6.0), 1), ((12.0, 6.0), 1)], ids=str)
def test_goals_of_long_verifies_are_judged_by_long_verifies_alone(monkeypatch, verify_ms, num_long):
    monkeypatch.setattr(tax, "_measured", lambda run, environment: one_run(*run.verify_ms))
    figures = tax.measure_tax(tax.TaxPlan(("timesliced", "peer"), TaxRun(verify_ms)))
    assert len([goal for goal in figures["goals"] if "time-sliced" in goal]) == num_long
    assert len([goal for goal in figures["goals"] if "second GPU" in goal]) == 2 * num_long
    assert {mode: run["service_device"] for mode, run in figures["runs"].items()} == {
        "timesliced": "cuda:0",
        "peer": "cuda:1",
    }
    assert figures["plan"]["drafter_device"] == 1
    assert "service_device" not in figures["plan"]["run"]
    assert figures["verify_ms"] == (6.1 if num_long else 2.1)


@pytest.mark.parametrize(
    ("arguments", "needed"),
    [(("tax", "--modes", "timesliced"), "a GPU"), (("tax", "--drafter-device", "1"), "2 GPUs"), (("step",), "a GPU")],
    ids=["tax", "tax-peer", "step"],
)
def test_a_benchmark_of_gpus_without_one_says_so_in_one_line(capfd, monkeypatch, arguments, needed):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["bench", *arguments]) == 2
    lines = [line for line in capfd.readouterr().err.splitlines() if line not in {"timesliced:", "peer:"}]
    assert len(lines) == 1
    assert f"needs {needed}, and 0 are visible" in lines[0]


def test_a_step_is_measured_eager_and_captured(capsys):
    arguments = ("step", "--dry", "--batches", "1", "2", "--drafts", "2", "--steps", "2", "--json")
    figures = json.loads(run(capsys, *arguments))["figures"]
    assert [(one["batch"], one["drafts"]) for one in figures["cases"]] == [(1, 2), (2, 2)]
    assert all(one["eager_us_p50"] > 0 and one["graph_us_p50"] > 0 for one in figures["cases"])


def test_metrics_measures_counting_beside_the_forward(capsys):
    report = json.loads(run(capsys, "metrics", "--rounds", "1", "--json"))
    assert set(report) == FORM
    figures = report["figures"]
    share = figures["counting_us"] / figures["forward_us"]
    assert figures["share"]["median"] == pytest.approx(share, rel=0.01)
    assert 0 < share < 1
    assert all(isinstance(met, bool) for met in figures["goals"].values())


def test_what_is_timed_is_what_a_round_of_the_service_counts(start):
    server = start()
    sequence = server.client().open().sequence(Story(1))
    sequence.propose(0, 3, 3)
    told = []
    for name in [name for name in dir(Metrics) if not name.startswith("_")]:
        tell = getattr(server.service.metrics, name)
        if callable(tell):
            setattr(server.service.metrics, name, lambda *args, tell=tell, name=name: (told.append(name), tell(*args)))
    sequence.propose(3, 3, 3, accepted_drafts=2)
    wait_until(lambda: "rpc_done" in told)
    timed = []
    counted = Metrics(CollectorRegistry(), 8)
    for name in set(told):
        setattr(counted, name, lambda *_, name=name: timed.append(name))
    count_round(counted)
    assert sorted(timed) == sorted(told)


def test_early_rounds_that_drafted_from_older_hidden_states_are_counted(monkeypatch):
    from drafter_service.bench.tax_measure import CHECKS_A_VERIFY, measure
    from drafter_service.bench.tax_steps import Steps
    from drafter_service.bench.tax_target import Device

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    copy, check, copies, in_slot, are_old = Device.copy, Steps.check, [], [], []

    def forgetful(device, target, source):
        copies.append(source)
        if len(copies) <= NUM_VARIANTS or len(copies) % 4:
            copy(device, target, source)
            in_slot[:] = [source]

    def counted(steps):
        are_old.append(in_slot[0] is not copies[-1])
        check(steps)

    monkeypatch.setattr(Device, "copy", forgetful)
    monkeypatch.setattr(Steps, "check", counted)
    figures = measure(TaxRun((0.1,), num_steps=8, num_turns=2, dry=True), lambda _text: None)
    assert figures["rounds_checked"] == len(are_old) == CHECKS_A_VERIFY
    assert figures["rounds_wrong"] == sum(are_old) > 0


def test_a_single_process_that_drafts_less_than_the_service_is_not_timed(monkeypatch):
    from drafter_service.bench import tax_target
    from drafter_service.bench.tax_measure import measure

    monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32")
    fill = tax_target._fill

    def with_a_floor(inputs, num_drafts):
        fill(inputs, num_drafts)
        inputs.min_logprob.fill_(0.0)  # it ends after its first draft

    monkeypatch.setattr(tax_target, "_fill", with_a_floor)
    with pytest.raises(RuntimeError, match="own round drafts 0 of"):
        measure(TaxRun((0.1,), num_steps=1, num_turns=1, dry=True), lambda _text: None)
