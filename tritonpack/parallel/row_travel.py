"""Rows of a sharded batch that a rank needs, from the ranks that own them, differentiably."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import Ranks, all_to_all
from tritonpack.parallel.layouts import Layout


class RowTravel:
    """How the rows that ranks want travel to them, and back.

    Attributes:
        ranks: the group.
        rows: how many rows of the batch this rank owns.
        wanted: how many rows this rank wants.
    """

    def __init__(self, layout: Layout, ranks: Ranks, wanted: Sequence[Tensor], device: torch.device) -> None:
        """Plan the exchange.

        Args:
            layout: which rows each rank owns.
            ranks: the group.
            wanted: for each rank the rows that it wants, ascending int64 in host memory.
            device: where the rows lie.
        """
        self.ranks, self.rows, self.wanted = ranks, layout.lengths[ranks.rank], wanted[ranks.rank].shape[0]
        owner, place = torch.empty(2, layout.num_rows, dtype=torch.int64)
        for rank, rows in enumerate(layout.rows_on_host):
            owner[rows], place[rows] = rank, torch.arange(rows.shape[0])
        leaving = [place[rows[owner[rows] == ranks.rank]] for rows in wanted]
        owners = owner[wanted[ranks.rank]]
        self._sent = [rows.shape[0] for rows in leaving]
        self._received = owners.bincount(minlength=ranks.size).tolist()
        self._leaving = torch.cat(leaving).to(device)
        self._arriving = owners.argsort(stable=True).to(device)  # the places of the rows that come

    def fetch(self, x: Tensor) -> Tensor:
        """The wanted rows, (wanted, ...), of all ranks' own rows, (rows, ...) each."""
        return _Travel.apply(x, self, True)

    def give_back(self, x: Tensor) -> Tensor:
        """The transpose of `fetch`: for each own row the sum of what ranks have for it. Unwanted rows get zeros."""
        return _Travel.apply(x, self, False)

    def travel(self, x: Tensor, there: bool) -> Tensor:
        """As `fetch`, or as `give_back`, without autograd."""
        width = x.new_empty(1, *x.shape[1:]).numel()
        sent, received = [n * width for n in self._sent], [n * width for n in self._received]
        if there:
            arrived = all_to_all(x[self._leaving], sent, received, self.ranks)()
            result = x.new_empty(self.wanted, *x.shape[1:])
            result[self._arriving] = arrived.view(-1, *x.shape[1:])
            return result
        arrived = all_to_all(x[self._arriving], received, sent, self.ranks)()
        return x.new_zeros(self.rows, *x.shape[1:]).index_add_(0, self._leaving, arrived.view(-1, *x.shape[1:]))


class _Travel(torch.autograd.Function):
    """(x, travel, there) -> the wanted rows, or own rows. The gradient travels the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: RowTravel, there: bool) -> Tensor:
        ctx.arguments = travel, there
        return travel.travel(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        travel, there = ctx.arguments
        return travel.travel(gradients[0], not there), None, None
