from specdraft.v1 import error_reason_pb2 as _error_reason_pb2
from specdraft.v1 import session_pb2 as _session_pb2
from specdraft.v1 import tensor_pb2 as _tensor_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RowsPolicy(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    ROWS_POLICY_UNSPECIFIED: _ClassVar[RowsPolicy]
    ROWS_POLICY_EXACT: _ClassVar[RowsPolicy]
    ROWS_POLICY_APPROXIMATE: _ClassVar[RowsPolicy]

class StopReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STOP_REASON_UNSPECIFIED: _ClassVar[StopReason]
    STOP_REASON_COMPLETE: _ClassVar[StopReason]
    STOP_REASON_NOT_ASKED: _ClassVar[StopReason]
    STOP_REASON_CONFIDENCE: _ClassVar[StopReason]
    STOP_REASON_GRAMMAR: _ClassVar[StopReason]
    STOP_REASON_POSITION_LIMIT: _ClassVar[StopReason]
    STOP_REASON_PAGES: _ClassVar[StopReason]
ROWS_POLICY_UNSPECIFIED: RowsPolicy
ROWS_POLICY_EXACT: RowsPolicy
ROWS_POLICY_APPROXIMATE: RowsPolicy
STOP_REASON_UNSPECIFIED: StopReason
STOP_REASON_COMPLETE: StopReason
STOP_REASON_NOT_ASKED: StopReason
STOP_REASON_CONFIDENCE: StopReason
STOP_REASON_GRAMMAR: StopReason
STOP_REASON_POSITION_LIMIT: StopReason
STOP_REASON_PAGES: StopReason

class EntryStatus(_message.Message):
    __slots__ = ("code", "reason", "message", "details", "retry_delay_ms")
    class DetailsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    CODE_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    DETAILS_FIELD_NUMBER: _ClassVar[int]
    RETRY_DELAY_MS_FIELD_NUMBER: _ClassVar[int]
    code: int
    reason: _error_reason_pb2.ErrorReason
    message: str
    details: _containers.ScalarMap[str, str]
    retry_delay_ms: int
    def __init__(self, code: _Optional[int] = ..., reason: _Optional[_Union[_error_reason_pb2.ErrorReason, str]] = ..., message: _Optional[str] = ..., details: _Optional[_Mapping[str, str]] = ..., retry_delay_ms: _Optional[int] = ...) -> None: ...

class SequenceState(_message.Message):
    __slots__ = ("last_op", "row_count", "last_pair_key", "ranges", "first_approximate_key")
    LAST_OP_FIELD_NUMBER: _ClassVar[int]
    ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    LAST_PAIR_KEY_FIELD_NUMBER: _ClassVar[int]
    RANGES_FIELD_NUMBER: _ClassVar[int]
    FIRST_APPROXIMATE_KEY_FIELD_NUMBER: _ClassVar[int]
    last_op: int
    row_count: int
    last_pair_key: int
    ranges: _containers.RepeatedCompositeFieldContainer[_session_pb2.KeyRange]
    first_approximate_key: int
    def __init__(self, last_op: _Optional[int] = ..., row_count: _Optional[int] = ..., last_pair_key: _Optional[int] = ..., ranges: _Optional[_Iterable[_Union[_session_pb2.KeyRange, _Mapping]]] = ..., first_approximate_key: _Optional[int] = ...) -> None: ...

class OpenSequenceRequest(_message.Message):
    __slots__ = ("open_id", "budget_tokens", "reserve", "rows_policy")
    OPEN_ID_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    RESERVE_FIELD_NUMBER: _ClassVar[int]
    ROWS_POLICY_FIELD_NUMBER: _ClassVar[int]
    open_id: bytes
    budget_tokens: int
    reserve: bool
    rows_policy: RowsPolicy
    def __init__(self, open_id: _Optional[bytes] = ..., budget_tokens: _Optional[int] = ..., reserve: bool = ..., rows_policy: _Optional[_Union[RowsPolicy, str]] = ...) -> None: ...

class OpenSequenceResponse(_message.Message):
    __slots__ = ("sequence_id", "state")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    state: SequenceState
    def __init__(self, sequence_id: _Optional[bytes] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class GetSequenceRequest(_message.Message):
    __slots__ = ("sequence_id",)
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    def __init__(self, sequence_id: _Optional[bytes] = ...) -> None: ...

class GetSequenceResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SequenceState
    def __init__(self, state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class ForkSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "open_id", "keep_keys_below", "budget_tokens")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_KEYS_BELOW_FIELD_NUMBER: _ClassVar[int]
    BUDGET_TOKENS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    open_id: bytes
    keep_keys_below: int
    budget_tokens: int
    def __init__(self, sequence_id: _Optional[bytes] = ..., open_id: _Optional[bytes] = ..., keep_keys_below: _Optional[int] = ..., budget_tokens: _Optional[int] = ...) -> None: ...

class ForkSequenceResponse(_message.Message):
    __slots__ = ("sequence_id", "state")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    state: SequenceState
    def __init__(self, sequence_id: _Optional[bytes] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class TruncateRequest(_message.Message):
    __slots__ = ("sequence_id", "op", "first_key", "accepted_drafts")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    FIRST_KEY_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    first_key: int
    accepted_drafts: int
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., first_key: _Optional[int] = ..., accepted_drafts: _Optional[int] = ...) -> None: ...

class TruncateResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SequenceState
    def __init__(self, state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class CloseSequenceRequest(_message.Message):
    __slots__ = ("sequence_id", "op", "accepted_drafts")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    accepted_drafts: int
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., accepted_drafts: _Optional[int] = ...) -> None: ...

class CloseSequenceResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class Pairs(_message.Message):
    __slots__ = ("first_key", "tokens", "hiddens", "allow_gap", "rope_positions", "embeddings", "verified_tokens")
    FIRST_KEY_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    HIDDENS_FIELD_NUMBER: _ClassVar[int]
    ALLOW_GAP_FIELD_NUMBER: _ClassVar[int]
    ROPE_POSITIONS_FIELD_NUMBER: _ClassVar[int]
    EMBEDDINGS_FIELD_NUMBER: _ClassVar[int]
    VERIFIED_TOKENS_FIELD_NUMBER: _ClassVar[int]
    first_key: int
    tokens: _containers.RepeatedScalarFieldContainer[int]
    hiddens: _tensor_pb2.TensorRef
    allow_gap: bool
    rope_positions: _containers.RepeatedScalarFieldContainer[int]
    embeddings: _tensor_pb2.TensorRef
    verified_tokens: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, first_key: _Optional[int] = ..., tokens: _Optional[_Iterable[int]] = ..., hiddens: _Optional[_Union[_tensor_pb2.TensorRef, _Mapping]] = ..., allow_gap: bool = ..., rope_positions: _Optional[_Iterable[int]] = ..., embeddings: _Optional[_Union[_tensor_pb2.TensorRef, _Mapping]] = ..., verified_tokens: _Optional[_Iterable[int]] = ...) -> None: ...

class CatchupRequest(_message.Message):
    __slots__ = ("entries",)
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[CatchupEntry]
    def __init__(self, entries: _Optional[_Iterable[_Union[CatchupEntry, _Mapping]]] = ...) -> None: ...

class CatchupEntry(_message.Message):
    __slots__ = ("sequence_id", "op", "pairs", "accepted_drafts")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    pairs: Pairs
    accepted_drafts: int
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., pairs: _Optional[_Union[Pairs, _Mapping]] = ..., accepted_drafts: _Optional[int] = ...) -> None: ...

class CatchupResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[CatchupResult]
    def __init__(self, results: _Optional[_Iterable[_Union[CatchupResult, _Mapping]]] = ...) -> None: ...

class CatchupResult(_message.Message):
    __slots__ = ("status", "state")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    status: EntryStatus
    state: SequenceState
    def __init__(self, status: _Optional[_Union[EntryStatus, _Mapping]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class ProposeRequest(_message.Message):
    __slots__ = ("entries", "lane_ticket")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    LANE_TICKET_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[ProposeEntry]
    lane_ticket: LaneTicket
    def __init__(self, entries: _Optional[_Iterable[_Union[ProposeEntry, _Mapping]]] = ..., lane_ticket: _Optional[_Union[LaneTicket, _Mapping]] = ...) -> None: ...

class LaneTicket(_message.Message):
    __slots__ = ("lane", "ticket", "ready_timeout_ms")
    LANE_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    READY_TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    lane: int
    ticket: int
    ready_timeout_ms: int
    def __init__(self, lane: _Optional[int] = ..., ticket: _Optional[int] = ..., ready_timeout_ms: _Optional[int] = ...) -> None: ...

class ProposeEntry(_message.Message):
    __slots__ = ("sequence_id", "op", "pairs", "draft_count", "accepted_drafts", "min_logprob", "mask", "output_slot", "recommend", "verify_us")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    PAIRS_FIELD_NUMBER: _ClassVar[int]
    DRAFT_COUNT_FIELD_NUMBER: _ClassVar[int]
    ACCEPTED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    MIN_LOGPROB_FIELD_NUMBER: _ClassVar[int]
    MASK_FIELD_NUMBER: _ClassVar[int]
    OUTPUT_SLOT_FIELD_NUMBER: _ClassVar[int]
    RECOMMEND_FIELD_NUMBER: _ClassVar[int]
    VERIFY_US_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    pairs: Pairs
    draft_count: int
    accepted_drafts: int
    min_logprob: float
    mask: GrammarMask
    output_slot: int
    recommend: bool
    verify_us: int
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., pairs: _Optional[_Union[Pairs, _Mapping]] = ..., draft_count: _Optional[int] = ..., accepted_drafts: _Optional[int] = ..., min_logprob: _Optional[float] = ..., mask: _Optional[_Union[GrammarMask, _Mapping]] = ..., output_slot: _Optional[int] = ..., recommend: bool = ..., verify_us: _Optional[int] = ...) -> None: ...

class GrammarMask(_message.Message):
    __slots__ = ("words", "arena_slot", "arena_row_count")
    WORDS_FIELD_NUMBER: _ClassVar[int]
    ARENA_SLOT_FIELD_NUMBER: _ClassVar[int]
    ARENA_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    words: _containers.RepeatedScalarFieldContainer[int]
    arena_slot: int
    arena_row_count: int
    def __init__(self, words: _Optional[_Iterable[int]] = ..., arena_slot: _Optional[int] = ..., arena_row_count: _Optional[int] = ...) -> None: ...

class ProposeResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ProposeResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ProposeResult, _Mapping]]] = ...) -> None: ...

class ProposeResult(_message.Message):
    __slots__ = ("status", "state", "drafts", "logprobs", "stop_reason", "recommended_drafts")
    STATUS_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    RECOMMENDED_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    status: EntryStatus
    state: SequenceState
    drafts: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    stop_reason: StopReason
    recommended_drafts: int
    def __init__(self, status: _Optional[_Union[EntryStatus, _Mapping]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ..., drafts: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., recommended_drafts: _Optional[int] = ...) -> None: ...

class ReadDraftsRequest(_message.Message):
    __slots__ = ("sequence_id", "op", "with_last_embedding")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    WITH_LAST_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    with_last_embedding: bool
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., with_last_embedding: bool = ...) -> None: ...

class ReadDraftsResponse(_message.Message):
    __slots__ = ("drafts", "logprobs", "stop_reason", "last_embedding")
    DRAFTS_FIELD_NUMBER: _ClassVar[int]
    LOGPROBS_FIELD_NUMBER: _ClassVar[int]
    STOP_REASON_FIELD_NUMBER: _ClassVar[int]
    LAST_EMBEDDING_FIELD_NUMBER: _ClassVar[int]
    drafts: _containers.RepeatedScalarFieldContainer[int]
    logprobs: _containers.RepeatedScalarFieldContainer[float]
    stop_reason: StopReason
    last_embedding: bytes
    def __init__(self, drafts: _Optional[_Iterable[int]] = ..., logprobs: _Optional[_Iterable[float]] = ..., stop_reason: _Optional[_Union[StopReason, str]] = ..., last_embedding: _Optional[bytes] = ...) -> None: ...

class TakeKVRequest(_message.Message):
    __slots__ = ("sequence_id", "op", "label")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    LABEL_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    label: str
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., label: _Optional[str] = ...) -> None: ...

class TakeKVResponse(_message.Message):
    __slots__ = ("carry", "head_fingerprint", "layout", "state")
    CARRY_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    carry: _session_pb2.CarryInfo
    head_fingerprint: str
    layout: KvLayout
    state: SequenceState
    def __init__(self, carry: _Optional[_Union[_session_pb2.CarryInfo, _Mapping]] = ..., head_fingerprint: _Optional[str] = ..., layout: _Optional[_Union[KvLayout, _Mapping]] = ..., state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class KvLayout(_message.Message):
    __slots__ = ("layer_count", "kv_head_count", "head_dim", "page_row_count", "dtype")
    LAYER_COUNT_FIELD_NUMBER: _ClassVar[int]
    KV_HEAD_COUNT_FIELD_NUMBER: _ClassVar[int]
    HEAD_DIM_FIELD_NUMBER: _ClassVar[int]
    PAGE_ROW_COUNT_FIELD_NUMBER: _ClassVar[int]
    DTYPE_FIELD_NUMBER: _ClassVar[int]
    layer_count: int
    kv_head_count: int
    head_dim: int
    page_row_count: int
    dtype: _tensor_pb2.DType
    def __init__(self, layer_count: _Optional[int] = ..., kv_head_count: _Optional[int] = ..., head_dim: _Optional[int] = ..., page_row_count: _Optional[int] = ..., dtype: _Optional[_Union[_tensor_pb2.DType, str]] = ...) -> None: ...

class InstallKVRequest(_message.Message):
    __slots__ = ("sequence_id", "op", "kv_id", "keep_keys_below", "head_fingerprint")
    SEQUENCE_ID_FIELD_NUMBER: _ClassVar[int]
    OP_FIELD_NUMBER: _ClassVar[int]
    KV_ID_FIELD_NUMBER: _ClassVar[int]
    KEEP_KEYS_BELOW_FIELD_NUMBER: _ClassVar[int]
    HEAD_FINGERPRINT_FIELD_NUMBER: _ClassVar[int]
    sequence_id: bytes
    op: int
    kv_id: bytes
    keep_keys_below: int
    head_fingerprint: str
    def __init__(self, sequence_id: _Optional[bytes] = ..., op: _Optional[int] = ..., kv_id: _Optional[bytes] = ..., keep_keys_below: _Optional[int] = ..., head_fingerprint: _Optional[str] = ...) -> None: ...

class InstallKVResponse(_message.Message):
    __slots__ = ("state",)
    STATE_FIELD_NUMBER: _ClassVar[int]
    state: SequenceState
    def __init__(self, state: _Optional[_Union[SequenceState, _Mapping]] = ...) -> None: ...

class FreeKVRequest(_message.Message):
    __slots__ = ("kv_id",)
    KV_ID_FIELD_NUMBER: _ClassVar[int]
    kv_id: bytes
    def __init__(self, kv_id: _Optional[bytes] = ...) -> None: ...

class FreeKVResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DriveRequest(_message.Message):
    __slots__ = ("correlation_id", "timeout_ms", "propose", "catchup", "truncate", "open_sequence", "close_sequence", "get_sequence", "take_kv", "install_kv", "free_kv", "fork_sequence", "read_drafts", "keep_alive")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_MS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CATCHUP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GET_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKE_KV_FIELD_NUMBER: _ClassVar[int]
    INSTALL_KV_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_FIELD_NUMBER: _ClassVar[int]
    FORK_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    READ_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    timeout_ms: int
    propose: ProposeRequest
    catchup: CatchupRequest
    truncate: TruncateRequest
    open_sequence: OpenSequenceRequest
    close_sequence: CloseSequenceRequest
    get_sequence: GetSequenceRequest
    take_kv: TakeKVRequest
    install_kv: InstallKVRequest
    free_kv: FreeKVRequest
    fork_sequence: ForkSequenceRequest
    read_drafts: ReadDraftsRequest
    keep_alive: _session_pb2.KeepAliveRequest
    def __init__(self, correlation_id: _Optional[int] = ..., timeout_ms: _Optional[int] = ..., propose: _Optional[_Union[ProposeRequest, _Mapping]] = ..., catchup: _Optional[_Union[CatchupRequest, _Mapping]] = ..., truncate: _Optional[_Union[TruncateRequest, _Mapping]] = ..., open_sequence: _Optional[_Union[OpenSequenceRequest, _Mapping]] = ..., close_sequence: _Optional[_Union[CloseSequenceRequest, _Mapping]] = ..., get_sequence: _Optional[_Union[GetSequenceRequest, _Mapping]] = ..., take_kv: _Optional[_Union[TakeKVRequest, _Mapping]] = ..., install_kv: _Optional[_Union[InstallKVRequest, _Mapping]] = ..., free_kv: _Optional[_Union[FreeKVRequest, _Mapping]] = ..., fork_sequence: _Optional[_Union[ForkSequenceRequest, _Mapping]] = ..., read_drafts: _Optional[_Union[ReadDraftsRequest, _Mapping]] = ..., keep_alive: _Optional[_Union[_session_pb2.KeepAliveRequest, _Mapping]] = ...) -> None: ...

class DriveResponse(_message.Message):
    __slots__ = ("correlation_id", "status", "propose", "catchup", "truncate", "open_sequence", "close_sequence", "get_sequence", "take_kv", "install_kv", "free_kv", "fork_sequence", "read_drafts", "keep_alive")
    CORRELATION_ID_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    PROPOSE_FIELD_NUMBER: _ClassVar[int]
    CATCHUP_FIELD_NUMBER: _ClassVar[int]
    TRUNCATE_FIELD_NUMBER: _ClassVar[int]
    OPEN_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    CLOSE_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    GET_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    TAKE_KV_FIELD_NUMBER: _ClassVar[int]
    INSTALL_KV_FIELD_NUMBER: _ClassVar[int]
    FREE_KV_FIELD_NUMBER: _ClassVar[int]
    FORK_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    READ_DRAFTS_FIELD_NUMBER: _ClassVar[int]
    KEEP_ALIVE_FIELD_NUMBER: _ClassVar[int]
    correlation_id: int
    status: EntryStatus
    propose: ProposeResponse
    catchup: CatchupResponse
    truncate: TruncateResponse
    open_sequence: OpenSequenceResponse
    close_sequence: CloseSequenceResponse
    get_sequence: GetSequenceResponse
    take_kv: TakeKVResponse
    install_kv: InstallKVResponse
    free_kv: FreeKVResponse
    fork_sequence: ForkSequenceResponse
    read_drafts: ReadDraftsResponse
    keep_alive: _session_pb2.KeepAliveResponse
    def __init__(self, correlation_id: _Optional[int] = ..., status: _Optional[_Union[EntryStatus, _Mapping]] = ..., propose: _Optional[_Union[ProposeResponse, _Mapping]] = ..., catchup: _Optional[_Union[CatchupResponse, _Mapping]] = ..., truncate: _Optional[_Union[TruncateResponse, _Mapping]] = ..., open_sequence: _Optional[_Union[OpenSequenceResponse, _Mapping]] = ..., close_sequence: _Optional[_Union[CloseSequenceResponse, _Mapping]] = ..., get_sequence: _Optional[_Union[GetSequenceResponse, _Mapping]] = ..., take_kv: _Optional[_Union[TakeKVResponse, _Mapping]] = ..., install_kv: _Optional[_Union[InstallKVResponse, _Mapping]] = ..., free_kv: _Optional[_Union[FreeKVResponse, _Mapping]] = ..., fork_sequence: _Optional[_Union[ForkSequenceResponse, _Mapping]] = ..., read_drafts: _Optional[_Union[ReadDraftsResponse, _Mapping]] = ..., keep_alive: _Optional[_Union[_session_pb2.KeepAliveResponse, _Mapping]] = ...) -> None: ...
