"""What the service promises, in plain Python: rows, operations, carries, forks and pages, without a head and a device.

Pages are numbers that are never used twice, so that pages in use are the distinct numbers that somebody holds.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count, groupby
from types import MappingProxyType

from google.protobuf.message import Message

from specdraft.v1 import drafter_pb2 as pb

PAGE_ROWS = 4
EMPTY = MappingProxyType({})


@dataclass(eq=False)
class Session:
    """A lease. `owner` is what its carries belong to: itself, or a key."""

    owner: object
    expires_at: float
    is_open: bool = True


@dataclass(eq=False)
class Sequence:
    """Rows by key: (token, hidden), hidden None where the row is the head's own draft row."""

    session: Session
    open_id: bytes
    max_keys: int
    keeps_drafts: bool
    rows: dict = field(default_factory=dict)
    pages: list = field(default_factory=list)
    draft_rows: tuple = ()
    reserved: int = 0
    last_op: int = 0
    last_request: bytes = b""
    last_answer: Message | None = None
    drafts_of_last_op: pb.ProposeResult | None = None
    opening: Message | None = None

    @property
    def last_key(self):
        return max(self.rows, default=-1)

    def below(self, first_key):
        return {key: row for key, row in self.rows.items() if key < first_key}

    def view(self):
        """Like a SequenceState."""
        approximate = [key for key, (_, hidden) in self.rows.items() if hidden is None]
        return (self.last_op, len(self.rows), self.last_key, ranges_of(self.rows), min(approximate, default=-1))


@dataclass(eq=False)
class Carry:
    """Rows without a sequence."""

    owner: object
    rows: dict
    pages: list
    label: str
    expires_at: float


@dataclass
class Expected:
    """What an answer must be.

    Attributes:
        reason: why it is refused; empty = it is not.
        view: where the sequence stands then; None = not said.
        same_as: the answer that must come again, byte for byte.
        finish: takes up what only the answer knows.
        num_drafts, stop: of a proposal.
        sequence: the one that it is about.
    """

    reason: str = ""
    view: Callable[[], tuple] | None = None
    same_as: Message | None = None
    finish: Callable[[Message], None] = lambda answer: None
    num_drafts: int = 0
    stop: int = pb.STOP_REASON_UNSPECIFIED
    sequence: Sequence | None = None


def ranges_of(keys):
    """Runs of neighbouring keys, half-open."""
    runs = [[key for _, key in run] for _, run in groupby(enumerate(sorted(keys)), lambda item: item[1] - item[0])]
    return tuple((run[0], run[-1] + 1) for run in runs)


def pages_for(num_rows):
    return -(-num_rows // PAGE_ROWS)


class Model:
    """The service as its clients may think of it."""

    def __init__(self, num_pages, max_carried, carry_ttl, max_seq_len):
        self.num_pages = num_pages
        self.max_carried = max_carried
        self.carry_ttl = carry_ttl
        self.max_seq_len = max_seq_len
        self.now = 0.0
        self.sequences = {}
        self.closed = {}
        self.carries = {}
        self.sessions = []
        self.evicted = 0
        self._in_copy = []
        self._new_page = count()
        self._handlers = {
            "OpenSequence": self._open,
            "ForkSequence": self._fork,
            "GetSequence": self._get,
            "ReadDrafts": self._read,
            "Truncate": self._truncate,
            "CloseSequence": self._close,
            "TakeKV": self._take,
            "InstallKV": self._install,
            "FreeKV": self._free,
        }

    # Pages.

    def holders(self, carries=None):
        """How many hold each page."""
        owners = [*self.sequences.values(), *(self.carries.values() if carries is None else carries)]
        return Counter([page for owner in owners for page in owner.pages] + self._in_copy)

    @property
    def in_use(self):
        return len(self.holders())

    @property
    def carried(self):
        """Pages that only carries hold."""
        others = Counter([page for owner in self.sequences.values() for page in owner.pages])
        return len({page for carry in self.carries.values() for page in carry.pages if page not in others})

    def find_room(self, num_needed):
        """Gives up the fewest oldest carries with which `num_needed(holders)` pages are free, or none: then False."""
        kv_ids = list(self.carries)
        for num_gone in range(len(kv_ids) + 1):
            holders = self.holders([self.carries[kv_id] for kv_id in kv_ids[num_gone:]])
            if num_needed(holders) <= self.num_pages - len(holders):
                for kv_id in kv_ids[:num_gone]:
                    del self.carries[kv_id]
                self.evicted += num_gone
                return True
        return False

    def take_pages(self, num):
        return [next(self._new_page) for _ in range(num)]

    def settle(self, sequence):
        num_rows = len(sequence.rows) + len(sequence.draft_rows)
        del sequence.pages[max(pages_for(num_rows), sequence.reserved) :]

    # Sessions and time.

    def open_session(self, owner, lease):
        session = Session(owner, self.now + lease)
        session.owner = session if owner is None else owner
        self.sessions.append(session)
        return session

    def carries_of(self, session):
        return {kv_id: carry for kv_id, carry in self.carries.items() if carry.owner == session.owner}

    def close_session(self, session):
        session.is_open = False
        self.sessions.remove(session)
        for store in (self.sequences, self.closed):
            for name in [name for name, sequence in store.items() if sequence.session is session]:
                del store[name]
        for kv_id in [kv_id for kv_id, carry in self.carries.items() if carry.owner is session]:
            del self.carries[kv_id]

    def pass_time(self, seconds):
        self.now += seconds
        for session in [session for session in self.sessions if session.expires_at <= self.now]:
            self.close_session(session)
        for kv_id in [kv_id for kv_id, carry in self.carries.items() if carry.expires_at <= self.now]:
            del self.carries[kv_id]

    # Calls.

    def expect(self, session, rpc, request):
        """What the answer to any call but Catchup and Propose must be."""
        if not session.is_open:
            return Expected("SESSION_UNKNOWN")
        return self._handlers[rpc](session, request)

    def _find(self, session, sequence_id):
        sequence = self.sequences.get(sequence_id)
        return sequence if sequence is not None and sequence.session is session else None

    def _opened(self, session, request, make):
        for known_id, known in self.sequences.items():
            if known.session is session and known.open_id == request.open_id:
                if known.opening != request:
                    return Expected("INVALID_FIELD")
                return Expected(view=known.view, finish=partial(_check_id, known_id), sequence=known)
        made = make()
        if isinstance(made, Expected):
            return made

        made.opening = request
        # Its pages are held from now on, and its id is for the service to say.
        self.sequences[made] = made

        def finish(answer):
            del self.sequences[made]
            assert answer.sequence_id not in self.sequences
            self.sequences[answer.sequence_id] = made

        return Expected(view=made.view, finish=finish, sequence=made)

    def _open(self, session, request):
        def make():
            made = Sequence(
                session,
                request.open_id,
                request.budget_tokens or self.max_seq_len,
                request.rows_policy == pb.ROWS_POLICY_APPROXIMATE,
            )
            made.reserved = pages_for(made.max_keys) if request.reserve else 0
            if not self.find_room(lambda _: made.reserved):
                return Expected("PAGES_EXHAUSTED")
            made.pages = self.take_pages(made.reserved)
            return made

        return self._opened(session, request, make)

    def _fork(self, session, request):
        source = self._find(session, request.sequence_id)

        def make():
            if source is None:
                return Expected("SEQUENCE_UNKNOWN")
            rows = source.below(request.keep_keys_below)
            max_keys = request.budget_tokens or self.max_seq_len
            if max(rows, default=-1) >= max_keys:
                return Expected("POSITION_LIMIT")
            num_full, num_left = divmod(len(rows), PAGE_ROWS)
            if num_left and not self.find_room(lambda _: 1):
                return Expected("PAGES_EXHAUSTED")
            made = Sequence(session, request.open_id, max_keys, source.keeps_drafts, rows)
            made.pages = source.pages[:num_full] + self.take_pages(1 if num_left else 0)
            return made

        return self._opened(session, request, make)

    def _get(self, session, request):
        sequence = self._find(session, request.sequence_id)
        return Expected("SEQUENCE_UNKNOWN") if sequence is None else Expected(view=sequence.view)

    def _read(self, session, request):
        sequence = self._find(session, request.sequence_id)
        if sequence is None:
            return Expected("SEQUENCE_UNKNOWN")
        kept = sequence.drafts_of_last_op
        if kept is None or request.op != sequence.last_op:
            return Expected("OP_OUT_OF_ORDER", sequence=sequence)
        answer = pb.ReadDraftsResponse(drafts=kept.drafts, logprobs=kept.logprobs, stop_reason=kept.stop_reason)
        return Expected(same_as=answer)

    def replay(self, sequence, request):
        """The answer to an operation by its number alone; None = it is the next one."""
        if request.op == sequence.last_op + 1:
            return None
        if request.op != sequence.last_op or not request.op:
            return Expected("OP_OUT_OF_ORDER", view=sequence.view, sequence=sequence)
        if packed(request) != sequence.last_request:
            return Expected("OP_REUSED", view=sequence.view, sequence=sequence)
        return Expected(same_as=sequence.last_answer, sequence=sequence)

    def accept(self, sequence, request, drafts=None):
        sequence.last_op, sequence.last_request = request.op, packed(request)
        sequence.drafts_of_last_op = drafts

    def _numbered(self, session, request, do):
        sequence = self._find(session, request.sequence_id)
        if sequence is None:
            return Expected("SEQUENCE_UNKNOWN")
        expected = self.replay(sequence, request) or do(sequence)
        if not expected.reason and expected.same_as is None:
            self.accept(sequence, request)
            inner = expected.finish

            def finish(answer):
                sequence.last_answer = answer
                inner(answer)

            expected.finish, expected.sequence = finish, sequence
        return expected

    def _truncate(self, session, request):
        def do(sequence):
            num_kept = max(request.first_key - sequence.last_key - 1, 0)
            sequence.rows, sequence.draft_rows = sequence.below(request.first_key), sequence.draft_rows[:num_kept]
            self.settle(sequence)
            return Expected(view=sequence.view)

        return self._numbered(session, request, do)

    def _close(self, session, request):
        closed = self.closed.get(request.sequence_id)
        if closed is not None and closed.session is session and closed.last_request == packed(request):
            return Expected()

        def do(sequence):
            del self.sequences[request.sequence_id]
            self.closed[request.sequence_id] = sequence
            sequence.pages = []
            return Expected()

        return self._numbered(session, request, do)

    def _take(self, session, request):
        def do(sequence):
            num_pages = pages_for(len(sequence.rows))
            carry = Carry(
                session.owner, sequence.rows, sequence.pages[:num_pages], request.label, self.now + self.carry_ttl
            )
            spare = sequence.pages[num_pages:]
            sequence.rows, sequence.draft_rows, sequence.pages = {}, (), spare
            self.settle(sequence)
            self.carries[carry] = carry
            while sum(len(one.pages) for one in self.carries.values()) > self.max_carried and len(self.carries) > 1:
                del self.carries[next(iter(self.carries))]
                self.evicted += 1
            num_missing = min(sequence.reserved - len(sequence.pages), self.num_pages - self.in_use)
            sequence.pages = sequence.pages + self.take_pages(max(num_missing, 0))

            def finish(answer):
                check_carry(answer.carry, carry)
                # In its place by age: it is the youngest.
                del self.carries[carry]
                self.carries[answer.carry.kv_id] = carry

            return Expected(view=sequence.view, finish=finish)

        return self._numbered(session, request, do)

    def _install(self, session, request):
        def do(sequence):
            if sequence.rows:
                return Expected("SEQUENCE_NOT_EMPTY")
            carry = self.carries_of(session).get(request.kv_id)
            if carry is None:
                return Expected("CARRY_UNKNOWN")
            keep = request.keep_keys_below if request.HasField("keep_keys_below") else 1 << 40
            rows = {key: row for key, row in carry.rows.items() if key < keep}
            if max(rows, default=-1) >= sequence.max_keys:
                return Expected("POSITION_LIMIT")
            del self.carries[request.kv_id]
            sequence.rows, sequence.pages = rows, carry.pages + sequence.pages
            self.settle(sequence)
            return Expected(view=sequence.view)

        return self._numbered(session, request, do)

    def _free(self, session, request):
        if request.kv_id not in self.carries_of(session):
            return Expected("CARRY_UNKNOWN")
        del self.carries[request.kv_id]
        return Expected()

    # Writes: all entries of a call take their pages before any of them is done.

    def expect_writes(self, session, entries, vocab_size):
        """What the result of each entry must be; finish all of them in their order."""
        counts = Counter(entry.sequence_id for entry in entries)
        return [
            Expected("DUPLICATE_SEQUENCE") if counts[entry.sequence_id] > 1 else self._write(session, entry, vocab_size)
            for entry in entries
        ]

    def _write(self, session, entry, vocab_size):
        sequence = self._find(session, entry.sequence_id)
        if sequence is None:
            return Expected("SEQUENCE_UNKNOWN")
        replayed = self.replay(sequence, entry)
        if replayed is not None:
            return replayed
        reason = self._wrong(sequence, entry.pairs, vocab_size)
        return Expected(reason, view=sequence.view) if reason else self._fitting_write(sequence, entry)

    def _fitting_write(self, sequence, entry):
        pairs, wanted = entry.pairs, getattr(entry, "draft_count", 0)
        kept = {key: row for key, row in self._verified(sequence, pairs).items() if key < pairs.first_key}
        num_rows = len(kept) + len(pairs.tokens)
        rowless = 0 if sequence.keeps_drafts else 1
        # Every draft that has a row needs a key for it.
        last_key = pairs.first_key + len(pairs.tokens) - 1
        num_drafts = min(wanted, max(sequence.max_keys - 1 - last_key + rowless, 0))
        stop = pb.STOP_REASON_COMPLETE if wanted else pb.STOP_REASON_NOT_ASKED
        stop = pb.STOP_REASON_POSITION_LIMIT if num_drafts < wanted else stop

        def end(num_drafts):
            return num_rows + max(num_drafts - rowless, 0)

        def needed(num_drafts):
            return lambda holders: self._num_needed(holders, sequence, len(kept), end(num_drafts))

        if not self.find_room(needed(num_drafts)):
            if not self.find_room(needed(0)):
                return Expected("PAGES_EXHAUSTED", view=sequence.view)
            while needed(num_drafts)(self.holders()) > self.num_pages - self.in_use:
                num_drafts -= 1
            stop = pb.STOP_REASON_PAGES
        self._take_for_write(sequence, len(kept), end(num_drafts))
        if num_drafts and entry.HasField("min_logprob"):
            num_drafts, stop = 1, pb.STOP_REASON_CONFIDENCE  # every draft is below the bound that these tests give
        stop = stop if isinstance(entry, pb.ProposeEntry) else pb.STOP_REASON_UNSPECIFIED
        finish = partial(self._finish_write, sequence, entry, kept)
        return Expected(view=sequence.view, finish=finish, num_drafts=num_drafts, stop=stop, sequence=sequence)

    def _finish_write(self, sequence, entry, kept, result):
        pairs = entry.pairs
        sequence.rows = dict(kept)
        for place, token in enumerate(pairs.tokens):
            sequence.rows[pairs.first_key + place] = (token, hidden_of(pairs, place))
        is_proposal = isinstance(entry, pb.ProposeEntry)
        sequence.draft_rows = tuple(result.drafts) if sequence.keeps_drafts and is_proposal else ()
        self._in_copy.clear()
        self.settle(sequence)
        self.accept(sequence, entry, result if is_proposal else None)
        sequence.last_answer = result

    @staticmethod
    def _verified(sequence, pairs):
        begin = sequence.last_key + 1
        return sequence.rows | {begin + place: (token, None) for place, token in enumerate(pairs.verified_tokens)}

    def _wrong(self, sequence, pairs, vocab_size):
        if any(token >= vocab_size for token in pairs.tokens):
            return "TOKEN_OUT_OF_RANGE"
        given = tuple(pairs.verified_tokens)
        if given:
            if sequence.last_key + 1 + len(given) != pairs.first_key or len(given) > len(sequence.draft_rows):
                return "INVALID_FIELD"
            if given != sequence.draft_rows[: len(given)]:
                return "DRAFT_MISMATCH"
        if pairs.first_key + len(pairs.tokens) > sequence.max_keys:
            return "POSITION_LIMIT"
        before = [key for key in self._verified(sequence, pairs) if key < pairs.first_key]
        if max(before, default=-1) + 1 < pairs.first_key and not pairs.allow_gap:
            return "MISSING_ROWS"
        return ""

    @staticmethod
    def _num_needed(holders, sequence, row_begin, num_rows):
        num_pages = pages_for(num_rows)
        touched = sequence.pages[row_begin // PAGE_ROWS : num_pages]
        return max(num_pages - len(sequence.pages), 0) + sum(holders[page] > 1 for page in touched)

    def _take_for_write(self, sequence, row_begin, num_rows):
        """Pages for new rows, and copies of shared pages; the originals are held until the write is done."""
        holders, num_pages = self.holders(), pages_for(num_rows)
        for index in range(row_begin // PAGE_ROWS, min(num_pages, len(sequence.pages))):
            if holders[sequence.pages[index]] > 1:
                self._in_copy.append(sequence.pages[index])
                (sequence.pages[index],) = self.take_pages(1)
        sequence.pages += self.take_pages(max(num_pages - len(sequence.pages), 0))


def packed(message):
    return type(message).__name__.encode() + message.SerializeToString(deterministic=True)


def hidden_of(pairs, place):
    """Bytes of the hidden row at a place."""
    size = len(pairs.hiddens.inline) // len(pairs.tokens)
    return pairs.hiddens.inline[place * size : (place + 1) * size]


def check_carry(info, carry):
    assert len(info.kv_id) == 16
    assert tuple((span.begin, span.end) for span in info.ranges) == ranges_of(carry.rows)
    assert info.label == carry.label


def _check_id(sequence_id, answer):
    assert answer.sequence_id == sequence_id
