"""Building requests: pure, from Python values to messages."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Final

from specdraft.errors import Reason, make_error
from specdraft.memory import ClientGpu, CudaError
from specdraft.options import SessionOptions
from specdraft.server_info import ServerInfo
from specdraft.v1 import session_pb2
from specdraft.words import PROTOCOL_VERSION, MemoryKind, wire

__all__ = ["choose_gpu", "choose_memory", "open_session_request", "read_boot_id"]

_BOOT_ID_PATH: Final = Path("/proc/sys/kernel/random/boot_id")


def read_boot_id() -> str:
    """The kernel's boot id of this host; empty where there is none."""
    return _BOOT_ID_PATH.read_text(encoding="ascii").strip() if _BOOT_ID_PATH.exists() else ""


def choose_memory(options: SessionOptions, info: ServerInfo, socket_path: str, boot_id: str) -> MemoryKind:
    """Resolves `memory`: "auto" means shared memory on a Unix socket of the same host where the service grants it."""
    if options.memory == "inline":
        return MemoryKind.INLINE
    if options.memory in {"host", "cuda"}:
        return MemoryKind.HOST if options.memory == "host" else MemoryKind.CUDA
    same_host = bool(socket_path) and bool(boot_id) and boot_id == info.boot_id
    if same_host and options.gpu is not None and MemoryKind.CUDA in info.memory_kinds:
        return MemoryKind.CUDA
    return MemoryKind.HOST if same_host and MemoryKind.HOST in info.memory_kinds else MemoryKind.INLINE


def choose_gpu(options: SessionOptions, kind: MemoryKind) -> ClientGpu | None:
    """The GPU that memory is shared on; None where none is.

    This process's context on it is there then. Making one may take longer than a lease, so it comes before the session.

    Raises:
        FailedPreconditionError: `TRANSPORT_UNAVAILABLE`: GPU memory was asked for, and there is no GPU.
    """
    if kind is not MemoryKind.CUDA:
        return None
    try:
        gpu = options.gpu or ClientGpu()
        gpu.driver.make_current(gpu.device)
        return gpu
    except (ImportError, CudaError, IndexError) as error:
        raise make_error(
            Reason.TRANSPORT_UNAVAILABLE, f"this process has no CUDA memory to share: {error}", kind="CUDA"
        ) from error


def open_session_request(
    options: SessionOptions, info: ServerInfo, kind: MemoryKind, boot_id: str, gpu: ClientGpu | None
) -> session_pb2.OpenSessionRequest:
    """The handshake."""
    return session_pb2.OpenSessionRequest(
        protocol_version=PROTOCOL_VERSION,
        hidden_source=wire(options.hidden_source),
        hidden_dtype=wire(options.dtype),
        hidden_width=options.hidden_width or info.head.hidden_width,
        layer_ids=options.layer_ids,
        vocab_size=options.vocab_size,
        memory_kind=wire(kind),
        slot_count=options.slot_count,
        max_drafts=options.max_drafts,
        prefill_row_count=options.prefill_rows,
        with_masks=options.with_masks,
        boot_id=boot_id,
        pid=gpu.pid if gpu else os.getpid(),
        device_uuid=gpu.uuid if gpu else b"",
        carry_key=options.carry_key,
        client_name=options.client_name,
    )
