"""The client's side of a decode loop: drafts where there are any, and never an exception of the service's."""

from __future__ import annotations

import logging
from collections.abc import Callable
from collections.abc import Sequence as Tokens
from contextlib import suppress
from typing import Any, Final, TypeVar

from specdraft.client import Client
from specdraft.errors import (
    AbortedError,
    DeadlineError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    OutOfRangeError,
    SpecdraftError,
    UnavailableError,
    UnimplementedError,
)
from specdraft.hiddens import read_rows
from specdraft.integrations.transformers.appetite import Appetite
from specdraft.sequence import Sequence

__all__ = ["Drafting"]

T = TypeVar("T")

_log: Final = logging.getLogger(__name__)

_LASTING: Final = (
    InvalidArgumentError,
    FailedPreconditionError,
    OutOfRangeError,
    UnimplementedError,
)
"""Errors that the next try would meet again: this generation goes on without drafts."""

_SILENT: Final = (DeadlineError, UnavailableError, AbortedError)
"""Errors after which closing the sequence would only wait for the same answer."""

_PAUSE_ROUNDS_MAX: Final = 1024


class Drafting:
    """Drafts for one generation.

    After an error the target goes on plain for `pause_rounds` rounds (twice as many after each further error), then
    drafting starts again in a new sequence at the present key. The hidden states before it are gone by then, so the
    write declares the gap: the head sees less context and drafts a little worse, and nothing has to be kept for a case
    that hardly happens.

    An error that is not the service's is a bug of this client. It is logged, and the generation goes on plain to its
    end: the target's tokens need nothing from here.
    """

    def __init__(self, client: Client, min_logprob: float | None, pause_rounds: int, *, adaptive: bool = False) -> None:
        self._client = client
        self._appetite = Appetite() if adaptive else None
        self._min_logprob = min_logprob
        self._pause_rounds = pause_rounds
        self._rounds_to_wait = 0
        self._given_up = False
        self._sequence: Sequence | None = None
        self._leaves_gap = False
        self.error: SpecdraftError | None = None

    def start(self, first_key: int, tokens: Tokens[int], hiddens: Any) -> None:
        """Writes the pairs of the prompt: none for a prompt of one token.

        A first key above 0 means that the target began on a cache whose hidden states nobody has.

        Raises:
            ValueError: the target's hidden states do not fit the session.
        """
        read_rows(hiddens, self._client.options.dtype, self._client.hidden_width)
        self._leaves_gap = first_key > 0
        self.attempt(lambda: self._start(first_key, tokens, hiddens))

    def propose(self, first_key: int, tokens: Tokens[int], hiddens: object, num_drafts: int) -> tuple[int, ...]:
        """Writes the pairs of the last verify and drafts; empty when there is nothing to be had.

        `error` tells afterwards what failed in this round, if something did.
        """
        self.error = None
        if self._rounds_to_wait:
            self._rounds_to_wait -= 1
            return ()
        return self.attempt(lambda: self._propose(first_key, tokens, hiddens, num_drafts)) or ()

    def attempt(self, work: Callable[[], T]) -> T | None:
        """What `work` returns; None if it fails, or if there will be no more drafts in this generation."""
        if self._given_up:
            return None
        try:
            return work()
        except SpecdraftError as error:
            self._fail(error)
        except Exception as error:  # noqa: BLE001 - whatever it is, the target's tokens do not depend on it
            _log.exception("drafting failed by an error of the client: this generation goes on without drafts")
            self._fail(InternalError(None, f"the client failed: {error!r}"))
            self._given_up = True
        return None

    def _start(self, first_key: int, tokens: Tokens[int], hiddens: object) -> None:
        self._sequence = self._client.open_sequence()
        if tokens:
            self._sequence.catchup(first_key, tokens, hiddens, allow_gap=self._leaves_gap)
            self._leaves_gap = False

    def _propose(self, first_key: int, tokens: Tokens[int], hiddens: object, num_drafts: int) -> tuple[int, ...]:
        if self._sequence is None:
            self._sequence = self._client.open_sequence()
        appetite = self._appetite
        proposal = self._sequence.propose(
            first_key,
            tokens,
            hiddens,
            num_drafts if appetite is None else appetite.at_most(num_drafts),
            allow_gap=self._leaves_gap,
            min_logprob=self._min_logprob,
            recommend=appetite is not None,
        )
        self._leaves_gap = False
        if appetite is not None:
            appetite.advised(proposal.recommended_drafts)
        return proposal.drafts

    def close(self, accepted_drafts: int | None) -> None:
        """Ends the sequence, and says how the last round went."""
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            self.attempt(lambda: sequence.close(accepted_drafts))

    def _fail(self, error: SpecdraftError) -> None:
        self.error = error
        self._leaves_gap = True
        self._given_up = isinstance(error, _LASTING)
        self._rounds_to_wait = self._pause_rounds
        self._pause_rounds = min(2 * self._pause_rounds, _PAUSE_ROUNDS_MAX)
        sequence, self._sequence = self._sequence, None
        if sequence is not None:
            with suppress(Exception):  # after a bug, this may be another: what stays open ends with the session
                sequence.leave() if isinstance(error, _SILENT) else sequence.close()
