"""A client made of the generated stubs alone, so that tests see what is on the wire."""

import mmap
import os
import queue
import secrets
import socket
import struct
import threading
from dataclasses import dataclass, field
from pathlib import Path

import grpc
import torch
from google.rpc import error_details_pb2
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_status import rpc_status

from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import drafter_pb2_grpc, error_reason_pb2, session_pb2, tensor_pb2

TOKEN_KEY = "specdraft-token-bin"
TIMEOUT_S = 20.0
WIDTH = 64
VOCAB = 128
DTYPES = {
    tensor_pb2.D_TYPE_FLOAT32: torch.float32,
    tensor_pb2.D_TYPE_BFLOAT16: torch.bfloat16,
    tensor_pb2.D_TYPE_FLOAT16: torch.float16,
}
BOOT_ID = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


@dataclass(frozen=True)
class Refused:
    """What a caller learns when it does not get what it asked for."""

    code: grpc.StatusCode
    reason: str
    text: str
    details: dict = field(hash=False)
    retry_ms: int
    domain: str

    @property
    def kind(self):
        return self.code.name, self.reason


CODES = {code.value[0]: code for code in grpc.StatusCode}


def refused(error):
    """A failed call as a `Refused`; reason and domain are empty where gRPC made the status."""
    reason, domain, details, retry_ms = "", "", {}, 0
    status = rpc_status.from_call(error)
    for packed in status.details if status else ():
        info, retry = error_details_pb2.ErrorInfo(), error_details_pb2.RetryInfo()
        if packed.Unpack(info):
            reason, domain, details = info.reason, info.domain, dict(info.metadata)
        if packed.Unpack(retry):
            retry_ms = retry.retry_delay.ToMilliseconds()
    return Refused(error.code(), reason, error.details(), details, retry_ms, domain)


def refused_entry(status):
    """An entry's status, or the status of an answer on a stream, as a `Refused`."""
    name = error_reason_pb2.ErrorReason.Name(status.reason).removeprefix("ERROR_REASON_")
    return Refused(CODES[status.code], name, status.message, dict(status.details), status.retry_delay_ms, "specdraft")


def refusal(call, *args, **kwargs):
    """Calls what must fail, and says how it did."""
    try:
        answer = call(*args, **kwargs)
    except grpc.RpcError as error:
        return refused(error)
    raise AssertionError(f"this should have been refused, and was answered: {answer}")


class Story:
    """Tokens and hidden rows of one text; the pair of a key is always the same."""

    def __init__(self, seed, length=256):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
        self.rows = torch.randn(length, WIDTH, generator=generator)

    def hidden_bytes(self, first_key, count, dtype=tensor_pb2.D_TYPE_FLOAT32):
        rows = self.rows[first_key : first_key + count].to(DTYPES[dtype])
        return rows.contiguous().view(torch.uint8).numpy().tobytes()

    def pairs(self, first_key, count, /, dtype=tensor_pb2.D_TYPE_FLOAT32, **changes):
        """Pairs first_key .. first_key + count - 1, inline."""
        ref = tensor_pb2.TensorRef(inline=self.hidden_bytes(first_key, count, dtype), dtype=dtype, row_count=count)
        fields = {"first_key": first_key, "tokens": self.tokens[first_key : first_key + count], "hiddens": ref}
        return pb.Pairs(**fields | changes)


class Client:
    """One connection."""

    def __init__(self, target, credentials=None, options=()):
        # A connection of its own: by default, gRPC shares one between equal channels of a process.
        options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1), *options]
        if credentials is None:
            self.channel = grpc.insecure_channel(target, options)
        else:
            self.channel = grpc.secure_channel(target, credentials, options)
        self.stub = drafter_pb2_grpc.DrafterStub(self.channel)
        self.health = health_pb2_grpc.HealthStub(self.channel)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.close()

    def close(self):
        self.channel.close()

    def info(self, timeout=TIMEOUT_S):
        return self.stub.GetServerInfo(session_pb2.GetServerInfoRequest(), timeout=timeout)

    def check(self, timeout=1.0):
        """The health that a probe sees, by name."""
        status = self.health.Check(health_pb2.HealthCheckRequest(), timeout=timeout).status
        return health_pb2.HealthCheckResponse.ServingStatus.Name(status)

    def open(self, **changes):
        """Opens a session."""
        answer = self.stub.OpenSession(open_request(**changes), timeout=TIMEOUT_S)
        return Session(self, answer)


def open_request(**changes):
    fields = {
        "protocol_version": 1,
        "hidden_source": session_pb2.HIDDEN_SOURCE_POST_NORM,
        "hidden_dtype": tensor_pb2.D_TYPE_FLOAT32,
        "hidden_width": WIDTH,
        "memory_kind": tensor_pb2.MEMORY_KIND_INLINE,
        "boot_id": BOOT_ID,
    }
    return session_pb2.OpenSessionRequest(**fields | changes)


class Session:
    """An open session. Calls are named as the RPCs."""

    def __init__(self, client, answer):
        self.client = client
        self.answer = answer
        self.token = answer.session_token

    def metadata(self):
        return ((TOKEN_KEY, self.token),)

    def call(self, name, request, timeout=TIMEOUT_S):
        return getattr(self.client.stub, name)(request, timeout=timeout, metadata=self.metadata())

    def begin(self, name, request, timeout=TIMEOUT_S):
        return getattr(self.client.stub, name).future(request, timeout=timeout, metadata=self.metadata())

    def keep_alive(self, nonce=b""):
        return self.call("KeepAlive", session_pb2.KeepAliveRequest(arena_nonce=nonce))

    def close(self):
        return self.call("CloseSession", session_pb2.CloseSessionRequest())

    def sequence(self, story=None, **changes):
        fields = {"open_id": secrets.token_bytes(16)} | changes
        answer = self.call("OpenSequence", pb.OpenSequenceRequest(**fields))
        return Sequence(self, answer, story or Story(0))

    def drive(self, token=None):
        return Drive(self.client, self.token if token is None else token)

    def arena(self):
        """Fetches and maps the arena, and proves it."""
        arena = Arena(self.answer.arena)
        assert self.keep_alive(arena.nonce()).mapping_proven
        return arena


class Sequence:
    """A sequence and the number of its next operation. Entries are made here, and sent by whoever likes."""

    def __init__(self, session, answer, story):
        self.session = session
        self.sequence_id = answer.sequence_id
        self.story = story
        self.op = answer.state.last_op

    def catchup_entry(self, first_key, count, op=None, pairs=None, **changes):
        pairs = pairs or self.story.pairs(first_key, count)
        return pb.CatchupEntry(sequence_id=self.sequence_id, op=op or self.op + 1, pairs=pairs, **changes)

    def propose_entry(self, first_key, count, draft_count=3, op=None, pairs=None, **changes):
        pairs = pairs or self.story.pairs(first_key, count)
        fields = {"draft_count": draft_count} | changes
        return pb.ProposeEntry(sequence_id=self.sequence_id, op=op or self.op + 1, pairs=pairs, **fields)

    def catchup(self, first_key, count, **changes):
        """Writes pairs; must go well."""
        entry = self.catchup_entry(first_key, count, **changes)
        return self._done(self.session.call("Catchup", pb.CatchupRequest(entries=[entry])))

    def propose(self, first_key, count, draft_count=3, **changes):
        """Writes pairs and drafts; must go well."""
        entry = self.propose_entry(first_key, count, draft_count, **changes)
        return self._done(self.session.call("Propose", pb.ProposeRequest(entries=[entry])))

    def _done(self, response):
        (result,) = response.results
        assert result.status.code == 0, result.status
        self.op = result.state.last_op
        return result

    def state(self):
        request = pb.GetSequenceRequest(sequence_id=self.sequence_id)
        return self.session.call("GetSequence", request).state

    def truncate_request(self, first_key, op=None, **changes):
        return pb.TruncateRequest(sequence_id=self.sequence_id, op=op or self.op + 1, first_key=first_key, **changes)

    def truncate(self, first_key, **changes):
        answer = self.session.call("Truncate", self.truncate_request(first_key, **changes))
        self.op = answer.state.last_op
        return answer

    def close_request(self, op=None, **changes):
        return pb.CloseSequenceRequest(sequence_id=self.sequence_id, op=op or self.op + 1, **changes)

    def close(self, **changes):
        return self.session.call("CloseSequence", self.close_request(**changes))

    def take_request(self, op=None, label=""):
        return pb.TakeKVRequest(sequence_id=self.sequence_id, op=op or self.op + 1, label=label)

    def take(self, **changes):
        answer = self.session.call("TakeKV", self.take_request(**changes))
        self.op = answer.state.last_op
        return answer

    def install_request(self, kv_id, op=None, **changes):
        fields = {"sequence_id": self.sequence_id, "op": op or self.op + 1, "kv_id": kv_id} | changes
        return pb.InstallKVRequest(**fields)

    def install(self, kv_id, **changes):
        answer = self.session.call("InstallKV", self.install_request(kv_id, **changes))
        self.op = answer.state.last_op
        return answer


class Drive:
    """An open stream; a thread of its own collects the answers."""

    def __init__(self, client, token):
        self._requests = queue.SimpleQueue()
        self._answers = queue.SimpleQueue()
        self._put_by = {}
        self._last_id = 0
        self._call = client.stub.Drive(iter(self._requests.get, None), metadata=((TOKEN_KEY, token),))
        self._thread = threading.Thread(target=self._collect, daemon=True)
        self._thread.start()

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.cancel()

    def attached(self):
        """Waits until the service has taken the stream up."""
        self._call.initial_metadata()
        return self

    def send(self, correlation_id=None, timeout_ms=10_000, **request):
        self._last_id += 1
        correlation_id = self._last_id if correlation_id is None else correlation_id
        self._requests.put(pb.DriveRequest(correlation_id=correlation_id, timeout_ms=timeout_ms, **request))
        return correlation_id

    def ask(self, timeout_ms=10_000, **request):
        """Sends one request and waits for its answer, whatever else arrives before."""
        return self.answer_to(self.send(timeout_ms=timeout_ms, **request))

    def answer_to(self, correlation_id):
        while correlation_id not in self._put_by:
            answer = self.answer()
            self._put_by[answer.correlation_id] = answer
        return self._put_by.pop(correlation_id)

    def answer(self, timeout=TIMEOUT_S):
        """The next answer; raises what ended the stream."""
        item = self._answers.get(timeout=timeout)
        if isinstance(item, Exception):
            raise item
        return item

    def finish(self):
        """No more requests."""
        self._requests.put(None)

    def ending(self):
        """Waits for the end of the stream: a `Refused`, or None when it ended well."""
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive(), "the stream should have ended"
        code = self._call.code()
        return None if code is grpc.StatusCode.OK else refused(self._call)

    def cancel(self):
        self._call.cancel()
        self._requests.put(None)
        self._thread.join(TIMEOUT_S)

    def _collect(self):
        try:
            for answer in self._call:
                self._answers.put(answer)
        except grpc.RpcError as error:
            self._answers.put(error)


class Arena:
    """The arena of a session, fetched from the side socket and mapped."""

    def __init__(self, layout):
        self.layout = layout
        answer, descriptor = fetch(layout.descriptor_socket, layout.descriptor_token)
        assert answer == b"\x00", answer
        try:
            self.map = mmap.mmap(descriptor, layout.size_bytes)
        finally:
            os.close(descriptor)

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.map.close()

    def nonce(self):
        start = self.layout.nonce_offset_bytes
        return self.map[start : start + 16]

    def put_slot(self, slot, rows):
        """Writes hidden rows into a slot, from its row 0."""
        start = self.layout.slots_offset_bytes + slot * self.layout.slot_stride_bytes
        self._put(start + self.layout.slot.hidden_offset_bytes, rows)

    def put_staging(self, first_row, rows):
        stride = self.layout.hidden_row_stride_bytes
        self._put(self.layout.staging_offset_bytes + first_row * stride, rows)

    def outputs(self, slot):
        """The outputs of a slot, by field."""
        base = self.layout.slots_offset_bytes + slot * self.layout.slot_stride_bytes
        kinds = {"status": "i", "op": "Q", "draft_count": "i", "stop_reason": "i", "row_count": "i"}
        kinds["last_pair_key"] = "q"
        found = {name: self._unpack(f"<{kind}", base, name)[0] for name, kind in kinds.items()}
        for name, kind in (("drafts", "i"), ("logprobs", "f")):
            found[name] = list(self._unpack(f"<{found['draft_count']}{kind}", base, name))
        found["last_embedding"] = list(self._unpack(f"<{WIDTH}f", base, "last_embedding"))
        return found

    def _unpack(self, kind, base, name):
        return struct.unpack_from(kind, self.map, base + getattr(self.layout.slot, f"{name}_offset_bytes"))

    def _put(self, start, rows):
        stride = self.layout.hidden_row_stride_bytes
        for index, row in enumerate(rows):
            data = row.contiguous().view(torch.uint8).numpy().tobytes()
            self.map[start + index * stride : start + index * stride + len(data)] = data


def fetch(path, token, timeout=10.0):
    """Shows a token to the side socket; returns the answer and the descriptor (None when refused)."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as side:
        side.settimeout(timeout)
        side.connect(path)
        side.sendall(token)
        answer, descriptors, _, _ = socket.recv_fds(side, 1, 1)
    return answer, descriptors[0] if descriptors else None


def in_slot(slot, count, dtype=tensor_pb2.D_TYPE_FLOAT32, **changes):
    """Hidden rows in an arena slot."""
    return tensor_pb2.TensorRef(arena_slot=tensor_pb2.ArenaSlot(slot=slot), dtype=dtype, row_count=count, **changes)


def in_staging(first_row, count, dtype=tensor_pb2.D_TYPE_FLOAT32, **changes):
    """Hidden rows in the staging area."""
    staging = tensor_pb2.ArenaStaging(first_row=first_row)
    return tensor_pb2.TensorRef(arena_staging=staging, dtype=dtype, row_count=count, **changes)


def mask_of(*allowed):
    """Mask words for one draft."""
    words = [0] * -(-VOCAB // 32)
    for token in allowed:
        words[token // 32] |= 1 << token % 32
    return words
