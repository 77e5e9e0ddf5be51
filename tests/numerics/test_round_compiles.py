"""Once warm, no batch, length, mask or number of drafts has a kernel compiled: for Hopper, without a GPU.

Launches compile and do nothing else, so what they leave is of no interest here; `test_gpu_runner` drives the same on
a GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from repository import ROOT

pytest.importorskip("triton")

# Run in a process of its own: in this one kernels are interpreted.
SCRIPT = r"""
import json, sys
from array import array
from functools import partial
from pathlib import Path

sys.path[:0] = ["kernels", "kernels/bench", "clients/python", "tests", "."]
import torch
from checkpoints import write_tiny_checkpoint
from drafter_kernels import Backend, CompileWatch
from drafter_kernels.draft_chain import begin_chains, extend_chains
from drafter_service.engine import eager_steps, forwards, graph_runner, round_core, slot_round
from drafter_service.engine.batch import RunEntry
from drafter_service.engine.runner import EagerRunner
from drafter_service.heads import BodyPrecision, LmHeadPrecision, MtpHead, load_head
from drafter_service.heads.kernel_forward import KernelForward
from drafter_service.memory.layout import ArenaWish, lay_out
from drafter_service.state.pool import KvPool, PoolShape
from hopper import compiling_for_hopper

directory, body, lm_head, draft_vocab = sys.argv[1:]
MtpHead.runs_kernels = True
for module in (forwards, eager_steps):
    module.KernelForward = partial(KernelForward, backend=Backend.TRITON)
round_core.begin_chains = partial(begin_chains, backend=Backend.TRITON)
round_core.extend_chains = partial(extend_chains, backend=Backend.TRITON)
slot_round.take_slots = partial(slot_round.take_slots, backend=Backend.TRITON)
slot_round.leave_slots = partial(slot_round.leave_slots, backend=Backend.TRITON)
graph_runner.capture = lambda run, *_: (run(), run)[1]

write_tiny_checkpoint(Path(directory), dtype="bfloat16")
levers = {"quantization": BodyPrecision(body), "lm_head": LmHeadPrecision(lm_head), "draft_vocab": draft_vocab}
head = load_head(Path(directory), packed=True, **levers)
layout = head.kv_layout()
shape = PoolShape(1, 16, layout.num_kv_heads, layout.head_dim, layout.dtype)
pool = KvPool(shape, 1, head.device)


def entry(pairs, begin, drafts, mask=False, keeps=False):
    pages = array("i", [0] * ((begin + pairs + drafts) // 16 + 1))
    hiddens = torch.zeros(pairs, 64, dtype=torch.bfloat16)
    masks = torch.ones(drafts, 128, dtype=torch.bool) if mask else None
    return RunEntry(pages, begin, begin, begin, tuple(range(pairs)), hiddens, drafts, None, masks, keeps)


def slot_rounds():
    # Of sessions whose arenas have other sizes, with hidden rows of every type.
    numbers = slot_round.StatusNumbers(*range(1, 9))

    def whole(*size):
        return torch.zeros(size, dtype=torch.int64)

    for name, item in (("float32", 4), ("bfloat16", 2), ("float16", 2)):
        for slots, most in ((1, 1), (8, 3), (64, 4)):
            layout = lay_out(ArenaWish(slots, most, 64 * item, 64 * item, 128, 0, with_masks=most > 1))
            arena = torch.zeros(layout.size, dtype=torch.uint8)
            place = slot_round.SlotPlace(arena, layout, name, 64, whole(1), whole(1), whole(9, 3), numbers)
            for batch in (1, 2, 8, 64):
                for pages in (128, 1025):
                    shape = round_core.RoundShape(batch, most + 1, most, pages)
                    slot_round.SlotRound(head, pool, shape, place).run()


compiled = []
eager = EagerRunner(head, pool, 64)
limits = graph_runner.GraphLimits(max_batch=64, max_drafts=4, max_pages=1025)
graphs = graph_runner.GraphRunner(eager, head, pool, limits)
with compiling_for_hopper(), CompileWatch(compiled.append):
    eager.warm_up()
    graphs.warm_up()
    slot_round.warm_up_slots(head, pool, slot_round.StatusNumbers(*range(1, 9)))
    first, captured = len(compiled), graphs.num_captured
    for batch in (1, 2, 3, 4, 16, 17, 33, 64):
        for begin in (0, 1, 15, 16, 17, 64, 3000, 16000):
            for drafts in (1, 2, 3, 4):
                for more in ({}, {"mask": True}, {"keeps": True}):
                    entries = [entry(1 + (batch + index) % 5, begin, drafts, **more) for index in range(batch)]
                    graphs.run(entries)
                    if drafts == 2:
                        eager.run(entries)
    for pairs in (1, 7, 15, 16, 17, 64, 65, 333, 1000, 1024, 1500):
        eager.run([entry(pairs, 0, 0)])
        eager.run([entry(pairs, 5, 2)] * 3)
    slot_rounds()
print(json.dumps({"first": first, "later": compiled[first:], "captured": graphs.num_captured - captured}))
"""


@pytest.mark.parametrize(
    "levers",
    [("as-stored", "nvfp4", "all"), ("nvfp4", "nvfp4", "first:100")],
    ids="-".join,
)
def test_nothing_is_compiled_or_captured_once_warm(tmp_path, levers):
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path / "triton")
    command = [sys.executable, "-c", SCRIPT, str(tmp_path / "head"), *levers]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    report = json.loads(done.stdout)
    assert report["first"] >= 20  # so that what is compiled later can be seen
    assert (report["later"], report["captured"]) == ([], 0)
