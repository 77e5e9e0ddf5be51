"""`GetServerInfo` and `OpenSession`: who we are, and whether the caller fits."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from drafter_service.engine.switch import RunnerKind
from drafter_service.memory import ArenaWish, CudaArena, DescriptorServer, HostArena, SharedArena, lay_out
from drafter_service.memory.gpu import GpuMemory
from drafter_service.memory.hiddens import DTYPES
from drafter_service.server.encoding import DTYPE_NUMBERS
from drafter_service.server.facts import PROTOCOL_VERSION, RUNNERS, ServiceFacts
from drafter_service.server.hiddens import DTYPE_NAMES
from drafter_service.server.refusals import invalid_field
from drafter_service.state import Agreement, Session
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import session_pb2, tensor_pb2

HIDDEN_SOURCES = {"pre_norm": session_pb2.HIDDEN_SOURCE_PRE_NORM, "post_norm": session_pb2.HIDDEN_SOURCE_POST_NORM}
CLIENT_NAME_MAX_BYTES = 64
FIELD_HEAD_BYTES = 3
"""What stands before a carry in the answer, at most: the field's number, and a length below 16 KiB."""
CARRY_KEY_BYTES = range(16, 65)


@dataclass(frozen=True, slots=True)
class Handshake:
    """Checks an `OpenSession` and makes its arena.

    Attributes:
        facts: who we are.
        descriptors: hands out host arenas; None = there are none.
        gpu: hands out CUDA arenas; None = there are none.
        runner: what runs a round now.
    """

    facts: ServiceFacts
    descriptors: DescriptorServer | None
    gpu: GpuMemory | None = None
    runner: Callable[[], RunnerKind] = lambda: RunnerKind.EAGER

    def agree(self, request: session_pb2.OpenSessionRequest) -> Agreement:
        """What both sides agree on. Raises HANDSHAKE_MISMATCH, naming the field and both values."""
        head = self.facts.head
        expected = HIDDEN_SOURCES[head.hidden_source]
        _compare("protocol_version", PROTOCOL_VERSION, request.protocol_version)
        _compare(
            "hidden_source",
            session_pb2.HiddenSource.Name(expected),
            _name(session_pb2.HiddenSource, request.hidden_source),
        )
        _compare("hidden_width", head.hidden_width, request.hidden_width)
        _compare("layer_ids", "", ",".join(map(str, request.layer_ids)))
        if request.vocab_size:
            _compare("vocab_size", head.vocab_size, request.vocab_size)
        dtype = DTYPE_NAMES.get(request.hidden_dtype)
        if dtype is None:
            raise _mismatch(
                "hidden_dtype", ", ".join(DTYPE_NAMES.values()), _name(tensor_pb2.DType, request.hidden_dtype)
            )
        max_drafts = request.max_drafts or self.facts.config.max_drafts
        if max_drafts > self.facts.config.max_drafts:
            raise invalid_field("max_drafts", max_drafts, f"at most {self.facts.config.max_drafts}")
        size = len(request.client_name.encode())
        if size > CLIENT_NAME_MAX_BYTES:
            raise invalid_field("client_name", f"{size} bytes", f"at most {CLIENT_NAME_MAX_BYTES} bytes")
        return Agreement(dtype, head.hidden_width, max_drafts, request.client_name, _carry_owner(request.carry_key))

    def memory_kind(self, request: session_pb2.OpenSessionRequest, *, is_local: bool) -> tensor_pb2.MemoryKind:
        """The memory kind granted. Raises TRANSPORT_UNAVAILABLE, OTHER_HOST, SAME_PID or GPU_UUID_NOT_VISIBLE."""
        asked = request.memory_kind
        has_host = self.descriptors is not None and is_local
        has_cuda = self.gpu is not None and is_local
        same_host = request.boot_id.strip() == self.facts.boot_id  # the file that it comes from ends with a newline
        if asked == tensor_pb2.MEMORY_KIND_UNSPECIFIED:
            if has_cuda and same_host and request.device_uuid:
                asked = tensor_pb2.MEMORY_KIND_CUDA
            else:
                return tensor_pb2.MEMORY_KIND_HOST if has_host and same_host else tensor_pb2.MEMORY_KIND_INLINE
        if asked == tensor_pb2.MEMORY_KIND_INLINE:
            return asked
        kinds = {tensor_pb2.MEMORY_KIND_HOST: has_host, tensor_pb2.MEMORY_KIND_CUDA: has_cuda}
        if not kinds.get(asked):
            name = _name(tensor_pb2.MemoryKind, asked)
            why = "" if is_local else ": over TCP rows travel inside the messages"
            raise make_error(Reason.TRANSPORT_UNAVAILABLE, f"{name} is not available here{why}", kind=name)
        if not same_host:
            why = "the boot id is another host's" if request.boot_id else "no boot_id was sent"
            raise make_error(Reason.OTHER_HOST, f"shared memory needs client and service on one host: {why}")
        if asked == tensor_pb2.MEMORY_KIND_CUDA and self.gpu is not None:
            self.gpu.check_client(request.pid, request.device_uuid)
        return asked

    def make_arena(
        self, request: session_pb2.OpenSessionRequest, agreement: Agreement, kind: tensor_pb2.MemoryKind
    ) -> SharedArena:
        """Makes the session's arena. Raises ARENA_EXHAUSTED, or what the driver has against it."""
        config, head = self.facts.config, self.facts.head
        item_bytes = DTYPES[agreement.hidden_dtype].itemsize
        wish = ArenaWish(
            num_slots=request.slot_count or 1,
            max_drafts=agreement.max_drafts,
            hidden_row_bytes=agreement.hidden_width * item_bytes,
            embedding_bytes=head.head_width * item_bytes,
            vocab_size=head.vocab_size,
            num_prefill_rows=request.prefill_row_count or config.prefill_rows,
            with_masks=request.with_masks,
        )
        layout = lay_out(wish)
        if layout.size > config.arena_bytes:
            raise make_error(
                Reason.ARENA_EXHAUSTED,
                f"the arena would have {layout.size} bytes; at most {config.arena_bytes}",
                retry_delay_ms=1000,
                bytes=layout.size,
                limit=config.arena_bytes,
            )
        if kind == tensor_pb2.MEMORY_KIND_CUDA:
            assert self.gpu is not None, "memory_kind has checked it"
            return self.gpu.make_arena(layout)
        assert self.descriptors is not None, "memory_kind has checked it"
        return HostArena(layout, self.descriptors)

    def server_info(self) -> session_pb2.GetServerInfoResponse:
        """Answer to `GetServerInfo`."""
        kinds = [tensor_pb2.MEMORY_KIND_INLINE]
        if self.descriptors is not None:
            kinds.append(tensor_pb2.MEMORY_KIND_HOST)
        if self.gpu is not None:
            kinds.append(tensor_pb2.MEMORY_KIND_CUDA)
        return session_pb2.GetServerInfoResponse(
            service_version=self.facts.version,
            protocol_version=PROTOCOL_VERSION,
            head=self._head_info(),
            limits=self._limits(),
            runner=RUNNERS[self.runner()],
            memory_kinds=kinds,
            incarnation=self.facts.incarnation,
            boot_id=self.facts.boot_id,
            device_uuids=self.gpu.uuids if self.gpu else (),
            pid=os.getpid(),
            levers=dict(self.facts.levers),
        )

    def _head_info(self) -> session_pb2.HeadInfo:
        head = self.facts.head
        return session_pb2.HeadInfo(
            model_type=head.model_type,
            kind="mtp",
            fingerprint=head.fingerprint,
            hidden_width=head.hidden_width,
            head_width=head.head_width,
            dtype=DTYPE_NUMBERS[head.dtype],
            hidden_source=HIDDEN_SOURCES[head.hidden_source],
            vocab_size=head.vocab_size,
            draft_vocab_size=head.draft_vocab_size,
            max_seq_len=head.max_seq_len,
            layer_count=head.num_layers,
            lookback=head.num_layers - 1,
            rank_count=1,
            kv_bytes_per_row=head.kv_bytes_per_row,
        )

    def _limits(self) -> session_pb2.Limits:
        config = self.facts.config
        return session_pb2.Limits(
            max_drafts=config.max_drafts,
            propose_batch_max=config.max_batch,
            prefill_rows_max=config.prefill_rows,
            message_size_max_bytes=config.message_bytes,
            sessions_max=config.max_sessions,
            sequences_per_session_max=config.max_sequences,
            in_flight_per_sequence_max=config.max_in_flight,
            kv_page_count=self.facts.num_pages,
            kv_page_row_count=config.page_rows,
            lease_ms=int(config.lease_s * 1000),
            grace_ms=int(config.grace_s * 1000),
        )


def open_session_response(
    session: Session,
    token: bytes,
    handshake: Handshake,
    arena: SharedArena | None,
    carries: Sequence[session_pb2.CarryInfo],
) -> session_pb2.OpenSessionResponse:
    """Answer to `OpenSession`; of `carries`, the oldest first, the youngest that one message holds."""
    facts = handshake.facts
    response = session_pb2.OpenSessionResponse(
        session_id=session.session_id,
        session_token=token,
        lease_ms=int(facts.config.lease_s * 1000),
        memory_kind=kind_of(arena),
        max_drafts=session.agreement.max_drafts,
        incarnation=facts.incarnation,
        device_uuid=handshake.gpu.uuid if handshake.gpu else b"",
    )
    if arena is not None:
        response.arena.CopyFrom(_arena_message(arena))
    if isinstance(arena, HostArena):
        response.arena.descriptor_token = arena.token
        response.arena.descriptor_socket = str(facts.descriptor_socket)
    elif isinstance(arena, CudaArena):
        response.arena.cuda_ipc_handle = arena.handle
        response.arena.device_uuid = response.device_uuid
    num_told = _num_that_fit(carries, facts.config.message_bytes - response.ByteSize())
    response.carries.extend(carries[len(carries) - num_told :])
    return response


def _num_that_fit(carries: Sequence[session_pb2.CarryInfo], num_bytes: int) -> int:
    """How many of the last ones fit into so many bytes of a message."""
    for num_fitting, carry in enumerate(reversed(carries)):
        num_bytes -= carry.ByteSize() + FIELD_HEAD_BYTES
        if num_bytes < 0:
            return num_fitting
    return len(carries)


def kind_of(arena: SharedArena | None) -> tensor_pb2.MemoryKind:
    """The memory kind of a session with this arena."""
    if arena is None:
        return tensor_pb2.MEMORY_KIND_INLINE
    return tensor_pb2.MEMORY_KIND_HOST if isinstance(arena, HostArena) else tensor_pb2.MEMORY_KIND_CUDA


def kind_name(kind: tensor_pb2.MemoryKind) -> str:
    """A memory kind as metrics call it."""
    return tensor_pb2.MemoryKind.Name(kind).removeprefix("MEMORY_KIND_").lower()


def _arena_message(arena: SharedArena) -> tensor_pb2.Arena:
    layout = arena.layout
    fields = layout.fields
    slot = tensor_pb2.SlotLayout(
        **{f"{name}_offset_bytes": getattr(fields, name) for name in fields.__slots__ if name != "stride"}
    )
    return tensor_pb2.Arena(
        kind=kind_of(arena),
        size_bytes=layout.size,
        slot_count=layout.wish.num_slots,
        slots_offset_bytes=layout.slots,
        slot_stride_bytes=fields.stride,
        staging_offset_bytes=layout.staging,
        prefill_row_count=layout.wish.num_prefill_rows,
        hidden_row_stride_bytes=layout.row_stride,
        slot=slot,
        nonce_offset_bytes=layout.nonce,
    )


def _carry_owner(carry_key: bytes) -> bytes:
    if not carry_key:
        return b""
    if len(carry_key) not in CARRY_KEY_BYTES:
        raise invalid_field("carry_key", f"{len(carry_key)} bytes", "16 to 64 bytes")
    return hashlib.sha256(carry_key).digest()


def _compare(field: str, ours: object, theirs: object) -> None:
    if ours != theirs:
        raise _mismatch(field, ours, theirs)


def _mismatch(field: str, ours: object, theirs: object) -> SpecdraftError:
    return make_error(
        Reason.HANDSHAKE_MISMATCH,
        f"{field}: the service has {ours or 'none'}, the client {theirs or 'none'}",
        field=field,
        ours=ours,
        theirs=theirs,
    )


def _name(enum: object, number: int) -> str:
    try:
        return str(enum.Name(number))  # type: ignore[attr-defined]  # every generated enum has it
    except ValueError:
        return str(number)
