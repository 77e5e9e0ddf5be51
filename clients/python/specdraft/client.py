"""The client for threads."""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence as Items
from contextlib import ExitStack
from types import TracebackType
from typing import Self, TypeAlias, Unpack

from specdraft import operations
from specdraft.answers import Carry, Proposal, SequenceState
from specdraft.channel import open_channel, socket_path
from specdraft.conversations import Conversations
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.exchanges import Exchange
from specdraft.items import (
    CatchupItem,
    ProposeItem,
    catchup_job,
    proposal_or_error,
    propose_job,
    state_or_error,
)
from specdraft.lanes import Lane
from specdraft.options import SessionKeywords, SessionOptions
from specdraft.regions import Region
from specdraft.sequence import Sequence
from specdraft.server_info import ServerInfo
from specdraft.session import Session, on_live_session, open_session
from specdraft.terms import closed_error, inherited_error
from specdraft.transport import Transport
from specdraft.v1 import session_pb2
from specdraft.words import MemoryKind, RowsPolicy
from specdraft.writes import catchup_jobs, propose_jobs

__all__ = ["Client"]

_Items: TypeAlias = Items[ProposeItem[Sequence]] | Items[CatchupItem[Sequence]]


class Client:
    """A connection to the service with one session. For threads; `AsyncClient` is its twin for asyncio.

    ```python
    with Client("unix:///run/specdraft/specdraft.sock", hidden_width=4096) as client:
        sequence = client.open_sequence()
    ```

    When the service has lost the session (it restarted), its sequences answer `NotFoundError`; the next `open_sequence`
    opens a new session by itself.
    """

    def __init__(self, target: str, **options: Unpack[SessionKeywords]) -> None:
        """Connects and opens the session.

        Args:
            target: "unix:///path/to/socket" or "host:port".
            **options: fields of `SessionOptions`.

        Raises:
            ValueError: an option is wrong by itself.
            SpecdraftError: no service there, or it refuses the handshake (`HANDSHAKE_MISMATCH`).
        """
        self._target = target
        self._options = SessionOptions(**options)
        self._lock = threading.Lock()
        self._closed = False
        self._pid = os.getpid()
        self._failure: SpecdraftError | None = None  # of the last attempt to open a session in another's place
        self._num_failures = 0
        self._conversations = Conversations(self._live_session, self._options)
        self._channel = open_channel(target, self._options.credentials)
        try:
            self._session = self._open_session()
        except BaseException:
            self._channel.close()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Ends the session and the connection. May be called twice. In a forked process it does nothing."""
        if os.getpid() != self._pid:  # the session is the parent's, and a lock may have been held when it forked
            return
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._session.close()
            self._channel.close()

    @property
    def session(self) -> Session:
        """The session in use."""
        return self._session

    @property
    def memory_kind(self) -> MemoryKind:
        """How hidden rows travel."""
        return self._session.terms.memory_kind

    @property
    def is_driving(self) -> bool:
        """Whether calls go over the `Drive` stream (False: unary calls)."""
        return self._session.is_driving

    @property
    def hidden_width(self) -> int:
        """Elements of one hidden row."""
        return self._session.terms.width

    @property
    def max_drafts(self) -> int:
        """Most drafts of one propose."""
        return self._session.terms.max_drafts

    @property
    def options(self) -> SessionOptions:
        """What was asked for."""
        return self._options

    @property
    def carries(self) -> tuple[Carry, ...]:
        """Carries that were found under the carry key when the session opened."""
        return self._session.terms.carries

    @property
    def conversations(self) -> Conversations:
        """Sequences that were parked between two turns, to be resumed."""
        return self._conversations

    def server_info(self) -> ServerInfo:
        """Asks what this service is."""
        self._check_open()
        request = session_pb2.GetServerInfoRequest()
        answer = Transport(self._channel).call(Exchange("GetServerInfo", request, self._options.timeout_s))
        return ServerInfo.read(answer)

    def reopen(self) -> None:
        """Opens a new session in the place of the present one, whose sequences are lost."""
        self._check_open()
        with self._lock:
            self._check_open()
            self._replace_session()

    def open_sequence(
        self, budget_tokens: int = 0, *, reserve: bool = False, rows_policy: RowsPolicy = RowsPolicy.EXACT
    ) -> Sequence:
        """Opens a sequence.

        Args:
            budget_tokens: most tokens that it will hold; 0 = the head's max_seq_len.
            reserve: take the memory of the whole budget now.
            rows_policy: which rows it keeps.
        """

        def open_in(session: Session) -> Sequence:
            timeout_s = session.terms.timeout_s
            steps = operations.open_sequence(budget_tokens, rows_policy, reserve=reserve, timeout_s=timeout_s)
            return Sequence(session, session.run(steps))

        return on_live_session(self._live_session, open_in)

    def propose_batch(self, items: Items[ProposeItem[Sequence]]) -> list[Proposal | SpecdraftError]:
        """`Sequence.propose` for several sequences in one call, which shares one forward.

        Returns:
            One proposal or error an item, in their order; an error of the whole call is every item's.

        Raises:
            ValueError: hidden rows of another shape or type, or no mask; nothing was sent.
        """
        session = self._session
        jobs = [propose_job(item.sequence.ledger, item, session.terms) for item in items]
        with self._locked(items):
            session.run(propose_jobs(jobs, session.terms, session.placement))
        return [proposal_or_error(job) for job in jobs]

    def catchup_batch(self, items: Items[CatchupItem[Sequence]]) -> list[SequenceState | SpecdraftError]:
        """`Sequence.catchup` for several sequences; returns and raises like `propose_batch`."""
        session = self._session
        jobs = [catchup_job(item.sequence.ledger, item, session.terms) for item in items]
        with self._locked(items):
            session.run(catchup_jobs(jobs, session.terms, session.placement))
        return [state_or_error(job) for job in jobs]

    def open_lane(self, stream: int) -> Lane:
        """Opens a lane: rounds whose drafts the host never waits for. Needs CUDA memory.

        Args:
            stream: the CUDA stream that verifies (`torch.cuda.current_stream().cuda_stream`, for example). What it
                holds is waited for: a first round proves that client and service see each other's writes in order.

        Raises:
            SpecdraftError: `TRANSPORT_UNAVAILABLE`: no CUDA memory, no `Drive` stream, a proof that failed, or so few
                hardware queues (CUDA_DEVICE_MAX_CONNECTIONS) that a lane would stop every other stream; calls without
                tickets work then; `IN_FLIGHT_EXHAUSTED`: the
                session has as many lanes as it may have.
        """
        return self._live_session().open_lane(stream, socket_path(self._target))

    def claim_slot(self) -> int:
        """An arena slot for early rounds of one sequence, this caller's until the session ends.

        Raises:
            ValueError: none is free; ask for more by `slot_count`.
        """
        return self._live_session().placement.claim_slot()

    def register_region(self, buffer: object) -> Region:
        """Has the service open a buffer of the target's in GPU memory: rows that lie in it are then passed, not copied.

        Everything in the buffer's allocation can be read by the service, so it is best a cudaMalloc of its own.

        Args:
            buffer: a dense torch tensor on the GPU, anything with `__cuda_array_interface__`, or a `DeviceRange`.

        Raises:
            ValueError: it is no such thing.
            SpecdraftError: `TRANSPORT_UNAVAILABLE`: the session has no CUDA memory, or the service was not started with
                `--allow-client-regions`; `MEMORY_NOT_SHAREABLE`; `REGIONS_EXHAUSTED`.
        """
        regions = self._session.regions
        if regions is None:
            raise make_error(Reason.TRANSPORT_UNAVAILABLE, "this session has no CUDA memory", kind="region")
        return regions.register(buffer)

    def free_kv(self, carry: Carry) -> None:
        """Gives a carry up."""
        session = self._session
        session.run(operations.free_kv(carry, session.terms.timeout_s))

    def _check_open(self) -> None:
        if self._closed:
            raise closed_error()
        if os.getpid() != self._pid:
            raise inherited_error()

    def _open_session(self) -> Session:
        return open_session(self._channel, self._target, self._options, self.server_info())

    def _live_session(self) -> Session:
        if self._session.is_over:
            self._check_open()
            num_failures = self._num_failures
            with self._lock:
                self._check_open()
                if self._session.is_over:
                    # Who waited while somebody else was told has been told too: deadlines must not add up.
                    if self._failure is not None and self._num_failures != num_failures:
                        raise self._failure
                    self._replace_session()
        return self._session

    def _replace_session(self) -> None:
        self._session.close()
        try:
            session = self._open_session()
        except SpecdraftError as error:
            self._failure, self._num_failures = error, self._num_failures + 1
            raise
        self._conversations.follow(self._session.terms, session.terms)
        self._session = session

    @staticmethod
    def _locked(items: _Items) -> ExitStack:
        # In the order of their ids, each once: two batches that share sequences cannot wait for each other.
        stack = ExitStack()
        chosen = {item.sequence.sequence_id: item.sequence for item in items}
        for sequence_id in sorted(chosen):
            stack.enter_context(chosen[sequence_id].lock)
        return stack
