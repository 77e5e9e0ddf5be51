"""What is compared: each case changes one lever of the default."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from drafter_service.demo.lever_ab.drafting import draft_at_positions
from drafter_service.demo.lever_ab.windows import Halves, Window
from drafter_service.engine.batch import RunResult
from drafter_service.heads import BodyPrecision, HiddenSource, LmHeadPrecision, MtpHead, RecycleSource

Drafting = Callable[[MtpHead, Sequence[Window], int, float | None], list[RunResult]]

FIRST = (512, 1024, 2048, 3072)
FREQUENT = (256, 512, 1024, 2048)
STOP_PROBABILITIES = (0.2, 0.4, 0.6, 0.8)
DEFAULT = "default"


@dataclass(frozen=True, slots=True)
class Case:
    """One value of one lever.

    Attributes:
        lever: its name.
        value: what it is set to.
        hidden_source: None = the family's.
        recycle: None = the family's.
        quantization: precision of the projections.
        lm_head: precision of the LM head.
        draft_vocab: all, first:N or ids:FILE.
        min_logprob: of the confidence stop; None = none.
        drafting: how drafts come about. A rows policy changes what a sequence holds from round to round, so that its
            cases need a way of their own, with rounds that follow one another; it goes here.
    """

    lever: str
    value: str
    hidden_source: HiddenSource | None = None
    recycle: RecycleSource | None = None
    quantization: BodyPrecision = BodyPrecision.AS_STORED
    lm_head: LmHeadPrecision = LmHeadPrecision.AS_STORED
    draft_vocab: str = "all"
    min_logprob: float | None = None
    drafting: Drafting = draft_at_positions


def make_cases(halves: Halves, folder: Path) -> list[Case]:
    """The default first. Writes the lists of frequent ids into the folder."""
    cases = [
        Case(DEFAULT, ""),
        Case("hidden_source", "pre_norm", hidden_source=HiddenSource.PRE_NORM),
        Case("recycle", "pre_norm", recycle=RecycleSource.PRE_NORM),
    ]
    precisions = (LmHeadPrecision.BF16, LmHeadPrecision.FP8, LmHeadPrecision.NVFP4)
    bodies = (BodyPrecision.FP8, BodyPrecision.NVFP4)
    cases += [Case("quantization", body.value, quantization=body) for body in bodies]
    cases += [Case("lm_head", precision.value, lm_head=precision) for precision in precisions]
    cases += [Case("draft_vocab", f"first:{count}", draft_vocab=f"first:{count}") for count in FIRST]
    for ids in _distinct([halves.frequent_ids(count) for count in FREQUENT]):
        file = folder / f"frequent-{len(ids)}.txt"
        file.write_text("\n".join(map(str, ids)), encoding="ascii")
        cases.append(Case("draft_vocab", f"ids: the {len(ids)} most frequent", draft_vocab=f"ids:{file}"))
    cases += [
        Case("min_logprob", f"ln {probability}", min_logprob=math.log(probability))
        for probability in STOP_PROBABILITIES
    ]
    return cases


def _distinct(lists: list[list[int]]) -> list[list[int]]:
    """Without those that the half is too small to fill: the last one is then all that it has."""
    return [ids for index, ids in enumerate(lists) if index == 0 or len(ids) > len(lists[index - 1])]
