"""The training text and the held-out text: the Python 3.11 sources and their documentation."""

import random
import zlib
from dataclasses import dataclass
from pathlib import Path

__all__ = ["HELD_OUT", "Corpus", "Document", "copy_held_out", "read_corpus"]

# Held out by path below the standard library (.py) or the documentation's sources (.rst.txt).
HELD_OUT = (
    "cmd.py",
    "fileinput.py",
    "graphlib.py",
    "json/decoder.py",
    "queue.py",
    "sched.py",
    "shelve.py",
    "textwrap.py",
    "howto/sorting.rst.txt",
    "library/queue.rst.txt",
    "library/sched.rst.txt",
    "library/shelve.rst.txt",
    "tutorial/errors.rst.txt",
)
# Installed packages, compiled leftovers, tables of character sets, a copy of the documentation, and files that
# are invalid on purpose.
_SKIPPED_FOLDERS = (
    "site-packages", "dist-packages", "__pycache__", "ensurepip", "encodings", "pydoc_data", "encoded_modules",
    "cjkencodings", "lib-dynload", "tokenizedata",
)  # fmt: skip
_MAX_BYTES = 400_000
_MAX_SHARED_LINES = 0.10
_LONG_LINE = 40


@dataclass(frozen=True)
class Document:
    """One file's text under the path that names it."""

    name: str
    text: str


@dataclass(frozen=True)
class Corpus:
    """Documents to learn from and documents to measure on; `dropped` counts files left out, by reason."""

    training: tuple[Document, ...]
    held_out: tuple[Document, ...]
    dropped: dict[str, int]


def read_corpus(stdlib: Path, docs: Path, *, seed: int) -> Corpus:
    """Read both trees, set the held-out files aside and drop what would give them away or teach tables."""
    found = [*_read_tree(stdlib, "*.py"), *_read_tree(docs, "*.rst.txt")]
    held_out = tuple(document for document in found if document.name in HELD_OUT)
    if len(held_out) != len(HELD_OUT):
        missing = sorted(set(HELD_OUT) - {document.name for document in held_out})
        raise FileNotFoundError(f"held-out files not found below {stdlib} and {docs}: {', '.join(missing)}")
    subjects = {_subject(document.name) for document in held_out}
    secret_lines = set().union(*(_long_lines(document.text) for document in held_out))
    training: list[Document] = []
    dropped: dict[str, int] = {}
    seen: set[str] = set()
    for document in found:
        reason = _reason_to_drop(document, subjects, secret_lines, seen)
        seen.add(document.text)
        if reason is None:
            training.append(document)
        else:
            dropped[reason] = dropped.get(reason, 0) + 1
    random.Random(seed).shuffle(training)
    return Corpus(tuple(training), held_out, dropped)


def copy_held_out(corpus: Corpus, folder: Path) -> None:
    """Write the held-out files below `folder` as they are, in the layout of their two trees."""
    for document in corpus.held_out:
        path = folder / document.name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(document.text, encoding="utf-8", newline="")


def _read_tree(root: Path, pattern: str) -> list[Document]:
    documents = []
    for path in sorted(root.rglob(pattern)):
        name = path.relative_to(root)
        if any(part in _SKIPPED_FOLDERS for part in name.parts) or not path.is_file():
            continue
        try:
            text = path.read_bytes().decode("utf-8")
        except UnicodeDecodeError:
            continue
        documents.append(Document(name.as_posix(), text.replace("\r\n", "\n")))
    return documents


def _subject(name: str) -> str:
    """What a file is about: `test/test_textwrap.py` and `library/textwrap.rst.txt` share a subject."""
    stem = name.rsplit("/", 1)[-1].split(".", 1)[0]
    return stem.removeprefix("test_")


def _long_lines(text: str) -> set[str]:
    return {line.strip() for line in text.splitlines() if len(line.strip()) >= _LONG_LINE}


def _reason_to_drop(document: Document, subjects: set[str], secret_lines: set[str], seen: set[str]) -> str | None:
    text = document.text
    if document.name in HELD_OUT:
        return "held out"
    if len(text) < 200 or len(text) > _MAX_BYTES:
        return "too short or too long"
    if text in seen:
        return "an exact copy"
    lines = _long_lines(text)
    if _subject(document.name) in subjects or len(lines & secret_lines) > _MAX_SHARED_LINES * max(1, len(lines)):
        return "shares a subject or lines with a held-out file"
    if _is_table(text):
        return "a table"
    return None


def _is_table(text: str) -> bool:
    """Data rather than prose or code: mostly digits, or so regular that it teaches a greedy decoder to loop."""
    digits = sum(character.isdigit() for character in text) / len(text)
    squeezed = len(zlib.compress(text.encode())) / len(text.encode())
    return digits > 0.15 or squeezed < 0.11 or (not text.isascii() and sum(c > "\x7f" for c in text) > 0.05 * len(text))
