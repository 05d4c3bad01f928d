"""Common parts of the exchanges: the arguments of one call of `attend`, masks between ranks, calls of the backend."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack import ops
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges.merge import sink_gradients
from tritonpack.parallel.layouts import Layout

ALL_HEADS = slice(None)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `attend` between ranks among which keys travel.

    Attributes:
        options: the options of attention without sinks, which are a differentiable argument.
        backend: a name of `backends.BACKENDS`.
    """

    ranks: Ranks
    layout: Layout
    mask: BlockDiagonalMask
    options: AttentionOptions
    backend: str

    def rows_mask(self, source: int) -> BlockDiagonalMask:
        """The mask between this rank's queries and the keys of the rank `source`."""
        return rows_mask(self.mask, self.layout, self.ranks.rank, source)

    def visible(self) -> list[bool]:
        """For each rank, whether this rank's queries see any of its keys; waits for the device once per mask."""

        def visible() -> list[bool]:
            masks = [self.rows_mask(source) for source in range(self.ranks.size)]
            return [bool((one.key_start < one.key_stop).any()) for one in masks]

        return self.mask.cached(("visible", self.layout, self.ranks.rank), visible)

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, heads: slice = ALL_HEADS
    ) -> tuple[Tensor, Tensor]:
        """out and lse of some query heads over some keys, without autograd."""
        options = self.options if self.options.alibi_slopes is None else of_heads(self.options, heads)
        return ops.attention(q, k, v, *ops.plan(q, k, v, mask, options, self.backend, backward=False))

    def backward(
        self, dout: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor, mask: BlockDiagonalMask,
        heads: slice = ALL_HEADS,
    ) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk and dv of some query heads and some keys. `out` and `lse` are the results over all keys."""
        arguments = ops.plan(q, k, v, mask, of_heads(self.options, heads), self.backend, backward=True)
        return ops.attention_backward(dout, None, q, k, v, out, lse, *arguments)[:3]


class Exchanged(torch.autograd.Function):
    """(exchange, call, q, k, v, sinks) -> out (n, H, D_v) of this rank's n rows, by `ring` or a `ByHeads`."""

    @staticmethod
    def forward(ctx: Any, exchange: Any, call: Call, *tensors: Tensor | None) -> Tensor:
        out, lse = exchange.forward(call, *tensors)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.arguments = exchange, call
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dout: Tensor) -> tuple[Tensor | None, ...]:
        exchange, call = ctx.arguments
        *tensors, sinks, out, lse = ctx.saved_tensors
        dsinks = None if sinks is None else sink_gradients(sinks, dout, out, lse)
        return None, None, *exchange.backward(call, dout, *tensors, out, lse), dsinks


def rows_mask(mask: BlockDiagonalMask, layout: Layout, rank: int, source: int | None = None) -> BlockDiagonalMask:
    """The mask between the queries of `rank` and all keys, or the keys of the rank `source`; cached on `mask`."""
    return mask.cached(
        ("rows", layout, rank, source),
        lambda: mask.restrict(layout.rows[rank], None if source is None else layout.rows[source]),
    )


def of_heads(options: AttentionOptions, heads: slice) -> AttentionOptions:
    """The options for some query heads."""
    slopes, sinks = options.alibi_slopes, options.sinks
    return replace(
        options,
        sinks=None if sinks is None else sinks[heads],
        alibi_slopes=None if slopes is None else slopes[:, heads],
    )


def join(k: Tensor, v: Tensor) -> Tensor:
    """k (T, n, D) and v (T, n, D_v) as one tensor (T, n (D + D_v)), for one message."""
    return torch.cat([k.flatten(1), v.flatten(1)], 1)


def split(joined: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """A joined tensor of some heads of k and v as (T, heads, D) and (T, heads, D_v)."""
    heads = joined.shape[1] // (k.shape[2] + v.shape[2])
    ks, vs = joined.split([heads * k.shape[2], heads * v.shape[2]], 1)
    return ks.unflatten(1, (heads, k.shape[2])), vs.unflatten(1, (heads, v.shape[2]))
