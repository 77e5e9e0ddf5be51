"""What the conformance tests share: one head, one driver process a client, one service."""

import pytest

from checkpoints import write_tiny_checkpoint
from conformance.drivers import LANGUAGES, Driver, command_of, go_tool
from conformance.place import Place


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def go():
    """The Go tool."""
    if go_tool() is None:
        pytest.skip("go is missing: `make go` installs it")
    return go_tool()


@pytest.fixture(scope="session")
def start_driver(tmp_path_factory, request):
    """A client's driver, started once."""
    drivers = {}

    def start(language):
        if language not in drivers:
            if language == "go":
                request.getfixturevalue("go")
            drivers[language] = Driver(command_of(language, tmp_path_factory.mktemp(language)), language)
        return drivers[language]

    yield start
    for driver in drivers.values():
        driver.close()


@pytest.fixture(scope="session", params=LANGUAGES)
def driver(request, start_driver):
    return start_driver(request.param)


@pytest.fixture(scope="session")
def shared_place(checkpoint):
    place = Place(checkpoint, {"max_sessions": 64})
    yield place
    place.close()
