"""A process that a benchmark starts beside the service: it ends when whoever started it ends, however that was."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import NoReturn, Self

STOP_TIMEOUT_S = 40.0
"""Longer than a service may take to drain: a child may have one of its own."""


class Child:
    """Runs a module of ours while the `with` block lasts; its standard output is read here.

    Args:
        module: its name.
        arguments: the command line's.
        environment: of the process.
    """

    def __init__(self, module: str, arguments: tuple[str, ...], environment: Mapping[str, str]) -> None:
        # Never written to: it breaks however we end. A pipe that `communicate` does not know and so does not close.
        stdin, self._held = os.pipe()
        try:
            self.process = subprocess.Popen(
                [sys.executable, "-m", module, *arguments],
                stdin=stdin,
                stdout=subprocess.PIPE,
                text=True,
                env=environment,
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
