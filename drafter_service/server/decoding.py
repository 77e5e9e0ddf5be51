"""Requests into operations: everything that can be wrong with a message by itself is found here."""

from __future__ import annotations

import hashlib
import secrets
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from google.protobuf.message import Message

from drafter_service.engine import operations as ops
from drafter_service.server.draft_wishes import draft_wish
from drafter_service.server.facts import ServiceFacts
from drafter_service.server.hiddens import read_hiddens
from drafter_service.server.refusals import invalid_field, not_implemented
from drafter_service.state import Session
from specdraft.errors import Reason, SpecdraftError, make_error
from specdraft.v1 import drafter_pb2 as pb

if TYPE_CHECKING:
    pass

_NUMBERED = (
    pb.ProposeEntry,
    pb.CatchupEntry,
    pb.TruncateRequest,
    pb.CloseSequenceRequest,
    pb.TakeKVRequest,
    pb.InstallKVRequest,
)
_NAMES: Mapping[type[Message], bytes] = {kind: kind.DESCRIPTOR.name.encode() + b"\0" for kind in _NUMBERED}
"""With its type: a `TakeKV` and a `Truncate` of everything, for example, have the same bytes."""

ROWS_POLICIES: Mapping[int, str] = {number: name for name, number in pb.RowsPolicy.items()}
"""Those that this build knows. Another one is of a later contract, and must not be taken for EXACT."""

LABEL_MAX_BYTES = 64
OPEN_ID_BYTES = 16


@dataclass(slots=True)
class Decoded:
    """The operations of a call, and those of them that are refused already.

    Attributes:
        operations: one an entry.
        refused: by index, why; the engine never sees these.
    """

    operations: list[ops.Operation]
    refused: dict[int, SpecdraftError]


class Decoder:
    """Turns requests of a session into operations.

    Args:
        facts: limits and head.
    """

    def __init__(self, facts: ServiceFacts) -> None:
        self._facts = facts
        self._vocab_size = facts.head.vocab_size

    def catchup(self, session: Session, request: pb.CatchupRequest) -> Decoded:
        """`Catchup`."""
        entries = request.entries
        decoded = Decoded([], {} if len(entries) == 1 else self._refused(entries))
        for index, entry in enumerate(entries):
            pairs = self._deferred(session, entry, self._facts.config.prefill_rows)
            decoded.operations.append(
                ops.Write(session.session_id, entry.sequence_id, entry.op, digest_of(entry), pairs, None)
            )
            if entry.op == 0:
                decoded.refused.setdefault(index, _unnumbered())
        return decoded

    def propose(self, session: Session, request: pb.ProposeRequest) -> Decoded:
        """`Propose`."""
        entries = request.entries
        decoded = Decoded([], {} if len(entries) == 1 else self._refused(entries))
        for index, entry in enumerate(entries):
            pairs = self._deferred(session, entry, session.agreement.max_drafts + 1)
            try:
                drafts = draft_wish(session, entry, self._vocab_size)
            except SpecdraftError as error:
                pairs, drafts = error, ops.DraftWish(0)
            decoded.operations.append(
                ops.Write(session.session_id, entry.sequence_id, entry.op, digest_of(entry), pairs, drafts)
            )
            if entry.op == 0:
                decoded.refused.setdefault(index, _unnumbered())
        return decoded

    def open_sequence(self, session: Session, request: pb.OpenSequenceRequest) -> Decoded:
        """`OpenSequence`."""
        if len(request.open_id) != OPEN_ID_BYTES:
            raise invalid_field("open_id", f"{len(request.open_id)} bytes", f"{OPEN_ID_BYTES} bytes")
        if request.rows_policy not in ROWS_POLICIES:
            raise invalid_field("rows_policy", request.rows_policy, f"one of {', '.join(ROWS_POLICIES.values())}")
        return _single(
            ops.Open(
                session.session_id,
                secrets.token_bytes(16),
                request.open_id,
                max_keys=self._budget(request.budget_tokens),
                reserve=request.reserve,
                max_sequences=self._facts.config.max_sequences,
                keeps_drafts=request.rows_policy == pb.ROWS_POLICY_APPROXIMATE,
            )
        )

    def fork_sequence(self, session: Session, request: pb.ForkSequenceRequest) -> Decoded:
        """`ForkSequence`."""
        if len(request.open_id) != OPEN_ID_BYTES:
            raise invalid_field("open_id", f"{len(request.open_id)} bytes", f"{OPEN_ID_BYTES} bytes")
        if request.keep_keys_below < 0:
            raise invalid_field("keep_keys_below", request.keep_keys_below, "0 or more")
        return _single(
            ops.Fork(
                session.session_id,
                request.sequence_id,
                new_id=secrets.token_bytes(16),
                open_id=request.open_id,
                keep_keys_below=request.keep_keys_below,
                max_keys=self._budget(request.budget_tokens),
                max_sequences=self._facts.config.max_sequences,
            )
        )

    def read_drafts(self, session: Session, request: pb.ReadDraftsRequest) -> Decoded:
        """`ReadDrafts`."""
        _check_op(request.op)
        return _single(ops.Read(session.session_id, request.sequence_id, request.op))

    def get_sequence(self, session: Session, request: pb.GetSequenceRequest) -> Decoded:
        """`GetSequence`."""
        return _single(ops.Get(session.session_id, request.sequence_id))

    def truncate(self, session: Session, request: pb.TruncateRequest) -> Decoded:
        """`Truncate`."""
        _check_op(request.op)
        if request.first_key < 0:
            raise invalid_field("first_key", request.first_key, "0 or more")
        return _single(
            ops.Truncate(
                session.session_id,
                request.sequence_id,
                request.op,
                digest_of(request),
                request.first_key,
                _accepted(request),
            )
        )

    def close_sequence(self, session: Session, request: pb.CloseSequenceRequest) -> Decoded:
        """`CloseSequence`."""
        _check_op(request.op)
        return _single(
            ops.Close(session.session_id, request.sequence_id, request.op, digest_of(request), _accepted(request))
        )

    def take_kv(self, session: Session, request: pb.TakeKVRequest) -> Decoded:
        """`TakeKV`."""
        _check_op(request.op)
        size = len(request.label.encode())
        if size > LABEL_MAX_BYTES:
            raise invalid_field("label", f"{size} bytes", f"at most {LABEL_MAX_BYTES} bytes")
        return _single(
            ops.Take(
                session.session_id,
                request.sequence_id,
                request.op,
                digest_of(request),
                session.carry_owner,
                request.label,
            )
        )

    def install_kv(self, session: Session, request: pb.InstallKVRequest) -> Decoded:
        """`InstallKV`."""
        _check_op(request.op)
        keep = request.keep_keys_below if request.HasField("keep_keys_below") else None
        if keep is not None and keep < 0:
            raise invalid_field("keep_keys_below", keep, "0 or more")
        return _single(
            ops.Install(
                session.session_id,
                request.sequence_id,
                request.op,
                digest_of(request),
                session.carry_owner,
                request.kv_id,
                keep,
                request.head_fingerprint,
            )
        )

    def free_kv(self, session: Session, request: pb.FreeKVRequest) -> Decoded:
        """`FreeKV`."""
        return _single(ops.Free(session.session_id, b"", session.carry_owner, request.kv_id))

    def _budget(self, budget_tokens: int) -> int:
        max_seq_len = self._facts.head.max_seq_len
        if budget_tokens > max_seq_len:
            raise invalid_field("budget_tokens", budget_tokens, f"at most {max_seq_len}")
        return budget_tokens or max_seq_len

    def _refused(self, entries: Sequence[pb.CatchupEntry | pb.ProposeEntry]) -> dict[int, SpecdraftError]:
        """What is wrong with entries because of each other. Raises for too many and for none."""
        limit = self._facts.config.max_batch
        if not entries:
            raise invalid_field("entries", 0, f"1 to {limit} entries")
        if len(entries) > limit:
            raise make_error(
                Reason.BATCH_TOO_LARGE, f"{len(entries)} entries; at most {limit}", entries=len(entries), limit=limit
            )
        refused = _twice("output slot", [_output_slot(entry) for entry in entries])
        return refused | _twice("sequence", [entry.sequence_id for entry in entries])

    def _deferred(
        self, session: Session, entry: pb.CatchupEntry | pb.ProposeEntry, limit: int
    ) -> ops.WriteWish | SpecdraftError:
        pairs = entry.pairs
        tokens, ref = tuple(pairs.tokens), pairs.hiddens
        try:
            self._check_tokens(pairs, tokens, ref.row_count, limit)
            hiddens = read_hiddens(session, ref, self._facts.head.dtype)
        except SpecdraftError as error:
            return error
        return ops.WriteWish(
            pairs.first_key,
            tokens,
            hiddens,
            pairs.allow_gap,
            _accepted(entry),
            tuple(pairs.verified_tokens),
        )

    def _check_tokens(self, pairs: pb.Pairs, tokens: tuple[int, ...], rows: int, limit: int) -> None:
        if pairs.first_key < 0:
            raise invalid_field("pairs.first_key", pairs.first_key, "0 or more")
        if pairs.rope_positions:
            raise not_implemented("Pairs.rope_positions")
        if pairs.HasField("embeddings"):
            raise not_implemented("Pairs.embeddings")
        count = len(tokens)
        if count == 0 or count != rows:
            raise make_error(
                Reason.PAIR_COUNT_MISMATCH, f"{count} tokens and {rows} hidden rows", tokens=count, rows=rows
            )
        if count > limit:
            raise make_error(Reason.TOO_MANY_PAIRS, f"{count} pairs; at most {limit}", pairs=count, limit=limit)
        if max(tokens) >= self._vocab_size:
            index = next(index for index, token in enumerate(tokens) if token >= self._vocab_size)
            raise make_error(
                Reason.TOKEN_OUT_OF_RANGE,
                f"tokens[{index}] is {tokens[index]}; ids are below {self._vocab_size}",
                index=index,
                token=tokens[index],
                vocab_size=self._vocab_size,
            )


def _output_slot(entry: pb.CatchupEntry | pb.ProposeEntry) -> int | None:
    return entry.output_slot if isinstance(entry, pb.ProposeEntry) and entry.HasField("output_slot") else None


def _twice(name: str, values: Sequence[object]) -> dict[int, SpecdraftError]:
    """What is wrong with the entries whose value another one has too; None is nobody's."""
    counts = Counter(values)
    return {
        index: make_error(Reason.DUPLICATE_SEQUENCE, f"the {name} stands more than once in this call")
        for index, value in enumerate(values)
        if value is not None and counts[value] > 1
    }


def _single(operation: ops.Operation) -> Decoded:
    return Decoded([operation], {})


def digest_of(message: Message) -> bytes:
    """Tells a retry from a re-used number."""
    typed = _NAMES[type(message)] + message.SerializeToString(deterministic=True)
    return hashlib.blake2b(typed, digest_size=16).digest()


def _check_op(op: int) -> None:
    if op == 0:
        raise _unnumbered()


def _unnumbered() -> SpecdraftError:
    return invalid_field("op", 0, "1 or more")


def _accepted(
    request: pb.CatchupEntry | pb.ProposeEntry | pb.TruncateRequest | pb.CloseSequenceRequest,
) -> int | None:
    return request.accepted_drafts if request.HasField("accepted_drafts") else None
