"""The repository's own files, for the tests that check its habits."""

import ast
import functools
import subprocess
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
GENERATED = ("clients/python/specdraft/v1/", "clients/go/specdraft/v1/")
HELD_OUT_TEXTS = "drafter_service/demo/texts/"


@functools.cache
def files() -> tuple[str, ...]:
    """Paths that are, or are about to be, under version control; `/` between the parts."""
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    listing = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True).stdout
    return tuple(sorted(path for path in listing.split("\0") if path and (ROOT / path).is_file()))


def sources(*suffixes: str) -> list[str]:
    """The files with these suffixes that people write: neither generated nor held-out texts."""
    return [path for path in files() if path.endswith(suffixes) and not path.startswith((*GENERATED, HELD_OUT_TEXTS))]


@functools.cache
def tree(path: str) -> ast.Module:
    return ast.parse((ROOT / path).read_text(encoding="utf-8"), filename=path)


def packages() -> dict[str, str]:
    """Import name of every package that people write, and the path of its `__init__.py`."""
    found = {}
    for path in sources("/__init__.py"):
        folder = path.removesuffix("/__init__.py")
        for root in ("kernels/", "clients/python/", ""):
            if folder.startswith(root):
                found[folder.removeprefix(root).replace("/", ".")] = path
                break
    return found
