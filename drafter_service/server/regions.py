"""`RegisterRegion`, as it comes."""

from __future__ import annotations

from drafter_service.memory.gpu import GpuMemory
from drafter_service.memory.regions import RegionWish
from drafter_service.server.hiddens import arena_of, regions_of
from drafter_service.server.refusals import invalid_field
from drafter_service.state import Session
from specdraft.memory.cuda import IPC_HANDLE_SIZE_BYTES, UUID_SIZE_BYTES
from specdraft.v1 import session_pb2


def register(
    session: Session, gpu: GpuMemory | None, request: session_pb2.RegisterRegionRequest
) -> session_pb2.RegisterRegionResponse:
    """Opens a region of the session's client. Raises SpecdraftError."""
    table = regions_of(session)
    assert gpu is not None, "only sessions with CUDA memory have regions"
    # Who has shown that it can map ours is on this host and on a GPU that we reach.
    arena_of(session)
    for field, size in (("cuda_ipc_handle", IPC_HANDLE_SIZE_BYTES), ("device_uuid", UUID_SIZE_BYTES)):
        given = len(getattr(request, field))
        if given != size:
            raise invalid_field(field, f"{given} bytes", f"{size} bytes")
    if request.length_bytes == 0:
        raise invalid_field("length_bytes", 0, "1 or more")
    gpu.check_visible(request.device_uuid)
    wish = RegionWish(
        request.cuda_ipc_handle, request.allocation_size_bytes, request.offset_bytes, request.length_bytes
    )
    return session_pb2.RegisterRegionResponse(region_id=table.register(wish))
