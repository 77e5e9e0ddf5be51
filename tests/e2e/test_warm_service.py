"""After it is ready a service compiles nothing and captures nothing, whatever is asked of it.

On a GPU a bf16 head is made of kernels; on a CPU the same requests are answered by the plain forward.
"""

from __future__ import annotations

import pytest

from checkpoints import write_tiny_checkpoint
from serving import running
from specdraft.v1 import drafter_pb2 as pb
from wire import Story, mask_of

MAX_BATCH, MAX_DRAFTS = 17, 4
LEVERS = {
    "default": {},
    "narrow": {"quantization": "nvfp4", "lm_head": "nvfp4", "draft_vocab": "first:100"},
}


@pytest.fixture(params=["cpu", pytest.param("cuda:0", marks=pytest.mark.gpu)])
def device(request):
    return request.param


@pytest.fixture(params=list(LEVERS))
def server(request, device, tmp_path):
    checkpoint = write_tiny_checkpoint(tmp_path / "head", seed=5, dtype="bfloat16")
    changes = {"device": device, "dtype": "bfloat16", "max_batch": MAX_BATCH, "max_drafts": MAX_DRAFTS}
    changes |= {"page_rows": 16, "prefill_rows": 1024, "max_seq_len": 4000, "max_in_flight": 64, "drain_s": 2.0}
    with running(checkpoint, num_pages=20_000, **changes, **LEVERS[request.param]) as server:
        yield server


def propose(sequences, first_key, pairs, drafts, **more):
    """One round of all sequences in one call."""
    entries = [sequence.propose_entry(first_key, pairs, drafts, **more) for sequence in sequences]
    answer = sequences[0].session.call("Propose", pb.ProposeRequest(entries=entries))
    for sequence, result in zip(sequences, answer.results, strict=True):
        assert result.status.code == 0, result.status
        assert len(result.drafts) == drafts
        sequence.op = result.state.last_op
    return answer.results


def test_the_shapes_that_others_compiled_for_are_ready(server, device):
    story = Story(3, length=3000)
    captured, session = server.metric("graph_captures_total"), server.client().open()
    mask = pb.GrammarMask(words=mask_of(*range(20, 60)))
    answers = 0
    for batch in (1, 2, 3, 4, 16, 17):
        for length in (1, 15, 16, 17, 64):
            sequences = [session.sequence(story) for _ in range(batch)]
            for sequence in sequences:
                sequence.catchup(0, length)
            for drafts in range(1, MAX_DRAFTS + 1):
                propose(sequences, length, 1 + drafts % 3, drafts)
                results = propose(sequences, length, 2, drafts, mask=mask)
                assert all(20 <= draft < 60 for result in results for draft in result.drafts)
                answers += 2 * batch
            for sequence in sequences:
                sequence.close()
    long = session.sequence(story)
    for begin in range(0, 2600, 650):
        long.catchup(begin, 650)
    for accepted in range(MAX_DRAFTS + 1):
        long.propose(2600, accepted + 1, MAX_DRAFTS)
    for length in (16, 17):  # a carry of one page, and of two
        short = session.sequence(story)
        short.catchup(0, length)
        short.take()
    assert answers > 300
    assert server.metric("jit_compiles_total") == 0
    if device != "cpu":
        assert server.metric("graph_captures_total") == captured > 0
