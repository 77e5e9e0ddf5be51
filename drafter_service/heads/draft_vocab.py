"""The ids that can be drafted: all, the first n, or those of a list, and always the control ids. No torch.

The LM head is most of what a draft forward reads. Cut to the ids that are worth drafting it is smaller; a token that
was cut is never drafted, and costs the drafts from there on.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from drafter_service.heads.control_ids import find_control_ids
from drafter_service.heads.safetensors_header import CheckpointError


@dataclass(frozen=True)
class DraftVocabulary:
    """`name` says how the ids were chosen; `ids` are target ids, ascending, `num_control` of them control ids."""

    name: str
    ids: tuple[int, ...]
    num_control: int

    def __len__(self) -> int:
        return len(self.ids)


def read_draft_vocab(text: str, vocab_size: int, directories: Iterable[Path]) -> DraftVocabulary | None:
    """What `all`, `first:N` or `ids:FILE` (one target id a line) means for a vocabulary; None = all of it.

    The control ids that the checkpoint directories name are added. Raises CheckpointError in one line.
    """
    kind, _, value = text.partition(":")
    if text == "all":
        return None
    if kind == "first":
        chosen, name = set(range(_count(value, vocab_size))), text
    elif kind == "ids" and value:
        # The file's name alone: clients read it, and the service's paths are none of their business.
        chosen, name = _read_ids(Path(value), vocab_size), f"ids:{Path(value).name}"
    else:
        raise CheckpointError(f"--draft-vocab {text!r} is none of all, first:N and ids:FILE")
    control = find_control_ids(directories, vocab_size)
    ids = tuple(sorted(chosen | control))
    return None if len(ids) == vocab_size else DraftVocabulary(name, ids, len(control))


def _count(text: str, vocab_size: int) -> int:
    if not (text.isascii() and text.isdigit()) or not 1 <= int(text[:10]) <= vocab_size:
        raise CheckpointError(f"--draft-vocab first:{text}: expected a number from 1 to the vocabulary's {vocab_size}")
    return int(text)


def _read_ids(file: Path, vocab_size: int) -> set[int]:
    try:
        lines = file.read_text(encoding="ascii").split("\n")
    except OSError as error:
        raise CheckpointError(f"--draft-vocab {file}: cannot be read ({error.strerror})") from error
    except UnicodeDecodeError as error:
        raise CheckpointError(f"--draft-vocab {file}: not a text of one id a line") from error
    ids = set()
    for number, line in enumerate(lines, start=1):
        text = line.strip()
        if not text:
            continue
        if not text.isdigit():
            raise CheckpointError(f"--draft-vocab {file}: line {number} is {text[:40]!r}, not a token id")
        # Cut short: a thousand digits are no number worth making.
        if len(text) > 10 or int(text) >= vocab_size:
            raise CheckpointError(
                f"--draft-vocab {file}: line {number} is {text[:40]}, outside the vocabulary of {vocab_size}"
            )
        ids.add(int(text))
    if not ids:
        raise CheckpointError(f"--draft-vocab {file}: holds no token id")
    return ids
