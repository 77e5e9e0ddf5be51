"""Sessions: one client's time-bound leases. Pure; shared between threads under one lock."""

from __future__ import annotations

import hashlib
import secrets
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from specdraft.errors import Reason, SpecdraftError, make_error

ID_BYTES = 16


class Closeable(Protocol):
    """Something that a session owns."""

    def close(self) -> None:
        """Gives it back. Safe to call twice."""
        ...


class Regions(Closeable, Protocol):
    """The client regions of a session."""

    def __len__(self) -> int:
        """How many are open."""
        ...


class DriveStream(Protocol):
    """The session's open stream, as far as a session cares."""

    def fence(self) -> None:
        """Ends the stream: another one has taken over."""
        ...

    def end(self, error: SpecdraftError) -> None:
        """Ends the stream with an error."""
        ...


@dataclass(frozen=True, slots=True)
class Agreement:
    """What client and service agreed on in the handshake.

    Attributes:
        hidden_dtype: name of the hidden rows' element type, "float32", "bfloat16" or "float16".
        hidden_width: elements of one hidden row.
        max_drafts: most drafts of an entry.
        client_name: the client's name for listings.
        carry_owner: whose the session's carries are: the hash of its carry key; empty = the session's own.
    """

    hidden_dtype: str
    hidden_width: int
    max_drafts: int
    client_name: str
    carry_owner: bytes = b""


class Session:
    """One client's lease, and what it owns besides sequences."""

    def __init__(self, agreement: Agreement, arena: Closeable | None, now: float, lease_s: float) -> None:
        self.session_id = secrets.token_bytes(ID_BYTES)
        self.agreement = agreement
        self.carry_owner = agreement.carry_owner or self.session_id
        self.opened_at = now
        self.expires_at = now + lease_s
        self.has_ended = False
        self.arena = arena
        self.regions: Regions | None = None
        self.lanes: Closeable | None = None
        self.mapping_proven = False
        self.drive: DriveStream | None = None


_Found = TypeVar("_Found", Session, Session | None)


class SessionTable:
    """The open sessions, found by their secret token.

    Args:
        lease_s: a session ends this long after its last call.
        grace_s: ... and this long after its stream broke, unless it comes back.
        max_sessions: most sessions at once.
        clock: monotonic seconds.
    """

    def __init__(self, lease_s: float, grace_s: float, max_sessions: int, clock: Callable[[], float]) -> None:
        self.lease_s = lease_s
        self.grace_s = grace_s
        self.max_sessions = max_sessions
        self._clock = clock
        self._lock = threading.Lock()
        self._by_token: dict[bytes, Session] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def open(self, agreement: Agreement, arena: Closeable | None) -> tuple[Session, bytes]:
        """Opens a session that owns `arena`, and makes its token. Raises SESSIONS_EXHAUSTED (arena left open)."""
        token = secrets.token_bytes(ID_BYTES)
        with self._lock:
            if len(self._by_token) >= self.max_sessions:
                raise make_error(
                    Reason.SESSIONS_EXHAUSTED,
                    f"{self.max_sessions} sessions are open, which is the limit",
                    retry_delay_ms=int(self.lease_s * 1000),
                    limit=self.max_sessions,
                )
            session = Session(agreement, arena, self._clock(), self.lease_s)
            self._by_token[_hashed(token)] = session
        return session, token

    def find(self, token: bytes) -> Session:
        """The token's session, its lease renewed. Raises SESSION_UNKNOWN."""
        now = self._clock()
        with self._lock:
            session = self._by_token.get(_hashed(token))
            if session is None or session.expires_at <= now:
                raise make_error(Reason.SESSION_UNKNOWN, "no session belongs to this token")
            session.expires_at = now + self.lease_s
        return session

    def renew(self, session: Session) -> None:
        """Renews the lease of a session that was found before. Raises SESSION_UNKNOWN once it has ended."""
        with self._lock:
            self._renew(session)

    def attach(self, session: Session, drive: DriveStream) -> None:
        """Makes `drive` the session's stream and fences the one before. Raises SESSION_UNKNOWN once it has ended.

        The lease is renewed: since the session was found the stream before may have been missed, or the session ended.
        """
        with self._lock:
            self._renew(session)
            before, session.drive = session.drive, drive
        if before is not None:
            before.fence()

    def detach(self, session: Session, drive: DriveStream, *, broken: bool) -> None:
        """The stream has ended; if it broke, the session has grace_s to come back."""
        with self._lock:
            if session.drive is not drive:
                return
            session.drive = None
            if broken:
                session.expires_at = min(session.expires_at, self._clock() + self.grace_s)

    def close(self, token: bytes) -> Session | None:
        """Forgets the token's session and returns it; None if there is none."""
        with self._lock:
            return self._ended(self._by_token.pop(_hashed(token), None))

    def pop_expired(self) -> list[Session]:
        """Forgets the sessions whose lease has ended and returns them."""
        now = self._clock()
        with self._lock:
            ended = [token for token, session in self._by_token.items() if session.expires_at <= now]
            return [self._ended(self._by_token.pop(token)) for token in ended]

    def num_regions(self) -> int:
        """Client regions that are open, over all sessions."""
        with self._lock:
            return sum(len(session.regions) for session in self._by_token.values() if session.regions is not None)

    def pop_all(self) -> list[Session]:
        """Forgets all sessions and returns them."""
        with self._lock:
            sessions = [self._ended(session) for session in self._by_token.values()]
            self._by_token.clear()
        return sessions

    def listed(self) -> list[Session]:
        """The open sessions, oldest first."""
        with self._lock:
            return sorted(self._by_token.values(), key=lambda session: session.opened_at)

    def _renew(self, session: Session) -> None:
        now = self._clock()
        if session.has_ended or session.expires_at <= now:
            raise make_error(Reason.SESSION_UNKNOWN, "no session belongs to this token")
        session.expires_at = now + self.lease_s

    @staticmethod
    def _ended(session: _Found) -> _Found:
        """Marks a session that is being forgotten."""
        if session is not None:
            session.has_ended = True
        return session


def _hashed(token: bytes) -> bytes:
    # Found by its hash, so that looking a token up takes no time that depends on how much of it was guessed.
    return hashlib.blake2b(token, digest_size=32).digest()
