"""Where a head's two vocabulary tables, the embedding and the LM head, come from. No torch.

Each is the head's own if its checkpoint has one, else the target's. A stored LM head wins over a tie flag: wrapper
configs carry flags of both kinds, and the tensor is the fact.
"""

from dataclasses import dataclass
from pathlib import Path

from drafter_service.heads.checkpoint import Checkpoint
from drafter_service.heads.config import CONFIG_NAME, ConfigReading, read_config_levels
from drafter_service.heads.provenance import ConfigReader
from drafter_service.heads.safetensors_header import CheckpointError, StoredTensor


@dataclass(frozen=True)
class VocabularyTables:
    """(role, tensor) pairs: `embedding`, and `lm_head` unless it is tied to the embedding."""

    stored: tuple[tuple[str, StoredTensor], ...]
    tied: bool
    notes: tuple[str, ...]


def find_tables(own: Checkpoint, target_directory: Path | None, reading: ConfigReading) -> VocabularyTables:
    """Finds both tables. Raises CheckpointError naming a table that is nowhere, too small or misshapen."""
    record, config = reading.record, reading.config
    target = None if target_directory is None else Checkpoint.open(target_directory)
    places = (own,) if target is None else (own, target)
    embedding = _first(places, record.embedding_names)
    if embedding is None:
        raise CheckpointError(f"{_described(places)}: no {' or '.join(record.embedding_names)}{_advice(target)}")
    tied = config.tie_word_embeddings
    notes: tuple[str, ...] = () if target is None else target.notes
    if target is not None and embedding.file.parent == target.directory:
        target_reader = _target_reader(target.directory, reading)
        tied = target_reader.boolean("tie_word_embeddings")
        if tied != config.tie_word_embeddings:
            notes += (f"tie_word_embeddings is {tied} by the target's config, which owns the embedding",)
    lm_head = _first(places, record.lm_head_names)
    if lm_head is None and not tied:
        raise CheckpointError(
            f"{_described(places)}: no {' or '.join(record.lm_head_names)}, and tie_word_embeddings is not set"
            f"{_advice(target)}"
        )
    stored = (("embedding", embedding),) if lm_head is None else (("embedding", embedding), ("lm_head", lm_head))
    if lm_head is not None and tied:
        notes += (f"tie_word_embeddings is set, but {lm_head.file.name} holds {lm_head.name}: the tensor is used",)
    for _, tensor in stored:
        notes += _check_shape(tensor, config.vocab_size, config.hidden_size)
    return VocabularyTables(stored, lm_head is None, notes)


def _target_reader(directory: Path, reading: ConfigReading) -> ConfigReader:
    reader = ConfigReader(directory / CONFIG_NAME, reading.record, read_config_levels(directory))
    for name in ("vocab_size", "hidden_size"):
        of_target, of_head = reader.integer(name), getattr(reading.config, name)
        if of_target != of_head:
            raise CheckpointError(f"{directory}: {name} is {of_target}, but the head's is {of_head}: another target?")
    return reader


def _first(places: tuple[Checkpoint, ...], names: tuple[str, ...]) -> StoredTensor | None:
    return next((tensor for place in places if (tensor := place.first_of(names)) is not None), None)


def _check_shape(tensor: StoredTensor, vocab_size: int, hidden_size: int) -> tuple[str, ...]:
    if len(tensor.shape) != 2 or tensor.shape[1] != hidden_size or tensor.shape[0] < vocab_size:
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} is {tensor.shape}, expected at least {vocab_size} rows of {hidden_size}"
        )
    padding = tensor.shape[0] - vocab_size
    return (f"{tensor.name}: {padding} rows beyond the vocabulary of {vocab_size} are never used",) if padding else ()


def _described(places: tuple[Checkpoint, ...]) -> str:
    return " and ".join(str(place.directory) for place in places)


def _advice(target: Checkpoint | None) -> str:
    return ": give the target's checkpoint (--target-checkpoint)" if target is None else ""
