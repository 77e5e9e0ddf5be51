"""Memory shared between a client and the service. Imports neither gRPC, nor CUDA, nor the client classes."""

from specdraft.memory.arena import HostArena, SlotOutputs
from specdraft.memory.cuda import CudaDriver, CudaError
from specdraft.memory.cuda_arena import ClientGpu, CudaArena, DeviceRange
from specdraft.memory.descriptors import (
    DESCRIPTOR_GRANTED,
    DESCRIPTOR_SEALS,
    DESCRIPTOR_TOKEN_SIZE_BYTES,
    NONCE_SIZE_BYTES,
    SIDE_SOCKET_SUFFIX,
    check_descriptor,
    fetch_descriptor,
    side_socket_path,
)
from specdraft.memory.layout import ArenaLayout, SlotLayout
from specdraft.memory.slots import SlotPool, StagingRows

__all__ = [
    "DESCRIPTOR_GRANTED",
    "DESCRIPTOR_SEALS",
    "DESCRIPTOR_TOKEN_SIZE_BYTES",
    "NONCE_SIZE_BYTES",
    "SIDE_SOCKET_SUFFIX",
    "ArenaLayout",
    "ClientGpu",
    "CudaArena",
    "CudaDriver",
    "CudaError",
    "DeviceRange",
    "HostArena",
    "SlotLayout",
    "SlotOutputs",
    "SlotPool",
    "StagingRows",
    "check_descriptor",
    "fetch_descriptor",
    "side_socket_path",
]
