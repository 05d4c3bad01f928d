"""Rows of a sharded batch that a rank needs, from the ranks that own them, differentiably."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import Ranks, all_to_all, wide
from tritonpack.parallel.layouts import Layout


class RowTravel:
    """How the rows that ranks want travel to them, and back.

    Attributes:
        ranks: the group.
        rows: how many rows of the batch this rank owns.
        wanted: how many rows this rank wants.
        moves: whether any rank wants rows of another one. If not, nothing is sent.
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
        owner, place = torch.empty(2, layout.num_rows, dtype=torch.int64, device="cpu")
        for rank, rows in enumerate(layout.rows_on_host):
            owner[rows], place[rows] = rank, torch.arange(rows.shape[0], device="cpu")
        leaving = [place[rows[owner[rows] == ranks.rank]] for rows in wanted]
        owners = owner[wanted[ranks.rank]]
        self.moves = any(bool((owner[rows] != rank).any()) for rank, rows in enumerate(wanted))
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
        if there:
            result = x.new_empty(self.wanted, *x.shape[1:])
            result[self._arriving] = self._exchange(x[self._leaving], self._sent, self._received)
            return result
        arrived = self._exchange(x[self._arriving], self._received, self._sent)
        total = x.new_zeros(self.rows, *x.shape[1:], dtype=wide(x.dtype))
        # Rank after rank: no rank wants a row twice, so sums have the same order in every run.
        for rows, part in zip(self._leaving.split(self._sent), arrived.split(self._sent), strict=True):
            total[rows] += part
        return total.to(x.dtype)

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """The rows that come, from the rows that go."""
        if not self.moves:
            return x
        width = x.new_empty(1, *x.shape[1:]).numel()
        arrive = all_to_all(x, [n * width for n in sent], [n * width for n in received], self.ranks)
        return arrive().view(sum(received), *x.shape[1:])


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
