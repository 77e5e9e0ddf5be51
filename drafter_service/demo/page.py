"""What the demo prints."""

from __future__ import annotations

from typing import Any

from drafter_service.demo.painting import Ink, Painter, paint_generation
from drafter_service.demo.prompts import Prompt
from drafter_service.demo.race import DRAFTED, GENERATE, LOOP, Outcome
from drafter_service.demo.tally import Tally
from specdraft.words import MemoryKind

MEMORY_WORDS = {
    MemoryKind.CUDA: "GPU memory that both processes map (CUDA IPC)",
    MemoryKind.HOST: "memory that both processes map",
    MemoryKind.INLINE: "messages",
}
PROMPT_LINES = 3
BAR_WIDTH = 30
PER_INDEX = 'specdraft_accepted_tokens_per_index_total{{draft_index="{}"}}'


def legend(painter: Painter) -> str:
    """Which colour or mark is what."""
    words = (
        (Ink.PROMPT, "the end of the prompt"),
        (Ink.FIRST, "first token: here the generation begins"),
        (Ink.ACCEPTED, "accepted draft"),
        (Ink.CORRECTION, "correction: the target's token where a draft was wrong"),
        (Ink.BONUS, "bonus: the target's token after drafts that were all right"),
    )
    lines = ["  " + painter.paint(text, ink) for ink, text in words]
    return "\n".join(["held-out Python library source, continued by the target:", *lines])


def generation(prompt: Prompt, records: list[Any], tokenizer: Any, painter: Painter) -> str:
    """One generation after the last lines of its prompt."""
    text = tokenizer.decode(list(prompt.tokens), skip_special_tokens=False)
    tail = "\n".join(text.split("\n")[-PROMPT_LINES:])
    title = painter.paint(f"{prompt.name}, from line {prompt.line}", Ink.TITLE)
    return f"{title}\n{painter.paint(tail, Ink.PROMPT)}{paint_generation(records, tokenizer, painter)}"


def acceptance(tally: Tally) -> str:
    """Acceptance by draft index: of the drafts offered at that place in the chain."""
    lines = [f"draft   offered  accepted   share   0%{'100%':>{BAR_WIDTH - 1}}"]
    for index, share in enumerate(tally.acceptance):
        bar = ("#" * round(BAR_WIDTH * share)).ljust(BAR_WIDTH)
        lines.append(f"{index + 1:>5}{tally.offered[index]:>10}{tally.accepted[index]:>10}{share:>8.0%}  |{bar}|")
    if tally.num_failed:
        lines.append(f"{tally.num_failed} rounds had no drafts because the service failed")
    return "\n".join(lines)


def side_by_side(outcome: Outcome, tally: Tally) -> str:
    """Forwards and tokens per second of the three ways in the turn with the median speedup."""
    num_tokens = outcome.shown.num_tokens
    lines = [f"{'':<22}{'target forwards':>17}{'tokens/s':>10}{'seconds':>9}"]
    for kind in (GENERATE, LOOP, DRAFTED):
        seconds = outcome.seconds[kind][outcome.median_turn]
        forwards = tally.num_rounds if kind == DRAFTED else outcome.num_plain_forwards
        lines.append(f"{kind:<22}{forwards:>17}{num_tokens / seconds:>10.1f}{seconds:>9.2f}")
    lines.append(
        f"speedup {outcome.speedup:.2f}x against the faster of the two without drafts ({outcome.baseline}): "
        f"{_of_turns(outcome)}"
    )
    return "\n".join(lines)


def _of_turns(outcome: Outcome) -> str:
    """How the turn of the table was chosen, and what the others gave."""
    speedups = outcome.speedups
    if len(speedups) == 1:
        return "one turn"
    return (
        f"turn {outcome.median_turn + 1}, the median of {len(speedups)} ({min(speedups):.2f}x to {max(speedups):.2f}x)"
    )


def losses(outcome: Outcome) -> str:
    """How many generations were compared with what `model.generate` gives, and how many differ."""
    return (
        f"{outcome.num_compared - outcome.num_different} of {outcome.num_compared} generations are "
        "model.generate(do_sample=False)'s own, token for token"
    )


def last_line(outcome: Outcome, tally: Tally) -> str:
    """The whole demo in one line."""
    return (
        f"demo: lossless={'yes' if outcome.is_lossless else 'no'} accept_length={tally.accept_length:.2f} "
        f"first={tally.first:.2f} rounds={tally.num_rounds}/{outcome.num_plain_forwards} "
        f"speedup={outcome.speedup:.2f}x"
    )


def service_counts(exposition: str, num_drafts: int) -> str:
    """What the service itself counted, read from its metrics."""
    names = {
        "proposals": "specdraft_proposals_total",
        "drafts": "specdraft_draft_tokens_total",
        "accepted": "specdraft_accepted_tokens_total",
    }
    values = _samples(exposition)
    counts = [f"{word} {values.get(name, 0):.0f}" for word, name in names.items()]
    per_index = [f"{values.get(PER_INDEX.format(index), 0):.0f}" for index in range(num_drafts)]
    return f"the service counted, over all runs: {', '.join(counts)}, accepted by index {' / '.join(per_index)}"


def _samples(exposition: str) -> dict[str, float]:
    lines = (line.rsplit(" ", 1) for line in exposition.splitlines() if line and not line.startswith("#"))
    return {name: float(value) for name, value in lines}
