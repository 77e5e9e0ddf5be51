"""What loading a head would do: its configuration, and every tensor with its place. No torch, no tensor data."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from drafter_service.heads.checkpoint import Checkpoint
from drafter_service.heads.config import ELEMENT_BYTES, ConfigReading, HeadConfig, read_config
from drafter_service.heads.provenance import ResolvedValue
from drafter_service.heads.record import ArchitectureRecord, HiddenSource, RecycleSource
from drafter_service.heads.safetensors_header import CheckpointError, StoredTensor
from drafter_service.heads.tables import find_tables

STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to load. Of a vocabulary table only the first `shape[0]` rows are read: `stored` has them all."""

    role: str
    layer: int | None
    stored: StoredTensor
    shape: tuple[int, ...]

    @property
    def dtype(self) -> str:
        """The stored element type, by torch's name."""
        return STORED_DTYPES[self.stored.dtype]


@dataclass(frozen=True)
class HeadPlan:
    """A head that can be loaded. `tied`: the LM head is the embedding. `weight_bytes`: on the device."""

    checkpoint: Path
    target_checkpoint: Path | None
    record: ArchitectureRecord
    config: HeadConfig
    values: tuple[ResolvedValue, ...]
    notes: tuple[str, ...]
    tensors: tuple[PlannedTensor, ...]
    tied: bool
    weight_bytes: int


def plan_head(
    checkpoint: Path,
    target_checkpoint: Path | None = None,
    *,
    dtype: str | None = None,
    hidden_source: HiddenSource | None = None,
    recycle: RecycleSource | None = None,
) -> HeadPlan:
    """Checks a checkpoint, and the target's where the head has no embedding or LM head of its own.

    `dtype` is `float32`, `bfloat16` or None for the type that the head's joining projection is stored in.
    Raises CheckpointError, in one line, naming what is missing, unused, misshapen or not supported.
    """
    reading = read_config(checkpoint, hidden_source=hidden_source, recycle=recycle)
    opened = Checkpoint.open(checkpoint)
    own = _own_tensors(opened, reading)
    tables = find_tables(opened, target_checkpoint, reading)
    rows = (reading.config.vocab_size, reading.config.hidden_size)
    planned = (*own, *(PlannedTensor(role, None, stored, rows) for role, stored in tables.stored))
    for tensor in planned:
        _check_dtype(tensor.stored)
    computed = dtype or own[0].dtype
    if computed not in ELEMENT_BYTES:
        raise CheckpointError(f"cannot compute in {computed}: supported is {' or '.join(ELEMENT_BYTES)}")
    origin = "override" if dtype else f"as {own[0].stored.name} is stored"
    return HeadPlan(
        checkpoint=checkpoint,
        target_checkpoint=target_checkpoint,
        record=reading.record,
        config=replace(reading.config, dtype=computed, tie_word_embeddings=tables.tied),
        values=(*reading.values, ResolvedValue("dtype", computed, origin)),
        notes=(*reading.notes, *opened.notes, *tables.notes, *_cast_notes(planned, computed)),
        tensors=planned,
        tied=tables.tied,
        weight_bytes=sum(_num_elements(tensor.shape) * weight_element_bytes(tensor, computed) for tensor in planned),
    )


def weight_element_bytes(tensor: PlannedTensor, computed: str) -> int:
    """Bytes of one element on the device. Norm weights (one dimension) stay float32: the norms compute in it."""
    return ELEMENT_BYTES["float32" if len(tensor.shape) == 1 else computed]


def _own_tensors(opened: Checkpoint, reading: ConfigReading) -> tuple[PlannedTensor, ...]:
    record, config = reading.record, reading.config
    wanted = record.named_tensors(config.num_layers)
    missing = [name for name, _, _ in wanted if name not in opened.tensors]
    if len(missing) == len(wanted):
        raise CheckpointError(
            f"{opened.directory}: config.json promises {config.num_layers} MTP layer, but no file holds"
            f" {record.tensor_prefix}* tensors: was it exported without them?"
        )
    if missing:
        raise CheckpointError(f"{opened.directory}: missing {', '.join(missing)}")
    for name, _, _ in wanted:
        # Before the unused ones: a quantised export has both, and this is the reason for the other.
        _check_dtype(opened.tensors[name])
    names = {name for name, _, _ in wanted}
    unused = [name for name in opened.tensors if name.startswith(record.tensor_prefix) and name not in names]
    if unused:
        raise CheckpointError(f"{opened.directory}: {', '.join(unused)} would not be used: not a head of this family?")
    planned = []
    for name, layer, tensor in wanted:
        stored, shape = opened.tensors[name], tuple(config.dimension(dimension) for dimension in tensor.shape)
        if stored.shape != shape:
            symbols = ", ".join(tensor.shape)
            raise CheckpointError(f"{stored.file}: {name} is {stored.shape}, expected {shape} ({symbols})")
        planned.append(PlannedTensor(tensor.role, layer, stored, shape))
    return tuple(planned)


def _check_dtype(stored: StoredTensor) -> None:
    if stored.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{stored.file}: {stored.name} is stored as {stored.dtype}: supported is {' or '.join(STORED_DTYPES)}"
        )


def _cast_notes(planned: tuple[PlannedTensor, ...], computed: str) -> tuple[str, ...]:
    cast = [tensor.stored.name for tensor in planned if len(tensor.shape) > 1 and tensor.dtype != computed]
    return (f"cast to {computed}: {', '.join(cast)}",) if cast else ()


def _num_elements(shape: tuple[int, ...]) -> int:
    count = 1
    for size in shape:
        count *= size
    return count
