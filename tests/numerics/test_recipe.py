"""What the recipe trains is what the service computes, and its files are the ones that ship."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from drafter_service.demo.recipe.store import load_head as load_trained_head
from drafter_service.demo.recipe.store import load_target as load_trained_target
from drafter_service.demo.target import HEAD, TARGET
from drafter_service.heads import load_head, oracle_draft

NUM_TOKENS = 12
DEPTH = 3


@pytest.fixture(scope="module")
def tokens() -> torch.Tensor:
    return torch.randint(4096, (1, NUM_TOKENS), generator=torch.Generator().manual_seed(3))


@torch.no_grad()
def test_the_trained_unrolling_drafts_what_the_services_oracle_drafts(tokens: torch.Tensor) -> None:
    """Training lets every position draft at once; serving goes pair by pair. Both from the shipped files."""
    target, head = load_trained_target(TARGET), load_trained_head(HEAD)
    served = load_head(HEAD, TARGET, dtype=torch.float32)
    hidden = target(tokens, dtype=torch.float32)
    table = target.embed_tokens.weight
    following = torch.cat((tokens[:, 1:], target.most_likely(hidden)[:, -1:]), dim=1)
    drafted = [following]
    for _ in range(DEPTH):
        states = head.unroll(table, following, hidden, drafted)
        drafted.append(target.most_likely(states[-1]))
    for position in (0, 4, NUM_TOKENS - 1):
        keys = torch.arange(position + 1)
        oracle = oracle_draft(served, following[0, : position + 1], hidden[0, : position + 1], keys, DEPTH)
        assert min(oracle.margins) > 1e-4  # no tie that rounding decides
        assert [ids[0, position].item() for ids in drafted[1:]] == oracle.ids


@torch.no_grad()
def test_the_shipped_target_is_the_one_that_was_trained(tokens: torch.Tensor) -> None:
    """transformers' own class computes the recipe's hidden states from the shipped file."""
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32).eval()
    ours = load_trained_target(TARGET)(tokens, dtype=torch.float32)
    theirs = model.model(tokens).last_hidden_state
    assert (ours - theirs).abs().max() < 1e-4 * theirs.abs().max()


def test_the_measured_acceptance_meets_what_the_demo_needs() -> None:
    measured = json.loads((HEAD.parent / "measured.json").read_text(encoding="utf-8"))
    assert measured["random_positions"]["rounds"] == 500
    assert measured["random_positions"]["first_draft_accepted"] >= 0.55
    assert measured["random_positions"]["mean_accept_length"] >= 1.9


def test_the_two_models_stay_small() -> None:
    assert sum(path.stat().st_size for path in Path(HEAD.parent).rglob("*") if path.is_file()) <= 12_000_000
