"""A scripted `Drafter` in this process: real gRPC over a Unix socket, made-up drafts, every request recorded.

It keeps what the clients' tests need of the contract (operation numbers, rows by key, per-entry statuses, the `Drive`
stream) and nothing of the drafting.
"""

import itertools
import os
import queue
import threading
import time
from concurrent import futures
from dataclasses import dataclass, field
from pathlib import Path

import grpc
from google.protobuf import any_pb2, duration_pb2
from google.rpc import error_details_pb2, status_pb2
from grpc_status import rpc_status

from fake_side_socket import FakeArena, FakeSideSocket
from specdraft.errors import DOMAIN, Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2, drafter_pb2_grpc, error_reason_pb2, session_pb2, tensor_pb2

OPERATIONS = {
    one.message_type.name.removesuffix("Request"): one.name
    for one in drafter_pb2.DriveRequest.DESCRIPTOR.oneofs_by_name["request"].fields
}
WORKERS = 16
ITEM_BYTES = {tensor_pb2.D_TYPE_FLOAT32: 4, tensor_pb2.D_TYPE_BFLOAT16: 2}


def status_of(error: SpecdraftError):
    """The gRPC status that the service makes of an exception."""
    status = status_pb2.Status(code=int(error.code), message=error.message)
    if error.reason is not None:
        info = error_details_pb2.ErrorInfo(reason=error.reason.value, domain=DOMAIN, metadata=dict(error.details))
        packed = any_pb2.Any()
        packed.Pack(info)
        status.details.append(packed)
    if error.retry_delay_ms:
        delay = duration_pb2.Duration()
        delay.FromMilliseconds(error.retry_delay_ms)
        packed = any_pb2.Any()
        packed.Pack(error_details_pb2.RetryInfo(retry_delay=delay))
        status.details.append(packed)
    return rpc_status.to_status(status)


def entry_status(error: SpecdraftError | None):
    if error is None:
        return drafter_pb2.EntryStatus()
    reason = error_reason_pb2.ErrorReason.Value(f"ERROR_REASON_{error.reason.value}") if error.reason else 0
    return drafter_pb2.EntryStatus(
        code=int(error.code),
        reason=reason,
        message=error.message,
        details=dict(error.details),
        retry_delay_ms=error.retry_delay_ms,
    )


@dataclass
class Sequence:
    last_op: int = 0
    tokens: dict = field(default_factory=dict)  # key -> token of the pair
    rows: dict = field(default_factory=dict)  # key -> hidden bytes
    last_digest: bytes = b""
    last_answer: object = None

    def state(self):
        keys, ranges = sorted(self.rows), []
        for _, run in itertools.groupby(enumerate(keys), lambda pair: pair[1] - pair[0]):
            span = [key for _, key in run]
            ranges.append(session_pb2.KeyRange(begin=span[0], end=span[-1] + 1))
        return drafter_pb2.SequenceState(
            last_op=self.last_op,
            row_count=len(keys),
            last_pair_key=keys[-1] if keys else -1,
            ranges=ranges,
            first_approximate_key=-1,
        )


@dataclass(frozen=True)
class Call:
    """A request as it arrived."""

    rpc: str
    request: object
    metadata: dict
    timeout_s: float | None
    over_drive: bool


class FakeService(drafter_pb2_grpc.DrafterServicer):
    """Attributes to script it with:

    draft: (sequence record, entry) -> list of ids.
    recommend: (entry) -> number of drafts to recommend, or None.
    faults: rpc -> list of exceptions or callables, used up one a call, before anything is done.
    after: rpc -> list of callables run after the operation and before its answer.
    entry_faults: list of (sequence_id, exception), used up as the entries come.
    """

    def __init__(self, folder: Path, **settings):
        self.path = Path(folder) / "drafter.sock"
        self.hidden_width = settings.get("hidden_width", 8)
        self.vocab_size = settings.get("vocab_size", 1000)
        self.limits = session_pb2.Limits(
            max_drafts=settings.get("max_drafts", 4),
            propose_batch_max=settings.get("batch_max", 8),
            prefill_rows_max=settings.get("prefill_rows", 16),
            message_size_max_bytes=settings.get("message_bytes", 4 * 1024 * 1024),
            lease_ms=settings.get("lease_ms", 30_000),
            grace_ms=settings.get("grace_ms", 2_000),
        )
        self.hosts_memory = settings.get("host_memory", True)
        self.has_drive = settings.get("has_drive", True)
        self.side_path = settings.get("side_path", Path(f"{self.path}.fd"))
        self.advertised_side_path = settings.get("advertised_side_path", self.side_path)
        self.draft = settings.get("draft", lambda sequence, entry: [7] * entry.draft_count)
        self.faults, self.after, self.entry_faults = {}, {}, []
        self.recommend = lambda entry: None
        self.seals = settings.get("seals")
        self.forget()
        self.start()

    # --- life ---------------------------------------------------------------------------------------------------------

    def forget(self):
        """Loses everything, as a restart does."""
        self.incarnation = os.urandom(16)
        self.calls, self.streams, self.drive_errors = [], [], []
        self.token, self.arena = None, None
        self.sequences, self.open_ids, self.carries = {}, {}, {}
        self.lock = threading.RLock()

    def start(self):
        workers, all_here = futures.ThreadPoolExecutor(WORKERS), threading.Barrier(WORKERS)
        list(workers.map(lambda _: all_here.wait(), range(WORKERS)))  # none starts later: tests count threads
        self.server = grpc.server(
            workers,
            options=[("grpc.max_receive_message_length", self.limits.message_size_max_bytes)],
        )
        drafter_pb2_grpc.add_DrafterServicer_to_server(self, self.server)
        self.server.add_insecure_port(f"unix://{self.path}")
        self.port = self.server.add_insecure_port("localhost:0")
        self.server.start()
        self.side = FakeSideSocket(self.side_path) if self.hosts_memory else None

    def stop(self):
        self.server.stop(None).wait()
        if self.side:
            self.side.close()
            self.side_path.unlink(missing_ok=True)
        if self.arena:
            self.arena.close()
            self.arena = None

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self.stop()

    @property
    def target(self):
        return f"unix://{self.path}"

    def requests(self, rpc):
        return [call.request for call in self.calls if call.rpc == rpc]

    # --- calls --------------------------------------------------------------------------------------------------------

    def perform(self, rpc, request, metadata, timeout_s, over_drive):
        with self.lock:
            self.calls.append(Call(rpc, request, metadata, timeout_s, over_drive))
            if rpc not in {"GetServerInfo", "OpenSession"} and metadata.get("specdraft-token-bin") != self.token:
                raise make_error(Reason.SESSION_UNKNOWN, "no such session")
            fault = self.faults.get(rpc, [None]).pop(0) if self.faults.get(rpc) else None
        if isinstance(fault, Exception):
            raise fault
        if fault is not None:
            fault()
        with self.lock:
            answer = getattr(self, "do_" + rpc)(request)
        for action in [self.after[rpc].pop(0)] if self.after.get(rpc) else []:
            action()
        return answer

    def unary(self, rpc, request, context):
        metadata = dict(context.invocation_metadata())
        try:
            return self.perform(rpc, request, metadata, context.time_remaining(), over_drive=False)
        except SpecdraftError as error:
            context.abort_with_status(status_of(error))

    def Drive(self, requests, context):
        if not self.has_drive:
            context.abort_with_status(status_of(make_error(Reason.NOT_IMPLEMENTED, "no Drive here", name="Drive")))
        metadata = dict(context.invocation_metadata())
        if metadata.get("specdraft-token-bin") != self.token:
            context.abort_with_status(status_of(make_error(Reason.SESSION_UNKNOWN, "no such session")))
        answers = queue.SimpleQueue()
        self.streams.append(answers)
        if not context.add_callback(lambda: answers.put(None)):
            return  # it has ended already
        threading.Thread(target=self.pump, args=(requests, metadata, answers), daemon=True).start()
        while (answer := answers.get()) is not None:
            if isinstance(answer, SpecdraftError):
                context.abort_with_status(status_of(answer))
            yield answer

    def pump(self, requests, metadata, answers):
        try:
            for request in requests:
                answer = self.answer_in_band(request, metadata)
                if answers in self.streams:
                    answers.put(answer)
        except grpc.RpcError:
            pass
        except Exception as error:  # noqa: BLE001 - the stream has ended under the iterator
            self.drive_errors.append(error)

    def answer_in_band(self, request, metadata):
        name = request.WhichOneof("request")
        rpc = next(rpc for rpc, known in OPERATIONS.items() if known == name)
        answer = drafter_pb2.DriveResponse(correlation_id=request.correlation_id)
        try:
            result = self.perform(rpc, getattr(request, name), metadata, request.timeout_ms / 1000, over_drive=True)
            getattr(answer, name).CopyFrom(result)
        except SpecdraftError as error:
            answer.status.CopyFrom(entry_status(error))
        return answer

    def cut(self, error=None):
        """Ends every open stream: broken, or with the given error."""
        streams, self.streams = self.streams, []
        for answers in streams:
            answers.put(error or make_error(Reason.STARTING, "cut"))

    # --- operations ---------------------------------------------------------------------------------------------------

    def do_GetServerInfo(self, request):
        kinds = [tensor_pb2.MEMORY_KIND_INLINE] + [tensor_pb2.MEMORY_KIND_HOST] * self.hosts_memory
        return session_pb2.GetServerInfoResponse(
            service_version="0.0.0",
            protocol_version=1,
            head=session_pb2.HeadInfo(
                model_type="fake",
                kind="mtp",
                fingerprint="00",
                hidden_width=self.hidden_width,
                vocab_size=self.vocab_size,
                max_seq_len=1 << 16,
                layer_count=1,
                hidden_source=session_pb2.HIDDEN_SOURCE_POST_NORM,
            ),
            limits=self.limits,
            memory_kinds=kinds,
            incarnation=self.incarnation,
            boot_id=Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
            levers={"runner": "eager"},
        )

    def do_OpenSession(self, request):
        if request.hidden_width != self.hidden_width:
            raise make_error(
                Reason.HANDSHAKE_MISMATCH, "widths", field="hidden_width", ours=self.hidden_width, theirs="?"
            )
        self.token = os.urandom(16)
        self.item_bytes = ITEM_BYTES[request.hidden_dtype]
        answer = session_pb2.OpenSessionResponse(
            session_id=os.urandom(16),
            session_token=self.token,
            lease_ms=self.limits.lease_ms,
            memory_kind=request.memory_kind,
            max_drafts=request.max_drafts or self.limits.max_drafts,
            incarnation=self.incarnation,
            carries=self.carries.values(),
        )
        if request.memory_kind == tensor_pb2.MEMORY_KIND_HOST:
            if self.arena:
                self.arena.close()
            rows = request.prefill_row_count or self.limits.prefill_rows_max
            seals = {} if self.seals is None else {"seals": self.seals}
            self.arena = FakeArena(
                self.hidden_width * self.item_bytes, request.slot_count, answer.max_drafts, rows, **seals
            )
            self.side.arenas[self.arena.token] = self.arena
            answer.arena.CopyFrom(self.arena.message(self.advertised_side_path))
        return answer

    def do_KeepAlive(self, request):
        if request.arena_nonce and (self.arena is None or request.arena_nonce != self.arena.nonce):
            raise make_error(Reason.MAPPING_NOT_PROVEN, "another nonce")
        return session_pb2.KeepAliveResponse(lease_ms=self.limits.lease_ms, mapping_proven=True)

    def do_CloseSession(self, request):
        self.token = None
        self.sequences.clear()
        return session_pb2.CloseSessionResponse()

    def do_OpenSequence(self, request):
        sequence_id = self.open_ids.setdefault(request.open_id, os.urandom(16))
        sequence = self.sequences.setdefault(sequence_id, Sequence())
        return drafter_pb2.OpenSequenceResponse(sequence_id=sequence_id, state=sequence.state())

    def do_ForkSequence(self, request):
        source = self.find(request)
        sequence_id = self.open_ids.setdefault(request.open_id, os.urandom(16))
        kept = {key: row for key, row in source.rows.items() if key < request.keep_keys_below}
        sequence = self.sequences.setdefault(sequence_id, Sequence(rows=kept))
        return drafter_pb2.ForkSequenceResponse(sequence_id=sequence_id, state=sequence.state())

    def do_GetSequence(self, request):
        return drafter_pb2.GetSequenceResponse(state=self.find(request).state())

    def do_Truncate(self, request):
        def work(sequence):
            self.drop(sequence, request.first_key)
            return lambda: drafter_pb2.TruncateResponse(state=sequence.state())

        return self.numbered(request, work)

    def do_CloseSequence(self, request):
        self.numbered(request, lambda sequence: lambda: None)
        self.sequences.pop(request.sequence_id)
        return drafter_pb2.CloseSequenceResponse()

    def do_TakeKV(self, request):
        def work(sequence):
            info = session_pb2.CarryInfo(kv_id=os.urandom(16), ranges=sequence.state().ranges, label=request.label)
            self.carries[info.kv_id] = info
            sequence.carried = dict(sequence.rows)
            self.drop(sequence, 0)
            return lambda: drafter_pb2.TakeKVResponse(carry=info, head_fingerprint="00", state=sequence.state())

        return self.numbered(request, work)

    def do_InstallKV(self, request):
        def work(sequence):
            if request.kv_id not in self.carries:
                raise make_error(Reason.CARRY_UNKNOWN, "no such carry")
            info = self.carries.pop(request.kv_id)
            limit = request.keep_keys_below if request.HasField("keep_keys_below") else 1 << 40
            sequence.rows = {key: b"" for span in info.ranges for key in range(span.begin, min(span.end, limit))}
            return lambda: drafter_pb2.InstallKVResponse(state=sequence.state())

        return self.numbered(request, work)

    def do_FreeKV(self, request):
        if self.carries.pop(request.kv_id, None) is None:
            raise make_error(Reason.CARRY_UNKNOWN, "no such carry")
        return drafter_pb2.FreeKVResponse()

    def do_Catchup(self, request):
        return drafter_pb2.CatchupResponse(results=[self.entry(one, None) for one in request.entries])

    def do_Propose(self, request):
        return drafter_pb2.ProposeResponse(results=[self.entry(one, self.draft) for one in request.entries])

    # --- state --------------------------------------------------------------------------------------------------------

    def entry(self, entry, draft):
        result_type = drafter_pb2.CatchupResult if draft is None else drafter_pb2.ProposeResult

        def work(sequence):
            self.write(sequence, entry.pairs)
            if draft is None:
                return lambda: result_type(state=sequence.state())
            drafts = draft(sequence, entry)
            asked = entry.draft_count
            reason = drafter_pb2.STOP_REASON_COMPLETE if asked else drafter_pb2.STOP_REASON_NOT_ASKED
            logprobs = [-0.5] * len(drafts)
            advice = self.recommend(entry)
            return lambda: result_type(
                state=sequence.state(),
                drafts=drafts,
                logprobs=logprobs,
                stop_reason=reason,
                recommended_drafts=advice,
            )

        try:
            for index, (sequence_id, error) in enumerate(self.entry_faults):
                if sequence_id in {entry.sequence_id, None}:
                    del self.entry_faults[index]
                    raise error
            return self.numbered(entry, work)
        except SpecdraftError as error:
            sequence = self.sequences.get(entry.sequence_id)
            return result_type(status=entry_status(error), state=sequence.state() if sequence else None)

    def write(self, sequence, pairs):
        data, size = self.read(pairs.hiddens), self.hidden_width * self.item_bytes
        if len(data) != len(pairs.tokens) * size:
            raise make_error(Reason.HIDDEN_SIZE_MISMATCH, "size", bytes=len(data), expected=len(pairs.tokens) * size)
        below = max((key for key in sequence.rows if key < pairs.first_key), default=-1)
        if pairs.first_key > below + 1 and not pairs.allow_gap:
            raise make_error(
                Reason.MISSING_ROWS, "gap", gap_begin=below + 1, gap_end=pairs.first_key, last_pair_key=below
            )
        self.drop(sequence, pairs.first_key)
        for index, token in enumerate(pairs.tokens):
            sequence.tokens[pairs.first_key + index] = token
            sequence.rows[pairs.first_key + index] = data[index * size : (index + 1) * size]

    def read(self, ref):
        return ref.inline if ref.WhichOneof("memory") == "inline" else self.arena.read(ref)

    @staticmethod
    def drop(sequence, first_key):
        for key in [key for key in sequence.rows if key >= first_key]:
            del sequence.rows[key]
            sequence.tokens.pop(key, None)

    def find(self, request):
        if request.sequence_id not in self.sequences:
            raise make_error(Reason.SEQUENCE_UNKNOWN, "no such sequence")
        return self.sequences[request.sequence_id]

    def numbered(self, request, work):
        sequence, digest = self.find(request), request.SerializeToString(deterministic=True)
        if request.op == sequence.last_op and sequence.last_op:
            if digest != sequence.last_digest:
                raise make_error(Reason.OP_REUSED, "another request", op=request.op)
            return sequence.last_answer
        if request.op != sequence.last_op + 1:
            state = sequence.state()
            raise make_error(
                Reason.OP_OUT_OF_ORDER,
                "order",
                op=request.op,
                last_op=state.last_op,
                row_count=state.row_count,
                last_pair_key=state.last_pair_key,
            )
        answer = work(sequence)
        sequence.last_op, sequence.last_digest = request.op, digest
        sequence.last_answer = answer()
        return sequence.last_answer


def _rpc(name):
    def handler(self, request, context):
        return self.unary(name, request, context)

    handler.__name__ = name
    return handler


for _name in [*OPERATIONS, "GetServerInfo", "OpenSession", "CloseSession"]:
    setattr(FakeService, _name, _rpc(_name))


def wait_until(condition, timeout_s=5.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "it did not happen"
        time.sleep(0.005)
