"""Layers that mix along the row: documents travel whole to one rank each, and their outputs travel back.

A recurrence or a convolution begins anew with each document, so a rank that has all tokens of a document computes it as
one process does. Each rank gets about equally many tokens. A document that lies on one rank stays there if it fits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from tritonpack.parallel.comm import Ranks, all_to_all
from tritonpack.parallel.layouts import Layout
from tritonpack.patches.packed_batch import PackedBatch

LEAST = 2  # tokens of the longest document on a rank: with fewer, parameters that act between tokens get no gradient


class WholeDocuments:
    """The documents that this rank computes in layers that mix along the row, and how their rows travel.

    Attributes:
        packed_batch: these documents, as a batch of one row. If all are shorter than LEAST, one of zeros follows.
        ranks: the group.
        rows: how many rows of the batch this rank owns.
        sent: (n,) int64, which of them travel, in the order in which they are sent; the others are padding.
        sent_counts: how many of them go to each rank.
        received_counts: how many rows come from each rank.
        order: (m,) int64, the places of the documents' rows among the rows that come.
    """

    def __init__(self, batch: PackedBatch, layout: Layout, ranks: Ranks) -> None:
        """Divide the documents of a batch, whose flattened rows are those of `layout`. Waits for the device."""
        begin, length = batch.lengths()
        target = torch.full((layout.num_rows,), -1)  # the rank that computes each row
        document = torch.repeat_interleave(torch.arange(length.shape[0]), length)
        first = length.cumsum(0) - length
        places = begin[document] + torch.arange(document.shape[0]) - first[document]
        source = torch.empty_like(target)
        for rank, rows in enumerate(layout.rows_on_host):
            source[rows] = rank
        owned = (document * ranks.size + source[places]).bincount(minlength=length.shape[0] * ranks.size)
        target[places] = _divide(length, owned.view(-1, ranks.size))[document]
        self.ranks, self.rows = ranks, layout.lengths[ranks.rank]
        mine = target[layout.rows_on_host[ranks.rank]]
        sent = mine.argsort(stable=True)[int((mine < 0).sum()) :]
        self.sent_counts = mine[sent].bincount(minlength=ranks.size).tolist()
        received = [rows[target[rows] == ranks.rank] for rows in layout.rows_on_host]
        self.received_counts = [rows.shape[0] for rows in received]
        order = torch.cat(received).argsort()
        self.sent, self.order = sent.to(batch.device), order.to(batch.device)
        lengths = length[target[begin] == ranks.rank].tolist()
        if max(lengths, default=0) < LEAST:
            lengths.append(LEAST)
        positions = torch.cat([torch.arange(n) for n in lengths])[None].to(batch.device)
        self.packed_batch = PackedBatch(None, positions, None, positions.shape, batch.device, batch.serving, True)

    def fetch(self, x: Any) -> Any:
        """The rows of this rank's documents, from a tensor (1, rows, ...) of its own rows; other values unchanged."""
        if not isinstance(x, Tensor) or x.shape[:2] != (1, self.rows):
            return x
        found = _Travel.apply(x[0], self, True)[None]
        zeros = self.packed_batch.tokens[1] - found.shape[1]
        return torch.cat([found, found.new_zeros(1, zeros, *found.shape[2:])], 1) if zeros else found

    def give_back(self, x: Any) -> Any:
        """The inverse of `fetch`. Padding gets zeros."""
        if not isinstance(x, Tensor) or x.shape[:2] != self.packed_batch.tokens:
            return x
        return _Travel.apply(x[0, : self.order.shape[0]], self, False)[None]

    def travel(self, x: Tensor, inward: bool) -> Tensor:
        """Own rows to the rows of documents, or the way back."""
        width = x[:1].numel() if x.shape[0] else x.new_empty(1, *x.shape[1:]).numel()
        sent, received = [n * width for n in self.sent_counts], [n * width for n in self.received_counts]
        if inward:
            arrived = all_to_all(x[self.sent], sent, received, self.ranks)().view(-1, *x.shape[1:])
            return arrived[self.order]
        leaving = torch.empty_like(x)
        leaving[self.order] = x
        result = x.new_zeros(self.rows, *x.shape[1:])
        result[self.sent] = all_to_all(leaving, received, sent, self.ranks)().view(-1, *x.shape[1:])
        return result


class _Travel(torch.autograd.Function):
    """(x, documents, inward) -> rows of documents, or own rows. The gradient travels the other way."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, documents: WholeDocuments, inward: bool) -> Tensor:
        ctx.arguments = documents, inward
        return documents.travel(x, inward)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        documents, inward = ctx.arguments
        return documents.travel(gradients[0], not inward), None, None


def _divide(length: Tensor, owned: Tensor) -> Tensor:
    """The rank that computes each document, (documents,) int64.

    The longest document chooses first. It goes to the rank that owns most of its rows among those where it fits into an
    equal share of all tokens, or else to the rank with the fewest tokens so far.

    Args:
        length: (documents,) int64.
        owned: (documents, ranks) int64, how many rows of each document each rank owns.
    """
    ranks = owned.shape[1]
    share = max(-(-int(length.sum()) // ranks), int(length.max()) if length.numel() else 0)
    loads, chosen = [0] * ranks, torch.empty_like(length)
    lengths, counts = length.tolist(), owned.tolist()
    for document in length.argsort(descending=True, stable=True).tolist():
        n, own = lengths[document], counts[document]
        fits = [rank for rank in range(ranks) if loads[rank] + n <= share]
        rank = max(fits, key=lambda r: (own[r], -loads[r])) if fits else min(range(ranks), key=lambda r: loads[r])
        chosen[document] = rank
        loads[rank] += n
    return chosen
