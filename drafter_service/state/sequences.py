"""What is remembered of a sequence: its rows, its pages, its operations, its last round. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field

from drafter_service.state.advice import Advice
from drafter_service.state.rows import KeySpan, Rows
from drafter_service.state.values import value
from specdraft.errors import Reason, SpecdraftError, make_error

MAX_SPANS = 128
"""Most key ranges of a sequence."""

MAX_ENDED = 65536
"""Ended sessions that are remembered; their ids are never used again."""

MAX_CLOSED = 1024
"""Closed sequences of a session whose closing is remembered, so that a retry of it gets its answer."""


@value
class SequenceView:
    """Where a sequence stands, as told to clients. Draft rows that wait for their verify are not counted."""

    last_op: int
    row_count: int
    last_pair_key: int
    ranges: tuple[KeySpan, ...]
    first_approximate_key: int = -1


@value
class Round:
    """The last round that drafted: what is needed to judge it.

    Attributes:
        first_key: P, the key under which the first verified token will be written.
        drafts: d_1 .. d_n.
    """

    first_key: int
    drafts: tuple[int, ...]

    def accepted(self, first_key: int, tokens: Seq[int], declared: int | None) -> int | None:
        """How many drafts the target accepted, told by the write that follows; None = it cannot be known.

        Args:
            first_key: key of the write's first pair.
            tokens: the write's tokens.
            declared: what the client says.
        """
        if declared is not None:
            return min(declared, len(self.drafts))
        if first_key != self.first_key:
            return None
        accepted = 0
        for draft, token in zip(self.drafts, tokens[:-1], strict=False):
            if draft != token:
                break
            accepted += 1
        return accepted


@dataclass(slots=True)
class Sequence:
    """One token sequence.

    Attributes:
        sequence_id: 16 random bytes.
        session_id: the session that owns it.
        open_id: the client's id of the call that opened it.
        opening: what that call asked for: another call with its id is none of its retries.
        max_keys: keys are < max_keys.
        reserved_pages: pages that it keeps even when it needs fewer.
        rows: which keys have a row.
        pages: page of rows [i * page_rows, (i + 1) * page_rows) at i. An array, so that it becomes a tensor
            without a copy.
        last_op: number of the last accepted operation.
        last_digest: digest of that operation's request.
        last_outcome: its answer, given again when it is retried.
        last_round: the last round, until it is judged.
        keeps_drafts: the rows policy: whether accepted draft rows stay, as approximate rows.
        draft_rows: tokens of the draft rows that lie behind `rows`, for the keys from rows.last_key + 1 on.
        first_approximate_key: first key of `rows` whose row is approximate, -1 = none.
        advice: what the session's acceptance says about draft counts; shared by its sequences.
        answered_at: when its last proposal was answered, monotonic seconds; 0 = never.
        num_rounds: rounds of lanes under way: the device may write its pages, and the books do not know yet what.
        num_forks: forks that copied a page of it.
    """

    sequence_id: bytes
    session_id: bytes
    open_id: bytes
    max_keys: int
    opening: tuple[object, ...] = ()
    reserved_pages: int = 0
    rows: Rows = field(default_factory=Rows)
    pages: array[int] = field(default_factory=lambda: array("i"))
    last_op: int = 0
    last_digest: bytes = b""
    last_outcome: object = None
    last_round: Round | None = None
    keeps_drafts: bool = False
    draft_rows: tuple[int, ...] = ()
    first_approximate_key: int = -1
    advice: Advice | None = None
    answered_at: float = 0.0
    num_rounds: int = 0
    num_forks: int = 0

    def view(self) -> SequenceView:
        """Where it stands."""
        rows = self.rows
        return SequenceView(self.last_op, rows.row_count, rows.last_key, rows.spans, self.first_approximate_key)

    def drop_rows(self, first_key: int) -> None:
        """Drops the rows with keys >= first_key, draft rows among them."""
        self.draft_rows = self.draft_rows[: max(first_key - self.rows.last_key - 1, 0)]
        self.rows = self.rows.below(first_key)
        if self.first_approximate_key >= first_key:
            self.first_approximate_key = -1

    def adopt_drafts(self, rows: Rows) -> None:
        """Takes over rows that `verified` made: draft rows among them are approximate from now on."""
        if rows.last_key > self.rows.last_key and self.first_approximate_key < 0:
            self.first_approximate_key = self.rows.last_key + 1
        self.rows = rows
        self.draft_rows = ()

    def take_rows(self, rows: Rows, first_key: int, draft_rows: tuple[int, ...]) -> None:
        """Takes over rows that a write from first_key on made; draft rows that nobody verified go, others come."""
        self.rows, self.draft_rows = rows, draft_rows
        if self.first_approximate_key >= first_key:
            self.first_approximate_key = -1

    def is_replay(self, op: int, digest: bytes) -> bool:
        """Whether `op` is the last accepted operation again; False = it is the next one.

        Raises:
            OP_REUSED: the same number with another request.
            OP_OUT_OF_ORDER: neither the last nor the next number.
            IN_FLIGHT_EXHAUSTED: a round of a lane has taken the number up, and is not entered yet.
        """
        if op == self.last_op + 1:
            self.check_idle()
            return False
        if op == self.last_op and op > 0:
            if digest != self.last_digest:
                raise make_error(Reason.OP_REUSED, f"operation {op} was accepted with another request", op=op)
            return True
        raise self.out_of_order(op, f"operation {op} came after {self.last_op}; the next is {self.last_op + 1}")

    def check_idle(self) -> None:
        """Raises IN_FLIGHT_EXHAUSTED while rounds of a lane are under way: nothing else may touch rows and pages."""
        if self.num_rounds:
            raise make_error(
                Reason.IN_FLIGHT_EXHAUSTED,
                "rounds of the sequence are under way in a lane",
                retry_delay_ms=10,
                limit=self.num_rounds,
            )

    def out_of_order(self, op: int, text: str) -> SpecdraftError:
        """OP_OUT_OF_ORDER with all that a client needs to go on."""
        return make_error(
            Reason.OP_OUT_OF_ORDER,
            text,
            op=op,
            last_op=self.last_op,
            row_count=self.rows.row_count,
            last_pair_key=self.rows.last_key,
            ranges=",".join(f"{span.begin}-{span.end}" for span in self.rows.spans),
        )

    def verified(self, first_key: int, verified_tokens: Seq[int]) -> Rows:
        """The rows before first_key once the draft rows that were verified count as rows.

        Args:
            first_key: key of the write's first pair.
            verified_tokens: what the target found at the keys from P on, P the first key after the rows.

        Raises:
            INVALID_FIELD: as many tokens as lie between P and first_key are needed, or none.
            DRAFT_MISMATCH: a draft row was made from another token.
        """
        if not verified_tokens:
            return self.rows
        begin = self.rows.last_key + 1
        if first_key != begin + len(verified_tokens) or len(verified_tokens) > len(self.draft_rows):
            text = f"{len(verified_tokens)} verified tokens from key {begin} do not lead to first_key {first_key}"
            expected = f"{min(max(first_key - begin, 0), len(self.draft_rows))} tokens"
            raise make_error(
                Reason.INVALID_FIELD, text, field="pairs.verified_tokens", value=len(verified_tokens), expected=expected
            )
        for place, (stored, given) in enumerate(zip(self.draft_rows, verified_tokens, strict=False)):
            if stored != given:
                raise make_error(
                    Reason.DRAFT_MISMATCH,
                    f"the draft row of key {begin + place} was made from token {stored}, the target has {given}",
                    key=begin + place,
                    stored=stored,
                    given=given,
                )
        return self.rows.written(begin, len(verified_tokens))

    def check_write(self, rows: Rows, first_key: int, num_pairs: int, *, allow_gap: bool) -> None:
        """Refuses pairs that do not follow.

        Args:
            rows: the rows before the write.
            first_key: key of the first pair.
            num_pairs: pairs.
            allow_gap: whether a gap is declared.

        Raises:
            POSITION_LIMIT: a pair past the limit.
            MISSING_ROWS: a gap that was not declared.
        """
        last = first_key + num_pairs - 1
        if last >= self.max_keys:
            raise make_error(
                Reason.POSITION_LIMIT,
                f"pair {last} is past the limit of {self.max_keys}",
                key=last,
                limit=self.max_keys,
            )
        if first_key == rows.last_key + 1:  # as nearly always
            return
        gap = rows.gap_before(first_key)
        if gap is None:
            return
        # Every answer tells the ranges, and has to fit into a message.
        is_full = len(rows.below(first_key).spans) >= MAX_SPANS
        if not allow_gap or is_full:
            text = f"the pairs [{gap.begin}, {gap.end}) before {first_key} have no rows"
            raise make_error(
                Reason.MISSING_ROWS,
                f"{text}, and a sequence has at most {MAX_SPANS} ranges" if is_full else text,
                gap_begin=gap.begin,
                gap_end=gap.end,
                last_pair_key=self.rows.last_key,
            )


class SequenceTable:
    """All sequences. Owned by the engine thread."""

    def __init__(self) -> None:
        self._by_id: dict[bytes, Sequence] = {}
        self._by_session: dict[bytes, dict[bytes, Sequence]] = {}
        self._by_open_id: dict[tuple[bytes, bytes], Sequence] = {}
        self._advice: dict[bytes, Advice] = {}
        self._closed: dict[bytes, dict[bytes, tuple[int, bytes]]] = {}  # by session: none makes others' be forgotten
        self._ended_sessions: dict[bytes, None] = {}

    def __len__(self) -> int:
        return len(self._by_id)

    def add(self, sequence: Sequence) -> None:
        """Adds an open sequence."""
        self._by_id[sequence.sequence_id] = sequence
        self._by_session.setdefault(sequence.session_id, {})[sequence.sequence_id] = sequence
        self._by_open_id[sequence.session_id, sequence.open_id] = sequence

    def find(self, session_id: bytes, sequence_id: bytes) -> Sequence:
        """The session's sequence; unknown and foreign ids alike raise SEQUENCE_UNKNOWN."""
        sequence = self._by_id.get(sequence_id)
        if sequence is None or sequence.session_id != session_id:
            raise make_error(Reason.SEQUENCE_UNKNOWN, "no such sequence in this session")
        return sequence

    def opened_as(self, session_id: bytes, open_id: bytes, opening: tuple[object, ...]) -> Sequence | None:
        """The open sequence that an earlier call with this id has made; None = this is the first one.

        Raises:
            INVALID_FIELD: that call asked for something else.
        """
        known = self._by_open_id.get((session_id, open_id))
        if known is not None and known.opening != opening:
            raise make_error(
                Reason.INVALID_FIELD,
                "open_id belongs to a sequence that another request has opened",
                field="open_id",
                value=open_id.hex(),
                expected="16 random bytes that no open sequence of the session has",
            )
        return known

    def remove(self, sequence: Sequence) -> None:
        """Forgets a sequence. Its pages are the caller's to release."""
        del self._by_id[sequence.sequence_id]
        del self._by_open_id[sequence.session_id, sequence.open_id]
        mine = self._by_session[sequence.session_id]
        del mine[sequence.sequence_id]
        if not mine:
            del self._by_session[sequence.session_id]

    def close(self, sequence: Sequence, op: int, digest: bytes) -> None:
        """Forgets a sequence and remembers for a while which operation closed it."""
        self.remove(sequence)
        closed = self._closed.setdefault(sequence.session_id, {})
        closed[sequence.sequence_id] = op, digest
        if len(closed) > MAX_CLOSED:
            del closed[next(iter(closed))]

    def was_closed_by(self, session_id: bytes, sequence_id: bytes, op: int, digest: bytes) -> bool:
        """Whether this very operation closed the sequence: then it is a retry."""
        return self._closed.get(session_id, {}).get(sequence_id) == (op, digest)

    def advice_of(self, session_id: bytes) -> Advice:
        """What the session's acceptance has said so far."""
        return self._advice.setdefault(session_id, Advice())

    def check_session(self, session_id: bytes) -> None:
        """Raises SESSION_UNKNOWN for a session that has ended: a call may have been on its way meanwhile."""
        if session_id in self._ended_sessions:
            raise make_error(Reason.SESSION_UNKNOWN, "no session belongs to this token")

    def end_session(self, session_id: bytes) -> None:
        """Forgets what was learnt about a session, whose sequences are gone already; it opens no others."""
        self._ended_sessions[session_id] = None
        if len(self._ended_sessions) > MAX_ENDED:
            del self._ended_sessions[next(iter(self._ended_sessions))]
        self._advice.pop(session_id, None)
        self._closed.pop(session_id, None)

    def count(self, session_id: bytes) -> int:
        """How many sequences the session has."""
        return len(self._by_session.get(session_id, ()))

    def of_session(self, session_id: bytes) -> list[Sequence]:
        """The session's sequences, in the order opened."""
        return list(self._by_session.get(session_id, {}).values())
