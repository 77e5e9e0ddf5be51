"""Paged attention in plain PyTorch: the specification that kernels are tested against."""

import torch
from torch import Tensor


def paged_attention(  # noqa: PLR0917  # the tensors of the operation, in the usual order
    q: Tensor, k_pages: Tensor, v_pages: Tensor, page_table: Tensor, row_counts: Tensor, scale: float
) -> Tensor:
    """softmax(scale * q k^T) v over the first row_counts[b] rows of each sequence b.

    q [B, Hq, D]; k_pages and v_pages [num_pages, page_size, Hkv, D], Hq a multiple of Hkv; page_table int
    [B, max_pages], row r of a sequence lies in page page_table[b, r // page_size] at r % page_size; row_counts int
    [B], each at least 1 and at most max_pages * page_size. Returns [B, Hq, D] in q's dtype, computed in float32.

    Table entries beyond a sequence's last row are never followed, and rows beyond it never reach the result,
    whatever either holds (-1, NaN, infinities).
    """
    batch, num_heads, head_dim = q.shape
    page_size, num_kv_heads = k_pages.shape[1], k_pages.shape[2]
    rows = torch.arange(page_table.shape[1] * page_size, dtype=torch.int64, device=q.device)
    valid = rows < row_counts[:, None]
    # Every row that does not count stands for row 0, which its own sequence wrote: finite, and masked below.
    row_index = torch.where(valid, rows, 0)
    pages = page_table.to(torch.int64).gather(1, row_index // page_size)
    addresses = pages * page_size + row_index % page_size
    # [B, rows, Hkv, D]: one copy of each sequence's rows, in order.
    k = k_pages.flatten(0, 1)[addresses].float()
    v = v_pages.flatten(0, 1)[addresses].float()
    grouped = q.float().view(batch, num_kv_heads, num_heads // num_kv_heads, head_dim)
    scores = torch.einsum("bhgd,brhd->bhgr", grouped, k) * scale
    weights = scores.masked_fill(~valid[:, None, None, :], -torch.inf).softmax(dim=-1)
    return torch.einsum("bhgr,brhd->bhgd", weights, v).reshape(batch, num_heads, head_dim).to(q.dtype)
