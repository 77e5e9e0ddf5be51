from specdraft.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class HiddenSource(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    HIDDEN_SOURCE_UNSPECIFIED: _ClassVar[HiddenSource]
    HIDDEN_SOURCE_PRE_NORM: _ClassVar[HiddenSource]
    HIDDEN_SOURCE_POST_NORM: _ClassVar[HiddenSource]
    HIDDEN_SOURCE_LAYERS: _ClassVar[HiddenSource]

class Runner(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    RUNNER_UNSPECIFIED: _ClassVar[Runner]
    RUNNER_EAGER: _ClassVar[Runner]
    RUNNER_GRAPH: _ClassVar[Runner]
HIDDEN_SOURCE_UNSPECIFIED: HiddenSource
HIDDEN_SOURCE_PRE_NORM: HiddenSource
HIDDEN_SOURCE_POST_NORM: HiddenSource
HIDDEN_SOURCE_LAYERS: HiddenSource
RUNNER_UNSPECIFIED: Runner
RUNNER_EAGER: Runner
RUNNER_GRAPH: Runner

class GetServerInfoRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetServerInfoResponse(_message.Message):
    __slots__ = ("service_version", "protocol_version", "head", "limits", "runner", "memory_kinds", "incarnation", "boot_id", "device_uuids", "pid", "levers")
    class LeversEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    SERVICE_VERSION_FIELD_NUMBER: _ClassVar[int]
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HEAD_FIELD_NUMBER: _ClassVar[int]
    LIMITS_FIELD_NUMBER: _ClassVar[int]
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KINDS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUIDS_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    LEVERS_FIELD_NUMBER: _ClassVar[int]
    service_version: str
    protocol_version: int
    head: HeadInfo
    limits: Limits
    runner: Runner
    memory_kinds: _containers.RepeatedScalarFieldContainer[_tensor_pb2.MemoryKind]
    incarnation: bytes
    boot_id: str
    device_uuids: _containers.RepeatedScalarFieldContainer[bytes]
    pid: int
    levers: _containers.ScalarMap[str, str]
    def __init__(self, service_version: _Optional[str] = ..., protocol_version: _Optional[int] = ..., head: _Optional[_Union[HeadInfo, _Mapping]] = ..., limits: _Optional[_Union[Limits, _Mapping]] = ..., runner: _Optional[_Union[Runner, str]] = ..., memory_kinds: _Optional[_Iterable[_Union[_tensor_pb2.MemoryKind, str]]] = ..., incarnation: _Optional[bytes] = ..., boot_id: _Optional[str] = ..., device_uuids: _Optional[_Iterable[bytes]] = ..., pid: _Optional[int] = ..., levers: _Optional[_Mapping[str, str]] = ...) -> None: ...

class HeadInfo(_message.Message):
    __slots__ = ("model_type", "kind", "fingerprint", "hidden_width", "head_width", "dtype", "hidden_source", "layer_ids", "vocab_size", "draft_vocab_size", "max_seq_len", "layer_count", "lookback", "block_gamma", "rank_count", "kv_bytes_per_row")
    MODEL_TYPE_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    HEAD_WIDTH_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SOURCE_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    DRAFT_VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MAX_SEQ_LEN_FIELD_NUMBER: _ClassVar[int]
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    LOOKBACK_FIELD_NUMBER: _ClassVar[int]
    BLOCK_GAMMA_FIELD_NUMBER: _ClassVar[int]
    RANK_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_BYTES_PER_ROW_FIELD_NUMBER: _ClassVar[int]
    model_type: str
    kind: str
    fingerprint: str
    hidden_width: int
    head_width: int
    dtype: _tensor_pb2.DType
    hidden_source: HiddenSource
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    draft_vocab_size: int
    max_seq_len: int
    layer_count: int
    lookback: int
    block_gamma: int
    rank_count: int
    kv_bytes_per_row: int
    def __init__(self, model_type: _Optional[str] = ..., kind: _Optional[str] = ..., fingerprint: _Optional[str] = ..., hidden_width: _Optional[int] = ..., head_width: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., hidden_source: _Optional[_Union[HiddenSource, str]] = ..., layer_ids: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., draft_vocab_size: _Optional[int] = ..., max_seq_len: _Optional[int] = ..., layer_count: _Optional[int] = ..., lookback: _Optional[int] = ..., block_gamma: _Optional[int] = ..., rank_count: _Optional[int] = ..., kv_bytes_per_row: _Optional[int] = ...) -> None: ...

class Limits(_message.Message):
    __slots__ = ("max_drafts", "propose_batch_max", "prefill_rows_max", "message_size_max_bytes", "sessions_max", "sequences_per_session_max", "in_flight_per_sequence_max", "kv_page_count", "kv_page_row_count", "lease_ms", "grace_ms")
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_BATCH_MAX_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROWS_MAX_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_SIZE_MAX_BYTES_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_MAX_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_PER_SESSION_MAX_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_PER_SEQUENCE_MAX_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_PAGE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    GRACE_MS_FIELD_NUMBER: _ClassVar[int]
    max_drafts: int
    propose_batch_max: int
    prefill_rows_max: int
    message_size_max_bytes: int
    sessions_max: int
    sequences_per_session_max: int
    in_flight_per_sequence_max: int
    kv_page_count: int
    kv_page_row_count: int
    lease_ms: int
    grace_ms: int
    def __init__(self, max_drafts: _Optional[int] = ..., propose_batch_max: _Optional[int] = ..., prefill_rows_max: _Optional[int] = ..., message_size_max_bytes: _Optional[int] = ..., sessions_max: _Optional[int] = ..., sequences_per_session_max: _Optional[int] = ..., in_flight_per_sequence_max: _Optional[int] = ..., kv_page_count: _Optional[int] = ..., kv_page_row_count: _Optional[int] = ..., lease_ms: _Optional[int] = ..., grace_ms: _Optional[int] = ...) -> None: ...

class OpenSessionRequest(_message.Message):
    __slots__ = ("protocol_version", "hidden_source", "hidden_dtype", "hidden_width", "layer_ids", "vocab_size", "memory_kind", "slot_count", "max_drafts", "prefill_row_count", "with_masks", "boot_id", "pid", "device_uuid", "carry_key", "client_name")
    PROTOCOL_VERSION_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_SOURCE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_DTYPE_FIELD_NUMBER: _ClassVar[int]
    HIDDEN_WIDTH_FIELD_NUMBER: _ClassVar[int]
    LAYER_IDS_FIELD_NUMBER: _ClassVar[int]
    VOCAB_SIZE_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    SLOT_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    PREFILL_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    WITH_MASKS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    CARRY_KEY_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    protocol_version: int
    hidden_source: HiddenSource
    hidden_dtype: _tensor_pb2.DType
    hidden_width: int
    layer_ids: _containers.RepeatedScalarFieldContainer[int]
    vocab_size: int
    memory_kind: _tensor_pb2.MemoryKind
    slot_count: int
    max_drafts: int
    prefill_row_count: int
    with_masks: bool
    boot_id: str
    pid: int
    device_uuid: bytes
    carry_key: bytes
    client_name: str
    def __init__(self, protocol_version: _Optional[int] = ..., hidden_source: _Optional[_Union[HiddenSource, str]] = ..., hidden_dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ..., hidden_width: _Optional[int] = ..., layer_ids: _Optional[_Iterable[int]] = ..., vocab_size: _Optional[int] = ..., memory_kind: _Optional[_Union[_tensor_pb2.MemoryKind, str]] = ..., slot_count: _Optional[int] = ..., max_drafts: _Optional[int] = ..., prefill_row_count: _Optional[int] = ..., with_masks: bool = ..., boot_id: _Optional[str] = ..., pid: _Optional[int] = ..., device_uuid: _Optional[bytes] = ..., carry_key: _Optional[bytes] = ..., client_name: _Optional[str] = ...) -> None: ...

class OpenSessionResponse(_message.Message):
    __slots__ = ("session_id", "session_token", "lease_ms", "memory_kind", "arena", "max_drafts", "carries", "incarnation", "device_uuid")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    SESSION_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MEMORY_KIND_FIELD_NUMBER: _ClassVar[int]
    ARENA_FIELD_NUMBER: _ClassVar[int]
    MAX_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    CARRIES_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    session_token: bytes
    lease_ms: int
    memory_kind: _tensor_pb2.MemoryKind
    arena: _tensor_pb2.Arena
    max_drafts: int
    carries: _containers.RepeatedCompositeFieldContainer[CarryInfo]
    incarnation: bytes
    device_uuid: bytes
    def __init__(self, session_id: _Optional[bytes] = ..., session_token: _Optional[bytes] = ..., lease_ms: _Optional[int] = ..., memory_kind: _Optional[_Union[_tensor_pb2.MemoryKind, str]] = ..., arena: _Optional[_Union[_tensor_pb2.Arena, _Mapping]] = ..., max_drafts: _Optional[int] = ..., carries: _Optional[_Iterable[_Union[CarryInfo, _Mapping]]] = ..., incarnation: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ...) -> None: ...

class CarryInfo(_message.Message):
    __slots__ = ("kv_id", "ranges", "label", "expires_in_ms")
    KV_ID_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    EXPIRES_IN_MS_FIELD_NUMBER: _ClassVar[int]
    kv_id: bytes
    ranges: _containers.RepeatedCompositeFieldContainer[KeyRange]
    label: str
    expires_in_ms: int
    def __init__(self, kv_id: _Optional[bytes] = ..., ranges: _Optional[_Iterable[_Union[KeyRange, _Mapping]]] = ..., label: _Optional[str] = ..., expires_in_ms: _Optional[int] = ...) -> None: ...

class KeyRange(_message.Message):
    __slots__ = ("begin", "end")
    BEGIN_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    begin: int
    end: int
    def __init__(self, begin: _Optional[int] = ..., end: _Optional[int] = ...) -> None: ...

class KeepAliveRequest(_message.Message):
    __slots__ = ("arena_nonce",)
    ARENA_NONCE_FIELD_NUMBER: _ClassVar[int]
    arena_nonce: bytes
    def __init__(self, arena_nonce: _Optional[bytes] = ...) -> None: ...

class KeepAliveResponse(_message.Message):
    __slots__ = ("lease_ms", "mapping_proven")
    LEASE_MS_FIELD_NUMBER: _ClassVar[int]
    MAPPING_PROVEN_FIELD_NUMBER: _ClassVar[int]
    lease_ms: int
    mapping_proven: bool
    def __init__(self, lease_ms: _Optional[int] = ..., mapping_proven: bool = ...) -> None: ...

class CloseSessionRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class CloseSessionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RegisterRegionRequest(_message.Message):
    __slots__ = ("cuda_ipc_handle", "device_uuid", "allocation_size_bytes", "offset_bytes", "length_bytes")
    CUDA_IPC_HANDLE_FIELD_NUMBER: _ClassVar[int]
    DEVICE_UUID_FIELD_NUMBER: _ClassVar[int]
    ALLOCATION_SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    LENGTH_BYTES_FIELD_NUMBER: _ClassVar[int]
    cuda_ipc_handle: bytes
    device_uuid: bytes
    allocation_size_bytes: int
    offset_bytes: int
    length_bytes: int
    def __init__(self, cuda_ipc_handle: _Optional[bytes] = ..., device_uuid: _Optional[bytes] = ..., allocation_size_bytes: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., length_bytes: _Optional[int] = ...) -> None: ...

class RegisterRegionResponse(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    def __init__(self, region_id: _Optional[bytes] = ...) -> None: ...

class UnregisterRegionRequest(_message.Message):
    __slots__ = ("region_id",)
    REGION_ID_FIELD_NUMBER: _ClassVar[int]
    region_id: bytes
    def __init__(self, region_id: _Optional[bytes] = ...) -> None: ...

class UnregisterRegionResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenLaneRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class OpenLaneResponse(_message.Message):
    __slots__ = ("lane", "descriptor_token", "descriptor_socket", "size_bytes", "ready_offset_bytes", "done_offset_bytes", "ready_timeout_ms")
    LANE_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_TOKEN_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTOR_SOCKET_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DONE_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    READY_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    descriptor_token: bytes
    descriptor_socket: str
    size_bytes: int
    ready_offset_bytes: int
    done_offset_bytes: int
    ready_timeout_ms: int
    def __init__(self, lane: _Optional[int] = ..., descriptor_token: _Optional[bytes] = ..., descriptor_socket: _Optional[str] = ..., size_bytes: _Optional[int] = ..., ready_offset_bytes: _Optional[int] = ..., done_offset_bytes: _Optional[int] = ..., ready_timeout_ms: _Optional[int] = ...) -> None: ...
