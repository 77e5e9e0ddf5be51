"""The comparison: every case on the same positions, and what came of it."""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch

from drafter_service.demo.acceptance import common_prefix, summary
from drafter_service.demo.lever_ab.cases import Case, make_cases
from drafter_service.demo.lever_ab.windows import CONTEXT_TOKENS, WINDOW_TOKENS, Window, read_halves, read_windows
from drafter_service.demo.target import HEAD, TARGET, load_target
from drafter_service.engine.batch import RunResult
from drafter_service.heads import MtpHead, load_head

_EXPLANATION = """default: hidden states and recycling post_norm, LM head as stored, all ids; a case changes one
won, lost: first drafts that only the case, only the default gets right; kept: accepted of those offered
ids: that can be drafted; covered: share of the target's tokens among them"""


@dataclass(frozen=True, slots=True)
class LeverPlan:
    """How much is measured.

    Attributes:
        num_positions: positions, the same for every case; one round each.
        num_drafts: K.
        seed: chooses the windows.
    """

    num_positions: int = 6000
    num_drafts: int = 3
    seed: int = 0


def measure_levers(plan: LeverPlan, head: Path = HEAD) -> dict[str, Any]:
    """Figures of every case, the default first. Needs no service: drafts are the runner's either way."""
    torch.set_num_threads(1)
    target = load_target()
    halves = read_halves(target)
    windows = read_windows(target, halves, plan.num_positions, plan.num_drafts, plan.seed)
    rows: list[dict[str, Any]] = []
    default: list[int] = []
    with tempfile.TemporaryDirectory(prefix="specdraft-") as folder:
        for case in make_cases(halves, Path(folder)):
            loaded = _load(case, head)
            results = case.drafting(loaded, windows, plan.num_drafts, case.min_logprob)
            accepted = _accepted(windows, results)
            default = default or accepted
            rows.append(
                {"lever": case.lever, "value": case.value}
                | _row(results, accepted, default, plan.num_drafts)
                | _head_facts(loaded, windows)
            )
    texts = {"window_tokens": WINDOW_TOKENS, "least_context_tokens": CONTEXT_TOKENS, "windows": len(windows)}
    texts |= {
        "counted_tokens": sum(map(len, halves.counted)),
        "measured_tokens": sum(map(len, halves.measured)),
    }
    return {"plan": asdict(plan), "texts": texts, "cases": rows}


def describe(figures: dict[str, Any]) -> str:
    """The figures as a table."""
    plan = figures["plan"]
    heads = (
        f"{'lever':<14}{'value':<28}{'by draft index':<21}{'length':>7}{'offered':>9}{'kept':>8}{'won':>6}{'lost':>6}"
        f"{'ids':>6}{'covered':>9}"
    )
    rows = [
        f"{row['lever']:<14}{row['value']:<28}"
        f"{' '.join(format(share, '.1%') for share in row['accepted_by_draft_index']):<21}"
        f"{row['mean_accept_length']:>7.3f}{row['offered']:>9}{row['accepted_per_offered']:>8.1%}"
        f"{row['first_won']:>6}{row['first_lost']:>6}{row['draft_vocab_size']:>6}{row['covered']:>9.1%}"
        for row in figures["cases"]
    ]
    about = (
        f"{plan['num_positions']} positions of held-out files, K = {plan['num_drafts']}, the target's own continuation"
    )
    return "\n".join([about, _EXPLANATION, heads, *rows])


def _load(case: Case, head: Path) -> MtpHead:
    return load_head(
        head,
        TARGET,
        dtype=torch.float32,
        hidden_source=case.hidden_source,
        recycle=case.recycle,
        quantization=case.quantization,
        lm_head=case.lm_head,
        draft_vocab=case.draft_vocab,
    )


def _accepted(windows: Sequence[Window], results: Sequence[RunResult]) -> list[int]:
    truth = [tokens[1:] for window in windows for tokens in window.truth]
    return [common_prefix(result.drafts, tokens) for result, tokens in zip(results, truth, strict=True)]


def _row(
    results: Sequence[RunResult], accepted: Sequence[int], default: Sequence[int], num_drafts: int
) -> dict[str, Any]:
    """Acceptance, and how the first drafts compare position by position."""
    offered = sum(len(result.drafts) for result in results)
    pairs = list(zip(accepted, default, strict=True))
    return summary(accepted, num_drafts) | {
        "offered": offered,
        "accepted": sum(accepted),
        "accepted_per_offered": round(sum(accepted) / offered, 4),
        "first_won": sum(ours > 0 and not theirs for ours, theirs in pairs),
        "first_lost": sum(theirs > 0 and not ours for ours, theirs in pairs),
    }


def _head_facts(head: MtpHead, windows: Sequence[Window]) -> dict[str, Any]:
    ids = head.weights.draft_ids
    kept = range(head.config.vocab_size) if ids is None else set(ids.tolist())
    truth = [token for window in windows for tokens in window.truth for token in tokens[1:]]
    return {
        "lm_head_error": float(head.levers["lm_head_error"]),
        "draft_vocab_size": head.draft_vocab_size,
        "covered": round(sum(token in kept for token in truth) / len(truth), 4),
    }
