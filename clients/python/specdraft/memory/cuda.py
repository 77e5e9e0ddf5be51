"""The few driver calls that GPU memory and lanes need, behind one interface. Importing this needs no CUDA."""

from __future__ import annotations

from typing import Final, Protocol

__all__ = [
    "DEFAULT_STREAM",
    "IPC_HANDLE_SIZE_BYTES",
    "UUID_SIZE_BYTES",
    "CudaDriver",
    "CudaError",
    "connections_problem",
    "format_uuid",
]

DEFAULT_STREAM: Final = 0
IPC_HANDLE_SIZE_BYTES: Final = 64
UUID_SIZE_BYTES: Final = 16

CONNECTIONS_VARIABLE: Final = "CUDA_DEVICE_MAX_CONNECTIONS"
DEFAULT_CONNECTIONS: Final = 8
MPS_CONNECTIONS: Final = 2

_STICKY: Final = frozenset(
    {
        "CUDA_ERROR_ASSERT",
        "CUDA_ERROR_CONTAINED",
        "CUDA_ERROR_CONTEXT_IS_DESTROYED",
        "CUDA_ERROR_ECC_UNCORRECTABLE",
        "CUDA_ERROR_EXTERNAL_DEVICE",
        "CUDA_ERROR_HARDWARE_STACK_ERROR",
        "CUDA_ERROR_ILLEGAL_ADDRESS",
        "CUDA_ERROR_ILLEGAL_INSTRUCTION",
        "CUDA_ERROR_INVALID_ADDRESS_SPACE",
        "CUDA_ERROR_INVALID_PC",
        "CUDA_ERROR_LAUNCH_FAILED",
        "CUDA_ERROR_LAUNCH_TIMEOUT",
        "CUDA_ERROR_MISALIGNED_ADDRESS",
        "CUDA_ERROR_MPS_CLIENT_TERMINATED",
        "CUDA_ERROR_MPS_RPC_FAILURE",
        "CUDA_ERROR_NVLINK_UNCORRECTABLE",
        "CUDA_ERROR_TENSOR_MEMORY_LEAK",
        "CUDA_ERROR_UNKNOWN",
    }
)


class CudaError(RuntimeError):
    """A driver call failed.

    Attributes:
        call: the driver's function.
        name: the driver's name for the error, for example "CUDA_ERROR_INVALID_VALUE".
    """

    def __init__(self, call: str, name: str) -> None:
        super().__init__(f"{call}: {name}")  # never an argument: handles are secrets
        self.call = call
        self.name = name

    @property
    def is_sticky(self) -> bool:
        """Whether every later call of the process fails likewise: only a new process helps."""
        return self.name in _STICKY


class CudaDriver(Protocol):
    """Driver calls. All but `devices` and `make_current` need a current context in the calling thread.

    Pointers, streams and devices are plain integers; a device is its ordinal in `devices`. Every method raises
    `CudaError`.
    """

    def devices(self) -> tuple[bytes, ...]:
        """UUIDs (16 bytes) of the GPUs that this process sees."""
        ...

    def make_current(self, device: int) -> None:
        """Makes the device's primary context current in this thread."""
        ...

    def allocate(self, size: int) -> int:
        """An allocation of its own, never a piece of a cached one."""
        ...

    def free(self, pointer: int) -> None:
        """Frees it. May block while a wait is open anywhere in the process."""
        ...

    def export_handle(self, pointer: int) -> bytes:
        """The 64-byte IPC handle of the allocation that starts at `pointer`."""
        ...

    def open_handle(self, handle: bytes) -> int:
        """Maps another process's allocation; returns where its base lies here."""
        ...

    def close_handle(self, pointer: int) -> None:
        """Unmaps it. May block like `free`."""
        ...

    def address_range(self, pointer: int) -> tuple[int, int]:
        """Base and size of the allocation that holds `pointer`."""
        ...

    def register_host(self, address: int, size: int) -> int:
        """Makes host pages (tmpfs or a memfd) reachable for the device; returns their device pointer."""
        ...

    def unregister_host(self, address: int) -> None:
        """Ends that. May block like `free`."""
        ...

    def create_stream(self) -> int:
        """A stream that does not synchronise with the default stream."""
        ...

    def destroy_stream(self, stream: int) -> None:
        """Gives it back once its work is done."""
        ...

    def is_done(self, stream: int) -> bool:
        """Whether everything in the stream has been done."""
        ...

    def synchronize(self, stream: int) -> None:
        """Waits until everything in the stream has been done."""
        ...

    def write_value(self, stream: int, pointer: int, value: int) -> None:
        """Enqueues: store a u64, behind everything before it in the stream, visible to every reader."""
        ...

    def wait_value(self, stream: int, pointer: int, value: int) -> None:
        """Enqueues: go on once the u64 there is >= value, compared signed and cyclically."""
        ...

    def copy(self, stream: int, target: int, source: int, size: int) -> None:
        """Enqueues a copy between any two pointers."""
        ...

    def fill(self, stream: int, pointer: int, value: int, size: int) -> None:
        """Enqueues: set bytes."""
        ...

    def can_access_peer(self, device: int, peer: int) -> bool:
        """Whether the device can read and write the peer's memory."""
        ...


def format_uuid(uuid: bytes) -> str:
    """A GPU's UUID as the vendor's tools write it."""
    text = uuid.hex()
    return f"GPU-{text[:8]}-{text[8:12]}-{text[12:16]}-{text[16:20]}-{text[20:]}"


def connections_problem(setting: str | None, num_lanes: int, *, is_mps: bool = False) -> str:
    """Why `num_lanes` lanes would stop every stream of this process; empty = they do not.

    Each lane's open wait holds one hardware queue, and other work needs one as well.

    Args:
        setting: the value of CUDA_DEVICE_MAX_CONNECTIONS when CUDA started; None = not set.
        num_lanes: lanes of this process on the device.
        is_mps: whether the process runs under MPS, whose own default is smaller.
    """
    default = MPS_CONNECTIONS if is_mps else DEFAULT_CONNECTIONS
    num_queues = int(setting) if setting is not None and setting.isdecimal() else default
    if num_lanes < num_queues:
        return ""
    return (
        f"{num_lanes} lanes need {CONNECTIONS_VARIABLE} of at least {num_lanes + 1}; it is "
        f"{num_queues}{'' if setting else ' by default'}, and must be set before CUDA starts"
    )
