"""A round of drafts made of the kernels, and the same in plain PyTorch bf16: both can be captured in a CUDA graph."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from heads import HeadSize, Weights, num_bytes, projection_shape
from torch import Tensor
from torch.nn.functional import embedding, rms_norm, scaled_dot_product_attention, silu
from torch.nn.functional import linear as torch_linear

from drafter_kernels import Backend
from drafter_kernels.fuse_pair import PairNorms
from drafter_kernels.linear import InputNorm, LinearWorkspace, linear, linear_joined, pair_linear, plan_linear
from drafter_kernels.lm_head import LmHeadWorkspace, lm_head, plan_lm_head
from drafter_kernels.paged_attention import AttentionWorkspace, plan_attention, projected_attention_into
from drafter_kernels.qk_rope_write import HeadNorms, RopeTable
from drafter_kernels.rms_norm import RowNorm

EPSILON = 1e-6
# Into how many parts plain PyTorch cuts a weight's rows for one row of x.
_PARTS: Final = 8
# How many sums of exponentials a row has at first: one sum a row would begin with a memset.
_SUMS: Final = 32


@dataclass(frozen=True)
class ChainSettings:
    """`body` is the format of the projections that may be quantised: fc, k and v stay bf16.

    `overlaps`: products of one row, and the LM head of one or of more than 32 (Hopper), start while the kernel before
    them drains.
    """

    batch: int
    num_drafts: int
    num_rows: int
    body: str = "bf16"
    head: str = "nvfp4"
    is_cut: bool = False
    overlaps: bool = True


class Bf16Head:
    """The weights that both sides start from, and the state that both begin a round with."""

    def __init__(self, size: HeadSize, weights: Weights, batch: int, num_rows: int) -> None:
        self.size, self.weights = size, weights
        names = ("fc", "q", "kv", "o", "gate_up", "down", "lm_head")
        self.projections = {name: weights.matrix(*projection_shape(size, name), "bf16") for name in names}
        self.embedding = weights.normal(size.vocab, size.hidden)
        self.norms = {
            name: weights.normal(width, scale=0.1, dtype=torch.float32) + 1
            for name, width in (
                *((name, size.hidden) for name in ("embedding", "hidden", "input", "ffn", "final")),
                *((name, size.head_dim) for name in ("q", "k")),
            )
        }
        self.state(batch, num_rows)

    def state(self, batch: int, num_rows: int, max_drafts: int = 8) -> None:
        """Sequences of num_rows rows on their own pages, and a pair for each to go on from."""
        size, device = self.size, self.weights.device
        pages = -(-(num_rows + max_drafts) // size.page_rows)
        pool = (batch * pages, size.page_rows, size.num_kv_heads, size.head_dim)
        self.k_pages, self.v_pages = self.weights.normal(*pool), self.weights.normal(*pool)
        table = torch.arange(batch * pages, dtype=torch.int32, device=device)
        self.page_table = table.view(batch, pages)
        self.tokens = torch.arange(batch, device=device) % size.vocab
        self.hiddens = self.weights.normal(batch, size.hidden)

    def slots(self, row: int) -> Tensor:
        """Where row `row` of each sequence lies, int64 [B]."""
        page_rows = self.size.page_rows
        return self.page_table[:, row // page_rows].long() * page_rows + row % page_rows

    def rope(self) -> RopeTable:
        """Of the demo's base."""
        rotary = self.size.rotary
        return RopeTable.of([1e7 ** (-2 * i / rotary) for i in range(rotary // 2)], self.weights.device)


class KernelChain:
    """The kernels, one after the other; every tensor is made here, so that `run` allocates nothing."""

    def __init__(self, head: Bf16Head, settings: ChainSettings) -> None:
        self.head, self.settings = head, settings
        size, device, batch = head.size, head.weights.device, settings.batch
        own = {name: head.weights.convert(head.projections[name], settings.body) for name in ("o", "gate_up", "down")}
        q, kv = head.projections["q"], head.projections["kv"]
        self.splits_qkv = settings.body != "bf16"
        own |= {"fc": head.projections["fc"]}
        if self.splits_qkv:
            own |= {"q": head.weights.convert(q, settings.body), "kv": kv}
        else:
            own |= {"qkv": torch.cat((q, kv))}
        self.projections = own
        rows = size.draft_vocab if settings.is_cut else size.vocab
        self.lm_head = head.weights.convert(head.projections["lm_head"][:rows].contiguous(), settings.head)
        self.draft_ids = torch.arange(rows, dtype=torch.int32, device=device) if settings.is_cut else None
        self._make_buffers(batch)

    @property
    def num_bytes(self) -> int:
        """What a draft forward has to read: weights once, and its rows of K and V."""
        size = self.head.size
        total = sum(num_bytes(weight) for weight in self.projections.values()) + num_bytes(self.lm_head)
        return total + self.settings.batch * self.settings.num_rows * 4 * size.num_kv_heads * size.head_dim

    def run(self) -> None:
        """One round: num_drafts forwards, each from the id and the hidden of the one before."""
        tokens, hiddens = self.head.tokens, self.head.hiddens
        for step in range(self.settings.num_drafts):
            self._forward(step, tokens, hiddens)
            tokens, hiddens = self.ids[step], self.recycled[step]

    def _make_buffers(self, batch: int) -> None:
        size, device, drafts = self.head.size, self.head.weights.device, self.settings.num_drafts

        def rows(width: int) -> Tensor:
            return torch.empty(batch, width, dtype=torch.bfloat16, device=device)

        self.joined, self.x, self.middle, self.final = rows(2 * size.hidden), *(rows(size.hidden) for _ in range(3))
        self.projected, self.ffn = rows(size.shape.width), rows(size.ffn)
        self.attended = rows(size.num_heads * size.head_dim)
        self.ids = torch.empty(drafts, batch, dtype=torch.int64, device=device)
        self.logprobs = torch.empty(drafts, batch, device=device)
        self.recycled = torch.empty(drafts, batch, size.hidden, dtype=torch.bfloat16, device=device)
        row_numbers = range(self.settings.num_rows, self.settings.num_rows + drafts)
        self.slots = torch.stack([self.head.slots(row) for row in row_numbers])
        self.keys = torch.stack([torch.full((batch,), row, device=device) for row in row_numbers])
        self.counts = torch.stack(
            [torch.full((batch,), row + 1, dtype=torch.int32, device=device) for row in row_numbers]
        )
        self._make_plans(batch)
        needs = [(self.plans[n], batch, *projection_shape(size, n)) for n in self.projections]
        self.workspace = LinearWorkspace(needs, device)
        self.lm_workspace = LmHeadWorkspace(self.lm_head, batch)
        self.attention_workspace = AttentionWorkspace(
            batch, size.num_heads, size.head_dim, self.attention_plan.parts, device
        )
        self.rope = self.head.rope()

    def _make_plans(self, batch: int) -> None:
        size, overlaps = self.head.size, self.settings.overlaps
        normed = {"qkv", "q", "kv", "gate_up"}
        self.plans = {
            name: plan_linear(weight, batch, swiglu=name == "gate_up", normed=name in normed, overlaps=overlaps)
            for name, weight in self.projections.items()
        }
        self.lm_plan = plan_lm_head(self.lm_head, batch, overlaps=overlaps)
        pages = self.head.page_table.shape[1] * size.page_rows
        self.attention_plan = plan_attention(batch, size.num_kv_heads, pages)

    def _project(self, name: str, x: Tensor, out: Tensor, **options: object) -> None:
        linear(x, self.projections[name], out, self.workspace, plan=self.plans[name], backend=Backend.TRITON, **options)

    def _forward(self, step: int, tokens: Tensor, hiddens: Tensor) -> None:
        size, norms = self.head.size, self.head.norms
        pair = PairNorms(norms["embedding"], norms["hidden"], EPSILON)
        pair_linear(
            tokens,
            self.head.embedding,
            hiddens,
            pair,
            self.projections["fc"],
            self.x,
            self.joined,
            self.workspace,
            plan=self.plans["fc"],
            backend=Backend.TRITON,
        )
        self._attend(step, InputNorm(norms["input"], EPSILON))
        self._project("o", self.attended, self.middle, residual=self.x)
        self._project("gate_up", self.middle, self.ffn, norm=InputNorm(norms["ffn"], EPSILON), swiglu=True)
        self._project("down", self.ffn, self.final, residual=self.middle)
        lm_head(
            self.final,
            self.lm_head,
            self.ids[step],
            self.logprobs[step],
            self.lm_workspace,
            norm=RowNorm(norms["final"], EPSILON, self.recycled[step]),
            draft_ids=self.draft_ids,
            plan=self.lm_plan,
            backend=Backend.TRITON,
        )
        assert size.hidden == self.final.shape[1]

    def _attend(self, step: int, norm: InputNorm) -> None:
        size, norms, batch = self.head.size, self.head.norms, self.settings.batch
        pools = (self.head.k_pages, self.head.v_pages)
        self._project_heads(norm)
        projected_attention_into(
            self.projected,
            self.keys[step],
            self.slots[step],
            *pools,
            self.head.page_table,
            self.counts[step],
            size.shape,
            HeadNorms(norms["q"], norms["k"], EPSILON),
            self.rope,
            size.head_dim**-0.5,
            self.attended.view(batch, size.num_heads, size.head_dim),
            self.attention_workspace,
            plan=self.attention_plan,
            backend=Backend.TRITON,
        )

    def _project_heads(self, norm: InputNorm) -> None:
        """Queries, gates, keys and values of x."""
        if not self.splits_qkv:
            self._project("qkv", self.x, self.projected, norm=norm)
            return
        names = ("q", "kv")
        linear_joined(
            self.x,
            [self.projections[name] for name in names],
            self.projected,
            self.workspace,
            norm=norm,
            plans=[self.plans[name] for name in names],
            backend=Backend.TRITON,
        )


class TorchChain:
    """The same head in plain PyTorch, bf16, with K/V in one dense tensor a sequence.

    As fast as plain PyTorch was found to be, by the layout of weights and by as few kernels as it needs:

    * The LM head lies column by column. One row of x meets the other weights in 8 parts (`bmm`), for which cuBLAS takes
      kernels that do not split K; the residual is what such a product adds to.
    * The projection's rows are in the order queries, keys, values, gates. The elements of a head are so ordered that
      those which turn together are half a head apart: norm scales, cosines and sines are then two factors for all heads
      of both kinds, and one copy takes keys and values to their row.
    * A pair's halves are normalised together.
    * Log-probabilities are computed for all drafts of a round at once, since no draft needs the one before it.
    """

    def __init__(self, head: Bf16Head, settings: ChainSettings) -> None:
        self.head, self.settings = head, settings
        size, batch, device, weights = head.size, settings.batch, head.weights.device, head.projections
        length, order = settings.num_rows + settings.num_drafts, _half_apart(size, device)
        k, v = (
            pages.view(batch, -1, size.num_kv_heads, size.head_dim)[:, :length].transpose(1, 2)
            for pages in (head.k_pages, head.v_pages)
        )
        self.kv = torch.stack((k[..., order], v))
        queries, gates = weights["q"].view(size.num_heads, 2, size.head_dim, size.hidden).unbind(1)
        keys, values = weights["kv"].view(2, size.num_kv_heads, size.head_dim, size.hidden)
        self.qkv = torch.cat([part.flatten(0, 1) for part in (queries[:, order], keys[:, order], values, gates)])
        self.lm_head = weights["lm_head"].T.contiguous()
        self.norms = {name: norm.to(torch.bfloat16) for name, norm in head.norms.items()}
        self.pair_norm = torch.stack((self.norms["embedding"], self.norms["hidden"]))
        self._make_rotation(order)
        shape = (settings.num_drafts, batch)
        self.ids = torch.empty(shape, dtype=torch.int64, device=device)
        self.logits = torch.empty(*shape, size.vocab, dtype=torch.bfloat16, device=device)
        self.best = torch.empty(shape, dtype=torch.bfloat16, device=device)
        self.logprobs = torch.empty(shape, device=device)

    @property
    def num_bytes(self) -> int:
        """What a draft forward has to read."""
        size = self.head.size
        weights = [weight for name, weight in self.head.projections.items() if name not in {"q", "kv"}]
        rows = self.settings.batch * self.settings.num_rows * 4 * size.num_kv_heads * size.head_dim
        return sum(weight.nbytes for weight in (*weights, self.qkv)) + rows

    def run(self) -> None:
        """One round."""
        tokens, hiddens = self.head.tokens, self.head.hiddens
        for step in range(self.settings.num_drafts):
            tokens, hiddens = self._forward(step, tokens, hiddens)
        sums = torch.sub(self.logits, self.best.float().unsqueeze(-1)).exp_().unflatten(-1, (_SUMS, -1)).sum(-1).sum(-1)
        torch.neg(sums.log_(), out=self.logprobs)

    def _make_rotation(self, order: Tensor) -> None:
        """What multiplies a normalised head, and what multiplies its halves exchanged: bf16 [K, heads, D] each."""
        size, settings, rope = self.head.size, self.settings, self.head.rope()
        half, turning = size.head_dim // 2, size.rotary // 2
        rows = torch.arange(settings.num_drafts, device=order.device, dtype=torch.float64) + settings.num_rows
        angles = rows[:, None] * rope.turns * (2 * torch.pi)
        cos = torch.ones(settings.num_drafts, 2, half, device=order.device, dtype=torch.float64)
        sin = torch.zeros_like(cos)
        cos[..., :turning] = angles.cos()[:, None]
        sin[..., :turning] = torch.stack((-angles.sin(), angles.sin()), 1)
        counts = (("q", size.num_heads), ("k", size.num_kv_heads))
        scales = torch.cat([self.head.norms[name].expand(count, -1) for name, count in counts])[:, order]
        self.cos = (cos.flatten(1)[:, None] * scales).to(torch.bfloat16)
        self.sin = (sin.flatten(1)[:, None] * scales.roll(half, -1)).to(torch.bfloat16)

    def _norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, x.shape[-1:], self.norms[name], EPSILON)

    def _forward(self, step: int, tokens: Tensor, hiddens: Tensor) -> tuple[Tensor, Tensor]:
        weights = self.head.projections
        pair = torch.stack((embedding(tokens, self.head.embedding), hiddens), 1)
        pair = rms_norm(pair, pair.shape[-1:], None, EPSILON).mul_(self.pair_norm)
        x = _product(pair.flatten(1), weights["fc"])
        x = _product(self._attend(step, self._norm(x, "input")), weights["o"], x)
        gate, up = torch_linear(self._norm(x, "ffn"), weights["gate_up"]).chunk(2, dim=-1)
        x = _product(silu(gate).mul_(up), weights["down"], x)
        y = self._norm(x, "final")
        torch.mm(y, self.lm_head, out=self.logits[step])
        torch.max(self.logits[step], -1, out=(self.best[step], self.ids[step]))
        return self.ids[step], y

    def _attend(self, step: int, normed: Tensor) -> Tensor:
        size, batch = self.head.size, self.settings.batch
        row, turned = self.settings.num_rows + step, size.num_heads + size.num_kv_heads
        parts = torch_linear(normed, self.qkv).view(batch, -1, size.head_dim)
        heads, gates = parts[:, :turned], parts[:, turned + size.num_kv_heads :]
        plain = rms_norm(heads, (size.head_dim,), None, EPSILON)
        torch.addcmul(plain * self.cos[step], plain.roll(size.head_dim // 2, -1), self.sin[step], out=heads)
        written = parts[:, size.num_heads : turned + size.num_kv_heads].unflatten(1, (2, -1))
        self.kv[..., row, :] = written.transpose(0, 1)
        keys, values = self.kv[..., : row + 1, :]
        q = parts[:, : size.num_heads, None]
        attended = scaled_dot_product_attention(q, keys, values, enable_gqa=True)[:, :, 0]
        return torch.sigmoid(gates).mul_(attended).flatten(1)


def _half_apart(size: HeadSize, device: torch.device) -> Tensor:
    """An order of a head's elements in which those that turn together are half a head apart."""
    turning, half = size.rotary // 2, size.head_dim // 2
    first, second, rest = torch.arange(size.head_dim, device=device).split(
        (turning, turning, size.head_dim - 2 * turning)
    )
    return torch.cat((first, rest[: half - turning], second, rest[half - turning :]))


def _product(x: Tensor, weight: Tensor, residual: Tensor | None = None) -> Tensor:
    """x weight^T, added to the residual in its place if there is one."""
    if len(x) > 1:
        return torch_linear(x, weight) if residual is None else residual.addmm_(x, weight.T)
    parts, column = weight.unflatten(0, (_PARTS, -1)), x.T.expand(_PARTS, -1, 1)
    if residual is None:
        return torch.bmm(parts, column).view(1, -1)
    residual.view(_PARTS, -1, 1).baddbmm_(parts, column)
    return residual
