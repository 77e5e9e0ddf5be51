"""The recipe's command line: corpus, pretrain, distil and measure, or all four."""

import argparse
import shutil
import time
from dataclasses import replace
from pathlib import Path

import torch

from . import corpus as texts
from . import tokenizer as tokens
from .distil import DistilPlan, distil, generate_text
from .head import Head
from .measure import MeasurePlan, measure
from .pretrain import PretrainPlan, pretrain
from .shapes import head_shape, target_shape
from .store import load_head, load_target, save_head, save_target, write_json
from .target import Target

_END_ID = 0  # the tokenizer's first entry


def main() -> None:
    """Parse and run."""
    arguments = _parser().parse_args()
    torch.manual_seed(arguments.seed)
    # Off in the run that made the shipped models: its bfloat16 backward on Hopper is under suspicion (PyTorch issue
    # 196678 and others).
    torch.backends.cuda.enable_cudnn_sdp(False)
    arguments.run(arguments)


def _corpus(arguments: argparse.Namespace) -> None:
    """Held-out copies, tokenizer and token streams below --out."""
    corpus = texts.read_corpus(arguments.stdlib, arguments.docs, seed=arguments.seed)
    out: Path = arguments.out
    texts.copy_held_out(corpus, out / "texts")
    shape = target_shape()
    tokenizer = tokens.train_tokenizer(corpus, shape.vocab_size)
    tokens.save_tokenizer(tokenizer, out / "models" / "target", shape.max_positions)
    counts = tokens.encode_corpus(tokenizer, corpus, out / "tokens.safetensors")
    write_json(out / "corpus.json", {"files": len(corpus.training), "dropped": corpus.dropped, "tokens": counts})
    print(counts, corpus.dropped)


def _pretrain(arguments: argparse.Namespace) -> None:
    """Both models from nothing, stored below --out/models."""
    out: Path = arguments.out
    plan = PretrainPlan(seconds=arguments.pretrain_seconds, compiled=not arguments.no_compile)
    if arguments.tiny:
        plan = replace(plan, batch=2, length=64, head_length=32, dtype=torch.float32, compiled=False)
    shape = target_shape(num_layers=2 if arguments.tiny else None)
    target = Target(shape, compiled=plan.compiled).to(arguments.device)
    head = Head(head_shape(shape)).to(arguments.device)
    streams = tokens.load_tokens(arguments.tokens or out / "tokens.safetensors", arguments.device)
    begun = time.monotonic()
    figures = pretrain(target, head, streams, plan, out / "training.jsonl")
    print("pretrain took", round(time.monotonic() - begun, 1), "s in all; last", figures)
    save_target(target, out / "models" / "target", end_id=_END_ID)
    save_head(head, out / "models" / "head", end_id=_END_ID)


def _distil(arguments: argparse.Namespace) -> None:
    """A better head for the stored target, as stored: rounded to bfloat16."""
    out: Path = arguments.out
    models: Path = arguments.models or out / "models"
    plan = DistilPlan(seconds=arguments.distil_seconds, compiled=not arguments.no_compile)
    if arguments.tiny:
        plan = replace(plan, batch=2, length=48, prompts=4, prompt_length=32, dtype=torch.float32, compiled=False)
    streams = tokens.load_tokens(arguments.tokens or out / "tokens.safetensors", arguments.device)
    target = load_target(models / "target", compiled=plan.compiled).to(arguments.device)
    head = load_head(models / "head").to(arguments.device)
    begun = time.monotonic()
    generated = generate_text(models / "target", streams["training"], plan)
    print("generated", tuple(generated.shape), "in", round(time.monotonic() - begun, 1), "s", flush=True)
    figures = distil(target, head, streams, generated, plan=plan, log=out / "training.jsonl")
    print("distil took", round(time.monotonic() - begun, 1), "s in all; last", figures)
    save_head(head, out / "models" / "head", end_id=_END_ID)


def _measure(arguments: argparse.Namespace) -> None:
    """Acceptance of the stored pair, written to measured.json beside the models."""
    plan = MeasurePlan(positions=arguments.positions, num_drafts=arguments.num_drafts, seed=arguments.seed)
    models: Path = arguments.models or arguments.out / "models"
    folder: Path = arguments.texts or arguments.out / "texts"
    figures = measure(models, folder, plan, device=arguments.device)
    print(figures)
    write_json(models / "measured.json", figures)


def _all(arguments: argparse.Namespace) -> None:
    shutil.rmtree(arguments.out / "models", ignore_errors=True)
    for run in (_corpus, _pretrain, _distil, _measure):
        run(arguments)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m drafter_service.demo.recipe", description=__doc__)
    commands = parser.add_subparsers(required=True)
    for name, run in (
        ("corpus", _corpus),
        ("pretrain", _pretrain),
        ("distil", _distil),
        ("measure", _measure),
        ("all", _all),
    ):
        command = commands.add_parser(name, help=(run.__doc__ or "all four, in order").strip())
        command.set_defaults(run=run)
        command.add_argument("--out", type=Path, default=Path("demo-models"), help="where everything is written")
        command.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
        command.add_argument("--seed", type=int, default=0)
        command.add_argument("--tiny", action="store_true", help="two layers and few tokens, to try the recipe")
        if name in ("corpus", "all"):
            command.add_argument("--stdlib", type=Path, required=True, help="the Python 3.11 library's folder")
            command.add_argument("--docs", type=Path, required=True, help="the documentation's .rst.txt sources")
        command.add_argument("--no-compile", action="store_true", help="run operation by operation: half as fast")
        command.add_argument("--tokens", type=Path, help="token streams, if not below --out")
        command.add_argument("--models", type=Path, help="stored models, if not below --out")
        command.add_argument("--texts", type=Path, help="held-out texts, if not below --out")
        command.add_argument("--pretrain-seconds", type=float, default=PretrainPlan.seconds)
        command.add_argument("--distil-seconds", type=float, default=DistilPlan.seconds)
        command.add_argument("--positions", type=int, default=MeasurePlan.positions)
        command.add_argument("--num-drafts", type=int, default=MeasurePlan.num_drafts)
    return parser


if __name__ == "__main__":
    main()
