"""The steps that `bench tax` compares: with the head in the target's process, early and late; and what they read."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from drafter_service.bench.tax_target import (
    MAX_POSITION,
    NUM_CONTEXT_ROWS,
    NUM_PAIRS,
    Device,
    OwnRound,
    Verify,
    context_rows,
    context_tokens,
    pair_rows,
    pair_tokens,
    pairs_bytes,
)
from drafter_service.memory.layout import ArenaWish, lay_out
from specdraft import Client, EarlyItem, EarlyRound, Lane, Sequence, SpecdraftError

NUM_VARIANTS = 16
"""Inputs that the rounds take turns with, so that a round that read an older one's hidden states shows."""

LOGPROB_TOLERANCE = 0.05


@dataclass(frozen=True, slots=True)
class Parties:
    """Who takes part.

    Attributes:
        device: the target's stream.
        own: the same round in the target's process.
        client: the target's connection, with the arena.
        witness: another one that shares no memory with the service.
        dtype: name of the hidden rows' element type.
        num_drafts: K.
    """

    device: Device
    own: OwnRound
    client: Client
    witness: Client
    dtype: str
    num_drafts: int

    @property
    def torch_dtype(self) -> torch.dtype:
        """Of the hidden rows."""
        return getattr(torch, self.dtype)  # type: ignore[no-any-return]  # one of torch's dtypes

    def context(self, client: Client) -> Sequence:
        """A sequence that holds the rows before the rounds."""
        sequence = client.open_sequence()
        sequence.catchup(0, context_tokens(), context_rows(client.hidden_width, self.torch_dtype))
        return sequence


@dataclass(frozen=True, slots=True)
class Variant:
    """Inputs of a round, and what it drafts from them.

    Attributes:
        number: which pairs.
        inputs: the slot's input part, on the target's device.
        drafts: ids.
        logprobs: theirs.
    """

    number: int
    inputs: Tensor
    drafts: tuple[int, ...]
    logprobs: tuple[float, ...]

    def fits(self, drafts: tuple[int, ...], logprobs: tuple[float, ...]) -> bool:
        """Whether a round drafted this."""
        pairs = zip(self.logprobs, logprobs, strict=False)
        return drafts == self.drafts and all(math.isclose(a, b, abs_tol=LOGPROB_TOLERANCE) for a, b in pairs)


class Steps:
    """The kinds of step that are compared, for one length of the verify."""

    def __init__(self, parties: Parties, verify: Verify, slot: int) -> None:
        self._parties = parties
        self._device = parties.device
        self._verify = verify
        self._slot = slot
        self._sequence = parties.context(parties.client)
        self._other = parties.context(parties.client)
        self._other_key = NUM_CONTEXT_ROWS
        self._lane: Lane = parties.client.open_lane(self._device.stream)
        self._early: tuple[EarlyRound, Variant] | None = None
        self.host_us: list[float] = []
        self.num_checked = 0
        self.num_wrong = 0
        self.num_confirmed = 0
        self._variants = self._confirmed(list(self._witnessed()))
        self._compare_own()
        self._rows = pair_rows(parties.client.hidden_width, parties.torch_dtype, 0).to(self._device.torch_device)

    def single(self) -> None:
        """Everything in one process."""
        own, device, inputs = self._parties.own, self._device, self._variants[0].inputs
        device.enqueue(self._verify.launch)
        device.enqueue(lambda: own.inputs.copy_(inputs))
        device.enqueue(own.launched.launch)
        device.enqueue(self._verify.next_work)
        device.synchronize()

    def early(self) -> None:
        """The round is sent while the verify runs."""
        device, variant = self._device, self._variants[self.num_checked % len(self._variants)]
        device.enqueue(self._verify.launch)
        self._early = self._round(variant), variant
        device.enqueue(self._verify.next_work)
        device.synchronize()

    def check(self) -> None:
        """Whether the early round read the hidden states that were meant for it. No part of the step."""
        assert self._early is not None, "a round was sent"
        early, variant = self._early
        drafts, logprobs = _outputs(early)
        self.num_checked += 1
        self.num_wrong += not variant.fits(drafts, logprobs)

    def late(self) -> None:
        """The call is sent after the verify, and its answer waited for."""
        self._device.enqueue(self._verify.launch)
        self._device.synchronize()
        self.host_result()
        self._device.enqueue(self._verify.next_work)
        self._device.synchronize()

    def host_result(self) -> None:
        """A host-synchronised Propose over Drive, with rows in GPU memory, of a sequence that grows as it goes."""
        if self._other_key + NUM_PAIRS + self._parties.num_drafts > MAX_POSITION:
            self._other.truncate(NUM_CONTEXT_ROWS)
            self._other_key = NUM_CONTEXT_ROWS
        self._other.propose(self._other_key, pair_tokens(0), self._rows, self._parties.num_drafts)
        self._other_key += NUM_PAIRS

    def close(self) -> None:
        """Gives lane and sequence back."""
        self._lane.close()
        self._sequence.close()
        self._other.close()

    def _round(self, variant: Variant) -> EarlyRound:
        inputs = variant.inputs
        self._device.copy(self._lane.arena.slot_field(self._slot, "first_key", len(inputs)), inputs)
        began = time.perf_counter()
        early = self._lane.propose_early([EarlyItem(self._sequence, self._slot, self._parties.num_drafts)])
        self.host_us.append((time.perf_counter() - began) * 1e6)
        return early

    def _witnessed(self) -> Iterator[Variant]:
        """What the service drafts from every variant's pairs when they come in messages."""
        parties, width = self._parties, self._parties.client.hidden_width
        item_bytes = parties.torch_dtype.itemsize
        layout = lay_out(ArenaWish(1, parties.num_drafts, width * item_bytes, width * item_bytes, 64, 0, False))
        with parties.context(parties.witness) as sequence:
            for number in range(NUM_VARIANTS):
                rows = pair_rows(width, parties.torch_dtype, number)
                found = sequence.propose(NUM_CONTEXT_ROWS, pair_tokens(number), rows, parties.num_drafts)
                inputs = pairs_bytes(layout, NUM_CONTEXT_ROWS, width, parties.torch_dtype, number)
                on_device = inputs.to(self._device.torch_device)
                yield Variant(number, on_device, found.drafts, tuple(found.logprobs))

    def _confirmed(self, variants: list[Variant]) -> list[Variant]:
        """Those that a round with nothing in its way drafts alike: not the few that rounding decides."""
        kept: list[Variant] = []
        for variant in variants:
            found = _outputs(self._round(variant))
            is_new = not any(other.fits(variant.drafts, variant.logprobs) for other in kept)
            if variant.fits(*found) and is_new:
                kept.append(variant)
        self.host_us.clear()
        self.num_confirmed = len(kept)
        # Where too few are alike, something is wrong: then all take part, and the wrong rounds are told.
        return kept if 2 * len(kept) >= NUM_VARIANTS else variants

    def _compare_own(self) -> None:
        """Refuses to time a round of this process that does less than the service's, or something else."""
        own, device, num_alike = self._parties.own, self._device, 0
        for variant in self._variants:
            device.enqueue(partial(own.inputs.copy_, variant.inputs))
            device.enqueue(own.launched.launch)
            device.synchronize()
            num_alike += variant.fits(*own.outputs())
        if 2 * num_alike < len(self._variants):
            raise RuntimeError(
                f"the target's own round drafts {num_alike} of {len(self._variants)} inputs as the service does"
            )


def _outputs(early: EarlyRound) -> tuple[tuple[int, ...], tuple[float, ...]]:
    (outputs,) = early.outputs(5.0)
    if isinstance(outputs, SpecdraftError):
        raise outputs
    return tuple(outputs.drafts), tuple(outputs.logprobs)
