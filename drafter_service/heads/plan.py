"""What loading a head would do: its configuration, and every tensor with its place. No torch, no tensor data."""

import math
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from drafter_service.heads.checkpoint import Checkpoint
from drafter_service.heads.config import ELEMENT_BYTES, ConfigReading, HeadConfig, read_config
from drafter_service.heads.draft_vocab import DraftVocabulary, read_draft_vocab
from drafter_service.heads.levers import (
    BodyPrecision,
    LmHeadPrecision,
    check_body,
    check_lm_head,
    is_rounded,
    resolve_lm_head,
)
from drafter_service.heads.provenance import ResolvedValue
from drafter_service.heads.record import ArchitectureRecord, HiddenSource, RecycleSource, TensorRole
from drafter_service.heads.safetensors_header import CheckpointError, StoredTensor
from drafter_service.heads.stored_formats import StoredFormat, StoredWeight, find_weight, names_of
from drafter_service.heads.tables import VocabularyTables, find_tables

_ID_BYTES: Final = 8
STORED_DTYPES: Final = {"F32": "float32", "BF16": "bfloat16"}


@dataclass(frozen=True)
class PlannedTensor:
    """One tensor to load. Of a vocabulary table only the first `shape[0]` rows are read: `stored` has them all.

    A narrow weight has `parts`: its elements and its scales, by what follows the weight's name.
    """

    role: str
    layer: int | None
    stored: StoredTensor
    shape: tuple[int, ...]
    format: StoredFormat = StoredFormat.PLAIN
    parts: tuple[tuple[str, StoredTensor], ...] = ()

    @property
    def is_narrow(self) -> bool:
        """Whether it is stored in fewer than 16 bits."""
        return self.format is not StoredFormat.PLAIN

    @property
    def dtype(self) -> str:
        """The stored element type, by torch's name; of a narrow weight, what it is multiplied with."""
        return "bfloat16" if self.is_narrow else STORED_DTYPES[self.stored.dtype]

    @property
    def files(self) -> tuple[StoredTensor, ...]:
        """Everything that is read for it."""
        return tuple(part for _, part in self.parts) or (self.stored,)


@dataclass(frozen=True)
class HeadPlan:
    """A head that can be loaded. `tied`: the LM head is the embedding.

    `lm_head` None (auto) is for the device to decide. `draft_vocab` None is all of the vocabulary.
    """

    checkpoint: Path
    target_checkpoint: Path | None
    record: ArchitectureRecord
    config: HeadConfig
    values: tuple[ResolvedValue, ...]
    notes: tuple[str, ...]
    tensors: tuple[PlannedTensor, ...]
    tied: bool
    lm_head: LmHeadPrecision | None
    draft_vocab: DraftVocabulary | None
    quantization: BodyPrecision = BodyPrecision.AS_STORED

    @property
    def has_own_lm_head(self) -> bool:
        """Whether the device gets a table for the LM head alone: not if it is the embedding as it is."""
        return not self.tied or self.draft_vocab is not None or self.lm_head not in {None, LmHeadPrecision.AS_STORED}

    @property
    def lm_head_source(self) -> PlannedTensor:
        """The table that the LM head is made of."""
        role = "embedding" if self.tied else "lm_head"
        return next(tensor for tensor in self.tensors if tensor.role == role)

    @property
    def weight_bytes(self) -> int:
        """Bytes on a CPU. An LM head that the device decides about (auto) counts as stored."""
        own = [tensor for tensor in self.tensors if tensor.role != "lm_head"]
        total = sum(math.prod(tensor.shape) * weight_element_bytes(tensor, self.config.dtype) for tensor in own)
        if not self.has_own_lm_head:
            return total
        dtype = "float32" if self.lm_head is LmHeadPrecision.FLOAT32 else self.config.dtype
        row_bytes = self.config.hidden_size * ELEMENT_BYTES[dtype]
        return total + self._num_lm_head_rows * row_bytes + self._draft_id_bytes

    @property
    def gpu_weight_bytes(self) -> int:
        """Bytes on a GPU: there narrow weights of a bf16 head stay narrow, and an LM head of auto is NVFP4."""
        if self.config.dtype != "bfloat16":
            return replace(self, lm_head=resolve_lm_head(self.lm_head, "cuda", self.config.hidden_size)).weight_bytes
        own = [tensor for tensor in self.tensors if tensor.role != "lm_head"]
        total = sum(_gpu_bytes(tensor, self.quantization) for tensor in own)
        precision = resolve_lm_head(self.lm_head, "cuda", self.config.hidden_size)
        if not replace(self, lm_head=precision).has_own_lm_head:
            return total
        size = _narrow_bytes((self._num_lm_head_rows, self.config.hidden_size), precision.value)
        return total + size + self._draft_id_bytes

    @property
    def _num_lm_head_rows(self) -> int:
        return self.config.vocab_size if self.draft_vocab is None else len(self.draft_vocab)

    @property
    def _draft_id_bytes(self) -> int:
        return 0 if self.draft_vocab is None else len(self.draft_vocab) * _ID_BYTES


# Of a weight of a bf16 head on a GPU: bits of 16 elements, bytes of a row's scale, and of the whole weight's.
_NARROW: Final = {
    "as-stored": (256, 0, 0),
    "float32": (512, 0, 0),
    "bf16": (256, 0, 0),
    "fp8": (128, 4, 0),
    "nvfp4": (72, 0, 4),
}


def _gpu_bytes(tensor: PlannedTensor, precision: BodyPrecision) -> int:
    if len(tensor.shape) == 1:
        return math.prod(tensor.shape) * ELEMENT_BYTES["float32"]
    if tensor.format is StoredFormat.FP8_BLOCKS:
        scale = dict(tensor.parts).get("weight_scale_inv") or dict(tensor.parts)["weight_scale"]
        return math.prod(tensor.shape) + math.prod(scale.shape) * ELEMENT_BYTES["float32"]
    kind = precision.value if is_rounded(tensor.role, precision) else "as-stored"
    return _narrow_bytes(tensor.shape, tensor.format.value.lower() if tensor.is_narrow else kind)


def _narrow_bytes(shape: tuple[int, ...], kind: str) -> int:
    bits, of_row, of_weight = _NARROW[kind]
    return math.prod(shape) * bits // 128 + shape[0] * of_row + of_weight


def plan_head(
    checkpoint: Path,
    target_checkpoint: Path | None = None,
    *,
    dtype: str | None = None,
    hidden_source: HiddenSource | None = None,
    recycle: RecycleSource | None = None,
    lm_head: LmHeadPrecision | None = LmHeadPrecision.AS_STORED,
    draft_vocab: str = "all",
    quantization: BodyPrecision = BodyPrecision.AS_STORED,
) -> HeadPlan:
    """Checks a checkpoint, and the target's where the head has no embedding or LM head of its own.

    `dtype` is `float32`, `bfloat16` or None for the type that the head's joining projection is stored in; `lm_head`
    None = NVFP4 on a GPU, as stored on a CPU; `draft_vocab` is `all`, `first:N` or `ids:FILE`.
    Raises CheckpointError, in one line, naming what is missing, unused, misshapen or not supported.
    """
    reading = read_config(checkpoint, hidden_source=hidden_source, recycle=recycle)
    opened = Checkpoint.open(checkpoint)
    own = own_tensors(opened, reading)
    tables = find_tables(opened, target_checkpoint, reading)
    planned = (*own, *_planned_tables(tables, reading.config))
    computed = dtype or own[0].dtype
    if computed not in ELEMENT_BYTES:
        raise CheckpointError(f"cannot compute in {computed}: supported is {' or '.join(ELEMENT_BYTES)}")
    check_body(quantization, reading.config)
    check_lm_head(lm_head, reading.config.hidden_size)
    directories = (checkpoint,) if target_checkpoint is None else (checkpoint, target_checkpoint)
    chosen = read_draft_vocab(draft_vocab, reading.config.vocab_size, directories)
    origin = "override" if dtype else f"as {own[0].stored.name} is stored"
    levers = _lever_values(quantization, lm_head, chosen)
    return HeadPlan(
        checkpoint=checkpoint,
        target_checkpoint=target_checkpoint,
        record=reading.record,
        config=replace(reading.config, dtype=computed, tie_word_embeddings=tables.tied),
        values=(*reading.values, ResolvedValue("dtype", computed, origin), *levers),
        notes=(*reading.notes, *opened.notes, *tables.notes, *_cast_notes(planned, computed), *_vocab_notes(chosen)),
        tensors=planned,
        tied=tables.tied,
        lm_head=lm_head,
        draft_vocab=chosen,
        quantization=quantization,
    )


def _planned_tables(tables: VocabularyTables, config: HeadConfig) -> tuple[PlannedTensor, ...]:
    """The vocabulary tables, of which the vocabulary's rows are read. Raises CheckpointError."""
    for _, stored in tables.stored:
        _check_dtype(stored)
    rows = (config.vocab_size, config.hidden_size)
    return tuple(PlannedTensor(role, None, stored, rows) for role, stored in tables.stored)


def weight_element_bytes(tensor: PlannedTensor, computed: str) -> int:
    """Bytes of one element on the device. Norm weights (one dimension) stay float32: the norms compute in it."""
    return ELEMENT_BYTES["float32" if len(tensor.shape) == 1 else computed]


def own_tensors(opened: Checkpoint, reading: ConfigReading) -> tuple[PlannedTensor, ...]:
    """The head's tensors but for the vocabulary tables. Raises CheckpointError."""
    record, config = reading.record, reading.config
    wanted = record.named_tensors(config.num_layers)
    found = {name: find_weight(opened.tensors, name) for name, _, _ in wanted}
    missing = [name for name, weight in found.items() if weight is None]
    if len(missing) == len(wanted):
        raise CheckpointError(
            f"{opened.directory}: config.json promises {config.num_layers} MTP layer, but no file holds"
            f" {record.tensor_prefix}* tensors: was it exported without them?"
        )
    if missing:
        raise CheckpointError(f"{opened.directory}: missing {', '.join(missing)}")
    weights = {name: weight for name, weight in found.items() if weight is not None}
    for weight in weights.values():
        # Before the unused ones: a quantised export has both, and this is the reason for the other.
        if weight.format is StoredFormat.PLAIN:
            _check_dtype(weight.stored)
    names = {used for name, weight in weights.items() for used in names_of(weight, opened.tensors, name)}
    unused = [name for name in opened.tensors if name.startswith(record.tensor_prefix) and name not in names]
    if unused:
        raise CheckpointError(f"{opened.directory}: {', '.join(unused)} would not be used: not a head of this family?")
    return tuple(
        _planned(weights[name], layer, role, tuple(config.dimension(dimension) for dimension in role.shape))
        for name, layer, role in wanted
    )


def _planned(weight: StoredWeight, layer: int | None, role: TensorRole, shape: tuple[int, ...]) -> PlannedTensor:
    stored = weight.stored
    if weight.shape != shape:
        symbols = ", ".join(role.shape)
        raise CheckpointError(f"{stored.file}: {stored.name} is {weight.shape}, expected {shape} ({symbols})")
    if weight.format is StoredFormat.PLAIN:
        return PlannedTensor(role.role, layer, stored, shape)
    return PlannedTensor(role.role, layer, stored, shape, weight.format, weight.parts)


def _check_dtype(stored: StoredTensor) -> None:
    if stored.dtype not in STORED_DTYPES:
        raise CheckpointError(
            f"{stored.file}: {stored.name} is stored as {stored.dtype}: supported is {' or '.join(STORED_DTYPES)}"
        )


def _cast_notes(planned: tuple[PlannedTensor, ...], computed: str) -> tuple[str, ...]:
    wide = [tensor for tensor in planned if len(tensor.shape) > 1 and not tensor.is_narrow]
    cast = [tensor.stored.name for tensor in wide if tensor.dtype != computed]
    return (f"cast to {computed}: {', '.join(cast)}",) if cast else ()


def _lever_values(
    quantization: BodyPrecision, precision: LmHeadPrecision | None, chosen: DraftVocabulary | None
) -> tuple[ResolvedValue, ...]:
    lm_head, origin = ("auto", "nvfp4 on a GPU, else as stored") if precision is None else (precision.value, "setting")
    values = (("lm_head", lm_head, origin), ("draft_vocab", "all" if chosen is None else chosen.name, "setting"))
    return (ResolvedValue("quantization", quantization.value, "setting"), *(ResolvedValue(*value) for value in values))


def _vocab_notes(chosen: DraftVocabulary | None) -> tuple[str, ...]:
    if chosen is None:
        return ()
    return (f"draft vocabulary {chosen.name}: {len(chosen):,} ids, {chosen.num_control} of them control ids",)
