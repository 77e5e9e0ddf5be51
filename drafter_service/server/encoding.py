"""Outcomes into answers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from drafter_service.engine import operations as ops
from drafter_service.server.facts import HeadFacts
from drafter_service.server.refusals import shortened, shortened_details
from drafter_service.state import KeySpan, SequenceView
from specdraft.errors import Reason, SpecdraftError
from specdraft.v1 import drafter_pb2 as pb
from specdraft.v1 import error_reason_pb2, session_pb2, tensor_pb2

_T = TypeVar("_T", ops.Written, ops.Opened, ops.Viewed, ops.Taken, ops.Listed, ops.Done)

STOPS = {stop: getattr(pb, f"STOP_REASON_{stop.name}") for stop in ops.Stop} | {None: pb.STOP_REASON_UNSPECIFIED}

DTYPE_NUMBERS = {"float32": tensor_pb2.D_TYPE_FLOAT32, "bfloat16": tensor_pb2.D_TYPE_BFLOAT16}


def reason_number(reason: Reason) -> error_reason_pb2.ErrorReason:
    """Number of a reason on the wire."""
    number: error_reason_pb2.ErrorReason = getattr(error_reason_pb2, f"ERROR_REASON_{reason.value}")
    return number


def entry_status(error: SpecdraftError | None) -> pb.EntryStatus:
    """How an entry went; None = OK."""
    if error is None:
        return pb.EntryStatus()
    assert error.reason is not None, "the service's own errors have reasons"
    return pb.EntryStatus(
        code=int(error.code),
        reason=reason_number(error.reason),
        message=shortened(error.message),
        details=shortened_details(error),
        retry_delay_ms=error.retry_delay_ms,
    )


def key_ranges(spans: Sequence[KeySpan]) -> list[session_pb2.KeyRange]:
    """Key ranges on the wire."""
    return [session_pb2.KeyRange(begin=span.begin, end=span.end) for span in spans]


def sequence_state(view: SequenceView | None) -> pb.SequenceState | None:
    """Where a sequence stands; None = unknown."""
    if view is None:
        return None
    return pb.SequenceState(
        last_op=view.last_op,
        row_count=view.row_count,
        last_pair_key=view.last_pair_key,
        ranges=key_ranges(view.ranges),
        first_approximate_key=view.first_approximate_key,
    )


def carry_info(carry: ops.CarryView) -> session_pb2.CarryInfo:
    """A carry on the wire."""
    return session_pb2.CarryInfo(
        kv_id=carry.kv_id, ranges=key_ranges(carry.ranges), label=carry.label, expires_in_ms=carry.left_ms
    )


def catchup_response(outcomes: Sequence[ops.Outcome]) -> pb.CatchupResponse:
    """Answer to `Catchup`."""
    return pb.CatchupResponse(
        results=[
            pb.CatchupResult(status=entry_status(_error(outcome)), state=sequence_state(_view(outcome)))
            for outcome in outcomes
        ]
    )


def fill_propose_result(result: pb.ProposeResult, outcome: ops.Outcome) -> None:
    """One entry's answer to `Propose`, into an empty message."""
    if not isinstance(outcome, ops.Written):
        result.status.CopyFrom(entry_status(_error(outcome)))
        state = sequence_state(_view(outcome))
        if state is not None:
            result.state.CopyFrom(state)
        return
    # In place: a message that is put into another is copied, by way of its serialised form.
    result.status.SetInParent()
    view, state = outcome.view, result.state
    state.last_op, state.row_count, state.last_pair_key = view.last_op, view.row_count, view.last_pair_key
    state.first_approximate_key = view.first_approximate_key
    for span in view.ranges:
        state.ranges.add(begin=span.begin, end=span.end)
    result.drafts.extend(outcome.drafts)
    result.logprobs.extend(outcome.logprobs)
    result.stop_reason = STOPS[outcome.stop]
    if outcome.recommended is not None:
        result.recommended_drafts = outcome.recommended


def open_sequence_response(outcomes: Sequence[ops.Outcome]) -> pb.OpenSequenceResponse:
    """Answer to `OpenSequence`. Raises what refused it, as all below."""
    opened = _only(outcomes, ops.Opened)
    return pb.OpenSequenceResponse(sequence_id=opened.sequence_id, state=sequence_state(opened.view))


def fork_sequence_response(outcomes: Sequence[ops.Outcome]) -> pb.ForkSequenceResponse:
    """Answer to `ForkSequence`."""
    opened = _only(outcomes, ops.Opened)
    return pb.ForkSequenceResponse(sequence_id=opened.sequence_id, state=sequence_state(opened.view))


def read_drafts_response(outcomes: Sequence[ops.Outcome], last_embedding: bytes) -> pb.ReadDraftsResponse:
    """Answer to `ReadDrafts`."""
    written = read_drafts(outcomes)
    return pb.ReadDraftsResponse(
        drafts=written.drafts,
        logprobs=written.logprobs,
        stop_reason=STOPS[written.stop],
        last_embedding=last_embedding,
    )


def read_drafts(outcomes: Sequence[ops.Outcome]) -> ops.Written:
    """The round that a `ReadDrafts` found."""
    return _only(outcomes, ops.Written)


def carry_infos(outcomes: Sequence[ops.Outcome]) -> list[session_pb2.CarryInfo]:
    """The carries that an owner has, for `OpenSession`."""
    return [carry_info(carry) for carry in _only(outcomes, ops.Listed).carries]


def get_sequence_response(outcomes: Sequence[ops.Outcome]) -> pb.GetSequenceResponse:
    """Answer to `GetSequence`."""
    return pb.GetSequenceResponse(state=sequence_state(_only(outcomes, ops.Viewed).view))


def truncate_response(outcomes: Sequence[ops.Outcome]) -> pb.TruncateResponse:
    """Answer to `Truncate`."""
    return pb.TruncateResponse(state=sequence_state(_only(outcomes, ops.Viewed).view))


def close_sequence_response(outcomes: Sequence[ops.Outcome]) -> pb.CloseSequenceResponse:
    """Answer to `CloseSequence`."""
    _only(outcomes, ops.Done)
    return pb.CloseSequenceResponse()


def take_kv_response(outcomes: Sequence[ops.Outcome], head: HeadFacts, page_rows: int) -> pb.TakeKVResponse:
    """Answer to `TakeKV`."""
    taken = _only(outcomes, ops.Taken)
    layout = pb.KvLayout(
        layer_count=head.num_layers,
        kv_head_count=head.num_kv_heads,
        head_dim=head.head_dim,
        page_row_count=page_rows,
        dtype=DTYPE_NUMBERS[head.dtype],
    )
    return pb.TakeKVResponse(
        carry=carry_info(taken.carry),
        head_fingerprint=head.fingerprint,
        layout=layout,
        state=sequence_state(taken.view),
    )


def install_kv_response(outcomes: Sequence[ops.Outcome]) -> pb.InstallKVResponse:
    """Answer to `InstallKV`."""
    return pb.InstallKVResponse(state=sequence_state(_only(outcomes, ops.Viewed).view))


def free_kv_response(outcomes: Sequence[ops.Outcome]) -> pb.FreeKVResponse:
    """Answer to `FreeKV`."""
    _only(outcomes, ops.Done)
    return pb.FreeKVResponse()


def _error(outcome: ops.Outcome) -> SpecdraftError | None:
    return outcome.error if isinstance(outcome, ops.Refusal) else None


def _view(outcome: ops.Outcome) -> SequenceView | None:
    return None if isinstance(outcome, ops.Done | ops.Listed) else outcome.view


def _only(outcomes: Sequence[ops.Outcome], kind: type[_T]) -> _T:
    (outcome,) = outcomes
    if isinstance(outcome, ops.Refusal):
        raise outcome.error
    assert isinstance(outcome, kind), "each operation has one kind of answer"
    return outcome
