"""A process of ours that we start: it ends when whoever started it ends, however that was."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn, Self

START_TIMEOUT_S = 120.0

STOP_TIMEOUT_S = 40.0
"""Longer than a service may take to drain: a child may have one of its own."""


class ProcessError(RuntimeError):
    """A process did not come up; its own line about why stands on standard error."""


class Child:
    """Runs a module of ours while the `with` block lasts; its standard output is read here.

    It imports what we import, wherever that was found.

    Args:
        module: its name.
        arguments: the command line's.
        environment: variables that differ from ours.
    """

    def __init__(self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str] | None = None) -> None:
        paths = os.pathsep.join(path for path in sys.path if path)
        # Never written to: it breaks however we end. A pipe that `communicate` does not know and so does not close.
        stdin, self._held = os.pipe()
        try:
            self.process = subprocess.Popen(  # noqa: S603  # our own interpreter and modules
                [sys.executable, "-m", module, *arguments],
                stdin=stdin,
                stdout=subprocess.PIPE,
                text=True,
                env=os.environ | dict(environment or {}) | {"PYTHONPATH": paths},
                process_group=0,  # Ctrl-C is ours: we end it
            )
        except BaseException:
            os.close(self._held)
            raise
        finally:
            os.close(stdin)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def first_line(self, name: str) -> str:
        """Waits for the line in which it says that it is ready. Raises ProcessError, which calls it by `name`."""
        stdout = self.process.stdout
        assert stdout is not None, "it was asked for"
        readable, _, _ = select.select([stdout], [], [], START_TIMEOUT_S)
        if not readable:
            raise ProcessError(f"{name} did not come up within {START_TIMEOUT_S:.0f} s")
        line = stdout.readline()
        if not line:
            code = self.process.wait(STOP_TIMEOUT_S)
            raise ProcessError(f"{name} did not come up: it ended with exit code {code}")
        return line

    def close(self) -> None:
        """Ends the process."""
        self.process.terminate()
        os.close(self._held)
        try:
            self.process.wait(STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        if self.process.stdout is not None:
            self.process.stdout.close()


def end_with_parent() -> None:
    """In the child: the end of standard input counts as SIGTERM."""

    def watch() -> None:
        while os.read(sys.stdin.fileno(), 1 << 10):
            pass
        os.kill(os.getpid(), signal.SIGTERM)

    threading.Thread(target=watch, name="stdin", daemon=True).start()


def unwind_at_sigterm() -> None:
    """In the child: SIGTERM unwinds the stack, so that what it has started and written is cleared away."""

    def end(number: int, _frame: object) -> NoReturn:
        signal.signal(number, signal.SIG_IGN)  # what is being cleared away must not be interrupted
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, end)
