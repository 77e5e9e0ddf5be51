"""A real Prometheus scrapes a real service under the demo's load: rules, alerts, every query of the dashboard."""

import re
import time
import urllib.request

import pytest
import watched_demo
import yaml
from watched_demo import RULES, as_grafana_asks, read_panels

from chart import CHART, debian_tool, run
from specdraft import Client

LOAD_S = 8.0
NUM_SESSIONS = 1000
ALERT_TESTS = CHART / "alerts" / "tests" / "alerts.yaml"


def rules():
    return [rule for group in yaml.safe_load(RULES.read_text(encoding="utf-8"))["groups"] for rule in group["rules"]]


ALERTS = sorted(rule["alert"] for rule in rules() if "alert" in rule)
RECORDED = sorted(rule["record"] for rule in rules() if "record" in rule)


@pytest.fixture(scope="module")
def watched():
    debian_tool("prometheus")
    with watched_demo.watched_demo() as running:
        running.load(LOAD_S)
        yield running


def test_promtool_takes_the_rules():
    done = run([debian_tool("promtool"), "check", "rules", RULES])
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{len(rules())} rules found" in done.stdout


def test_every_alert_fires_when_it_should_and_is_silent_when_not():
    done = run([debian_tool("promtool"), "test", "rules", ALERT_TESTS])
    assert done.returncode == 0, done.stdout + done.stderr
    cases = [case for test in yaml.safe_load(ALERT_TESTS.read_text())["tests"] for case in test["alert_rule_test"]]
    fire = {case["alertname"] for case in cases if case["exp_alerts"]}
    silent = {case["alertname"] for case in cases if not case["exp_alerts"]}
    assert sorted(fire) == sorted(silent) == ALERTS


def test_promtool_sees_an_alert_that_does_not_do_what_its_case_says(tmp_path):
    text = ALERT_TESTS.read_text(encoding="utf-8").replace("../rules.yaml", str(RULES))
    wrong = tmp_path / "wrong.yaml"
    wrong.write_text(text.replace("exp_alerts: []", "exp_alerts: [{}]", 1), encoding="utf-8")
    assert run([debian_tool("promtool"), "test", "rules", wrong]).returncode != 0


def test_the_target_is_up_and_every_rule_is_well(watched):
    def target():
        (found,) = watched.prometheus.ask("targets")["activeTargets"]
        return found

    # One scrape may come late on a busy machine: Prometheus gives it no more than the time between two.
    watched_demo.wait_for(lambda: target()["health"] == "up", 10, "the target")
    loaded = [rule for group in watched.prometheus.ask("rules")["groups"] for rule in group["rules"]]
    assert sorted(rule["name"] for rule in loaded) == sorted(ALERTS + RECORDED)
    assert {rule["health"] for rule in loaded} == {"ok"}


@pytest.mark.parametrize("name", RECORDED)
def test_every_recorded_series_has_data_under_load(watched, name):
    found = watched_demo.wait_for(
        lambda: watched.prometheus.ask("query", query=name)["result"], timeout_s=10, what=name
    )
    assert all(float(item["value"][1]) == float(item["value"][1]) for item in found), "a NaN"


PANEL_QUERIES = [(panel.title, query.expr) for panel in read_panels() for query in panel.queries]


@pytest.mark.parametrize(("title", "expr"), PANEL_QUERIES)
def test_every_query_of_the_dashboard_returns_data_under_load(watched, title, expr):
    assert "$__rate_interval" in expr or "rate(" not in expr
    asked = as_grafana_asks(expr, "60s")
    found = watched_demo.wait_for(lambda: watched.prometheus.ask("query", query=asked)["result"], 10, title)
    assert all(float(item["value"][1]) == float(item["value"][1]) for item in found), "a NaN"


def test_what_is_recorded_is_what_was_counted(watched):
    with urllib.request.urlopen(watched.metrics, timeout=10) as answer:
        page = answer.read().decode()
    counted = {
        name: float(re.search(rf"^specdraft_{name}_total (\S+)$", page, re.MULTILINE)[1])
        for name in ("accepted_tokens", "proposals", "draft_tokens")
    }
    values = {name: watched_demo.wait_for(lambda name=name: scraped(watched, name), 10, name) for name in counted}
    assert values == counted
    length = watched.prometheus.value("specdraft:accept_length:mean5m")
    assert 1.5 < length < 4
    ratio = watched.prometheus.value("specdraft:acceptance:ratio5m")
    assert length == pytest.approx(1 + ratio * counted["draft_tokens"] / counted["proposals"], rel=0.15)


def scraped(watched, name):
    """The counter's value once Prometheus has what stands still by now."""
    value = watched.prometheus.value(f"specdraft_{name}_total")
    ((_, points),) = watched.prometheus.series(f"specdraft_{name}_total", time.time() - 3, time.time(), 0.5)
    return value if len({at_rest for _, at_rest in points}) == 1 else None


def num_series(watched):
    return watched.prometheus.value("scrape_samples_scraped")


def test_no_metric_grows_series_with_sessions(watched):
    def scrape_after(moment):
        seen = f'timestamp(up{{job="specdraft"}}) > {moment} and up{{job="specdraft"}} == 1'
        watched_demo.wait_for(lambda: watched.prometheus.ask("query", query=seen)["result"], 20, "a scrape")
        return num_series(watched)

    ended = 'specdraft_sessions_ended_total{end_reason="closed"}'
    before, num_before = scrape_after(time.time()), watched.prometheus.value(ended)
    for number in range(NUM_SESSIONS):
        with Client(watched.service, client_name=f"client-{number}") as client, client.open_sequence():
            pass
    assert scrape_after(time.time()) == before
    assert watched.prometheus.value(ended) == num_before + NUM_SESSIONS
    assert watched.prometheus.value("specdraft_sessions") == 0
