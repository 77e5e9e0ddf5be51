"""The draft that has to match the oracle before the service says that it is ready."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from drafter_service.engine import Engine
from drafter_service.engine import operations as ops
from drafter_service.heads import MtpHead, oracle_draft
from specdraft.errors import SpecdraftError

NUM_PAIRS = 5
NUM_DRAFTS = 3
TIMEOUT_S = 60.0
MARGINS = {torch.float32: 1e-4, torch.bfloat16: 2e-2}
"""Top-2 margin, as a part of the largest |logit|, below which two right computations may choose differently."""


class SelfTestError(RuntimeError):
    """The service drafts something else than the oracle; it must not serve."""


def self_test(engine: Engine, head: MtpHead) -> None:
    """Drafts through the engine and compares with the oracle. Raises SelfTestError."""
    generator = torch.Generator().manual_seed(0)
    tokens = torch.randint(head.config.vocab_size, (NUM_PAIRS,), generator=generator)
    hiddens = torch.randn(NUM_PAIRS, head.config.hidden_size, generator=generator)
    session, sequence = b"self-test session", b"self-test"
    _ask(engine, ops.Open(session, sequence, b"self-test open", NUM_PAIRS + NUM_DRAFTS, False, max_sequences=1))
    wish = ops.WriteWish(0, tuple(tokens.tolist()), hiddens, allow_gap=False, accepted_drafts=None)
    write = ops.Write(session, sequence, 1, b"", wish, ops.DraftWish(NUM_DRAFTS))
    written = _ask(engine, write)
    _ask(engine, ops.CloseSession(session, b""))
    assert isinstance(written, ops.Written), "a write that worked"
    _compare(head, tokens, hiddens, written.drafts)


def _ask(engine: Engine, operation: ops.Operation) -> ops.Outcome:
    try:
        outcome = engine.ask(operation, TIMEOUT_S)
    except SpecdraftError as error:
        raise SelfTestError(f"the self-test failed: {error}") from error
    if isinstance(outcome, ops.Refusal):
        raise SelfTestError(f"the self-test was refused: {outcome.error}")
    return outcome


def _compare(head: MtpHead, tokens: torch.Tensor, hiddens: torch.Tensor, drafts: Sequence[int]) -> None:
    device = head.device
    keys = torch.arange(NUM_PAIRS, device=device)
    expected = oracle_draft(head, tokens.to(device), hiddens.to(device), keys, NUM_DRAFTS)
    if len(drafts) != NUM_DRAFTS:
        raise SelfTestError(f"the self-test got {len(drafts)} of {NUM_DRAFTS} drafts")
    for index, (ours, theirs, margin) in enumerate(zip(drafts, expected.ids, expected.margins, strict=True)):
        if margin < MARGINS[head.dtype]:
            return
        if ours != theirs:
            raise SelfTestError(f"the self-test's draft {index} is {ours}, the oracle's is {theirs}")
