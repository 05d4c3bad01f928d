"""Layers that mix along the row: documents travel whole to one rank each, and their outputs travel back.

A recurrence or a convolution begins anew with each document, so a rank that has all tokens of a document computes it as
one process does. Each rank gets about equally many tokens. A document that lies on one rank stays there if it fits. A
document that is much longer than a rank's share of the batch is refused.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import Ranks, all_to_all
from tritonpack.parallel.layouts import Layout
from tritonpack.patches.packed_batch import PackedBatch

LEAST = 2  # tokens of the longest document on a rank: with fewer, parameters that act between tokens get no gradient
SLACK = 1.05  # a rank's tokens over the mean, up to which documents stay where they are
LONGEST = 1.25  # tokens of a document over a rank's equal share of the batch


class WholeDocuments:
    """The documents that this rank computes in layers that mix along the row, and how their rows travel.

    Attributes:
        packed_batch: these documents, as a batch of one row. If all are shorter than LEAST, one of zeros follows.
    """

    def __init__(self, batch: PackedBatch, layout: Layout, ranks: Ranks) -> None:
        """Divide the documents of a batch, whose flattened rows are those of `layout`. Waits for the device.

        Raises:
            ValueError: on every rank, if a document has more than LONGEST times a rank's share of the tokens.
        """
        begin, length = batch.lengths()
        _require_short(length, ranks.size)
        document = torch.repeat_interleave(torch.arange(length.shape[0], device="cpu"), length)
        rows = begin[document] + torch.arange(document.shape[0], device="cpu") - (length.cumsum(0) - length)[document]
        owner = torch.empty(layout.num_rows, dtype=torch.int64, device="cpu")
        for rank, own in enumerate(layout.rows_on_host):
            owner[own] = rank
        owned = (document * ranks.size + owner[rows]).bincount(minlength=length.shape[0] * ranks.size)
        chosen = _divide(length, owned.view(-1, ranks.size))
        wanted = [rows[chosen[document] == rank] for rank in range(ranks.size)]
        self._travel = RowTravel(layout, ranks, wanted, batch.device)
        self.packed_batch = _in_one_row(length[chosen == ranks.rank], batch)

    def fetch(self, x: Any) -> Any:
        """The rows of this rank's documents, from a tensor (1, rows, ...) of its own rows; other values unchanged."""
        if not isinstance(x, Tensor) or x.shape[:2] != (1, self._travel.rows):
            return x
        x = self._travel.fetch(x[0])[None]
        zeros = self.packed_batch.tokens[1] - x.shape[1]  # for the document that `_in_one_row` has appended
        return torch.cat([x, x.new_zeros(1, zeros, *x.shape[2:])], 1) if zeros else x

    def give_back(self, x: Any) -> Any:
        """The inverse of `fetch`. Padding gets zeros."""
        if not isinstance(x, Tensor) or x.shape[:2] != self.packed_batch.tokens:
            return x
        return self._travel.give_back(x[0, : self._travel.wanted])[None]


def _require_short(length: Tensor, ranks: int) -> None:
    """Refuse documents that one rank can't compute in about its share of the time and the memory."""
    longest, total = int(length.max()) if length.numel() else 0, int(length.sum())
    if longest * ranks > LONGEST * total:
        raise ValueError(
            f"a document has {longest} of the batch's {total} tokens, but layers with recurrences or convolutions "
            f"compute each document whole on one of the {ranks} ranks, so it may have {LONGEST} times a rank's share, "
            f"{int(LONGEST * total / ranks)} tokens. Put more documents into a batch, share it among fewer ranks, or "
            "cut documents."
        )


def _in_one_row(length: Tensor, batch: PackedBatch) -> PackedBatch:
    """Documents of these lengths, (documents,) int64, as a batch of one row.

    A document of LEAST tokens follows if all are shorter.
    """
    lengths = length.tolist()
    if max(lengths, default=0) < LEAST:
        lengths.append(LEAST)
    positions = torch.cat([torch.arange(n, device="cpu") for n in lengths])[None].to(batch.device)
    return PackedBatch(None, positions, None, positions.shape, batch.device, batch.serving, by_document=True)


def _divide(length: Tensor, owned: Tensor) -> Tensor:
    """The rank that computes each document, (documents,) int64.

    The longest document is placed first. It goes to the rank that owns most of its rows among those where it fits into
    SLACK times an equal share of all tokens, or else to the rank with the fewest tokens so far.

    Args:
        length: (documents,) int64.
        owned: (documents, ranks) int64, how many rows of each document each rank owns.
    """
    ranks = owned.shape[1]
    share = max(math.ceil(SLACK * int(length.sum()) / ranks), int(length.max()) if length.numel() else 0)
    loads, chosen = [0] * ranks, torch.empty_like(length)
    lengths, counts = length.tolist(), owned.tolist()
    for document in length.argsort(descending=True, stable=True).tolist():
        n, own = lengths[document], counts[document]
        fits = [rank for rank in range(ranks) if loads[rank] + n <= share]
        rank = max(fits, key=lambda r: (own[r], -loads[r])) if fits else min(range(ranks), key=lambda r: loads[r])
        chosen[document] = rank
        loads[rank] += n
    return chosen


class RowTravel:
    """An exchange of rows between ranks: each gets the rows that it wants, and later gives results back.

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
            wanted: for each rank the rows that it wants, ascending int64 in host memory. No two ranks want one row.
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
        """The inverse of `fetch`. Rows that no rank wants get zeros."""
        return _Travel.apply(x, self, False)

    def travel(self, x: Tensor, there: bool) -> Tensor:
        """As `fetch`, or as `give_back`, without autograd."""
        if there:
            result = x.new_empty(self.wanted, *x.shape[1:])
            result[self._arriving] = self._exchange(x[self._leaving], self._sent, self._received)
            return result
        result = x.new_zeros(self.rows, *x.shape[1:])
        result[self._leaving] = self._exchange(x[self._arriving], self._received, self._sent)
        return result

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        """Send rows to the ranks that want them, and return the rows received."""
        if not self.moves:
            return x
        width = x.new_empty(1, *x.shape[1:]).numel()
        arrive = all_to_all(x, [n * width for n in sent], [n * width for n in received], self.ranks)
        return arrive().view(sum(received), *x.shape[1:])


class _Travel(torch.autograd.Function):
    """(x, travel, there) -> the wanted rows if `there`, else own rows. The gradient takes the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, travel: RowTravel, there: bool) -> Tensor:
        ctx.arguments = travel, there
        return travel.travel(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        travel, there = ctx.arguments
        return travel.travel(gradients[0], not there), None, None
