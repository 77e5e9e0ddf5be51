"""Pings: an idle client is not cut off, and the connection is still the same one afterwards.

Minutes are scaled down: the service allows a ping in as much less time than it really does as the client pings more
often.
"""

import re

import pytest

from conformance.place import Place
from conformance.proxy import GOAWAY
from conformance.world import World
from drafter_service.server import app
from repository import ROOT
from serving import temporary_directory, wait_until
from specdraft import channel

LIMIT = "grpc.http2.min_ping_interval_without_data_ms"
PING = 6
SCALE = 400  # 10 s become 25 ms, and 60 s 150 ms


def go_keepalive_ms():
    text = (ROOT / "clients/go/specdraft/options.go").read_text(encoding="utf-8")
    (seconds,) = re.findall(r"keepaliveTime\s+= (\d+) \* time\.Second", text)
    return int(seconds) * 1000


def test_both_clients_ping_much_more_rarely_than_the_service_allows():
    for interval_ms in (channel._KEEPALIVE_TIME_MS, go_keepalive_ms()):
        assert interval_ms >= 5 * app.MIN_PING_INTERVAL_S * 1000


@pytest.fixture
def place(checkpoint, monkeypatch, request):
    """A service that allows a ping in `request.param` milliseconds."""
    real = app.grpc.server

    def server(*arguments, options=(), **named):
        options = [(name, request.param if name == LIMIT else value) for name, value in options]
        return real(*arguments, options=options, **named)

    monkeypatch.setattr(app.grpc, "server", server)
    place = Place(checkpoint, {})
    yield place
    place.close()


@pytest.mark.parametrize("place", [app.MIN_PING_INTERVAL_S * 1000 // SCALE], indirect=True)
def test_an_idle_client_keeps_its_connection(driver, place):
    interval_ms = go_keepalive_ms() if driver.name == "go" else channel._KEEPALIVE_TIME_MS
    with temporary_directory() as directory:
        world = World(driver, place, directory, is_proxied=True)
        world.run({"open": {"keepalive_ms": interval_ms // SCALE}}, {})
        world.run({"open_sequence": {}}, {})
        world.run({"prefill": {"tokens": 6}}, {})
        # Each ping is answered by one; a service that minded would end the connection at the third. gRPC for Python
        # sends two without data and then waits for seconds.
        wanted = world.proxy.frames.counts.get(PING, 0) + (6 if driver.name == "go" else 2)
        wait_until(lambda: world.proxy.frames.counts.get(PING, 0) >= wanted, text="pings")
        world.run({"propose": {"key": 5}}, {})
        assert world.proxy.frames.counts.get(GOAWAY, 0) == 0
        assert world.proxy.num_connections == 1
        world.close()


@pytest.mark.parametrize("place", [60_000], indirect=True)
def test_a_client_that_pings_too_often_would_be_noticed(start_driver, place):
    # The Go client's: gRPC for Python itself sends few pings without data.
    with temporary_directory() as directory:
        world = World(start_driver("go"), place, directory, is_proxied=True)
        world.run({"open": {"keepalive_ms": 30}}, {})
        wait_until(lambda: world.proxy.frames.counts.get(GOAWAY, 0) > 0, text="a GOAWAY")
        world.close()
