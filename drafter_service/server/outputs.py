"""What a round leaves in its arena slot."""

from __future__ import annotations

from collections.abc import Callable

from drafter_service.engine import operations as ops
from drafter_service.memory import SlotOutputs
from drafter_service.server.encoding import STOPS, reason_number

Embed = Callable[[int, str], bytes]
"""Embedding of a token, as little-endian elements of a hidden dtype."""


def slot_outputs(op: int, outcome: ops.Outcome, embed: Embed, dtype: str) -> SlotOutputs:
    """The outputs of one entry of a `Propose`.

    Args:
        op: the entry's operation number.
        outcome: how it went.
        embed: embeds the last draft.
        dtype: of the session's hidden rows.
    """
    if isinstance(outcome, ops.Written):
        return SlotOutputs(
            op=op,
            status=0,
            stop_reason=int(STOPS[outcome.stop]),
            drafts=outcome.drafts,
            logprobs=outcome.logprobs,
            last_embedding=embed(outcome.drafts[-1], dtype) if outcome.drafts else b"",
            row_count=outcome.view.row_count,
            last_pair_key=outcome.view.last_pair_key,
        )
    assert isinstance(outcome, ops.Refusal), "a write has two kinds of outcome"
    assert outcome.error.reason, "the service's own errors have reasons"
    view = outcome.view
    return SlotOutputs(
        op=op,
        status=int(reason_number(outcome.error.reason)),
        stop_reason=0,
        drafts=(),
        logprobs=(),
        last_embedding=b"",
        row_count=0 if view is None else view.row_count,
        last_pair_key=-1 if view is None else view.last_pair_key,
    )
