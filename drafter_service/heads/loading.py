"""Loading a head: from a checked plan to weights on a device."""

from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_kernels.linear import LinearWeight
from drafter_kernels.quantize import Nvfp4Weight, pack_nvfp4, read_stored_weight
from drafter_service.heads.body import round_projection
from drafter_service.heads.fingerprint import head_fingerprint
from drafter_service.heads.kernel_weights import join_layer
from drafter_service.heads.levers import BodyPrecision, LmHeadPrecision, describe_levers, resolve_lm_head
from drafter_service.heads.lm_head import LmHead, make_lm_head
from drafter_service.heads.mtp import MtpHead
from drafter_service.heads.plan import HeadPlan, PlannedTensor, plan_head
from drafter_service.heads.projections import narrowed, runs_kernels
from drafter_service.heads.record import HiddenSource, RecycleSource
from drafter_service.heads.safetensors_header import CheckpointError
from drafter_service.heads.weights import HeadWeights, LayerWeights

_ALIGNMENT: Final = 16


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
    packed: bool | None = None,
) -> MtpHead:
    """Plans and loads a head in one go. `dtype` is torch.float32, torch.bfloat16 or None for the stored type.

    The levers are those of `plan_head`; `packed` is as in `load_planned_head`. Raises CheckpointError before any
    tensor is read if the checkpoint cannot be used.
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
    return load_planned_head(plan, torch.device(device), packed=packed)


def load_planned_head(plan: HeadPlan, device: torch.device, *, packed: bool | None = None) -> MtpHead:
    """Reads a plan's tensors onto a device, rounds them, and cuts the LM head, as the plan says.

    `packed`: weights stay in as few bits as they are rounded to, and projections are joined, as kernels take them;
    None = where kernels run.
    """
    if packed is None:
        packed = runs_kernels(device, getattr(torch, plan.config.dtype))
    precision = resolve_lm_head(plan.lm_head, device.type, plan.config.hidden_size)
    plan = replace(plan, lm_head=precision)
    loaded = {
        (tensor.role, tensor.layer): _load(tensor, plan, device, packed=packed)
        for tensor in plan.tensors
        if tensor.role != "lm_head"
    }
    own: dict[str, Any] = {role: tensor for (role, layer), tensor in loaded.items() if layer is None}
    ids = None if plan.draft_vocab is None else torch.tensor(plan.draft_vocab.ids)
    lm_head = LmHead(own["embedding"], 0.0)
    if plan.has_own_lm_head:
        lm_head = _load_lm_head(plan, precision, ids, device, packed=packed)
    of_layer: dict[str, Any] = {role: tensor for (role, layer), tensor in loaded.items() if layer is not None}
    layer, joined = LayerWeights(**of_layer), None
    if packed:
        layer, joined = join_layer(layer, getattr(torch, plan.config.dtype))
    draft_ids = None if ids is None else ids.to(device)
    weights = HeadWeights(layers=(layer,), lm_head=lm_head.table, draft_ids=draft_ids, **own)
    levers = describe_levers(plan.config, precision, lm_head.relative_error, plan.draft_vocab, plan.quantization)
    return MtpHead(plan.config, plan.record, weights, head_fingerprint(plan), levers=levers, joined=joined)


def _load_lm_head(
    plan: HeadPlan, precision: LmHeadPrecision, ids: Tensor | None, device: torch.device, *, packed: bool
) -> LmHead:
    rows = _read(plan.lm_head_source)
    # Cut first: rows that are never drafted need no memory on the device, and no part in the scales.
    kept = rows if ids is None else rows[ids]
    return make_lm_head(
        _aligned(kept) if packed else kept, precision, getattr(torch, plan.config.dtype), device, packed=packed
    )


def _read(tensor: PlannedTensor) -> Tensor:
    """As stored, on the host. Rows that only pad the vocabulary are left in the file."""
    with safe_open(tensor.stored.file, framework="pt") as file:
        rows: Tensor = file.get_slice(tensor.stored.name)[: tensor.shape[0]]
    return rows


def _load(tensor: PlannedTensor, plan: HeadPlan, device: torch.device, *, packed: bool) -> LinearWeight:
    if tensor.is_narrow:
        weight = _load_narrow(tensor, device)
        return weight if packed else narrowed(weight, getattr(torch, plan.config.dtype))
    rows = _aligned(_read(tensor)) if packed else _read(tensor)
    dtype = torch.float32 if rows.dim() == 1 else getattr(torch, plan.config.dtype)
    return round_projection(rows.to(device=device, dtype=dtype), tensor.role, plan.quantization, packed=packed)


def _load_narrow(tensor: PlannedTensor, device: torch.device) -> LinearWeight:
    """A weight that was stored in few bits, as it is. Raises CheckpointError for scales that are none."""
    tensors = {}
    for suffix, part in tensor.parts:
        with safe_open(part.file, framework="pt") as file:
            tensors[suffix] = _aligned(file.get_tensor(part.name)).to(device)
    try:
        weight = read_stored_weight(tensors)
    except ValueError as error:
        raise CheckpointError(f"{tensor.stored.file}: {tensor.stored.name}: {error}") from error
    return pack_nvfp4(weight) if isinstance(weight, Nvfp4Weight) else weight


def _aligned(rows: Tensor) -> Tensor:
    """For kernels. Mapped from a file rows may begin anywhere, and on a CPU they are used where they lie."""
    return rows if rows.data_ptr() % _ALIGNMENT == 0 else rows.clone()
