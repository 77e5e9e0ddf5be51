"""Folders, files, sizes and words: the habits that CONTRIBUTING.md describes."""

import ast
import re
from collections import Counter
from pathlib import PurePosixPath

import pytest

from repository import HELD_OUT_TEXTS, ROOT, files, sources, tree

FOLDERS = {".ci", "clients", "drafter_service", "helm", "kernels", "proto", "tests"}

ROOT_FILES = {
    ".dockerignore",
    ".editorconfig",
    ".gitattributes",
    ".gitignore",
    ".pre-commit-config.yaml",
    "ARCHITECTURE.md",
    "BENCHMARKS.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "DECISIONS.md",
    "Dockerfile",
    "LICENSE",
    "Makefile",
    "README.md",
    "SECURITY.md",
    "buf.yaml",
    "constraints.txt",
    "pyproject.toml",
}

MODULE_LINES = 500
FUNCTION_LINES = 40
TRITON_KERNEL_LINES = 120

# Functions that are longer, each with its reason: "path::qualified.name".
LONG_FUNCTIONS: dict[str, str] = {}

EXECUTABLE_FORMATS = {"cloudpickle", "dill", "joblib", "marshal", "pickle", "shelve"}

LOCK_FILES = re.compile(
    r"(^|/)([^/]*\.lock|package-lock\.json|npm-shrinkwrap\.json|pnpm-lock\.yaml|[^/]*[.-]lock\.json)$"
)

# Hosts of registries, and paths of one machine. The test below looks for them in every file, this one among them: each
# is cut at a "~", which is taken out before the comparison, so that the list does not find itself.
FORBIDDEN_WORDS = tuple(
    word.replace("~", "")
    for word in (
        "py~pi.org",
        "python~hosted.org",
        "proxy.go~lang.org",
        "sum.go~lang.org",
        "npm~js.org",
        "crates~.io",
        "repo1.~maven.org",
        "deb.~debian.org",
        "/w~ork/",
        "/r~oot/",
        "/h~ome/",
        "co-authored~-by",
    )
)
# Where one of these words is right, with the reason: (path, word).
WORDS_IN_PLACE: dict[tuple[str, str], str] = {}


def python_sources() -> list[str]:
    return sources(".py", ".pyi")


def functions(path: str):
    """(qualified name, node) of every function and method in a module."""

    def walk(node: ast.AST, prefix: str):
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef):
                yield prefix + child.name, child
            named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
            yield from walk(child, f"{prefix}{child.name}." if named else prefix)

    return walk(tree(path), "")


def body_lines(node: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Lines from `def` to the end, without the docstring: documenting never makes a function too long."""
    lines = node.end_lineno - node.lineno + 1
    first = node.body[0]
    if isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant) and isinstance(first.value.value, str):
        lines -= first.end_lineno - first.lineno + 1
    return lines


def is_triton_kernel(node: ast.FunctionDef | ast.AsyncFunctionDef) -> bool:
    """Gluon is Triton's own: the same compiler, with layouts written out."""
    decorators = [ast.unparse(decorator) for decorator in node.decorator_list]
    return any("triton.jit" in decorator or "gluon.jit" in decorator for decorator in decorators)


def test_top_level_folders_are_exactly_the_known_ones():
    assert {path.split("/")[0] for path in files() if "/" in path} == FOLDERS


def test_files_at_the_root_are_known_ones():
    assert {path for path in files() if "/" not in path} <= ROOT_FILES


def test_folders_that_are_no_packages_have_no_init():
    no_packages = ("clients/__init__.py", "clients/python/__init__.py", "kernels/__init__.py")
    found = [
        p for p in files() if p in no_packages or (p.startswith(("proto/", "tests/")) and p.endswith("/__init__.py"))
    ]
    assert not found


def test_test_files_have_unique_names():
    names = Counter(PurePosixPath(path).name for path in sources(".py") if path.startswith("tests/"))
    assert not [name for name, count in names.items() if count > 1 and name != "conftest.py"]


def test_no_module_is_too_long():
    sizes = {path: len((ROOT / path).read_text(encoding="utf-8").splitlines()) for path in sources(".py", ".go")}
    assert not {path: size for path, size in sizes.items() if size > MODULE_LINES}


def test_no_function_is_too_long():
    long = {}
    for path in (path for path in python_sources() if not path.startswith("tests/")):
        for name, node in functions(path):
            limit = TRITON_KERNEL_LINES if is_triton_kernel(node) else FUNCTION_LINES
            if body_lines(node) > limit:
                long[f"{path}::{name}"] = body_lines(node)
    assert set(long) == set(LONG_FUNCTIONS), long


def imported_modules(node: ast.AST) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    return [node.module] if isinstance(node, ast.ImportFrom) and node.module else []


@pytest.mark.parametrize("path", python_sources())
def test_nothing_executable_is_read_and_nothing_waits_for_the_collector(path):
    for node in ast.walk(tree(path)):
        assert not {name.split(".")[0] for name in imported_modules(node)} & EXECUTABLE_FORMATS
        assert not (isinstance(node, ast.Attribute) and ast.unparse(node) == "torch.load")
        assert not (
            isinstance(node, ast.ImportFrom) and node.module == "torch" and "load" in {a.name for a in node.names}
        )
        assert not (isinstance(node, ast.FunctionDef) and node.name == "__del__")


def test_there_are_no_lock_files():
    assert not [path for path in files() if LOCK_FILES.search(path)]


def test_nothing_names_a_registry_host_or_a_path_of_one_machine():
    found = set()
    for path in (path for path in files() if not path.startswith(HELD_OUT_TEXTS)):
        content = (ROOT / path).read_bytes()
        if b"\0" in content:
            continue
        text = content.decode("utf-8").lower()
        found |= {(path, word) for word in FORBIDDEN_WORDS if word in text}
    assert found == set(WORDS_IN_PLACE)
