"""One token sequence of an `AsyncClient`."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence as Tokens
from types import TracebackType
from typing import Self

from specdraft import operations
from specdraft.aio.session import AsyncSession
from specdraft.answers import Carry, Proposal, SequenceState, StoredDrafts
from specdraft.errors import SpecdraftError
from specdraft.hiddens import read_rows
from specdraft.items import ProposeItem, proposal, propose_job, written
from specdraft.ledger import Ledger
from specdraft.pairs import PairRun, prompt_pairs
from specdraft.statuses import is_uncertain
from specdraft.writes import Job, catchup_jobs, propose_jobs

__all__ = ["AsyncSequence"]


class AsyncSequence:
    """One token sequence known to the service. Made by `AsyncClient.open_sequence`.

    The methods are those of `specdraft.Sequence`, to be awaited; tasks that share a sequence take turns. A cancelled
    call counts as one whose outcome is unknown.
    """

    def __init__(self, session: AsyncSession, ledger: Ledger) -> None:
        self._session = session
        self._ledger = ledger
        self.lock = asyncio.Lock()
        self._closed = False

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    @property
    def sequence_id(self) -> bytes:
        """Its id, 16 bytes."""
        return self._ledger.sequence_id

    @property
    def session(self) -> AsyncSession:
        """The session that it belongs to."""
        return self._session

    @property
    def ledger(self) -> Ledger:
        """Its operation counter."""
        return self._ledger

    @property
    def known_state(self) -> SequenceState:
        """Where the sequence stood after the last answer, without asking."""
        return self._ledger.state

    async def prefill(self, prompt_tokens: Tokens[int], hiddens: object) -> SequenceState:
        """As `Sequence.prefill`."""
        terms = self._session.terms
        run = prompt_pairs(prompt_tokens, read_rows(hiddens, terms.dtype, terms.width))
        return self.known_state if run is None else await self._catchup(run)

    async def catchup(
        self,
        first_key: int,
        tokens: Tokens[int],
        hiddens: object,
        *,
        allow_gap: bool = False,
        accepted_drafts: int | None = None,
        verified_tokens: Tokens[int] = (),
    ) -> SequenceState:
        """As `Sequence.catchup`."""
        rows = read_rows(hiddens, self._session.terms.dtype, self._session.terms.width)
        return await self._catchup(PairRun(first_key, tokens, rows, allow_gap, accepted_drafts, verified_tokens))

    async def propose(
        self,
        first_key: int,
        tokens: Tokens[int],
        hiddens: object,
        num_drafts: int,
        *,
        allow_gap: bool = False,
        accepted_drafts: int | None = None,
        min_logprob: float | None = None,
        mask: Tokens[int] = (),
        verified_tokens: Tokens[int] = (),
        recommend: bool = False,
        verify_us: int | None = None,
    ) -> Proposal:
        """As `Sequence.propose`."""
        item = ProposeItem(
            self,
            first_key,
            tokens,
            hiddens,
            num_drafts,
            allow_gap=allow_gap,
            accepted_drafts=accepted_drafts,
            min_logprob=min_logprob,
            mask=mask,
            verified_tokens=verified_tokens,
            recommend=recommend,
            verify_us=verify_us,
        )
        job = propose_job(self._ledger, item, self._session.terms)
        async with self.lock:
            await self._session.run(propose_jobs([job], self._session.terms, self._session.placement))
        return proposal(job)

    async def truncate(self, first_key: int, accepted_drafts: int | None = None) -> SequenceState:
        """As `Sequence.truncate`."""
        async with self.lock:
            return await self._session.run(
                operations.truncate(self._ledger, first_key, accepted_drafts, self._session.terms.timeout_s)
            )

    async def state(self) -> SequenceState:
        """As `Sequence.state`."""
        async with self.lock:
            return await self._session.run(operations.read_state(self._ledger, self._session.terms.timeout_s))

    async def read_drafts(self, op: int | None = None, *, with_last_embedding: bool = False) -> StoredDrafts:
        """As `Sequence.read_drafts`."""
        timeout_s = self._session.terms.timeout_s
        async with self.lock:
            return await self._session.run(
                operations.read_drafts(self._ledger, op, with_last_embedding=with_last_embedding, timeout_s=timeout_s)
            )

    async def take_kv(self, label: str = "") -> Carry:
        """As `Sequence.take_kv`."""
        async with self.lock:
            return await self._session.run(operations.take_kv(self._ledger, label, self._session.terms.timeout_s))

    async def install_kv(self, carry: Carry, keep_keys_below: int | None = None) -> SequenceState:
        """As `Sequence.install_kv`."""
        async with self.lock:
            return await self._session.run(
                operations.install_kv(self._ledger, carry, keep_keys_below, self._session.terms.timeout_s)
            )

    async def fork(self, keep_keys_below: int, budget_tokens: int = 0) -> AsyncSequence:
        """As `Sequence.fork`."""
        async with self.lock:
            ledger = await self._session.run(
                operations.fork_sequence(self._ledger, keep_keys_below, budget_tokens, self._session.terms.timeout_s)
            )
        return AsyncSequence(self._session, ledger)

    async def close(self, accepted_drafts: int | None = None) -> None:
        """As `Sequence.close`."""
        if self._session.is_inherited:
            return
        async with self.lock:
            if self._closed:
                return
            self._closed = True
            try:
                await self._session.run(
                    operations.close_sequence(self._ledger, accepted_drafts, self._session.terms.timeout_s)
                )
            except SpecdraftError as error:
                if is_uncertain(error):
                    self._session.leave(self._ledger)
                else:
                    self._ledger.release()

    async def leave(self) -> None:
        """As `Sequence.leave`."""
        if self._session.is_inherited:
            return
        async with self.lock:
            if not self._closed:
                self._closed = True
                self._session.leave(self._ledger)

    async def _catchup(self, run: PairRun) -> SequenceState:
        job = Job(self._ledger, run)
        async with self.lock:
            await self._session.run(catchup_jobs([job], self._session.terms, self._session.placement))
        return written(job)
