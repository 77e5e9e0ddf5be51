"""Loading a head: from a checked plan to weights on a device."""

from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from drafter_service.heads.fingerprint import head_fingerprint
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
) -> MtpHead:
    """Plans and loads a head in one go. `dtype` is torch.float32, torch.bfloat16 or None for the stored type.

    Raises CheckpointError before any tensor is read if the checkpoint cannot be used.
    """
    name = None if dtype is None else str(dtype).removeprefix("torch.")
    plan = plan_head(checkpoint, target_checkpoint, dtype=name, hidden_source=hidden_source, recycle=recycle)
    return load_planned_head(plan, torch.device(device))


def load_planned_head(plan: HeadPlan, device: torch.device) -> MtpHead:
    """Reads a plan's tensors onto a device."""
    loaded = {(tensor.role, tensor.layer): _load(tensor, plan, device) for tensor in plan.tensors}
    own = {role: tensor for (role, layer), tensor in loaded.items() if layer is None}
    own.setdefault("lm_head", own["embedding"])
    layers = tuple(
        LayerWeights(**{role: tensor for (role, layer), tensor in loaded.items() if layer == number})
        for number in range(plan.config.num_layers)
    )
    weights = HeadWeights(layers=layers, **own)
    return MtpHead(plan.config, plan.record, weights, head_fingerprint(plan))


def _load(tensor: PlannedTensor, plan: HeadPlan, device: torch.device) -> Tensor:
    with safe_open(tensor.stored.file, framework="pt") as file:
        # The slice keeps rows that only pad the vocabulary off the device, and their values out of every result.
        rows: Tensor = file.get_slice(tensor.stored.name)[: tensor.shape[0]]
    dtype = torch.float32 if rows.dim() == 1 else getattr(torch, plan.config.dtype)
    return rows.to(device=device, dtype=dtype)
