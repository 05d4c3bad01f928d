"""Sharding: one batch spread over ranks: its shards, what is gathered of them again, and sums over all of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.all_gather_with_grad import AllGatherWithGrad
from tritonpack.parallel.attention import Exchange, attend
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout

GradReduce = Literal["mean", "sum"]

# Groups, and handles of what is under way, are nothing for a graph: it ends there, and another one begins behind.
exchanges = torch.compiler.disable(reason="sequence parallelism exchanges with other ranks here")


@dataclass(frozen=True)
class Kept:
    """Some rows of a batch, in an order of their own, and where ranks have them.

    Attributes:
        shape: of the rows as they were asked for, such as (batch, 3) for the last three tokens.
        chosen: (own rows among them,) int64, which of them are this rank's.
        local: likewise, their places in its shard.
        lengths: how many of them each rank has.
        order: (rows,) int64, where each lies in what the ranks have of them, laid end to end.
    """

    shape: torch.Size
    chosen: Tensor
    local: Tensor
    lengths: list[int]
    order: Tensor

    def pick(self, x: Tensor) -> Tensor:
        """This rank's of what there is one of for each of the rows, as (1, own)."""
        return x.flatten()[self.chosen.to(x.device)][None]


@dataclass(frozen=True, eq=False)
class Sharding:
    """How one batch is spread over ranks, its rows laid end to end as one stream.

    The objective is the mean over ranks of the losses that they compute: a loss that all ranks compute alike from
    gathered tensors is that loss, and so is one summed by `total`. With `grad_reduce="mean"` gradients are exact once
    they are averaged over the ranks, with "sum" once they are summed.

    Attributes:
        ranks: the group.
        layout: which rows each rank owns.
        tokens: (B, T), the shape of the batch.
        columns: how many tokens of padding stand at the end of its rows in the layout: a model can't be run on none, so
            a very short batch is filled up until every rank has some.
        exchange, heads_k_stride: as `attend` takes them.
        grad_reduce: as above.
    """

    ranks: Ranks
    layout: Layout
    tokens: torch.Size
    columns: int
    exchange: Exchange
    heads_k_stride: int | None
    grad_reduce: GradReduce

    @property
    def rows(self) -> int:
        """How many of the batch's rows this rank has."""
        return self.layout.lengths[self.ranks.rank]

    def shard(self, x: Tensor, dim: int = 0, *, fill: float = 0) -> Tensor:
        """This rank's rows of a tensor with the batch's (B, T) at `dim` and `dim + 1`: there, they are (1, rows).

        `fill` stands where the batch has been filled up.
        """
        if dim + 1 >= x.ndim or x.shape[dim : dim + 2] != self.tokens:
            raise ValueError(
                f"the batch has tokens of shape {tuple(self.tokens)}, which the tensor must have at dimension {dim}; "
                f"got shape {tuple(x.shape)}."
            )
        if self.columns:
            x = pad(x, [0, 0] * (x.ndim - dim - 2) + [0, self.columns], value=fill)
        rows = self.layout.rows[self.ranks.rank].to(x.device)
        return x.flatten(dim, dim + 1).index_select(dim, rows).unsqueeze(dim)

    def gather(self, x: Tensor) -> Tensor:
        """The shards (1, rows, ...) of all ranks as (B, T, ...), with a gradient for every rank's shard."""
        if x.shape[:2] != (1, self.rows):
            raise ValueError(
                f"rank {self.ranks.rank} has {self.rows} rows of the batch, so its shard must be (1, {self.rows}, ...);"
                f" got shape {tuple(x.shape)}."
            )
        whole = self._gather(x, self.layout.lengths)
        batch, length = self.tokens
        return self.layout.unshard(whole, 1)[0].unflatten(0, (batch, -1))[:, :length]

    def keep(self, rows: Tensor) -> Kept:
        """Find rows of the batch, int64 numbers of tokens in the flattened batch in any shape and order."""
        rows = rows + rows // self.tokens[1] * self.columns
        lengths = torch.tensor(self.layout.lengths, device=rows.device)
        ends = lengths.cumsum(0)
        places = self.layout.inverse.to(rows.device)[rows.flatten()]
        owners = torch.searchsorted(ends, places, right=True)
        chosen = (owners == self.ranks.rank).nonzero().flatten()
        local = (places - (ends - lengths)[owners])[chosen]
        counts = owners.bincount(minlength=self.ranks.size).tolist()
        return Kept(rows.shape, chosen, local, counts, owners.argsort(stable=True).argsort())

    def gather_kept(self, x: Tensor, kept: Kept) -> Tensor:
        """What ranks computed of kept rows, (1, own, ...), as (*kept.shape, ...)."""
        return self._gather(x, kept.lengths)[0].index_select(0, kept.order).unflatten(0, kept.shape)

    @exchanges
    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of their parts of a loss, equal on all of them."""
        factor = self.ranks.size if self.grad_reduce == "mean" else 1
        return _Total.apply(part, self.ranks, factor)

    @exchanges
    def attend(self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, **options: Any) -> Tensor:
        """Attention of this rank's rows by the batch's mask; shapes and options as `attend` takes them."""
        return attend(
            q,
            k,
            v,
            mask,
            self.layout,
            self.ranks.group,
            exchange=self.exchange,
            heads_k_stride=self.heads_k_stride,
            **options,
        )

    @exchanges
    def _gather(self, x: Tensor, lengths: Sequence[int]) -> Tensor:
        if self.grad_reduce == "sum":
            x = _Scaled.apply(x, 1 / self.ranks.size)
        return AllGatherWithGrad(self.ranks.group, 1, lengths)(x)


class _Total(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, factor: int) -> Tensor:
        ctx.factor = factor
        total = part.clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.factor, None, None


class _Scaled(torch.autograd.Function):
    """x as it is, its gradient times a factor."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.factor, None
