"""How one batch is divided among ranks: take this rank's rows of a tensor, gather all rows, sum parts of a loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.functional import pad

from tritonpack.parallel.all_gather_with_grad import AllGatherWithGrad
from tritonpack.parallel.comm import Ranks, sum_over
from tritonpack.parallel.dimensions import Exchanges
from tritonpack.parallel.layouts import Layout

GradReduce = Literal["mean", "sum"]

# A compiled graph can't hold process groups or handles of collectives. It ends here, and another graph begins after it.
_REASON = "sequence parallelism exchanges with other ranks here, which ends a graph; leave fullgraph=True out"
outside_of_graphs = torch.compiler.disable(reason=_REASON)
between_graphs = torch.compiler.disable(recursive=False, reason=_REASON)  # the functions that it calls have graphs


@dataclass(frozen=True, eq=False)
class KeptRows:
    """Chosen rows of a batch, such as the tokens whose logits are computed, and which ranks own them.

    Attributes:
        shape: the shape of the chosen rows, such as (batch, 3) for the last three tokens of each row.
        layout: which of the chosen rows each rank owns.
        local: (own,) int64, the places of this rank's chosen rows in its shard.
    """

    shape: torch.Size
    layout: Layout
    local: Tensor


@dataclass(frozen=True, eq=False)
class Sharding:
    """How one batch is divided among ranks. Its B rows of T tokens count as one stream.

    The objective is the mean over ranks of their losses. So a loss that all ranks compute alike from gathered tensors,
    or that `total` has summed, counts once. Gradients are exact after they are averaged over ranks, or summed with
    `grad_reduce="sum"`.

    Attributes:
        ranks: the group.
        layout: which rows each rank owns.
        tokens: (B, T), the shape of the batch.
        columns: the number of padding tokens at the end of each row, so that every rank of a short batch has rows.
        exchange, heads_k_stride: as in `attend`.
        grad_reduce: "mean" or "sum".
    """

    ranks: Ranks
    layout: Layout
    tokens: torch.Size
    columns: int
    exchange: Exchanges
    heads_k_stride: int | None
    grad_reduce: GradReduce

    @property
    def rows(self) -> int:
        """How many of the batch's rows this rank owns."""
        return self.layout.lengths[self.ranks.rank]

    def shard(self, x: Tensor, dim: int = 0, *, fill: float = 0) -> Tensor:
        """This rank's rows of a tensor: its dimensions (B, T) at `dim` become (1, rows). Padding is `fill`."""
        if dim + 1 >= x.ndim or x.shape[dim : dim + 2] != self.tokens:
            raise ValueError(
                f"the batch has tokens of shape {tuple(self.tokens)}, which the tensor must have at dimension {dim}; "
                f"got shape {tuple(x.shape)}."
            )
        if self.columns:
            x = pad(x, [0, 0] * (x.ndim - dim - 2) + [0, self.columns], value=fill)
        return self.layout.shard(x.flatten(dim, dim + 1), self.ranks.rank, dim).unsqueeze(dim)

    def gather(self, x: Tensor) -> Tensor:
        """The shards (1, rows, ...) of all ranks as (B, T, ...), with a gradient for every rank's shard."""
        if x.shape[:2] != (1, self.rows):
            raise ValueError(
                f"rank {self.ranks.rank} has {self.rows} rows of the batch, so its shard must be (1, {self.rows}, ...);"
                f" got shape {tuple(x.shape)}."
            )
        batch, length = self.tokens
        return self._gather(x, self.layout)[0].unflatten(0, (batch, -1))[:, :length]

    def keep(self, rows: Tensor) -> KeptRows:
        """The owners of chosen rows: int64 numbers of tokens in the flattened batch, of any shape and in any order."""
        rows = rows + rows // self.tokens[1] * self.columns
        lengths = torch.tensor(self.layout.lengths, device=rows.device)
        ends = lengths.cumsum(0)
        places = self.layout.inverse.to(rows.device)[rows.flatten()]
        owners = torch.searchsorted(ends, places, right=True)
        counts = owners.bincount(minlength=self.ranks.size).tolist()
        layout = Layout(owners.argsort(stable=True).split(counts))
        own = layout.rows[self.ranks.rank]
        return KeptRows(rows.shape, layout, (places - (ends - lengths)[owners])[own])

    def shard_kept(self, x: Tensor, kept: KeptRows) -> Tensor:
        """This rank's part, (1, own), of a tensor with one number for each chosen row."""
        return kept.layout.shard(x.flatten(), self.ranks.rank)[None]

    def gather_kept(self, x: Tensor, kept: KeptRows) -> Tensor:
        """The chosen rows of all ranks, (1, own, ...) each, as (*kept.shape, ...)."""
        return self._gather(x, kept.layout)[0].unflatten(0, kept.shape)

    @outside_of_graphs
    def total(self, part: Tensor) -> Tensor:
        """The sum over ranks of their parts of a loss, equal on all of them."""
        return _Total.apply(part, self.ranks, self.ranks.size if self.grad_reduce == "mean" else 1)

    @outside_of_graphs
    def _gather(self, x: Tensor, layout: Layout) -> Tensor:
        """The rows of all ranks' shards along dimension 1, in the order of the layout."""
        if self.grad_reduce == "sum" and x.requires_grad:
            size = self.ranks.size
            x = x.view_as(x)
            x.register_hook(lambda gradient: gradient / size)
        return layout.unshard(AllGatherWithGrad(self.ranks.group, 1, layout.lengths)(x), 1)


class _Total(torch.autograd.Function):
    """(part, ranks, factor) -> the sum over ranks. The gradient of `part` is the gradient of the sum times `factor`."""

    @staticmethod
    def forward(ctx: Any, part: Tensor, ranks: Ranks, factor: int) -> Tensor:
        ctx.factor = factor
        return sum_over(part, ranks)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0] * ctx.factor, None, None
