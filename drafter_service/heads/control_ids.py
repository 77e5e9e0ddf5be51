"""Ids of a vocabulary that a draft vocabulary must never lose: ends, paddings, roles, tool calls. No torch.

They stand at the end of a vocabulary and are rare in texts, so that every cut by position or by frequency leaves them
out; in the traffic of agents they are 4 to 6 in a hundred tokens.
"""

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from drafter_service.heads.safetensors_header import CheckpointError, read_json_object

_CONFIGS: Final = ("config.json", "generation_config.json")
_TOKENIZER: Final = "tokenizer.json"
_TOKENIZER_CONFIG: Final = "tokenizer_config.json"
_ID_SUFFIX: Final = "_token_id"
_NAME_SUFFIX: Final = "_token"
_TEXT_CONFIG: Final = "text_config"


def find_control_ids(directories: Iterable[Path], vocab_size: int) -> set[int]:
    """Control ids below vocab_size that the files of checkpoint directories name; files that are absent name none.

    They are every `*_token_id` of config.json, its text_config and generation_config.json; the added tokens of
    tokenizer.json and tokenizer_config.json; and what the latter's `*_token` names are in the former's vocabulary.
    Raises CheckpointError naming the file if one of these is not what it should be.
    """
    found: set[int] = set()
    for directory in directories:
        for name in _CONFIGS:
            found.update(_of_config(directory / name))
        found.update(_of_tokenizer(directory / _TOKENIZER, directory / _TOKENIZER_CONFIG))
    return {token for token in found if token < vocab_size}


def _of_config(file: Path) -> Iterator[int]:
    document = _read(file)
    text = document.get(_TEXT_CONFIG)
    for values in (document, text if isinstance(text, dict) else {}):
        for key, value in values.items():
            if key.endswith(_ID_SUFFIX) and value is not None:
                for token in value if isinstance(value, list) else [value]:
                    # Some configurations say "none" with -1.
                    if token != -1:
                        yield _id(file, key, token)


def _of_tokenizer(file: Path, config_file: Path) -> Iterator[int]:
    document, config = _read(file), _read(config_file)
    added = document.get("added_tokens") or []
    if not isinstance(added, list):
        raise CheckpointError(f"{file}: added_tokens is not a list")
    for entry in added:
        yield _id(file, "added_tokens", entry.get("id") if isinstance(entry, dict) else entry)
    decoder = config.get("added_tokens_decoder") or {}
    if not isinstance(decoder, dict):
        raise CheckpointError(f"{config_file}: added_tokens_decoder is not an object")
    for key in decoder:
        yield _id(config_file, "added_tokens_decoder", int(key) if key.isascii() and key.isdigit() else key)
    model = document.get("model")
    vocabulary = model.get("vocab") if isinstance(model, dict) else None
    if isinstance(vocabulary, dict):
        yield from (_id(file, "model.vocab", vocabulary[name]) for name in _names(config) if name in vocabulary)


def _names(config: dict[str, object]) -> Iterator[str]:
    """The texts of a tokenizer's own tokens: plain, or objects with their content."""
    for key, value in config.items():
        entries = value if key == "additional_special_tokens" and isinstance(value, list) else [value]
        if key.endswith(_NAME_SUFFIX) or key == "additional_special_tokens":
            for entry in entries:
                content = entry.get("content") if isinstance(entry, dict) else entry
                if isinstance(content, str):
                    yield content


def _id(file: Path, key: str, value: object) -> int:
    if type(value) is not int or value < 0:
        raise CheckpointError(f"{file}: {key} holds {value!r}, which is not a token id")
    return value


def _read(file: Path) -> dict[str, object]:
    return read_json_object(file) if file.exists() else {}
