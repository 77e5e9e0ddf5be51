from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    D_TYPE_UNSPECIFIED: _ClassVar[DType]
    D_TYPE_FLOAT32: _ClassVar[DType]
    D_TYPE_BFLOAT16: _ClassVar[DType]
    D_TYPE_FLOAT16: _ClassVar[DType]

class MemoryKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    MEMORY_KIND_UNSPECIFIED: _ClassVar[MemoryKind]
    MEMORY_KIND_INLINE: _ClassVar[MemoryKind]
    MEMORY_KIND_HOST: _ClassVar[MemoryKind]
    MEMORY_KIND_CUDA: _ClassVar[MemoryKind]
D_TYPE_UNSPECIFIED: DType
D_TYPE_FLOAT32: DType
D_TYPE_BFLOAT16: DType
D_TYPE_FLOAT16: DType
MEMORY_KIND_UNSPECIFIED: MemoryKind
MEMORY_KIND_INLINE: MemoryKind
MEMORY_KIND_HOST: MemoryKind
MEMORY_KIND_CUDA: MemoryKind

class TensorRef(_message.Message):
    __slots__ = ("arena_slot", "arena_staging", "region", "inline", "dtype", "row_count", "row_stride_bytes")
    ARENA_SLOT_FIELD_NUMBER: _ClassVar[int]
    ARENA_STAGING_FIELD_NUMBER: _ClassVar[int]
    REGION_FIELD_NUMBER: _ClassVar[int]
    INLINE_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    ROW_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    arena_slot: ArenaSlot
    arena_staging: ArenaStaging
    region: RegionRange
    inline: bytes
    dtype: DType
    row_count: int
    row_stride_bytes: int
    def __init__(self, arena_slot: _Optional[_Union[ArenaSlot, _Mapping]] = ..., arena_staging: _Optional[_Union[ArenaStaging, _Mapping]] = ..., region: _Optional[_Union[RegionRange, _Mapping]] = ..., inline: _Optional[bytes] = ..., dtype: _Optional[_Union[DType, str]] = ..., row_count: _Optional[int] = ..., row_stride_bytes: _Optional[int] = ...) -> None: ...

class ArenaSlot(_message.Message):
    __slots__ = ("slot",)
    SLOT_FIELD_NUMBER: _ClassVar[int]
    slot: int
    def __init__(self, slot: _Optional[int] = ...) -> None: ...

class ArenaStaging(_message.Message):
    __slots__ = ("first_row",)
    FIRST_ROW_FIELD_NUMBER: _ClassVar[int]
    first_row: int
    def __init__(self, first_row: _Optional[int] = ...) -> None: ...

class RegionRange(_message.Message):
    __slots__ = ("region_id", "offset_bytes")
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    offset_bytes: int
    def __init__(self, region_id: _Optional[bytes] = ..., offset_bytes: _Optional[int] = ...) -> None: ...

class Arena(_message.Message):
    __slots__ = ("kind", "size_bytes", "slot_count", "slots_offset_bytes", "slot_stride_bytes", "staging_offset_bytes", "prefill_row_count", "hidden_row_stride_bytes", "slot", "nonce_offset_bytes", "descriptor_token", "descriptor_socket", "cuda_ipc_handle", "device_uuid")
    KIND_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    SLOTS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STAGING_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_ROW_STRIDE_BYTES_FIELD_NUMBER: _ClassVar[int]
    SLOT_FIELD_NUMBER: _ClassVar[int]
    NONCE_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_SOCKET_FIELD_NUMBER: _ClassVar[int]
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    kind: MemoryKind
    size_bytes: int
    slot_count: int
    slots_offset_bytes: int
    slot_stride_bytes: int
    staging_offset_bytes: int
    prefill_row_count: int
    hidden_row_stride_bytes: int
    slot: SlotLayout
    nonce_offset_bytes: int
    descriptor_token: bytes
    descriptor_socket: str
    cuda_ipc_handle: bytes
    device_uuid: bytes
    def __init__(self, kind: _Optional[_Union[MemoryKind, str]] = ..., size_bytes: _Optional[int] = ..., slot_count: _Optional[int] = ..., slots_offset_bytes: _Optional[int] = ..., slot_stride_bytes: _Optional[int] = ..., staging_offset_bytes: _Optional[int] = ..., prefill_row_count: _Optional[int] = ..., hidden_row_stride_bytes: _Optional[int] = ..., slot: _Optional[_Union[SlotLayout, _Mapping]] = ..., nonce_offset_bytes: _Optional[int] = ..., descriptor_token: _Optional[bytes] = ..., descriptor_socket: _Optional[str] = ..., cuda_ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class SlotLayout(_message.Message):
    __slots__ = ("first_key_offset_bytes", "pair_count_offset_bytes", "tokens_offset_bytes", "hidden_offset_bytes", "mask_offset_bytes", "status_offset_bytes", "op_offset_bytes", "draft_count_offset_bytes", "stop_reason_offset_bytes", "drafts_offset_bytes", "logprobs_offset_bytes", "last_embedding_offset_bytes", "row_count_offset_bytes", "last_pair_key_offset_bytes")
    FIRST_KEY_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    PAIR_COUNT_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    TOKENS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    MASK_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STATUS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    OP_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNT_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_EMBEDDING_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LAST_PAIR_KEY_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    first_key_offset_bytes: int
    pair_count_offset_bytes: int
    tokens_offset_bytes: int
    hidden_offset_bytes: int
    mask_offset_bytes: int
    status_offset_bytes: int
    op_offset_bytes: int
    draft_count_offset_bytes: int
    stop_reason_offset_bytes: int
    drafts_offset_bytes: int
    logprobs_offset_bytes: int
    last_embedding_offset_bytes: int
    row_count_offset_bytes: int
    last_pair_key_offset_bytes: int
    def __init__(self, first_key_offset_bytes: _Optional[int] = ..., pair_count_offset_bytes: _Optional[int] = ..., tokens_offset_bytes: _Optional[int] = ..., hidden_offset_bytes: _Optional[int] = ..., mask_offset_bytes: _Optional[int] = ..., status_offset_bytes: _Optional[int] = ..., op_offset_bytes: _Optional[int] = ..., draft_count_offset_bytes: _Optional[int] = ..., stop_reason_offset_bytes: _Optional[int] = ..., drafts_offset_bytes: _Optional[int] = ..., logprobs_offset_bytes: _Optional[int] = ..., last_embedding_offset_bytes: _Optional[int] = ..., row_count_offset_bytes: _Optional[int] = ..., last_pair_key_offset_bytes: _Optional[int] = ...) -> None: ...
