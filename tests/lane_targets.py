"""A target on a simulated GPU, in the service's own process: what it leaves in slots, when, and what it finds there."""

import ctypes
import struct
import threading
from contextlib import contextmanager

from specdraft import Sequence
from specdraft.lanes import EarlyItem
from specdraft.ledger import Ledger
from specdraft.v1 import tensor_pb2
from wire import Story

STORY = Story(21)
K = 3


class Target:
    """Its "verify" leaves pairs in the slot, as kernels of its stream would."""

    def __init__(self, clients, gpu=None, client=None, **options):
        self.clients = clients
        self.gpu = gpu or clients.gpu_of_client()
        self.client = client or clients.client(self.gpu, **{"slot_count": 4} | options)
        self.driver = self.gpu.driver
        self.stream = self.driver.create_stream()
        self.lane = self.client.open_lane(self.stream)
        self.seen = []

    def beside(self):
        """Another stream of the same session, with a lane of its own."""
        return Target(self.clients, self.gpu, self.client)

    def verify(self, slot, first_key, count, gate=None):
        """Enqueues a verify that ends once `gate` (an address) is 1, and leaves `count` pairs of the story."""
        if gate is not None:
            self.driver.wait_value(self.stream, gate, 1)
        arena = self.lane.arena

        def leave():
            tokens = STORY.tokens[first_key : first_key + count]
            rows = STORY.rows[first_key : first_key + count].contiguous()
            put(arena.slot_field(slot, "first_key", 8), struct.pack("<q", first_key))
            put(arena.slot_field(slot, "pair_count", 4), struct.pack("<i", count))
            put(arena.slot_field(slot, "tokens", 4 * count), struct.pack(f"<{count}i", *tokens))
            ctypes.memmove(arena.slot_field(slot, "hidden", 0).pointer, rows.data_ptr(), rows.nbytes)

        self.driver.launch(self.stream, leave)

    def propose(self, sequence, slot, num_drafts=K, **options):
        early = self.lane.propose_early([EarlyItem(sequence, slot, num_drafts, **options)])
        self.driver.launch(self.stream, lambda: self.seen.append(self.lane.arena.slot_field(slot, "drafts", 4 * K)))
        return early

    def gate(self):
        return self.clients.gate(self.driver)


def put(field, data):
    ctypes.memmove(field.pointer, data, len(data))


def expected(clients, writes):
    """Drafts of the same writes by host-synchronised calls."""
    raw = clients.server.client().open(memory_kind=tensor_pb2.MEMORY_KIND_INLINE)
    sequence = raw.sequence(STORY)
    return [tuple(sequence.propose(first_key, count, K).drafts) for first_key, count in writes]


@contextmanager
def busy(clients):
    """The engine is at work on somebody else's call, and takes up nothing else meanwhile."""
    server = clients.server
    with clients.client() as neighbour, neighbour.open_sequence() as sequence:
        before = len(server.runner.batches)
        call = threading.Thread(target=sequence.propose, args=(0, STORY.tokens[:1], STORY.rows[:1], 1))
        with server.runner.held():
            call.start()
            server.runner.wait_for_batch(before)
            yield
        call.join()


def desk(clients):
    return clients.server.service.assembly._lanes.desk


def twin_of(sequence, last_op):
    """The sequence again, as used by somebody who does not take turns."""
    twin = Sequence(sequence.session, Ledger(sequence.sequence_id, sequence.known_state))
    twin.ledger.last_op = last_op
    return twin
