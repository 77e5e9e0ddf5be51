from specdraft.v1 import session_pb2 as _session_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from typing import ClassVar as _ClassVar, Iterable as _Iterable, Mapping as _Mapping, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class SetRunnerRequest(_message.Message):
    __slots__ = ("runner",)
    RUNNER_FIELD_NUMBER: _ClassVar[int]
    runner: _session_pb2.Runner
    def __init__(self, runner: _Optional[_Union[_session_pb2.Runner, str]] = ...) -> None: ...

class SetRunnerResponse(_message.Message):
    __slots__ = ("previous",)
    PREVIOUS_FIELD_NUMBER: _ClassVar[int]
    previous: _session_pb2.Runner
    def __init__(self, previous: _Optional[_Union[_session_pb2.Runner, str]] = ...) -> None: ...

class ListSessionsRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListSessionsResponse(_message.Message):
    __slots__ = ("sessions",)
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    sessions: _containers.RepeatedCompositeFieldContainer[SessionInfo]
    def __init__(self, sessions: _Optional[_Iterable[_Union[SessionInfo, _Mapping]]] = ...) -> None: ...

class SessionInfo(_message.Message):
    __slots__ = ("session_id", "client_name", "sequence_count", "age_ms", "lease_left_ms", "driving")
    SESSION_ID_FIELD_NUMBER: _ClassVar[int]
    CLIENT_NAME_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    AGE_MS_FIELD_NUMBER: _ClassVar[int]
    LEASE_LEFT_MS_FIELD_NUMBER: _ClassVar[int]
    DRIVING_FIELD_NUMBER: _ClassVar[int]
    session_id: bytes
    client_name: str
    sequence_count: int
    age_ms: int
    lease_left_ms: int
    driving: bool
    def __init__(self, session_id: _Optional[bytes] = ..., client_name: _Optional[str] = ..., sequence_count: _Optional[int] = ..., age_ms: _Optional[int] = ..., lease_left_ms: _Optional[int] = ..., driving: bool = ...) -> None: ...

class DrainRequest(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class DrainResponse(_message.Message):
    __slots__ = ("session_count",)
    SESSION_COUNT_FIELD_NUMBER: _ClassVar[int]
    session_count: int
    def __init__(self, session_count: _Optional[int] = ...) -> None: ...
