"""Exchange by ring: blocks of keys and values travel from rank to rank, and each rank attends to the block it has.

Partial results are merged by their log-sum-exp in float32 (docs/math.md, section 5). Backward computes the gradients of
each block from the log-sum-exp over all keys. The gradients of a block travel with it, in float32, until they reach the
rank that owns it. A rank holds two blocks at a time, however many ranks there are.

Source: Liu, Zaharia and Abbeel, Ring Attention (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonpack.parallel.comm import Arrival, shift, wide
from tritonpack.parallel.exchanges.call import Call, Gradients, join, split

_ALL = slice(None)


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
    exact = torch.promote_types(q.dtype, torch.float32)
    out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=exact)
    lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=exact)
    for source, ks, vs in _blocks(call, k, v):
        if call.visible()[source]:
            part, part_lse = call.forward(q, ks, vs, call.rows_mask(source), _ALL, None)
            merged = torch.logaddexp(lse, part_lse)
            out = out * _weight(lse, merged) + part * _weight(part_lse, merged)
            lse = merged
    if sinks is not None:  # a key without a value; a row that sees no key has no sink either
        merged = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sinks[:, None]))
        out, lse = out * _weight(lse, merged), merged
    return out.to(q.dtype), lse


def backward(
    call: Call, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, out: Tensor,
    lse: Tensor,
) -> Gradients:  # fmt: skip
    """dq, dk, dv of this rank's rows, and its part of dsinks."""
    dq = torch.zeros_like(q, dtype=wide(q.dtype))
    coming: Arrival | None = None
    for source, ks, vs in _blocks(call, k, v):
        if call.visible()[source]:
            dq_part, dk, dv, _ = call.backward(dout, dlse, q, ks, vs, out, lse, call.rows_mask(source), _ALL, None)
            dq += dq_part
            dkv = join(dk, dv).to(dq.dtype)
        else:
            dkv = dq.new_zeros(ks.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))
        if coming is not None:
            dkv += coming()
        if call.ranks.size > 1:
            coming = shift(dkv, call.layout.lengths[(source - 1) % call.ranks.size], call.ranks)
    dk, dv = split(dkv if coming is None else coming(), k, v)
    dsinks = None if sinks is None else _sink_gradients(sinks, dout, dlse, out, lse)
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _blocks(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank's number, keys and values, beginning with this rank's. The next block travels meanwhile."""
    size, block = call.ranks.size, join(k, v)
    for step in range(size):
        source = (call.ranks.rank - step) % size
        coming = shift(block, call.layout.lengths[(source - 1) % size], call.ranks) if step + 1 < size else None
        yield source, *split(block, k, v)
        if coming is not None:
            block = coming()


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """(T, H, 1): the weight of a partial result in the merged one; 0 where a row has seen no key."""
    return torch.where(lse == float("-inf"), 0.0, torch.exp(lse - merged)).T[..., None]


def _sink_gradients(sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """(H,): the part of the gradient that comes from this rank's rows (docs/math.md, section 6)."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1).T
    if dlse is not None:
        delta = delta - dlse
    share = torch.exp(sinks[:, None] - lse)
    return -torch.where(lse == float("-inf"), 0.0, share * delta).sum(1).to(sinks.dtype)
