"""From hidden states to drafts: logits, grammar mask, draft vocabulary, argmax and log-probability in one pass."""

from drafter_kernels.lm_head.op import LmHeadWorkspace, lm_head
from drafter_kernels.lm_head.plan import LmHeadPlan, plan_lm_head
from drafter_kernels.lm_head.reference import GrammarMasks, LmHeadWeight, lm_head_reference

__all__ = [
    "GrammarMasks",
    "LmHeadPlan",
    "LmHeadWeight",
    "LmHeadWorkspace",
    "lm_head",
    "lm_head_reference",
    "plan_lm_head",
]
