"""The backend "reference": dense attention as in the formulas, in any dtype, on any device, with O(T^2) memory."""

from __future__ import annotations

import torch
from torch import Tensor

from tritonpack.backends.dropout import keep_mask
from tritonpack.backends.tile_table import NO_TABLES, TileTables
from tritonpack.errors import BackendUnavailableError
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions


def check_device(q: Tensor) -> None:
    """Accept any device and dtype."""


def plan_tiles(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, *, backward: bool
) -> TileTables:
    """Return no tables.

    Raises:
        BackendUnavailableError: `pack_invariant` was passed.
    """
    if options.pack_invariant:
        raise BackendUnavailableError(
            "backend='reference' computes all documents in one product and can't be pack_invariant; use "
            "backend='blocked' or 'triton'."
        )
    return NO_TABLES


def forward(
    q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, options: AttentionOptions, tiles: TileTables = NO_TABLES
) -> tuple[Tensor, Tensor]:
    """Compute out (T_q, H, D_v) in q's dtype and lse (H, T_q) in float32 or float64, all in this wider dtype."""
    q_, k_, v_ = _clean(q, k, v, mask)
    scores, _ = masked_scores(q_, k_, mask, options)
    lse = torch.logsumexp(scores, dim=-1)
    if options.sinks is not None:
        with_sink = torch.logaddexp(lse, options.sinks[:, None].to(lse.dtype))
        lse = torch.where(lse == float("-inf"), lse, with_sink)  # a row that sees no key doesn't see the sink
    out = torch.einsum("hqk,khd->qhd", _probabilities(scores, lse) * kept_weights(q_, k_, options), v_)
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
    options: AttentionOptions,
    tiles: TileTables = NO_TABLES,
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Compute (dq, dk, dv, dsinks) in the shapes and dtypes of q, k, v, sinks (docs/math.md, section 3)."""
    q_, k_, v_ = _clean(q, k, v, mask)
    live = (mask.key_start < mask.key_stop)[:, None, None]
    dout_ = torch.where(live, dout.to(q_.dtype), 0.0)
    scores, slope = masked_scores(q_, k_, mask, options)
    p, kept = _probabilities(scores, lse), kept_weights(q_, k_, options)
    dp = torch.einsum("qhd,khd->hqk", dout_, v_) * kept
    delta = (p * dp).sum(-1)
    if dlse is not None:
        delta = delta - torch.where(live[:, 0, 0], dlse.to(q_.dtype), 0.0)
    ds = p * (dp - delta[..., None]) * slope * options.scale
    dq = torch.einsum("hqk,khd->qhd", ds, k_)
    dk = _sum_groups(torch.einsum("hqk,qhd->khd", ds, q_), k.shape[1])
    dv = _sum_groups(torch.einsum("hqk,qhd->khd", p * kept, dout_), v.shape[1])
    dsinks = None
    if options.sinks is not None:
        share = torch.exp(options.sinks[:, None] - lse).masked_fill(lse == float("-inf"), 0.0)
        dsinks = -(share * delta).sum(-1).to(options.sinks.dtype)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _clean(q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask) -> tuple[Tensor, Tensor, Tensor]:
    """Widen q, k and v, repeat key heads, and zero queries without keys and unseen keys, because 0 * NaN is NaN."""
    wide = torch.promote_types(q.dtype, torch.float32)
    group = q.shape[1] // k.shape[1]
    seeing = (mask.key_start < mask.key_stop)[:, None, None]
    transposed = mask.transpose()
    seen = (transposed.key_start < transposed.key_stop)[:, None, None]
    q = torch.where(seeing, q.to(wide), 0.0)
    k, v = (torch.where(seen, x.to(wide), 0.0).repeat_interleave(group, dim=1) for x in (k, v))
    return q, k, v


def masked_scores(
    q: Tensor, k: Tensor, mask: BlockDiagonalMask, options: AttentionOptions
) -> tuple[Tensor, Tensor | float]:
    """Compute scores [H, T_q, T_k], -inf for hidden keys, and their derivative by the scaled product of q and k.

    Both are in the dtype of q and k, which have the same heads.
    """
    scores = torch.einsum("qhd,khd->hqk", q, k) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = options.softcap * capped, 1 - capped**2
    if options.alibi_slopes is not None:
        assert mask.diagonal is not None
        places = torch.arange(mask.num_keys, device=q.device) if mask.key_places is None else mask.key_places
        distances = (mask.diagonal[:, None] - places).abs()
        scores = scores - (options.alibi_slopes.T[..., None] * distances).to(scores.dtype)
    return scores.masked_fill(~mask.to_dense(), float("-inf")), slope


def kept_weights(q: Tensor, k: Tensor, options: AttentionOptions) -> Tensor | float:
    """Return dropout's factors of weights, [H, T_q, T_k], in the dtype of q."""
    if not options.dropout_p:
        return 1.0
    assert options.dropout_seed is not None
    heads, queries, keys = (torch.arange(n, device=q.device) for n in (q.shape[1], q.shape[0], k.shape[0]))
    keep = keep_mask(options.dropout_seed, heads[:, None, None], queries[:, None], keys, options.dropout_p)
    return keep.to(q.dtype) / (1 - options.dropout_p)


def _probabilities(scores: Tensor, lse: Tensor) -> Tensor:
    # A row that sees no key has lse = -inf, and -inf - -inf is NaN. With 0 in its place the result is exp(-inf) = 0.
    return torch.exp(scores - lse.masked_fill(lse == float("-inf"), 0.0)[..., None])


def _sum_groups(grad: Tensor, kv_heads: int) -> Tensor:
    return grad.unflatten(1, (kv_heads, -1)).sum(2)
