"""Streams for waits, on a simulated GPU whose streams share few hardware queues."""

import pytest

from drafter_service.memory import hardware_queues
from drafter_service.memory.hardware_queues import find_streams
from specdraft.memory.counters import CounterPage
from specdraft.memory.cuda import DEFAULT_STREAM
from specdraft.memory.simulated import SimulatedDriver


@pytest.fixture
def make(tmp_path, monkeypatch):
    monkeypatch.setattr(hardware_queues, "GONE_S", 0.05)
    made = []

    def make_one(num_queues):
        made.append(SimulatedDriver(tmp_path, num_queues=num_queues))
        made[-1].make_current(0)
        return made[-1]

    yield make_one
    for driver in made:
        driver.close()


@pytest.mark.parametrize(("num_queues", "num_found"), [(16, 6), (5, 3), (2, 0)])
def test_what_is_found_can_wait_all_at_once_and_stops_nobody(make, num_queues, num_found):
    driver = make(num_queues)
    busy = driver.create_stream()
    must_go = [DEFAULT_STREAM, busy]
    found = find_streams(driver, 0, 6, must_go)
    assert len(found) == num_found, "a queue each, and none of those that must go"
    assert driver.num_open_waits == driver.num_registered == 0
    assert driver.num_streams == 1 + num_found, "what was of no use is given back"
    page = CounterPage()
    pointer = driver.register_host(page.address, 4096)
    for index, stream in enumerate(found):
        driver.wait_value(stream, pointer, 1)
        driver.write_value(stream, pointer + 8 * (index + 1), 1)
    for stream in must_go:
        driver.synchronize(stream)
    assert driver.num_open_waits == num_found
    page.store(0, 1)
    for index, stream in enumerate(found):
        driver.synchronize(stream)
        assert page.load(8 * (index + 1)) == 1
    driver.unregister_host(page.address)


def test_too_few_queues_are_logged(make, caplog):
    find_streams(make(3), 0, 6, [DEFAULT_STREAM])
    assert "only 2 of 6 streams can wait at once" in caplog.text
