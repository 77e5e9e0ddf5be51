"""What is computed: families of draft heads as data, their checkpoints, the forward and its specification.

Planning (`plan_head`, `describe`) needs no torch, so a bad checkpoint is refused before torch is imported;
the names that do need it are imported on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Final

from drafter_service.heads.checkpoint import Checkpoint, CheckpointError, StoredTensor
from drafter_service.heads.config import HeadConfig, read_config
from drafter_service.heads.draft_vocab import DraftVocabulary
from drafter_service.heads.inspect import as_json, describe
from drafter_service.heads.levers import BodyPrecision, LmHeadPrecision
from drafter_service.heads.plan import HeadPlan, PlannedTensor, plan_head
from drafter_service.heads.provenance import ResolvedValue
from drafter_service.heads.record import ArchitectureRecord, HiddenSource, RecycleSource

if TYPE_CHECKING:
    from drafter_service.heads.loading import load_head, load_planned_head
    from drafter_service.heads.mtp import HeadOutput, KvLayout, KvReader, KvWriter, MtpHead
    from drafter_service.heads.oracle import OracleDraft, oracle_draft

__all__ = [
    "ArchitectureRecord",
    "BodyPrecision",
    "Checkpoint",
    "CheckpointError",
    "DraftVocabulary",
    "HeadConfig",
    "HeadOutput",
    "HeadPlan",
    "HiddenSource",
    "KvLayout",
    "KvReader",
    "KvWriter",
    "LmHeadPrecision",
    "MtpHead",
    "OracleDraft",
    "PlannedTensor",
    "RecycleSource",
    "ResolvedValue",
    "StoredTensor",
    "as_json",
    "describe",
    "load_head",
    "load_planned_head",
    "oracle_draft",
    "plan_head",
    "read_config",
]

_NEEDS_TORCH: Final = {
    "HeadOutput": "mtp",
    "KvLayout": "mtp",
    "KvReader": "mtp",
    "KvWriter": "mtp",
    "MtpHead": "mtp",
    "OracleDraft": "oracle",
    "load_head": "loading",
    "load_planned_head": "loading",
    "oracle_draft": "oracle",
}


def __getattr__(name: str) -> object:
    if name not in _NEEDS_TORCH:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_NEEDS_TORCH[name]}"), name)
