"""Draws every panel of the dashboard with the data of one run of the demo's load, and the page that shows them.

    PYTHONPATH=.:kernels:clients/python .venv/bin/python helm/tools/pictures.py [--seconds 90]

Needs `make setup` and Prometheus. Writes docs/pictures/*.svg and docs/dashboard.md of the chart.
"""

from __future__ import annotations

import argparse
import datetime as dt
import math
import platform
import re
import time
from pathlib import Path

from drawing import draw
from watched_demo import CHART, NUM_DRAFTS, Panel, Prometheus, as_grafana_asks, read_panels, watched_demo

DOCS = CHART / "docs"
RATE_INTERVAL = "10s"
STEP_S = 1.0

HEAD = """# The dashboard, panel by panel

Made by `python helm/tools/pictures.py`: the queries of `dashboards/specdraft.json`, asked of a Prometheus that scraped
the demo's service for {seconds:.0f} s ({date}, {machine}). One target generated held-out code with {drafts} drafts a
round, one generation after the other, each in a session of its own, followed by one carry and one call that is refused
on purpose. Rates are over {interval}, and the first {interval} are left out. **These are the demo's small models on a
CPU that had other work at the same time**: the pictures show what a panel looks like, not what a GPU does.
"""


def series_of(
    prometheus: Prometheus, panel: Panel, begin: float, end: float
) -> list[tuple[str, list[tuple[float, float]]]]:
    """Legend and (seconds since begin, value) of everything that the panel shows."""
    lines = []
    for query in panel.queries:
        asked = as_grafana_asks(query.expr, RATE_INTERVAL)
        for labels, points in prometheus.series(asked, begin, end, STEP_S):
            legend = re.sub(r"\{\{(\w+)\}\}", lambda match, labels=labels: labels.get(match[1], ""), query.legend)
            legend = re.sub(r"^127\.0\.0\.1:\d+$", "drafter:9464", legend)
            lines.append(
                (legend or panel.title, [(at - begin, value) for at, value in points if not math.isnan(value)])
            )
    return lines


def picture_name(number: int, panel: Panel) -> str:
    return f"{number:02d}-{re.sub(r'[^a-z0-9]+', '-', panel.title.lower()).strip('-')}.svg"


def main() -> int:
    parser = argparse.ArgumentParser(description="draws the dashboard's panels")
    parser.add_argument("--seconds", type=float, default=90.0)
    seconds = parser.parse_args().seconds
    folder = DOCS / "pictures"
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.svg"):
        old.unlink()
    with watched_demo() as watched:
        begin = time.time()
        watched.load(seconds)
        end = time.time()
        begin += float(RATE_INTERVAL.removesuffix("s"))
        page = [
            HEAD.format(
                seconds=end - begin,
                date=dt.datetime.now(tz=dt.UTC).date(),
                machine=f"{platform.machine()}, Python {platform.python_version()}",
                drafts=NUM_DRAFTS,
                interval=RATE_INTERVAL.replace("s", " s"),
            )
        ]
        for number, panel in enumerate(read_panels(), 1):
            lines = series_of(watched.prometheus, panel, begin, end)
            assert lines, f"{panel.title}: no data"
            name = picture_name(number, panel)
            Path(folder / name).write_text(
                draw(panel.title, panel.unit, lines, stacked=panel.stacked), encoding="utf-8"
            )
            page.append(caption(name, panel))
    (DOCS / "dashboard.md").write_text("\n".join(page), encoding="utf-8")
    return 0


def caption(name: str, panel: Panel) -> str:
    """A panel's part of the page."""
    shown = " In Grafana the last value, as a number." if panel.kind == "stat" else ""
    queries = "\n".join(query.expr for query in panel.queries)
    return (
        f"## {panel.title}\n\n{panel.text}{shown}\n\n![{panel.title}](pictures/{name})\n\n```promql\n{queries}\n```\n"
    )


if __name__ == "__main__":
    raise SystemExit(main())
