"""Turns of conversations for asyncio: parking a sequence's rows, and going on from them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable

from specdraft.aio.sequence import AsyncSequence
from specdraft.aio.session import AsyncSession, on_live_session
from specdraft.answers import Carry
from specdraft.carry_book import CarryBook, KnownCarry, Wanted, compact
from specdraft.options import SessionOptions
from specdraft.terms import SessionTerms
from specdraft.turns import Opening, Resumed, free_carries, resume
from specdraft.words import RowsPolicy

__all__ = ["AsyncConversations"]


class AsyncConversations:
    """`Conversations` with the same words, to be awaited. `AsyncClient.conversations`."""

    def __init__(self, live_session: Callable[[], Awaitable[AsyncSession]], options: SessionOptions) -> None:
        self._live_session = live_session
        self._book = CarryBook(options.carries_max, options.carry_tokens_max)
        self._has_key = bool(options.carry_key)

    def __len__(self) -> int:
        return len(self._book)

    @property
    def carries(self) -> tuple[Carry, ...]:
        """As `Conversations.carries`."""
        return tuple(one.carry for one in self._book.known)

    async def park(self, sequence: AsyncSequence, tokens: Iterable[int], conversation: str = "") -> Carry:
        """As `Conversations.park`."""
        kept, session = compact(tokens), sequence.session
        carry = await sequence.take_kv(conversation)
        await sequence.close()
        known = KnownCarry.make(carry, kept, session.terms.layer_count)
        await session.run(free_carries(self._book.add(known), session.terms.timeout_s))
        return carry

    async def resume(
        self,
        tokens: Iterable[int],
        conversation: str = "",
        *,
        budget_tokens: int = 0,
        rows_policy: RowsPolicy = RowsPolicy.EXACT,
        keep_carry: bool = False,
    ) -> Resumed[AsyncSequence]:
        """As `Conversations.resume`."""
        prompt = compact(tokens)

        async def resume_in(session: AsyncSession) -> Resumed[AsyncSequence]:
            terms = session.terms
            wanted = Wanted(prompt, conversation, terms.layer_count, terms.page_rows, keep_carry)
            ledger = await session.run(resume(self._book, wanted, Opening(budget_tokens, rows_policy, terms.timeout_s)))
            return Resumed.of(AsyncSequence(session, ledger), ledger.state)

        return await on_live_session(self._live_session, resume_in)

    async def adopt(self, carry: Carry, tokens: Iterable[int]) -> None:
        """As `Conversations.adopt`."""
        session = await self._live_session()
        known = KnownCarry.make(carry, compact(tokens), session.terms.layer_count)
        await session.run(free_carries(self._book.add(known), session.terms.timeout_s))

    def forget(self, carry: Carry) -> None:
        """As `Conversations.forget`."""
        self._book.forget(carry)

    def follow(self, before: SessionTerms, now: SessionTerms) -> None:
        """As `Conversations.follow`."""
        if before.incarnation != now.incarnation or not self._has_key:
            self._book.clear()
