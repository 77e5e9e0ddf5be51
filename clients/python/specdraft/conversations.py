"""Turns of conversations for threads: parking a sequence's rows, and going on from them."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from specdraft.answers import Carry
from specdraft.carry_book import CarryBook, KnownCarry, Wanted, compact
from specdraft.options import SessionOptions
from specdraft.sequence import Sequence
from specdraft.session import Session, on_live_session
from specdraft.terms import SessionTerms
from specdraft.turns import Opening, Resumed, free_carries, resume
from specdraft.words import RowsPolicy

__all__ = ["Conversations"]


class Conversations:
    """The carries that a client has parked, with the tokens that their rows were made from. `Client.conversations`.

    ```python
    resumed = client.conversations.resume(prompt, "chat-17")
    key = resumed.next_key  # the target feeds t_key.. in any case, and so has their hidden states
    resumed.sequence.catchup(key, prompt[key + 1 :], hiddens[key : len(prompt) - 1])
    ...  # propose, verify, propose ..
    client.conversations.park(resumed.sequence, tokens_so_far, "chat-17")
    ```

    What is remembered is bounded (`SessionOptions.carries_max`, `carry_tokens_max`); what has to be forgotten is given
    up at the service too. Methods may be called from several threads.
    """

    def __init__(self, live_session: Callable[[], Session], options: SessionOptions) -> None:
        self._live_session = live_session
        self._book = CarryBook(options.carries_max, options.carry_tokens_max)
        self._has_key = bool(options.carry_key)

    def __len__(self) -> int:
        return len(self._book)

    @property
    def carries(self) -> tuple[Carry, ...]:
        """The carries that are known, the longest unused first. Some may have expired at the service meanwhile."""
        return tuple(one.carry for one in self._book.known)

    def park(self, sequence: Sequence, tokens: Iterable[int], conversation: str = "") -> Carry:
        """Moves a sequence's rows out, remembers what they were made from, and closes the sequence.

        Write the pairs of the last verify first (`catchup`, with its `accepted_drafts`): what is not written by now has
        to be written in the next turn.

        Args:
            sequence: any open sequence of this client.
            tokens: t_0.. of the sequence, at least as many as its rows depend on; more do no harm.
            conversation: a short name (64 bytes at most, no secret) that the caller can find its history by. It is the
                carry's label. Within one conversation a later turn may drop what an earlier one held.

        Raises:
            ValueError: a token is negative or needs more than 32 bits.
            SpecdraftError: what `Sequence.take_kv` raises; the sequence stays open.
        """
        kept, session = compact(tokens), sequence.session
        carry = sequence.take_kv(conversation)
        sequence.close()
        known = KnownCarry.make(carry, kept, session.terms.layer_count)
        session.run(free_carries(self._book.add(known), session.terms.timeout_s))
        return carry

    def resume(
        self,
        tokens: Iterable[int],
        conversation: str = "",
        *,
        budget_tokens: int = 0,
        rows_policy: RowsPolicy = RowsPolicy.EXACT,
        keep_carry: bool = False,
    ) -> Resumed[Sequence]:
        """Opens a sequence for a prompt, with the rows of the known carry that has the longest prefix in common.

        With c common tokens the keys below c - layer_count survive. The carry moves into the sequence if no row of it
        is lost by that, or if it is of the same conversation; otherwise it is shared and stays for its own. A carry
        that the service no longer has is forgotten, and the next best is tried; at worst nothing is kept.

        Args:
            tokens: t_0..t_{n-1}, the whole prompt.
            conversation: as for `park`; "" = none.
            budget_tokens: as for `Client.open_sequence`.
            rows_policy: as for `Client.open_sequence`; a shared carry brings the policy of this call too.
            keep_carry: keep the carry for further prompts that begin like it, whatever is used of it.

        Raises:
            ValueError: a token is negative or needs more than 32 bits.
            SpecdraftError: what opening a sequence raises.
        """
        prompt = compact(tokens)

        def resume_in(session: Session) -> Resumed[Sequence]:
            terms = session.terms
            wanted = Wanted(prompt, conversation, terms.layer_count, terms.page_rows, keep_carry)
            ledger = session.run(resume(self._book, wanted, Opening(budget_tokens, rows_policy, terms.timeout_s)))
            return Resumed.of(Sequence(session, ledger), ledger.state)

        return on_live_session(self._live_session, resume_in)

    def adopt(self, carry: Carry, tokens: Iterable[int]) -> None:
        """Makes a carry known that was not parked by this client: one of `Client.carries`, found under the carry key.

        Args:
            carry: its label is the conversation that it was parked under.
            tokens: exactly the tokens that its rows were made from, as given to `park`.

        Raises:
            ValueError: a token is negative or needs more than 32 bits.
            SpecdraftError: the client is closed, or could not open a session in the place of a lost one.
        """
        session = self._live_session()
        known = KnownCarry.make(carry, compact(tokens), session.terms.layer_count)
        session.run(free_carries(self._book.add(known), session.terms.timeout_s))

    def forget(self, carry: Carry) -> None:
        """Forgets a carry; the service keeps it until it expires. `Client.free_kv` gives it up at once."""
        self._book.forget(carry)

    def follow(self, before: SessionTerms, now: SessionTerms) -> None:
        """Forgets the carries that went with a session, now that another has taken its place. The client calls it."""
        if before.incarnation != now.incarnation or not self._has_key:
            self._book.clear()
