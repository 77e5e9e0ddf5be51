"""The chart's guides name what is there."""

import json
import re

import yaml
from prometheus_client import CollectorRegistry

from drafter_service.telemetry import Metrics
from repository import ROOT
from specdraft.errors import Reason

CHART = ROOT / "helm" / "drafter-service"
DOCS = CHART / "docs"
PANELS = json.loads((CHART / "dashboards" / "specdraft.json").read_text(encoding="utf-8"))["panels"]
RULES = yaml.safe_load((CHART / "alerts" / "rules.yaml").read_text(encoding="utf-8"))


def text_of(name):
    return (DOCS / name).read_text(encoding="utf-8")


def test_every_link_and_picture_leads_to_a_file():
    pages = [CHART / "README.md", *DOCS.glob("*.md")]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#:]+)(?:#[^)]*)?\)", page.read_text())]
    assert len(links) > 20
    assert [f"{page.name}: {link}" for page, link in links if not (page.parent / link).exists()] == []


def test_every_shape_and_every_topic_has_its_guide():
    names = {
        "sidecar",
        "paired",
        "node",
        "deployment",
        "failures",
        "watching",
        "capacity",
        "upgrades",
        "dashboard",
        "gpus",
    }
    assert {page.stem for page in DOCS.glob("*.md")} == names


def test_every_panel_has_its_picture_and_its_query_on_the_page():
    page = text_of("dashboard.md")
    pictures = re.findall(r"!\[([^]]+)\]\((pictures/[^)]+)\)", page)
    assert [title for title, _ in pictures] == [panel["title"] for panel in PANELS]
    for _, path in pictures:
        assert re.search(r"<poly(line|gon) points=\"[\d.]+,[\d.]+ ", (DOCS / path).read_text(encoding="utf-8"))
    assert {path.name for path in (DOCS / "pictures").iterdir()} == {path.split("/")[1] for _, path in pictures}
    for panel in PANELS:
        for target in panel["targets"]:
            assert target["expr"] in page


def test_every_alert_is_told():
    page = text_of("watching.md")
    alerts = {rule["alert"] for group in RULES["groups"] for rule in group["rules"] if "alert" in rule}
    assert alerts == set(re.findall(r"^\| `(Specdraft\w+)` \|", page, re.MULTILINE))


def test_every_metric_is_told_and_no_other():
    metrics = Metrics(CollectorRegistry(), 8)
    metrics.watch({"sessions": float, "sequences": float, "regions_open": float}, {"free": float}, {"kv": float})
    metrics.describe_process("0")
    metrics.describe_head({})
    suffixes = {"counter": "_total", "info": "_info"}
    families = [family for family in metrics.registry.collect() if family.name.startswith("specdraft_")]
    names = {family.name + suffixes.get(family.type, "") for family in families}
    page = text_of("watching.md").partition("## Rules and alerts")[0]
    assert set(re.findall(r"`(specdraft_\w+)`", page)) == names


def test_every_reason_that_the_failure_table_names_is_one():
    words = set(re.findall(r"`([A-Z]+_[A-Z_]+)`", text_of("failures.md")))
    known = {str(reason.value) for reason in Reason} | {"NOT_SERVING", "FAILED_PRECONDITION"}
    assert len(words) >= 4
    assert words <= known
