"""The server that histories are played on, its clock and its oracle, and how its answers are read."""

import time
from collections import Counter
from dataclasses import dataclass, field

import grpc
import torch

from drafter_service.heads import oracle_draft
from drafter_service.heads.oracle import oracle_forward
from fake_service import OPERATIONS
from histories_model import PAGE_ROWS
from serving import Running, tiny_config
from specdraft.errors import REASON_CODES, Reason
from wire import TIMEOUT_S, Refused, refused, refused_entry

WIDTH, VOCAB = 32, 64
SIZES = {"vocab_size": VOCAB, "hidden_size": WIDTH, "num_heads": 2, "num_kv_heads": 1, "intermediate_size": 48}
PAGE_BYTES = 2 * PAGE_ROWS * 16 * 4
NUM_PAGES = 6
MAX_CARRIED = 4
MAX_SEQ_LEN = 24
MAX_DRAFTS = 4
LEASE_S, GRACE_S, CARRY_TTL_S = 30.0, 5.0, 40.0
JUMP_S = 16.0
"""Two jumps end a lease, three a carry, one a grace; histories take no time themselves."""

MARGIN = 1e-4
MOST_SKIPPED = 0.1
HIDDENS = torch.randn(48, WIDTH, generator=torch.Generator().manual_seed(5))
HIDDEN_BYTES = [row.numpy().tobytes() for row in HIDDENS]


@dataclass
class Tally:
    """What was done, so that a test cannot pass by doing nothing."""

    rpcs: Counter = field(default_factory=Counter)
    reasons: Counter = field(default_factory=Counter)
    events: Counter = field(default_factory=Counter)
    compared: int = 0
    skipped: int = 0

    def check(self):
        assert self.compared > 0
        assert self.skipped <= MOST_SKIPPED * (self.compared + self.skipped)


class World:
    """A server that many histories use one after the other, and its clock."""

    def __init__(self, checkpoint, directory):
        self.ahead = 0.0
        self.tally = Tally()
        self._config = tiny_config(
            checkpoint,
            directory,
            kv_bytes=NUM_PAGES * PAGE_BYTES,
            max_seq_len=MAX_SEQ_LEN,
            max_drafts=MAX_DRAFTS,
            lease_s=LEASE_S,
            grace_s=GRACE_S,
            carry_ttl_s=CARRY_TTL_S,
            carry_share=MAX_CARRIED / NUM_PAGES,
        )
        self._start()

    def _start(self):
        self.server = Running(self._config, clock=lambda: time.monotonic() + self.ahead)
        self.clients = [self.server.client(), self.server.client()]
        self.incarnation = self.clients[0].info().incarnation

    def close(self):
        self.server.close()

    def restart(self):
        """Another service on the same socket."""
        before = self.incarnation
        self.close()
        self._start()
        assert self.incarnation != before

    def poison(self):
        """NaN in every free page, and in every row of a page that holds no pair. The engine is idle."""
        server = self.server
        idle = [(page, row) for page in server.allocator.free_pages() for row in range(PAGE_ROWS)]
        for owner in [*server.ledger.sequences._by_id.values(), *server.ledger.vault.carries]:
            first = owner.rows.row_count + len(getattr(owner, "draft_rows", ()))
            places = [divmod(row, PAGE_ROWS) for row in range(first, len(owner.pages) * PAGE_ROWS)]
            pages = [(owner.pages[index], row) for index, row in places]
            idle += [(page, row) for page, row in pages if not server.allocator.is_shared(page)]
        if idle:
            pages, rows = torch.tensor(idle).T
            for store in server.service.assembly.pool.pages(0):
                store[pages, rows] = float("nan")

    def oracle(self, rows, num_drafts):
        """The oracle's drafts after the last of these rows; draft rows among them are made by the oracle too."""
        head = self.server.service.assembly.head
        tokens, hiddens = [], []
        for key in sorted(rows):
            token, hidden = rows[key]
            if hidden is None:
                known = sorted(rows)[: len(tokens)]
                _, recycled = oracle_forward(head, torch.tensor(tokens), torch.stack(hiddens), torch.tensor(known))
            tokens.append(token)
            hiddens.append(recycled if hidden is None else HIDDENS[HIDDEN_BYTES.index(hidden)])
        return oracle_draft(head, torch.tensor(tokens), torch.stack(hiddens), torch.tensor(sorted(rows)), num_drafts)


def next_op(sequence):
    return sequence.last_op + 1 if sequence else 1


def code_of(reason):
    return int(REASON_CODES[Reason(reason)])


def state_of(state):
    ranges = tuple((span.begin, span.end) for span in state.ranges)
    return (state.last_op, state.row_count, state.last_pair_key, ranges, state.first_approximate_key)


def send(side, rpc, request, over_drive):
    """The answer, or how it was refused."""
    if over_drive:
        answer = side.drive.ask(**{OPERATIONS[rpc]: request})
        return refused_entry(answer.status) if answer.status.code else getattr(answer, OPERATIONS[rpc])
    try:
        return side.session.call(rpc, request, timeout=TIMEOUT_S)
    except grpc.RpcError as error:
        return refused(error)


def short(message):
    """A message in one line, without its hidden rows."""
    if isinstance(message, Refused):
        return f"{message.reason} {message.details}"
    lines = [line.strip() for line in str(message).splitlines()]
    return " ".join(line for line in lines if not line.startswith("inline"))
