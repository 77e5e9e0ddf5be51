"""A head plan as text or as JSON-ready data, for looking at a checkpoint before serving it. No torch."""

from collections.abc import Iterable
from typing import Final

from drafter_service.heads.plan import HeadPlan, PlannedTensor

PAGE_ROWS: Final = 16


def describe(plan: HeadPlan) -> str:
    """The plan for a person: family, values and their sources, tensors, memory, notes."""
    record = plan.record
    target = f", target {plan.target_checkpoint}" if plan.target_checkpoint else ""
    computes = (
        f"joins {record.concat}; norms scale by {record.norm}; {record.attention}; {record.ffn};"
        f" pair k at RoPE position k+{record.rope_position_offset}"
    )
    sections = [
        f"{record.family} head of {plan.checkpoint}{target}",
        computes,
        _section("values", _table((value.name, str(value.value), value.source) for value in plan.values)),
        _section("tensors", _table(_tensor_row(tensor) for tensor in plan.tensors)),
        _section("memory", _table((name, f"{count:,} bytes") for name, count in _memory(plan).items())),
        _section("notes", list(plan.notes) or ["none"]),
    ]
    if plan.tied:
        sections[3] += "\n  the LM head is the embedding (tied)"
    return "\n\n".join(sections) + "\n"


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
    return {"weights": plan.weight_bytes, "kv_row": row, f"kv_page_of_{PAGE_ROWS}_rows": PAGE_ROWS * row}


def _tensor_row(tensor: PlannedTensor) -> tuple[str, ...]:
    shape = "x".join(str(size) for size in tensor.stored.shape)
    return tensor.stored.name, tensor.stored.dtype, shape, str(tensor.stored.file)


def _section(title: str, lines: Iterable[str]) -> str:
    return "\n".join([f"{title}:", *(f"  {line}" for line in lines)])


def _table(rows: Iterable[tuple[str, ...]]) -> list[str]:
    listed = list(rows)
    widths = [max(len(cell) for cell in column) for column in zip(*listed, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in listed]
