"""The probabilities of a call, which FlashAttention-2's tests read; dense and slow."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tritonpack.attention import MAX_HEAD_DIM, varlen_attention
from tritonpack.masks.block_diagonal import BlockDiagonalMask


@torch.no_grad()
def probabilities_of(
    q: Tensor, k: Tensor, cu_q: Tensor, cu_k: Tensor, mask: BlockDiagonalMask, max_q: int | Tensor | None,
    max_k: int | Tensor | None, **options: Any,
) -> Tensor:  # fmt: skip
    """Each pair's probability before dropout, negative if dropout drops the pair: (B, H, max_q, max_k) in q's dtype.

    They are the outputs of attention with unit vectors as values: once without dropout, and once with it to find the
    pairs that are left. q is (T_q, H, D), k (T_k, H_kv, D); the offsets (B + 1,) are the mask's, the options the
    call's. A longest document of None is read from the offsets, which waits.
    """
    max_q, max_k = (int(cu.diff().max()) if m is None else int(m) for cu, m in ((cu_q, max_q), (cu_k, max_k)))
    (document, row), (_, column) = (_places(cu, x.shape[0]) for cu, x in ((cu_q, q), (cu_k, k)))
    result = q.new_zeros(cu_q.shape[0] - 1, q.shape[1], max_q, max_k)
    within = document < cu_q.shape[0] - 1
    for first in range(0, max_k, MAX_HEAD_DIM):
        columns = torch.arange(first, min(first + MAX_HEAD_DIM, max_k), device=q.device)
        units = (column[:, None] == columns).to(k.dtype)[:, None].expand(-1, k.shape[1], -1)
        p = varlen_attention(q, k, units, mask, **{**options, "dropout_p": 0.0, "dropout_seed": None})
        p = torch.where(varlen_attention(q, k, units, mask, **options) > 0, p, -p)
        result[document[within], :, row[within], first : first + columns.shape[0]] = p[within]
    return result


def _places(cu: Tensor, total: int) -> tuple[Tensor, Tensor]:
    """The document of each row, and the row's place in it."""
    rows = torch.arange(total, device=cu.device)
    document = torch.searchsorted(cu, rows, right=True) - 1
    return document, rows - cu[document]
