"""The oracle: dense attention straight from the formula, in any dtype, on any device. O(T^2) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack.mask import BlockDiagonalMask


def forward(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, *, scale: float) -> tuple[Tensor, Tensor]:
    """out (T_q, H, D) in q's dtype, lse (H, T_q) in float32 or float64; computed in that wider dtype."""
    q_, k_, v_ = _clean(q, k, v, mask)
    scores = _scores(q_, k_, mask, scale)
    lse = torch.logsumexp(scores, dim=-1)
    out = torch.einsum("hqk,khd->qhd", _probabilities(scores, lse), v_)
    return out.to(q.dtype), lse


def backward(
    dout: Tensor,
    dlse: Tensor | None,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    mask: BlockDiagonalMask,
    *,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """(dq, dk, dv) in the shapes and dtype of q, k, v: the gradients of docs/math.md, section 3."""
    q_, k_, v_ = _clean(q, k, v, mask)
    live = (mask.key_start < mask.key_stop)[:, None, None]
    dout_ = torch.where(live, dout.to(q_.dtype), 0.0)
    p = _probabilities(_scores(q_, k_, mask, scale), lse)
    dp = torch.einsum("qhd,khd->hqk", dout_, v_)
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(live[:, 0, 0], dlse.to(q_.dtype), 0.0)
    ds = p * (dp - delta[..., None]) * scale
    dq = torch.einsum("hqk,khd->qhd", ds, k_)
    dk = _sum_groups(torch.einsum("hqk,qhd->khd", ds, q_), k.shape[1])
    dv = _sum_groups(torch.einsum("hqk,qhd->khd", p, dout_), v.shape[1])
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _clean(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask) -> tuple[Tensor, Tensor, Tensor]:
    """q, k, v in the wider dtype, key heads repeated, with zeros where nothing sees or is seen (0 * NaN is NaN)."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    seeing = (mask.key_start < mask.key_stop)[:, None, None]
    transposed = mask.transpose()
    seen = (transposed.key_start < transposed.key_stop)[:, None, None]
    q = torch.where(seeing, q.to(wide), 0.0)
    k, v = (torch.where(seen, x.to(wide), 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    return q, k, v


def _scores(q: Tensor, k: Tensor, mask: BlockDiagonalMask, scale: float) -> Tensor:
    scores = torch.einsum("qhd,khd->hqk", q, k) * scale
    return scores.masked_fill(~mask.to_dense(), float("-inf"))


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # An empty row has lse = -inf, and -inf - -inf is NaN; any finite number in its place gives exp(-inf) = 0.
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    return grad.unflatten(1, (kv_heads, -1)).sum(2)
