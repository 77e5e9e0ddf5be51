"""What can be asked of the engine, and what it answers. Pure data: no messages, no torch calls."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import IntEnum
from typing import TYPE_CHECKING, Any

from drafter_service.state import KeySpan, SequenceView
from drafter_service.state.values import value
from specdraft.errors import SpecdraftError

if TYPE_CHECKING:
    from torch import Tensor

    from drafter_service.memory.hiddens import PackedRows


class Stop(IntEnum):
    """Why drafting ended where it did (`StopReason` on the wire)."""

    COMPLETE = 1
    NOT_ASKED = 2
    CONFIDENCE = 3
    GRAMMAR = 4
    POSITION_LIMIT = 5
    PAGES = 6


@value
class Operation:
    """One thing to do.

    Attributes:
        session_id: whose it is.
        sequence_id: the sequence it is about; empty = the session or a carry.
    """

    session_id: bytes
    sequence_id: bytes


@value
class NumberedOperation(Operation):
    """An operation that counts.

    Attributes:
        op: its number, from 1.
        digest: of its request; tells a retry from a re-used number.
    """

    op: int
    digest: bytes


@value
class WriteWish:
    """The pairs of a write, checked at the border.

    Attributes:
        first_key: key of the first pair.
        tokens: tokens[j] = t_{first_key + j + 1}.
        hiddens: [len(tokens), hidden width], private to the service.
        allow_gap: whether a gap before first_key is declared.
        accepted_drafts: how many drafts of the last round the target accepted; None = not said.
        verified_tokens: approximate rows: what the target found at the keys of the draft rows before first_key.
    """

    first_key: int
    tokens: tuple[int, ...]
    hiddens: Tensor | PackedRows
    allow_gap: bool
    accepted_drafts: int | None
    verified_tokens: tuple[int, ...] = ()


@value
class DraftWish:
    """How to draft after the write.

    Attributes:
        num_drafts: K; 0 = only write.
        min_logprob: stop after the first draft below it; None = do not stop.
        masks: one for all drafts or one a draft, bool [1 or K, vocab]; None = everything is allowed.
        recommend: whether to say how many drafts are worth asking for.
        verify_s: how long the target's verify takes, in seconds; None = take the time since the last answer.
        max_drafts: most drafts that may be recommended.
    """

    num_drafts: int
    min_logprob: float | None = None
    masks: Tensor | None = None
    recommend: bool = False
    verify_s: float | None = None
    max_drafts: int = 0


@value
class Write(NumberedOperation):
    """`Catchup` (drafts is None) or `Propose`.

    Attributes:
        pairs: what to write, or the border's error. The error is raised only once the operation turns out to be the
            next one: a retry of an accepted operation is answered from memory whatever its memory holds by now.
        drafts: how to draft; None = a catch-up.
    """

    pairs: WriteWish | SpecdraftError
    drafts: DraftWish | None


@value
class Open(Operation):
    """`OpenSequence`; sequence_id is the id for a new one.

    Attributes:
        open_id: the client's id of this call; a retry finds the same sequence by it.
        max_keys: keys are < max_keys.
        reserve: whether to take the pages of all max_keys rows now.
        max_sequences: most sequences of the session.
        keeps_drafts: the approximate rows policy.
    """

    open_id: bytes
    max_keys: int
    reserve: bool
    max_sequences: int
    keeps_drafts: bool = False

    @property
    def new_id(self) -> bytes:
        """Id for the new sequence."""
        return self.sequence_id


@value
class Fork(Operation):
    """`ForkSequence`; sequence_id is the sequence to share from.

    Attributes:
        new_id: id for the new sequence.
        open_id: as for Open.
        keep_keys_below: the rows that are shared.
        max_keys: as for Open.
        max_sequences: as for Open.
        keeps_drafts: as for Open; the fork has its source's.
    """

    new_id: bytes
    open_id: bytes
    keep_keys_below: int
    max_keys: int
    max_sequences: int
    keeps_drafts: bool = False


@value
class Get(Operation):
    """`GetSequence`."""


@value
class Read(Operation):
    """`ReadDrafts`.

    Attributes:
        op: the operation whose drafts are wanted.
    """

    op: int


@value
class Truncate(NumberedOperation):
    """`Truncate`."""

    first_key: int
    accepted_drafts: int | None


@value
class Close(NumberedOperation):
    """`CloseSequence`."""

    accepted_drafts: int | None


@value
class Take(NumberedOperation):
    """`TakeKV`.

    Attributes:
        owner: whose the carry is: the session's id, or the hash of its carry key.
        label: the client's own name.
    """

    owner: bytes
    label: str


@value
class Install(NumberedOperation):
    """`InstallKV`; owner as for Take."""

    owner: bytes
    kv_id: bytes
    keep_keys_below: int | None
    fingerprint: str


@value
class Free(Operation):
    """`FreeKV`; sequence_id is empty, owner as for Take."""

    owner: bytes
    kv_id: bytes


@value
class ListCarries(Operation):
    """The carries of an owner, for `OpenSession`; sequence_id is empty."""

    owner: bytes


@value
class Expire(Operation):
    """Carries whose time is over go; session_id and sequence_id are empty."""


@value
class CloseSession(Operation):
    """The end of a session: all its sequences and carries; sequence_id is empty."""


@value
class LaneWrite(NumberedOperation):
    """One entry of a `Propose` with a lane ticket: its pairs are in an arena slot, and only the device knows them.

    Attributes:
        slot: of the session's arena; its outputs go there too.
        num_drafts: K.
        min_logprob: stop after the first draft below it; None = do not stop.
        accepted_drafts: as for WriteWish.
    """

    slot: int
    num_drafts: int
    min_logprob: float | None
    accepted_drafts: int | None


@value
class Task(Operation):
    """Something of the service's own to be done in the engine's thread, behind what was asked about a sequence before.

    Without one to follow, session_id and sequence_id are empty.
    """

    action: Callable[[], None]


@value
class Written:
    """Answer to a Write that worked.

    Attributes:
        view: where the sequence stands.
        drafts: d_1 .. d_n.
        logprobs: natural logarithms, one a draft.
        stop: why there are not more; None for a catch-up.
        recommended: number of drafts worth asking for, if that was asked.
    """

    view: SequenceView
    drafts: tuple[int, ...] = ()
    logprobs: tuple[float, ...] = ()
    stop: Stop | None = None
    recommended: int | None = None


@value
class Opened:
    """Answer to Open: the sequence, and whether it is new."""

    sequence_id: bytes
    view: SequenceView
    is_new: bool


@value
class Viewed:
    """Answer to Get, Truncate, Install."""

    view: SequenceView


@value
class CarryView:
    """A carry, as told to clients; left_ms is the time until it is given up."""

    kv_id: bytes
    ranges: tuple[KeySpan, ...]
    label: str
    left_ms: int


@value
class Taken:
    """Answer to Take."""

    carry: CarryView
    view: SequenceView


@value
class Listed:
    """Answer to ListCarries, the oldest first."""

    carries: tuple[CarryView, ...]


@value
class Done:
    """Answer to Close, Free, Expire, CloseSession."""


@value
class Refusal:
    """An operation that was refused.

    Attributes:
        error: why.
        view: where the sequence stands, None if it is unknown.
    """

    error: SpecdraftError
    view: SequenceView | None


Answer = Written | Opened | Viewed | Taken | Listed | Done
Outcome = Answer | Refusal


class Call:
    """Operations that were asked for together, and are answered together.

    Args:
        operations: what to do; entries of one call take pages in this order.
        submitted_at: monotonic seconds at which it was asked.
        deadline: monotonic seconds after which what has not begun is not begun any more.
        on_done: called once, in the engine's thread, when every outcome is there. Must be quick and must not raise.

    Attributes:
        num_open: operations that have no outcome yet.
    """

    def __init__(
        self,
        operations: Sequence[Operation],
        submitted_at: float,
        deadline: float,
        on_done: Callable[[list[Outcome]], None],
    ) -> None:
        self.operations = operations
        self.submitted_at = submitted_at
        self.deadline = deadline
        self.num_open = len(operations)
        self._outcomes: list[Outcome | None] = [None] * self.num_open
        self._joined: tuple[int, ...] = ()
        self._lock = threading.Lock()
        self._on_done = on_done

    def open_indices(self) -> Sequence[int]:
        """The operations that have no outcome yet and wait for none that is in flight already."""
        if self.num_open == len(self._outcomes) and not self._joined:
            return range(self.num_open)
        return [index for index, outcome in enumerate(self._outcomes) if outcome is None and index not in self._joined]

    def join(self, index: int) -> None:
        """Operation `index` is the retry of one in flight, whose outcome it will get."""
        self._joined += (index,)

    def finish(self, index: int, outcome: Outcome) -> None:
        """Gives the outcome of operation `index`."""
        with self._lock:
            assert self._outcomes[index] is None, "an operation ends once"
            self._outcomes[index] = outcome
            self.num_open -= 1
            is_done = self.num_open == 0
        if is_done:
            outcomes: list[Any] = self._outcomes  # none is missing any more
            self._on_done(outcomes)
