"""A head plan as text or as JSON-ready data, for looking at a checkpoint before serving it. No torch."""

from collections.abc import Iterable
from pathlib import Path
from typing import Final

from drafter_service.heads.checkpoint import Checkpoint
from drafter_service.heads.config import ConfigReading, read_config
from drafter_service.heads.plan import HeadPlan, PlannedTensor, own_tensors
from drafter_service.heads.record import ArchitectureRecord

PAGE_ROWS: Final = 16


def describe(plan: HeadPlan) -> str:
    """The plan for a person: family, values and their sources, tensors, memory, notes."""
    target = f", target {plan.target_checkpoint}" if plan.target_checkpoint else ""
    sections = [
        f"{plan.record.family} head of {plan.checkpoint}{target}",
        _computes(plan.record),
        _section("values", _table((value.name, str(value.value), value.source) for value in plan.values)),
        _section("tensors", _table(_tensor_row(tensor) for tensor in plan.tensors)),
        _section("memory", _table(_memory_rows(plan))),
    ]
    if plan.tied:
        sections[3] += "\n  the LM head is the embedding (tied)"
    if plan.notes:
        sections.append(_section("notes", plan.notes))
    return "\n\n".join(sections) + "\n"


def missing_tables(checkpoint: Path) -> list[str]:
    """Vocabulary tables that the head has to get from its target's checkpoint. Raises CheckpointError."""
    reading, opened = read_config(checkpoint), Checkpoint.open(checkpoint)
    own_tensors(opened, reading)
    return _missing(opened, reading)


def describe_alone(checkpoint: Path) -> str:
    """A head without its vocabulary tables, for a person. Raises CheckpointError."""
    reading, opened = read_config(checkpoint), Checkpoint.open(checkpoint)
    tensors = own_tensors(opened, reading)
    missing = " and ".join(_missing(opened, reading))
    notes = [*reading.notes, *opened.notes, f"no {missing} here: to load it, give --target-checkpoint"]
    stored = sum(part.num_bytes for tensor in tensors for part in tensor.files)
    sections = [
        f"{reading.record.family} head of {checkpoint}, without its vocabulary tables",
        _computes(reading.record),
        _section("values", _table((value.name, str(value.value), value.source) for value in reading.values)),
        _section("tensors", _table(_tensor_row(tensor) for tensor in tensors)),
        _section("memory", [f"weights as stored  {stored:,} bytes, the tables not counted"]),
        _section("notes", notes),
    ]
    return "\n\n".join(sections) + "\n"


def _missing(opened: Checkpoint, reading: ConfigReading) -> list[str]:
    record = reading.record
    missing = [] if opened.first_of(record.embedding_names) else ["embedding"]
    if not reading.config.tie_word_embeddings and not opened.first_of(record.lm_head_names):
        missing.append("LM head")
    return missing


def _computes(record: ArchitectureRecord) -> str:
    return (
        f"joins {record.concat}; norms scale by {record.norm}; {record.attention}; {record.ffn};"
        f" pair k at RoPE position k+{record.rope_position_offset}"
    )


def as_json(plan: HeadPlan) -> dict[str, object]:
    """The same facts as plain dictionaries, lists, strings and numbers."""
    record = plan.record
    return {
        "family": record.family,
        "checkpoint": str(plan.checkpoint),
        "target_checkpoint": None if plan.target_checkpoint is None else str(plan.target_checkpoint),
        "record": {
            "concat": record.concat.value,
            "norm": record.norm.value,
            "attention": record.attention.value,
            "ffn": record.ffn.value,
            "rope_position_offset": record.rope_position_offset,
        },
        "values": [{"name": value.name, "value": value.value, "source": value.source} for value in plan.values],
        "tensors": [
            {
                "role": tensor.role,
                "name": tensor.stored.name,
                "dtype": tensor.stored.dtype,
                "format": tensor.format.value,
                "shape": list(tensor.stored.shape),
                "rows_used": tensor.shape[0],
                "file": str(tensor.stored.file),
            }
            for tensor in plan.tensors
        ],
        "tied": plan.tied,
        "memory_bytes": _memory(plan),
        "notes": list(plan.notes),
    }


def _memory(plan: HeadPlan) -> dict[str, int]:
    row = plan.config.kv_row_bytes
    weights = {"weights": plan.weight_bytes, "weights_on_a_gpu": plan.gpu_weight_bytes}
    return {**weights, "kv_row": row, f"kv_page_of_{PAGE_ROWS}_rows": PAGE_ROWS * row}


def _memory_rows(plan: HeadPlan) -> Iterable[tuple[str, str]]:
    """What loading takes beside what the files hold: of a larger table some rows only, and perhaps another type."""
    stored = sum(part.num_bytes for tensor in plan.tensors for part in tensor.files)
    yield "weights as stored", f"{stored:,} bytes"
    for name, count in _memory(plan).items():
        yield f"{name.replace('_', ' ')} loaded as {plan.config.dtype}", f"{count:,} bytes"


def _tensor_row(tensor: PlannedTensor) -> tuple[str, ...]:
    shape = "x".join(str(size) for size in tensor.stored.shape)
    dtype = f"{tensor.stored.dtype} ({tensor.format})" if tensor.is_narrow else tensor.stored.dtype
    return tensor.stored.name, dtype, shape, str(tensor.stored.file)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    listed = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*listed, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]
