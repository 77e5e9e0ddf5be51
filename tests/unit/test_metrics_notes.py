"""What the hot path notes is counted by the time somebody looks, however he looks."""

import threading

from prometheus_client import CollectorRegistry

from drafter_service.telemetry import Metrics
from drafter_service.telemetry.metrics import MAX_NOTED


def test_a_scrape_sees_everything_that_was_noted_before_it():
    registry = CollectorRegistry()
    metrics = Metrics(registry, 8)
    metrics.batch_run(2, 5, 0.25)
    metrics.write_done(3, "COMPLETE")
    metrics.round_judged(3, 2)
    assert registry.get_sample_value("specdraft_rows_written_total", {"kind": "exact"}) == 5
    assert registry.get_sample_value("specdraft_device_busy_seconds_total") == 0.25
    assert registry.get_sample_value("specdraft_draft_tokens_total") == 3
    assert registry.get_sample_value("specdraft_accepted_tokens_per_index_total", {"draft_index": "1"}) == 1
    assert registry.get_sample_value("specdraft_accepted_tokens_per_index_total", {"draft_index": "2"}) == 0


def test_notes_that_nobody_scrapes_are_entered_all_the_same():
    metrics = Metrics(CollectorRegistry(), 8)
    for _ in range(MAX_NOTED + 1):
        metrics.queued(1e-3)
    assert metrics._stages["queue"]._sum.get() > 0


def test_threads_that_note_while_others_scrape_lose_nothing():
    registry = CollectorRegistry()
    metrics = Metrics(registry, 8)

    def work():
        for _ in range(3000):
            metrics.write_done(1, "COMPLETE")

    threads = [threading.Thread(target=work) for _ in range(3)]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        registry.get_sample_value("specdraft_proposals_total")
    assert registry.get_sample_value("specdraft_proposals_total") == 9000


def test_kernels_compiled_while_serving_are_counted_and_named(caplog):
    registry = CollectorRegistry()
    metrics = Metrics(registry, 8)
    with caplog.at_level("WARNING", logger="drafter_service"):
        metrics.jit_compiled("lm_head")
    assert registry.get_sample_value("specdraft_jit_compiles_total") == 1
    assert "lm_head" in caplog.text
