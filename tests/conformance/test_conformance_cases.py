"""Every client gives the same answers: the cases of cases/*.yaml against the real service."""

import pytest

from checkpoints import write_tiny_checkpoint
from conformance.drivers import LANGUAGES, Driver, command_of, go_tool
from conformance.place import Place
from conformance.reading import load_cases
from conformance.world import World
from serving import temporary_directory

CASES = load_cases()


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="module", params=LANGUAGES)
def driver(request, tmp_path_factory):
    if request.param == "go" and go_tool() is None:
        pytest.skip("go is missing: `make go` installs it")
    driver = Driver(command_of(request.param, tmp_path_factory.mktemp("driver")), request.param)
    yield driver
    driver.close()


@pytest.fixture(scope="module")
def shared_place(checkpoint):
    place = Place(checkpoint, {"max_sessions": 64})
    yield place
    place.close()


@pytest.mark.parametrize("case", CASES, ids=[case["name"] for case in CASES])
def test_case(case, driver, shared_place, checkpoint):
    settings = case.get("server")
    place = shared_place if settings is None else Place(checkpoint, settings)
    try:
        with temporary_directory() as directory:
            world = World(driver, place, directory, is_proxied=case.get("proxy", False))
            try:
                for step in case["steps"]:
                    world.run(step, {})
                world.check_comparisons()
            finally:
                world.close()
    finally:
        if place is not shared_place:
            place.close()
