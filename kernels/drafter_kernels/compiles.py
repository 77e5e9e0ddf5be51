"""Seeing kernels being compiled: what should happen before a service is ready, and never after."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Self


class CompileWatch:
    """Calls `on_compile` with the kernel's name after each compilation, from `open` (or `with`) until `close`.

    Loading a kernel from Triton's cache on disk counts too: it takes tens of milliseconds. One watch at a time: a
    hook that is already there is called as well, and put back by `close`.
    """

    def __init__(self, on_compile: Callable[[str], None]) -> None:
        self._on_compile = on_compile
        self._previous: Callable[..., Any] | None = None
        self._is_open = False

    def open(self) -> Self:
        """Begins to watch. Raises ModuleNotFoundError without Triton."""
        from triton import knobs

        assert not self._is_open
        self._previous = knobs.runtime.jit_post_compile_hook
        knobs.runtime.jit_post_compile_hook = self._compiled
        self._is_open = True
        return self

    def close(self) -> None:
        """Ends it; may be called twice."""
        if not self._is_open:
            return
        from triton import knobs

        knobs.runtime.jit_post_compile_hook = self._previous
        self._is_open = False

    def __enter__(self) -> Self:
        return self.open()

    def __exit__(self, *_: object) -> None:
        self.close()

    def _compiled(self, *args: Any, **kwargs: Any) -> Any:
        function = kwargs.get("fn")
        self._on_compile(str(getattr(function, "name", function)))
        return None if self._previous is None else self._previous(*args, **kwargs)
