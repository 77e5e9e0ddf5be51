"""Compiles kernels for Hopper on a machine without a GPU: the calls are made as always, and nothing is launched."""

from __future__ import annotations

import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

TARGET = GPUTarget("cuda", 90, 32)


class NoDevice:
    """What Triton asks a driver for before it compiles."""

    def get_current_target(self) -> GPUTarget:
        """Hopper."""
        return TARGET

    def get_current_device(self) -> int:
        """The only one."""
        return 0

    def get_current_stream(self, _device: int) -> int:
        """The default stream."""
        return 0

    def get_active_torch_device(self) -> torch.device:
        """Where the tensors are."""
        return torch.device("cpu")


@dataclass(frozen=True)
class Compiled:
    """A kernel as the assembler left it. `stack_bytes` > 0 means that registers were spilled, or an indexed array."""

    name: str
    num_registers: int
    stack_bytes: int
    shared_bytes: int
    ptx: str
    sass: str


@contextmanager
def compiling_for_hopper() -> Iterator[list[Any]]:
    """Within this, launches compile for Hopper and do nothing else; yields the list that the compiled kernels go to.

    Needs a process of its own, in which TRITON_INTERPRET is not set. Tensors are on the CPU, and may be empty memory.
    """
    launched: list[Any] = []
    plain = JITFunction.run

    def compile_only(self: Any, *args: Any, **kwargs: Any) -> None:
        launched.append(plain(self, *args, **kwargs | {"warmup": True}))

    driver.set_active(NoDevice())
    JITFunction.run = compile_only
    try:
        yield launched
    finally:
        JITFunction.run = plain


def examine(kernel: Any) -> Compiled:
    """Reads registers, stack and machine code with the tools that Triton brings."""
    tools = Path(triton.__file__).parent / "backends" / "nvidia" / "bin"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        usage = _output(tools / "cuobjdump", "-res-usage", file.name)
        sass = _output(tools / "nvdisasm", "-c", file.name)
    found = re.search(r"REG:(\d+) STACK:(\d+)", usage)
    assert found, usage
    return Compiled(kernel.metadata.name, int(found[1]), int(found[2]), kernel.metadata.shared, kernel.asm["ptx"], sass)


def _output(*command: str | Path) -> str:
    # Triton's own tools.
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout  # noqa: S603
