"""One token sequence of a `Client`."""

from __future__ import annotations

import threading
from collections.abc import Sequence as Tokens
from types import TracebackType
from typing import Self

from specdraft import operations
from specdraft.answers import Carry, Proposal, SequenceState, StoredDrafts
from specdraft.errors import SpecdraftError
from specdraft.hiddens import read_rows
from specdraft.items import draft, proposal, written
from specdraft.ledger import Ledger
from specdraft.pairs import PairRun, prompt_pairs
from specdraft.session import Session
from specdraft.statuses import is_uncertain
from specdraft.writes import Job, catchup_jobs, propose_jobs

__all__ = ["Sequence"]


class Sequence:
    """One token sequence known to the service. Made by `Client.open_sequence`.

    Methods may be called from several threads; they take turns. Every method raises `SpecdraftError`, and after a
    timeout or a broken connection the next one first asks the service where the sequence stands.
    """

    def __init__(self, session: Session, ledger: Ledger) -> None:
        self._session = session
        self._ledger = ledger
        self.lock = threading.Lock()
        self._closed = False

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def sequence_id(self) -> bytes:
        """Its id, 16 bytes."""
        return self._ledger.sequence_id

    @property
    def session(self) -> Session:
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

    def prefill(self, prompt_tokens: Tokens[int], hiddens: object) -> SequenceState:
        """Writes the pairs of a prompt: `prompt[1:]` with `hiddens[:-1]`. A prompt of one token writes nothing.

        Args:
            prompt_tokens: t_0..t_{n-1}.
            hiddens: h_0..h_{n-1}, [n, hidden_width].

        Raises:
            ValueError: hidden rows of another shape or type.
            SpecdraftError: what the service answered; the chunks before are written.
        """
        terms = self._session.terms
        run = prompt_pairs(prompt_tokens, read_rows(hiddens, terms.dtype, terms.width))
        return self.known_state if run is None else self._catchup(run)

    def catchup(
        self,
        first_key: int,
        tokens: Tokens[int],
        hiddens: object,
        *,
        allow_gap: bool = False,
        accepted_drafts: int | None = None,
        verified_tokens: Tokens[int] = (),
    ) -> SequenceState:
        """Writes pairs: rows with keys >= first_key are dropped, then one row a pair is appended.

        Args:
            first_key: f.
            tokens: tokens[j] = t_{f+j+1}.
            hiddens: row j = h_{f+j}, [len(tokens), hidden_width].
            allow_gap: keys between the stored rows and f may stay without rows.
            accepted_drafts: accepted drafts of the last round; None = the service counts.
            verified_tokens: rows policy APPROXIMATE: t_{P+1}.. of the keys from P up to f, where P = last_pair_key + 1.
                They must equal the last drafts (`DRAFT_MISMATCH`), whose rows then stay as approximate rows.
        """
        rows = read_rows(hiddens, self._session.terms.dtype, self._session.terms.width)
        return self._catchup(PairRun(first_key, tokens, rows, allow_gap, accepted_drafts, verified_tokens))

    def propose(
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
        """Writes pairs like `catchup`, then drafts `num_drafts` tokens from the last one.

        Args:
            first_key: f.
            tokens: tokens[j] = t_{f+j+1}; after a verify, [d_1 .. d_a, bonus].
            hiddens: row j = h_{f+j}, [len(tokens), hidden_width].
            num_drafts: K; 0 only writes.
            allow_gap: as for `catchup`.
            accepted_drafts: as for `catchup`.
            min_logprob: stop after the first draft whose log-probability is below this.
            mask: grammar mask, 32-bit words, [W] or [K, W] flattened, W = ceil(vocab_size / 32); empty = none.
            verified_tokens: as for `catchup`.
            recommend: answer `Proposal.recommended_drafts` too.
            verify_us: how long the target's verify takes, in microseconds, for the recommendation; None = the service
                takes the time from its last answer to this request.
        """
        session = self._session
        rows = read_rows(hiddens, session.terms.dtype, session.terms.width)
        run = PairRun(first_key, tokens, rows, allow_gap, accepted_drafts, verified_tokens)
        wish = draft(num_drafts, min_logprob, mask, recommend=recommend, verify_us=verify_us)
        job = Job(self._ledger, run, wish)
        with self.lock:
            session.run(propose_jobs([job], session.terms, session.placement))
        return proposal(job)

    def truncate(self, first_key: int, accepted_drafts: int | None = None) -> SequenceState:
        """Drops the rows with keys >= first_key; 0 empties the sequence."""
        with self.lock:
            return self._session.run(
                operations.truncate(self._ledger, first_key, accepted_drafts, self._session.terms.timeout_s)
            )

    def state(self) -> SequenceState:
        """Asks the service where the sequence stands."""
        with self.lock:
            return self._session.run(operations.read_state(self._ledger, self._session.terms.timeout_s))

    def read_drafts(self, op: int | None = None, *, with_last_embedding: bool = False) -> StoredDrafts:
        """The drafts of the last round, from the service's own copy.

        Args:
            op: the operation that drafted; None = the last one. Only the last operation's drafts are kept.
            with_last_embedding: whether to bring the embedding of the last draft.

        Raises:
            AbortedError: `OP_OUT_OF_ORDER`: the last operation is another one, or drafted nothing.
        """
        timeout_s = self._session.terms.timeout_s
        with self.lock:
            return self._session.run(
                operations.read_drafts(self._ledger, op, with_last_embedding=with_last_embedding, timeout_s=timeout_s)
            )

    def take_kv(self, label: str = "") -> Carry:
        """Moves all rows out; the sequence is empty then. `label`: the caller's own name, at most 64 bytes."""
        with self.lock:
            return self._session.run(operations.take_kv(self._ledger, label, self._session.terms.timeout_s))

    def install_kv(self, carry: Carry, keep_keys_below: int | None = None) -> SequenceState:
        """Moves a carry into this empty sequence. With c common tokens, keep keys below c - layer_count."""
        with self.lock:
            return self._session.run(
                operations.install_kv(self._ledger, carry, keep_keys_below, self._session.terms.timeout_s)
            )

    def fork(self, keep_keys_below: int, budget_tokens: int = 0) -> Sequence:
        """A new sequence that shares the rows with keys below `keep_keys_below`."""
        with self.lock:
            ledger = self._session.run(
                operations.fork_sequence(self._ledger, keep_keys_below, budget_tokens, self._session.terms.timeout_s)
            )
        return Sequence(self._session, ledger)

    def close(self, accepted_drafts: int | None = None) -> None:
        """Gives the sequence up. Never raises: one that cannot be closed now is closed before the next is opened."""
        if self._session.is_inherited:  # the lock may have been held when the process forked
            return
        with self.lock:
            if self._closed:
                return
            self._closed = True
            try:
                self._session.run(
                    operations.close_sequence(self._ledger, accepted_drafts, self._session.terms.timeout_s)
                )
            except SpecdraftError as error:
                if is_uncertain(error):
                    self._session.leave(self._ledger)
                else:
                    self._ledger.release()

    def leave(self) -> None:
        """As `close`, but without asking now: for a caller who has just seen that the service does not answer."""
        if self._session.is_inherited:
            return
        with self.lock:
            if not self._closed:
                self._closed = True
                self._session.leave(self._ledger)

    def _catchup(self, run: PairRun) -> SequenceState:
        job = Job(self._ledger, run)
        with self.lock:
            self._session.run(catchup_jobs([job], self._session.terms, self._session.placement))
        return written(job)
