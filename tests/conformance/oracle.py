"""What a sequence should hold and draft, kept beside the service: pairs by key, and the oracle over them."""

import math
from dataclasses import dataclass, field

import torch

from drafter_service.heads.oracle import oracle_forward
from wire import VOCAB, WIDTH

MARGIN = {torch.float32: 1e-4, torch.bfloat16: 4e-2}
LOGPROB_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 0.25}
STORY_TOKENS = 256


class Story:
    """A seeded text: t_i and h_i. Pair k is (tokens[k + 1], rows[k])."""

    def __init__(self, seed, length=STORY_TOKENS):
        generator = torch.Generator().manual_seed(seed)
        self.tokens = torch.randint(VOCAB, (length,), generator=generator).tolist()
        self.rows = torch.randn(length, WIDTH, generator=generator)

    def row_bytes(self, first, count, dtype="float32"):
        rows = self.rows[first : first + count].to(getattr(torch, dtype))
        return rows.contiguous().view(torch.uint8).numpy().tobytes()


@dataclass(frozen=True)
class Row:
    token: int
    hidden: torch.Tensor
    is_exact: bool = True


@dataclass
class Model:
    """A sequence as it should be.

    Attributes:
        story: where its tokens and rows come from.
        rows: what is stored, by key.
        drafted: rows that the last round's drafts have, under the approximate policy; by key.
        drafts: the last round's.
        keeps_drafts: whether the policy is approximate.
    """

    story: Story
    rows: dict = field(default_factory=dict)
    drafted: dict = field(default_factory=dict)
    drafts: list = field(default_factory=list)
    keeps_drafts: bool = False

    def write(self, first_key, pairs, num_verified=0):
        """Takes rows with keys >= first_key away and appends the pairs [(token, hidden)]."""
        kept = {key: self.drafted[key] for key in range(first_key - num_verified, first_key)}
        self.truncate(first_key)
        self.rows |= kept | {first_key + index: Row(*pair) for index, pair in enumerate(pairs)}

    def truncate(self, first_key):
        self.rows = {key: row for key, row in self.rows.items() if key < first_key}
        self.drafted, self.drafts = {}, []

    def forked(self, keep_keys_below):
        rows = {key: row for key, row in self.rows.items() if key < keep_keys_below}
        return Model(self.story, rows, keeps_drafts=self.keeps_drafts)

    @property
    def last_pair_key(self):
        return max((key for key, row in self.rows.items() if row.is_exact), default=-1)

    @property
    def ranges(self):
        found = []
        for key in sorted(self.rows):
            if found and found[-1][1] == key:
                found[-1][1] = key + 1
            else:
                found.append([key, key + 1])
        return found

    def check_state(self, state):
        """Compares what a service says of the sequence."""
        assert state["row_count"] == len(self.rows), (state, self.ranges)
        assert state["last_pair_key"] == self.last_pair_key, (state, self.ranges)
        assert state["ranges"] == self.ranges, (state, self.ranges)
        first = min((key for key, row in self.rows.items() if not row.is_exact), default=-1)
        assert state["first_approximate_key"] == first, (state, first)

    def check_drafts(self, head, answer, allowed=None):
        """Compares drafts with the oracle's; returns how many were compared. Remembers the drafts and their rows."""
        rows, compared, told = dict(self.rows), 0, answer["drafts"]
        device, tie = head.device, MARGIN[head.dtype]
        for index, (draft, logprob) in enumerate(zip(told, answer["logprobs"], strict=True)):
            keys = sorted(rows)
            logits, recycled = oracle_forward(
                head,
                torch.tensor([rows[key].token for key in keys], device=device),
                torch.stack([rows[key].hidden.to(device, torch.float32) for key in keys]),
                torch.tensor(keys, device=device),
            )
            logits = logits.float().cpu()
            if allowed is not None:
                logits = logits.masked_fill(~allowed[min(index, len(allowed) - 1)], -math.inf)
            best = logits.topk(2)
            largest = logits[logits.isfinite()].abs().max()
            assert (best.values[0] - logits[draft]) / largest < tie, (
                f"draft {index} is {draft}, the oracle's {int(best.indices[0])}"
            )
            if (best.values[0] - best.values[1]) / largest >= tie:
                assert abs(logits.log_softmax(-1)[draft] - logprob) < LOGPROB_TOLERANCE[head.dtype]
                compared += 1
            rows[keys[-1] + 1] = Row(draft, recycled, is_exact=False)
        self.drafts = list(told)
        self.drafted = {key: row for key, row in rows.items() if key not in self.rows} if self.keeps_drafts else {}
        return compared


def rounded(rows, dtype):
    """Rows as the service sees them after they have travelled as `dtype`."""
    return rows.to(getattr(torch, dtype)).float()


def bits_of(words, vocab_size=VOCAB):
    """Mask words [W] or [K, W] flattened as bool rows."""
    width = -(-vocab_size // 32)
    rows = [words[start : start + width] for start in range(0, len(words), width)]
    return [torch.tensor([bool(row[i // 32] >> (i % 32) & 1) for i in range(vocab_size)]) for row in rows]
