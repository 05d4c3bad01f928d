"""The division of one batch among ranks: take this rank's rows of a tensor, gather all rows, sum parts of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tritonpack.parallel.all_gather_with_grad import AllGatherWithGrad
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.dimensions import Dimensions
from tritonpack.parallel.layouts import Layout

# A compiled graph can't hold process groups or handles of collectives. It ends here, and another graph begins after it.
_REASON = "sequence parallelism exchanges with other ranks here, which ends a graph; leave fullgraph=True out"
outside_of_graphs = torch.compiler.disable(reason=_REASON)
between_graphs = torch.compiler.disable(recursive=False, reason=_REASON)  # the functions that it calls have graphs


@dataclass(frozen=True, eq=False)
class Sharding:
    """The division of one batch among ranks. Its B rows of T tokens count as one stream.

    Gradients are exact when averaged over ranks, for a loss that all ranks compute alike or that `total` has summed.

    Attributes:
        dimensions: how ranks share attention.
        layout: which rows each rank owns.
        tokens: (B, T), the shape of the batch.
        columns: the number of padding tokens at the end of each row, so that every rank of a short batch has rows.
    """

    dimensions: Dimensions
    layout: Layout
    tokens: torch.Size
    columns: int

    @property
    def rows(self) -> int:
        """The number of the batch's rows that this rank owns."""
        return self.layout.lengths[self.dimensions.ranks.rank]

    def shard(self, x: Tensor, dim: int = 0, *, fill: float = 0) -> Tensor:
        """This rank's rows of a tensor: its dimensions (B, T) at `dim` become (1, rows). Padding is `fill`."""
        if dim + 1 >= x.ndim or x.shape[dim : dim + 2] != self.tokens:
            raise ValueError(
                f"the batch has tokens of shape {tuple(self.tokens)}, which the tensor must have at dimension {dim}; "
                f"got shape {tuple(x.shape)}."
            )
        if self.columns:
            x = pad(x, [0, 0] * (x.ndim - dim - 2) + [0, self.columns], value=fill)
        return self.take(x, dim)

    def take(self, x: Tensor, dim: int = 0) -> Tensor:
        """`shard` of a tensor that has the padding."""
        return self.layout.shard(x.flatten(dim, dim + 1), self.dimensions.ranks.rank, dim).unsqueeze(dim)

    @outside_of_graphs
    def gather(self, x: Tensor) -> Tensor:
        """The shards (1, rows, ...) of all ranks as (B, T, ...), with a gradient for every rank's shard."""
        if x.shape[:2] != (1, self.rows):
            raise ValueError(
                f"rank {self.dimensions.ranks.rank} has {self.rows} rows of the batch, so its shard must be "
                f"(1, {self.rows}, ...); got shape {tuple(x.shape)}."
            )
        batch, length = self.tokens
        whole = self.layout.unshard(AllGatherWithGrad(self.dimensions.ranks.group, 1, self.layout.lengths)(x), 1)
        return whole[0].unflatten(0, (batch, -1))[:, :length]

    @outside_of_graphs
    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of their parts of a loss, equal on all of them."""
        return _Total.apply(part, self.dimensions.ranks)


class _Total(torch.autograd.Function):
    """(part, ranks) -> the sum over ranks. The gradient of `part` is the sum's gradient times the number of ranks."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks) -> Tensor:
        ctx.size, total = ranks.size, part.clone()
        dist.all_reduce(total, group=ranks.group)
        return total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.size, None
