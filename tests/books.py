"""An engine over a tiny head, without a network, that poisons everything a sequence does not own."""

from __future__ import annotations

import queue
import secrets
import time
from collections import Counter
from dataclasses import dataclass

import torch
from prometheus_client import CollectorRegistry

from drafter_service.engine import Engine, HeadIdentity, Ledger, Scheduler
from drafter_service.engine import operations as ops
from drafter_service.engine.in_flight import InFlight
from drafter_service.engine.runner import EagerRunner
from drafter_service.engine.vault import CarryLimits, Vault
from drafter_service.heads import MtpHead, oracle_draft
from drafter_service.state import Carry, PageAllocator, Sequence
from drafter_service.state.pool import KvPool, PoolShape
from drafter_service.telemetry import Metrics

SESSION = b"a session"
MARGIN = 1e-4
"""Top-2 margin below which float32 rounding may decide."""

MOST_SKIPPED = 0.1


@dataclass
class Comparison:
    """Counts the compared positions, so that a test cannot pass by comparing nothing."""

    compared: int = 0
    skipped: int = 0

    def check(self) -> None:
        assert self.compared > 0
        assert self.skipped <= MOST_SKIPPED * (self.compared + self.skipped)


class Books:
    """An engine, its pool and its metrics.

    Args:
        head: computes.
        num_pages: pages of the pool.
        page_rows: rows in a page.
        max_batch: most entries of one forward.
        borrows: whether callers of the engine's `work` may do a step.
    """

    def __init__(
        self,
        head: MtpHead,
        num_pages: int = 64,
        page_rows: int = 4,
        max_batch: int = 8,
        limits: CarryLimits | None = None,
        *,
        wrap_runner=lambda runner, head, pool: runner,
        borrows: bool = False,
    ) -> None:
        layout = head.kv_layout()
        shape = PoolShape(layout.num_layers, page_rows, layout.num_kv_heads, layout.head_dim, layout.dtype)
        self.head = head
        self.page_rows = page_rows
        self.pool = KvPool(shape, num_pages, head.device)
        self.registry = CollectorRegistry()
        metrics = Metrics(self.registry, 8)
        self.allocator = PageAllocator(num_pages)
        self.now = 0.0
        vault = Vault(self.allocator, limits or CarryLimits(300.0, num_pages), metrics, lambda: self.now)
        identity = HeadIdentity(head.fingerprint, page_rows)
        self.ledger = Ledger(self.allocator, identity, vault, metrics, self.pool.copy_page)
        self.runner = wrap_runner(EagerRunner(head, self.pool), head, self.pool)
        self.engine = Engine(
            self.ledger,
            Scheduler(max_batch, 64),
            self.runner,
            in_flight=InFlight(2),
            observer=metrics,
            clock=time.monotonic,
            borrows=borrows,
        )
        self.engine.start()

    def close(self) -> None:
        self.engine.stop()

    def ask(self, *operations: ops.Operation) -> list[ops.Outcome]:
        """Outcomes of one call; everything that nobody owns is poisoned before and after."""
        self.poison()
        outcomes = self.submit(*operations).get(timeout=30)
        self.poison()
        self.check_pages()
        return outcomes

    def submit(self, *operations: ops.Operation) -> queue.SimpleQueue[list[ops.Outcome]]:
        answers: queue.SimpleQueue[list[ops.Outcome]] = queue.SimpleQueue()
        self.engine.submit(ops.Call(operations, time.monotonic(), time.monotonic() + 30, answers.put))
        return answers

    def open(self, max_keys: int = 200, session: bytes = SESSION) -> bytes:
        sequence_id = secrets.token_bytes(16)
        opened = ops.Open(session, sequence_id, secrets.token_bytes(16), max_keys, reserve=False, max_sequences=9999)
        (outcome,) = self.ask(opened)
        assert isinstance(outcome, ops.Opened)
        return outcome.sequence_id

    def poison(self) -> None:
        """NaN in every free page, and in every row of a used page that holds no pair. The engine must be idle."""
        self.pool.poison(self.allocator.free_pages())
        for owner in self.owners():
            first = owner.rows.row_count + len(getattr(owner, "draft_rows", ()))
            for row in range(first, len(owner.pages) * self.page_rows):
                page, offset = owner.pages[row // self.page_rows], row % self.page_rows
                if self.allocator.is_shared(page):
                    continue  # somebody else's row
                for layer in range(self.pool.shape.num_layers):
                    for store in self.pool.pages(layer):
                        store[page, offset] = float("nan")

    def check_pages(self) -> None:
        """Every page has one owner or none, and nobody holds more than its rows need."""
        used = Counter(page for owner in self.owners() for page in owner.pages)
        assert sorted([*used, *self.allocator.free_pages()]) == list(range(self.allocator.num_pages))
        assert all(self.allocator.num_freed({page: count}) for page, count in used.items())
        for owner in self.owners():
            num_rows = owner.rows.row_count + len(getattr(owner, "draft_rows", ()))
            needed = self.ledger.num_pages_for(num_rows)
            assert needed <= len(owner.pages) <= max(needed, getattr(owner, "reserved_pages", 0))

    def owners(self) -> list[Sequence | Carry]:
        return [*self.ledger.sequences._by_id.values(), *self.ledger.vault.carries]

    def rows_of(self, sequence_id: bytes) -> bytes:
        """The bytes of a sequence's rows: equal bytes mean that nothing touched them."""
        sequence = self.ledger.sequences._by_id[sequence_id]
        pages = torch.tensor(sequence.pages, dtype=torch.int64)
        keys_values = [store[pages].flatten(0, 1)[: sequence.rows.row_count] for store in self.pool.pages(0)]
        return torch.stack(keys_values).cpu().view(torch.uint8).numpy().tobytes()

    def expect_oracle(
        self, written: ops.Outcome, pairs: dict[int, tuple[int, torch.Tensor]], count: int, comparison: Comparison
    ) -> None:
        """The drafts are those of the oracle over exactly these pairs (key -> token, hidden)."""
        assert isinstance(written, ops.Written), written
        keys = sorted(pairs)
        device = self.head.device
        tokens = torch.tensor([pairs[key][0] for key in keys], device=device)
        hiddens = torch.stack([pairs[key][1] for key in keys]).to(device)
        expected = oracle_draft(self.head, tokens, hiddens, torch.tensor(keys, device=device), count)
        assert len(written.drafts) == count
        for index, margin in enumerate(expected.margins):
            if margin < MARGIN:
                comparison.skipped += count - index
                return
            assert written.drafts[index] == expected.ids[index]
            assert abs(written.logprobs[index] - expected.logprobs[index]) < 1e-3
            comparison.compared += 1


def write(  # noqa: PLR0917  # reads like the contract's Propose
    sequence_id: bytes,
    op: int,
    first_key: int,
    tokens: list[int],
    hiddens: torch.Tensor | None,
    num_drafts: int | None = None,  # reads like the contract's Propose
    *,
    accepted: int | None = None,
    allow_gap: bool = False,
    digest: bytes = b"",
    session: bytes = SESSION,
    verified: tuple[int, ...] = (),
) -> ops.Write:
    """A catch-up (num_drafts None) or a proposal."""
    pairs = ops.WriteWish(first_key, tuple(tokens), hiddens, allow_gap, accepted, verified)
    wish = None if num_drafts is None else ops.DraftWish(num_drafts)
    return ops.Write(session, sequence_id, op, digest, pairs, wish)
