"""Services and clients for the end-to-end tests."""

import pytest

from checkpoints import write_tiny_checkpoint
from scenes import make_scene
from serving import running


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("head"))


@pytest.fixture(scope="session")
def shared_server(tiny_checkpoint):
    """One service for all tests that leave nothing behind."""
    with running(tiny_checkpoint, max_sessions=64) as server:
        yield server


@pytest.fixture
def start(tiny_checkpoint):
    """Starts services of a test's own; the keyword arguments are settings."""
    stack = []

    def start_one(**changes):
        context = running(tiny_checkpoint, **changes)
        server = context.__enter__()
        stack.append(context)
        return server

    yield start_one
    while stack:
        stack.pop().__exit__(None, None, None)


@pytest.fixture
def scene(shared_server):
    with make_scene(shared_server) as made:
        yield made
