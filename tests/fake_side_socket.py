"""The side socket of a fake service: a thread that trades tokens for descriptors, and the arenas behind them."""

import fcntl
import mmap
import os
import socket
import threading
from pathlib import Path

from specdraft.memory import DESCRIPTOR_GRANTED, DESCRIPTOR_SEALS, DESCRIPTOR_TOKEN_SIZE_BYTES
from specdraft.v1 import tensor_pb2

PAGE_BYTES = 4096
SLOT_FIELDS = {
    "first_key_offset_bytes": 0,
    "pair_count_offset_bytes": 8,
    "tokens_offset_bytes": 16,
    "status_offset_bytes": 128,
    "op_offset_bytes": 136,
    "draft_count_offset_bytes": 144,
    "stop_reason_offset_bytes": 148,
    "drafts_offset_bytes": 152,
    "logprobs_offset_bytes": 192,
    "last_embedding_offset_bytes": 256,
    "row_count_offset_bytes": 240,
    "last_pair_key_offset_bytes": 248,
    "hidden_offset_bytes": 1024,
}


def round_up(value, step):
    return -(-value // step) * step


class FakeArena:
    """A sealed memfd with slots and a staging area; rows are padded to 64 bytes so that strides matter."""

    def __init__(self, row_bytes, slot_count, max_drafts, prefill_rows, seals=DESCRIPTOR_SEALS):
        self.row_bytes = row_bytes
        self.stride = round_up(row_bytes, 64)
        self.slot_stride = round_up(1024 + (max_drafts + 1) * self.stride, PAGE_BYTES)
        self.staging = PAGE_BYTES + slot_count * self.slot_stride
        self.size = round_up(self.staging + prefill_rows * self.stride, PAGE_BYTES)
        self.slot_count, self.prefill_rows = slot_count, prefill_rows
        self.fd = os.memfd_create("fake-arena", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        os.ftruncate(self.fd, self.size)
        self.map = mmap.mmap(self.fd, self.size)
        if seals:
            fcntl.fcntl(self.fd, fcntl.F_ADD_SEALS, seals)
        self.nonce = os.urandom(16)
        self.map[64:80] = self.nonce
        self.token = os.urandom(DESCRIPTOR_TOKEN_SIZE_BYTES)

    def message(self, socket_path):
        return tensor_pb2.Arena(
            kind=tensor_pb2.MEMORY_KIND_HOST,
            size_bytes=self.size,
            slot_count=self.slot_count,
            slots_offset_bytes=PAGE_BYTES,
            slot_stride_bytes=self.slot_stride,
            staging_offset_bytes=self.staging,
            prefill_row_count=self.prefill_rows,
            hidden_row_stride_bytes=self.stride,
            slot=tensor_pb2.SlotLayout(**SLOT_FIELDS),
            nonce_offset_bytes=64,
            descriptor_token=self.token,
            descriptor_socket=str(socket_path),
        )

    def read(self, ref):
        """Dense bytes of the rows that a `TensorRef` names."""
        if ref.WhichOneof("memory") == "arena_slot":
            start = PAGE_BYTES + ref.arena_slot.slot * self.slot_stride + 1024
        else:
            start = self.staging + ref.arena_staging.first_row * self.stride
        offsets = [start + row * self.stride for row in range(ref.row_count)]
        return b"".join(self.map[offset : offset + self.row_bytes] for offset in offsets)

    def close(self):
        self.map.close()
        os.close(self.fd)


class FakeSideSocket:
    """Hands out the arenas registered with `arenas[token]`."""

    def __init__(self, path: Path):
        self.path = path
        self.arenas = {}
        self.answer = DESCRIPTOR_GRANTED
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.listener.bind(str(path))
        self.listener.listen()
        self.thread = threading.Thread(target=self.serve, daemon=True)
        self.thread.start()

    def serve(self):
        while True:
            try:
                peer, _ = self.listener.accept()
            except OSError:
                return
            with peer:
                arena = self.arenas.pop(peer.recv(DESCRIPTOR_TOKEN_SIZE_BYTES), None)
                if arena is None or self.answer != DESCRIPTOR_GRANTED:
                    peer.sendall(b"\x01")
                else:
                    socket.send_fds(peer, [DESCRIPTOR_GRANTED], [arena.fd])

    def close(self):
        self.listener.shutdown(socket.SHUT_RDWR)
        self.listener.close()
        self.thread.join()
