"""Exchange by ring: the ranks' keys and values travel from rank to rank, and each attends to what visits.

Partial results are merged by their log-sum-exp in float32 (docs/math.md, section 5). Backward computes each visiting
block's share from the whole row's log-sum-exp; gradients of keys travel on with their block, in float32, until they are
home. Memory is that of two blocks, however many ranks there are.

Bytes that a rank receives, with T / R rows per rank, R ranks, n key heads of dimensions D and D_v, and b bytes per
number: forward (R - 1) T / R n (D + D_v) b, backward the same plus T n (D + D_v) max(b, 4).

Source: Liu, Zaharia and Abbeel, Ring Attention (arXiv:2310.01889).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import shift, wide
from tritonpack.parallel.exchanges.call import Call

_ALL = slice(None)


class Ring(torch.autograd.Function):
    """(call, q, k, v, sinks) -> out (n, H, D_v), lse (H, n) of this rank's n rows."""

    @staticmethod
    def forward(ctx: Any, call: Call, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None) -> tuple[Tensor, Tensor]:
        exact = torch.promote_types(q.dtype, torch.float32)
        out = q.new_zeros(q.shape[0], q.shape[1], v.shape[2], dtype=exact)
        lse = q.new_full((q.shape[1], q.shape[0]), float("-inf"), dtype=exact)
        for source, ks, vs in _visiting(call, k, v):
            if call.visible()[source]:
                part, part_lse = call.forward(q, ks, vs, call.rows_mask(source), _ALL, None)
                merged = torch.logaddexp(lse, part_lse)
                out = out * _share(lse, merged) + part * _share(part_lse, merged)
                lse = merged
        if sinks is not None:  # a key without a value; a row that sees nothing has no sink either
            merged = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sinks[:, None]))
            out, lse = out * _share(lse, merged), merged
        out = out.to(q.dtype)
        ctx.save_for_backward(q, k, v, out, lse, sinks)
        ctx.call = call
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor | None) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse, sinks = ctx.saved_tensors
        call, ranks = ctx.call, ctx.call.ranks
        dout, dlse = gradients
        dout = torch.zeros_like(out) if dout is None else dout
        dq = torch.zeros_like(q, dtype=wide(q.dtype))
        size = k.shape[1] * (k.shape[2] + v.shape[2])
        coming: tuple[Tensor, list[Any]] | None = None
        for source, ks, vs in _visiting(call, k, v):
            dkv = dq.new_zeros(call.lengths[source] * size)
            if call.visible()[source]:
                dq_part, dk, dv, _ = call.backward(
                    dout, dlse, q, ks, vs, out, lse, call.rows_mask(source), _ALL, None
                )  # fmt: skip
                dq += dq_part
                dkv = torch.cat([dk.flatten(), dv.flatten()]).to(dkv.dtype)
            if coming is not None:
                dkv += _arrived(coming)
            if ranks.size > 1:
                coming = shift(dkv, call.lengths[(source - 1) % ranks.size] * size, ranks)
        if coming is not None:
            dkv = _arrived(coming)
        dk, dv = _split(dkv, k, v, k.shape[0])
        dsinks = None if sinks is None else _sink_gradients(sinks, dout, dlse, out, lse)
        return None, dq.to(q.dtype), dk.to(k.dtype), dv.to(v.dtype), dsinks


def _visiting(call: Call, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Each rank's number, keys and values, the own first; the next block travels while the caller computes."""
    size, per_row = call.ranks.size, k.shape[1] * (k.shape[2] + v.shape[2])
    block = torch.cat([k.flatten(), v.flatten()])
    for step in range(size):
        source = (call.ranks.rank - step) % size
        coming = None
        if step + 1 < size:
            coming = shift(block, call.lengths[(source - 1) % size] * per_row, call.ranks)
        yield source, *_split(block, k, v, call.lengths[source])
        if coming is not None:
            block = _arrived(coming)


def _arrived(coming: tuple[Tensor, list[Any]]) -> Tensor:
    block, handles = coming
    for handle in handles:
        handle.wait()
    return block


def _split(block: Tensor, k: Tensor, v: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """A flat block of `rows` rows as keys and values, shaped like k and v."""
    numbers = rows * k.shape[1] * k.shape[2]
    return block[:numbers].view(rows, *k.shape[1:]), block[numbers:].view(rows, *v.shape[1:])


def _share(lse: Tensor, merged: Tensor) -> Tensor:
    """(T, H, 1): what a partial result weighs in the merged one; 0 where nothing was seen."""
    return torch.where(lse == float("-inf"), 0.0, torch.exp(lse - merged)).T[..., None]


def _sink_gradients(sinks: Tensor, dout: Tensor, dlse: Tensor | None, out: Tensor, lse: Tensor) -> Tensor:
    """(H,): these rows' share (docs/math.md, section 6)."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1).T
    if dlse is not None:
        delta = delta - dlse
    empty = lse == float("-inf")
    share = torch.exp(sinks[:, None] - lse)
    return -torch.where(empty, 0.0, share * delta).sum(1).to(sinks.dtype)
