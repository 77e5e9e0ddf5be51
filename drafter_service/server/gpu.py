"""The GPU that the service shares memory on: a real one, a simulated one, or none."""

from __future__ import annotations

import logging

import torch

from drafter_service.config import ConfigError, ServiceConfig
from drafter_service.memory.gpu import GpuLimits, GpuMemory
from specdraft.memory.cuda import CudaDriver, CudaError, format_uuid
from specdraft.memory.cuda_bindings import CudaBindingsDriver
from specdraft.memory.simulated import SimulatedDriver

_log = logging.getLogger(__name__)


def open_gpu(config: ServiceConfig, device: torch.device) -> GpuMemory | None:
    """What is shared on the head's device; None on a CPU. Raises ConfigError."""
    limits = GpuLimits(config.gpu_arena_bytes, config.max_regions if config.allow_client_regions else 0)
    if config.simulated_gpu is not None:
        if device.type != "cpu":
            raise ConfigError("--simulated-gpu plays a GPU for a head on the CPU: it needs --device cpu")
        driver: CudaDriver = SimulatedDriver(config.simulated_gpu)
        return GpuMemory(driver, 0, device, limits)
    if device.type != "cuda":
        return None
    try:
        driver = CudaBindingsDriver()
        # Torch counts the GPUs that are visible to this process, and so does the driver.
        gpu = GpuMemory(driver, device.index or 0, device, limits)
    except ImportError as error:
        raise ConfigError("--device cuda needs cuda-bindings (the extra `gpu`)") from error
    except CudaError as error:
        raise ConfigError(f"--device {device}: the driver does not start: {error}") from error
    _log.info("GPU memory is shared on %s", format_uuid(gpu.uuid))
    return gpu
