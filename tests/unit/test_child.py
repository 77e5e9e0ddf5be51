"""Processes of ours that we start: what they import, and what becomes of one that says something unexpected."""

import pytest

from drafter_service.config import ServiceConfig
from drafter_service.server import process
from drafter_service.server.child import Child, ProcessError


@pytest.fixture
def module(tmp_path, monkeypatch):
    """Writes a module that is found here by `sys.path` alone."""
    monkeypatch.syspath_prepend(tmp_path)

    def write(text):
        (tmp_path / "only_here.py").write_text(text, encoding="utf-8")
        return "only_here"

    return write


def test_a_child_imports_what_we_import_whatever_its_variables_say(module):
    with Child(module("print('found')"), (), {"PYTHONPATH": "/nowhere"}) as child:
        assert child.first_line("it") == "found\n"


def test_a_service_that_says_something_else_first_has_not_come_up_and_is_ended(module, monkeypatch, tmp_path):
    started = []

    def start(_module, _flags):
        started.append(Child(module("import time\nprint('hello', flush=True)\ntime.sleep(60)"), ()))
        return started[-1]

    monkeypatch.setattr(process, "Child", start)
    service = process.ServiceProcess(ServiceConfig(checkpoint=tmp_path))
    with pytest.raises(ProcessError, match="it said 'hello'"):
        service.__enter__()
    assert started[0].process.returncode is not None
