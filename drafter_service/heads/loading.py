"""Loading a head: from a checked plan to weights on a device."""

from dataclasses import replace
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.heads.body import round_projection
from drafter_service.heads.fingerprint import head_fingerprint
from drafter_service.heads.levers import BodyPrecision, LmHeadPrecision, describe_levers, resolve_lm_head
from drafter_service.heads.lm_head import LmHead, make_lm_head
from drafter_service.heads.mtp import MtpHead
from drafter_service.heads.plan import HeadPlan, PlannedTensor, plan_head
from drafter_service.heads.record import HiddenSource, RecycleSource
from drafter_service.heads.weights import HeadWeights, LayerWeights


def load_head(
    checkpoint: Path,
    target_checkpoint: Path | None = None,
    *,
    dtype: torch.dtype | None = None,
    device: torch.device | str = "cpu",
    hidden_source: HiddenSource | None = None,
    recycle: RecycleSource | None = None,
    lm_head: LmHeadPrecision | None = LmHeadPrecision.AS_STORED,
    draft_vocab: str = "all",
    quantization: BodyPrecision = BodyPrecision.AS_STORED,
) -> MtpHead:
    """Plans and loads a head in one go. `dtype` is torch.float32, torch.bfloat16 or None for the stored type.

    The levers are those of `plan_head`. Raises CheckpointError before any tensor is read if the checkpoint cannot be
    used.
    """
    plan = plan_head(
        checkpoint,
        target_checkpoint,
        dtype=None if dtype is None else str(dtype).removeprefix("torch."),
        hidden_source=hidden_source,
        recycle=recycle,
        lm_head=lm_head,
        draft_vocab=draft_vocab,
        quantization=quantization,
    )
    return load_planned_head(plan, torch.device(device))


def load_planned_head(plan: HeadPlan, device: torch.device) -> MtpHead:
    """Reads a plan's tensors onto a device, rounds them, and cuts the LM head, as the plan says."""
    precision = resolve_lm_head(plan.lm_head, device.type, plan.config.hidden_size)
    plan = replace(plan, lm_head=precision)
    loaded = {
        (tensor.role, tensor.layer): _load(tensor, plan, device) for tensor in plan.tensors if tensor.role != "lm_head"
    }
    own = {role: tensor for (role, layer), tensor in loaded.items() if layer is None}
    ids = None if plan.draft_vocab is None else torch.tensor(plan.draft_vocab.ids)
    lm_head = _load_lm_head(plan, precision, ids, device) if plan.has_own_lm_head else LmHead(own["embedding"], 0.0)
    layers = tuple(
        LayerWeights(**{role: tensor for (role, layer), tensor in loaded.items() if layer == number})
        for number in range(plan.config.num_layers)
    )
    draft_ids = None if ids is None else ids.to(device)
    weights = HeadWeights(layers=layers, lm_head=lm_head.table, draft_ids=draft_ids, **own)
    levers = describe_levers(plan.config, precision, lm_head.relative_error, plan.draft_vocab, plan.quantization)
    return MtpHead(plan.config, plan.record, weights, head_fingerprint(plan), levers=levers)


def _load_lm_head(plan: HeadPlan, precision: LmHeadPrecision, ids: Tensor | None, device: torch.device) -> LmHead:
    rows = _read(plan.lm_head_source)
    # Cut first: rows that are never drafted need no memory on the device, and no part in the scales.
    kept = rows if ids is None else rows[ids]
    return make_lm_head(kept.to(device), precision, getattr(torch, plan.config.dtype))


def _read(tensor: PlannedTensor) -> Tensor:
    """As stored, on the host. Rows that only pad the vocabulary are left in the file."""
    with safe_open(tensor.stored.file, framework="pt") as file:
        rows: Tensor = file.get_slice(tensor.stored.name)[: tensor.shape[0]]
    return rows


def _load(tensor: PlannedTensor, plan: HeadPlan, device: torch.device) -> Tensor:
    rows = _read(tensor)
    dtype = torch.float32 if rows.dim() == 1 else getattr(torch, plan.config.dtype)
    return round_projection(rows.to(device=device, dtype=dtype), tensor.role, plan.quantization)
