"""The decode loop: draft, verify in one forward, keep what the target would have chosen itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

import torch
from transformers.generation.configuration_utils import GenerationMode
from transformers.generation.utils import GenerateDecoderOnlyOutput

from specdraft.client import Client
from specdraft.integrations.transformers.choosing import Chooser
from specdraft.integrations.transformers.drafting import Drafting
from specdraft.integrations.transformers.hidden_states import HiddenTap
from specdraft.integrations.transformers.records import RoundRecord
from specdraft.integrations.transformers.target import Target
from specdraft.pairs import NextPairs, next_pairs
from specdraft.words import MemoryKind

__all__ = ["SpeculativeDecoding", "speculative_generate"]

_MODES: Final = (GenerationMode.GREEDY_SEARCH, GenerationMode.SAMPLE)
_PAUSE_ROUNDS: Final = 16


@dataclass(frozen=True, slots=True)
class _Loop:
    """The parts of one generation."""

    target: Target
    chooser: Chooser
    tap: HiddenTap
    drafting: Drafting


class SpeculativeDecoding:
    """A decoding method for `model.generate(..., custom_generate=...)`. Made by `speculative_generate`.

    The tokens are the target's own: greedy decoding gives what `generate` gives, sampling draws every token from the
    target's distribution at its position. Logits processors and stopping criteria see every token in turn. An error of
    the service, or of this client while it drafts, never ends a generation; it goes on without drafts.
    """

    def __init__(
        self,
        client: Client | None,
        num_drafts: int,
        *,
        on_round: Callable[[RoundRecord], None] | None = None,
        streamer: Any = None,
        min_logprob: float | None = None,
        pause_rounds: int = _PAUSE_ROUNDS,
        adaptive: bool = False,
    ) -> None:
        if client is None and num_drafts:
            raise ValueError(f"num_drafts {num_drafts} needs a client")
        self._client = client
        self._num_drafts = min(num_drafts, client.max_drafts) if client else 0
        self._on_round = on_round
        self._streamer = streamer
        self._min_logprob = min_logprob
        self._pause_rounds = pause_rounds
        self._adaptive = adaptive

    def __call__(
        self,
        model: Any,
        input_ids: torch.Tensor,
        *,
        logits_processor: Any,
        stopping_criteria: Any,
        generation_config: Any,
        synced_gpus: bool = False,
        streamer: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        """Generates after `input_ids` [1, n]; what `generate` calls.

        Returns:
            The sequence [1, n + generated], or `GenerateDecoderOnlyOutput` with `return_dict_in_generate`.

        Raises:
            ValueError: what this kind of decoding cannot do, by name; before anything is generated.
        """
        _check_config(generation_config, synced_gpus=synced_gpus)
        target = Target(model, input_ids, model_kwargs)
        if streamer is None and self._streamer is not None:
            streamer = self._streamer  # `generate` keeps the streamer that it was given to itself
            streamer.put(input_ids.cpu())
        chooser = Chooser(input_ids, logits_processor, stopping_criteria, generation_config, streamer)
        if self._client is None or self._num_drafts == 0:
            self._decode_plain(target, chooser)
        else:
            self._decode(self._client, model, target, chooser)
        if streamer is not None:
            streamer.end()
        if not generation_config.return_dict_in_generate:
            return chooser.ids
        return GenerateDecoderOnlyOutput(
            sequences=chooser.ids, scores=chooser.scores, logits=chooser.logits, past_key_values=target.cache
        )

    def _decode_plain(self, target: Target, chooser: Chooser) -> None:
        logits = target.prefill(chooser.ids)
        while True:
            position = target.position
            self._tell(RoundRecord(position, (), 0, (chooser.choose(logits[:, 0]),)))
            if chooser.is_done:
                return
            logits = target.verify(chooser.ids, 1)
            target.forget(target.position)  # nothing: but sliding layers shrink back to their window only then

    def _decode(self, client: Client, model: Any, target: Target, chooser: Chooser) -> None:
        tap = HiddenTap(model, client.options, is_on_gpu=client.memory_kind is MemoryKind.CUDA)
        drafting = Drafting(client, self._min_logprob, self._pause_rounds, adaptive=self._adaptive)
        loop = _Loop(target, chooser, tap, drafting)
        accepted: int | None = None
        try:
            pairs = self._start(loop)
            while not chooser.is_done:
                pairs, accepted = self._round(loop, pairs)
        finally:
            loop.drafting.close(accepted)

    def _start(self, loop: _Loop) -> NextPairs:
        """The prompt and the first token. Pair P - 1 waits for the first propose."""
        first_key = loop.target.position
        with loop.tap.listening(), loop.tap.checked():
            logits = loop.target.prefill(loop.chooser.ids)
        hiddens = loop.tap.rows()
        fed = loop.chooser.ids[0, -hiddens.shape[0] :].tolist()
        loop.drafting.start(first_key, fed[1:], hiddens[:-1])
        token = loop.chooser.choose(logits[:, 0])
        position = loop.target.position
        self._tell(RoundRecord(position, (), 0, (token,), loop.drafting.error))
        return NextPairs(position - 1, [token], hiddens[-1:], position)

    def _round(self, loop: _Loop, pairs: NextPairs) -> tuple[NextPairs, int]:
        """One propose and the verify that follows it (contract, section 2.1)."""
        chooser, drafting, position = loop.chooser, loop.drafting, loop.target.position
        wanted = max(0, min(self._num_drafts, chooser.num_left - 1))
        drafts = drafting.propose(pairs.first_key, pairs.tokens, pairs.hiddens, wanted)
        ids = torch.cat([chooser.ids, chooser.ids.new_tensor([drafts])], dim=-1) if drafts else chooser.ids
        # Logits processors may run the model too: what it does for them is neither heard nor read.
        with loop.tap.listening():
            logits = loop.target.verify(ids, 1 + len(drafts))
        hiddens = drafting.attempt(loop.tap.rows)
        tokens: list[int] = []
        num_accepted = 0
        for index in range(1 + len(drafts)):
            tokens.append(chooser.choose(logits[:, index]))
            is_draft = index < len(drafts) and tokens[-1] == drafts[index]
            num_accepted += is_draft
            if chooser.is_done or not is_draft:
                break
        # The last token chosen has not been fed, whether it was a draft that ended the generation or the bonus.
        loop.target.forget(position + len(tokens))
        following = drafting.attempt(lambda: next_pairs(position, drafts, len(tokens) - 1, tokens[-1], hiddens))
        self._tell(RoundRecord(position, drafts, num_accepted, tuple(tokens), drafting.error))
        return following or pairs, num_accepted

    def _tell(self, record: RoundRecord) -> None:
        if self._on_round is not None:
            self._on_round(record)


def speculative_generate(
    client: Client | None,
    num_drafts: int = 3,
    *,
    on_round: Callable[[RoundRecord], None] | None = None,
    streamer: Any = None,
    min_logprob: float | None = None,
    pause_rounds: int = _PAUSE_ROUNDS,
    adaptive: bool = False,
) -> SpeculativeDecoding:
    """A decoding method for `model.generate(..., custom_generate=...)` that drafts through the service.

    ```python
    model.generate(**inputs, custom_generate=speculative_generate(client, num_drafts=3))
    ```

    Args:
        client: an open client whose `hidden_source` and `hidden_dtype` fit the head; None only with `num_drafts=0`.
        num_drafts: K, at most the service's `max_drafts`; 0 = the same loop without drafts, for comparison.
        on_round: told after each forward of the target what was drafted and accepted.
        streamer: gets the prompt and every token. `generate(streamer=...)` does not hand its streamer on to a
            `custom_generate` function, so it has to be given here. Its tokenizer neither: in the place of
            `generate(stop_strings=...)`, pass `stopping_criteria=[StopStringCriteria(tokenizer, stop_strings)]`.
        min_logprob: stop drafting after the first draft below it.
        pause_rounds: rounds without drafts after an error of the service, before it is tried again.
        adaptive: draft as many as the service recommends from the acceptance and times seen, `num_drafts` at most,
            and none where drafting does not pay.
    """
    return SpeculativeDecoding(
        client,
        num_drafts,
        on_round=on_round,
        streamer=streamer,
        min_logprob=min_logprob,
        pause_rounds=pause_rounds,
        adaptive=adaptive,
    )


def _check_config(config: Any, *, synced_gpus: bool) -> None:
    if synced_gpus:
        raise ValueError("speculative decoding does not take synced_gpus")
    for name in ("output_attentions", "output_hidden_states"):
        if config.return_dict_in_generate and getattr(config, name, False):
            raise ValueError(f"speculative decoding does not give {name}")
    if (config.num_beams or 1) > 1:
        raise ValueError(f"speculative decoding takes num_beams=1, not {config.num_beams}")
    mode = config.get_generation_mode()
    if mode not in _MODES:
        raise ValueError(f"speculative decoding is greedy or samples, and this configuration asks for {mode.value}")
