"""Exchange by ring: blocks of keys and values travel from rank to rank, and each rank attends to the block it has.

Partial results are merged by their log-sum-exp in float32. Backward computes the gradients of each block
from the log-sum-exp over all keys. The gradients of a block travel behind it, in float32, until they reach the rank
that owns it. This rank computes one half of its own keys while the first block travels, and the other half while the
last gradients travel. A rank holds two blocks at a time, however many ranks there are.

Source: Liu, Zaharia and Abbeel, Ring Attention (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from tritonpack.parallel.comm import Arrival, shift, wide
from tritonpack.parallel.exchanges.call import Call, join, merge, merge_sinks, split
from tritonpack.parallel.exchanges.keys import OwnKeys, own_halves, own_keys


def forward(call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
    """out (n, H, D_v) and lse (H, n) of this rank's n rows."""
    blocks = _blocks(call, k, v)
    own, ks, vs = next(blocks)
    out, lse = call.forward(q, ks, vs, call.rows_mask(own))
    out = out.to(lse.dtype)
    for source, ks, vs in blocks:
        if call.visible()[source]:
            out, lse = merge(out, lse, *call.forward(q, ks, vs, call.rows_mask(source)))
    if sinks is not None:
        out, lse = merge_sinks(out, lse, sinks)
    return out.to(q.dtype), lse


def backward(
    call: Call, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """dq, dk, dv of this rank's rows."""
    size = call.ranks.size
    dq, dk, dv = (torch.zeros_like(x, dtype=wide(x.dtype)) for x in (q, k, v))
    coming: Arrival | None = None

    def add_own(part: OwnKeys) -> None:
        gradients = call.backward(dout, q, k[part.rows], v[part.rows], out, lse, part.mask)
        dq.add_(gradients[0])
        part.give_back(*gradients[1:], call.ranks)(dk, dv)

    first, *last = own_halves(call) if size > 1 else [own_keys(call)]
    for source, ks, vs in _blocks(call, k, v):
        if source == call.ranks.rank:
            add_own(first)
            continue
        if call.visible()[source]:
            dq_part, *dkv_part = call.backward(dout, q, ks, vs, out, lse, call.rows_mask(source))
            dq += dq_part
            dkv = join(*dkv_part).to(dq.dtype)
        else:
            dkv = dq.new_zeros(ks.shape[0], k.shape[1] * (k.shape[2] + v.shape[2]))
        if coming is not None:
            dkv += coming()
        coming = shift(dkv, call.layout.lengths[(source - 1) % size], call.ranks)
    for half in last:
        add_own(half)
    if coming is not None:
        for total, arrived in zip((dk, dv), split(coming(), k, v), strict=True):
            total += arrived
    return dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype)


def _blocks(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank's number, keys and values, beginning with this rank's. The next block travels meanwhile."""
    size, block = call.ranks.size, join(k, v)
    for step in range(size):
        source = (call.ranks.rank - step) % size
        coming = shift(block, call.layout.lengths[(source - 1) % size], call.ranks) if step + 1 < size else None
        yield source, *split(block, k, v)
        if coming is not None:
            block = coming()
