"""Calls of the fused LM head under test, and what their results are compared with."""

import torch

from drafter_kernels.lm_head import GrammarMasks, LmHeadWorkspace, lm_head
from drafter_kernels.quantize import pack_nvfp4, quantize_fp8, quantize_nvfp4, widen
from kernel_backends import TRITON, on, unwritten

# Of the largest logit. The kernels sum in another order, NVFP4 rounds x to float16, and without tensor cores four
# products are summed in float16.
TOLERANCE = 1e-3


def stored(kind, weight):
    match kind:
        case "nvfp4":
            return pack_nvfp4(quantize_nvfp4(weight))
        case "fp8":
            return quantize_fp8(weight)
        case _:
            return weight.to(getattr(torch, kind))


def run(x, weight, *, plan, device, **options):
    """The kernel's ids and logprobs, on the CPU."""
    x, weight = x.to(device), on(device, weight)
    ids = unwritten(len(x), dtype=torch.int64, device=device)
    logprobs = unwritten(len(x), device=device)
    workspace = LmHeadWorkspace(weight, len(x), (plan,))
    for tensor in (workspace.partials, workspace.packed, workspace.row_scales):
        tensor.fill_(torch.nan)
    lm_head(x, weight, ids, logprobs, workspace, plan=plan, backend=TRITON, **options)
    return ids.cpu(), logprobs.cpu()


def expect(found, expected, x, weight):
    """The same ids, and log-probabilities as near as rounding of logits lets them be."""
    assert torch.equal(found[0], expected[0])
    finite = expected[1].isfinite()
    largest = (x.float() @ widen(weight).T).nan_to_num(0, 0, 0).abs().amax(-1)
    error = (found[1] - expected[1])[finite].abs()
    assert bool((error <= TOLERANCE * largest[finite] + 1e-5).all()), error / largest[finite]
    assert torch.equal(found[1][~finite], expected[1][~finite])


def masks_of(allowed, rows):
    """GrammarMasks from bool [R, vocabulary]."""
    count, vocab = allowed.shape
    bits = torch.zeros(count, -(-vocab // 32) * 32, dtype=torch.int64)
    bits[:, :vocab] = allowed
    words = (bits.view(count, -1, 32) << torch.arange(32)).sum(-1)
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    return GrammarMasks(words, torch.tensor(rows, dtype=torch.int32))
