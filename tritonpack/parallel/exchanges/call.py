"""Common parts of the exchanges: the arguments of one call of `attend`, masks between ranks, merging of parts.

The kernels compute each part of the keys without sinks. A sink is one more part, a key without a value (docs/math.md,
sections 5 and 6).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tritonpack import ops
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.options import AttentionOptions
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout

ALL_HEADS = slice(None)


@dataclass(frozen=True, eq=False)
class Call:
    """One call of `attend` between ranks among which keys travel.

    Attributes:
        exchange: a name of `dimensions.KeyExchange`.
        options: the options of attention without sinks, which are a differentiable argument.
        backend: a name of `backends.BACKENDS`.
    """

    exchange: str
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
        masks = map(self.rows_mask, range(self.ranks.size))
        return self.mask.cached(
            ("visible", self.layout, self.ranks.rank),
            lambda: [bool((one.key_start < one.key_stop).any()) for one in masks],
        )

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


def merge(out: Tensor, lse: Tensor, part: Tensor, part_lse: Tensor) -> tuple[Tensor, Tensor]:
    """out (T, H, D_v) and lse (H, T), in float32 or float64, merged with a partial result of other keys."""
    merged = torch.logaddexp(lse, part_lse)
    return (out * _weight(lse, merged)).add_(part * _weight(part_lse, merged)), merged


def merge_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """out (T, H, D_v) and lse (H, T), as in `merge`, with sinks (H,); a row that sees no key has no sink either."""
    merged = torch.where(lse == float("-inf"), lse, torch.logaddexp(lse, sinks[:, None]))
    return out * _weight(lse, merged), merged


def sink_gradients(sinks: Tensor, dout: Tensor, out: Tensor, lse: Tensor) -> Tensor:
    """(H,): the part of the gradient that comes from this rank's rows."""
    delta = (out.to(lse.dtype) * dout.to(lse.dtype)).sum(-1).T
    share = torch.exp(sinks[:, None] - lse)
    return -torch.where(lse == float("-inf"), 0.0, share * delta).sum(1).to(sinks.dtype)


def _weight(lse: Tensor, merged: Tensor) -> Tensor:
    """(T, H, 1): the weight of a partial result in the merged one; 0 where a row has seen no key."""
    return torch.where(lse == float("-inf"), 0.0, torch.exp(lse - merged)).T[..., None]
