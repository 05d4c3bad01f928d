"""Layers that mix along the row: documents travel whole to one rank each, and their outputs travel back.

A recurrence or a convolution begins anew with each document, so a rank that has all tokens of a document computes it as
one process does. Each rank gets about equally many tokens. A document that lies on one rank stays there if it fits.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout
from tritonpack.parallel.row_travel import RowTravel
from tritonpack.patches.packed_batch import PackedBatch

LEAST = 2  # tokens of the longest document on a rank: with fewer, parameters that act between tokens get no gradient
SLACK = 1.05  # a rank's tokens over the mean, up to which documents stay where they are
UNEVEN = 1.25  # a rank's tokens over the mean, from which a document is long for its ranks


class WholeDocuments:
    """The documents that this rank computes in layers that mix along the row, and how their rows travel.

    Attributes:
        packed_batch: these documents, as a batch of one row. If all are shorter than LEAST, one of zeros follows.
        uneven: whether a document is so long that its rank has much more work than the others.
    """

    def __init__(self, batch: PackedBatch, layout: Layout, ranks: Ranks) -> None:
        """Divide the documents of a batch, whose flattened rows are those of `layout`. Waits for the device."""
        begin, length = batch.lengths()
        document = torch.repeat_interleave(torch.arange(length.shape[0], device="cpu"), length)
        rows = begin[document] + torch.arange(document.shape[0], device="cpu") - (length.cumsum(0) - length)[document]
        owner = torch.empty(layout.num_rows, dtype=torch.int64, device="cpu")
        for rank, own in enumerate(layout.rows_on_host):
            owner[own] = rank
        owned = (document * ranks.size + owner[rows]).bincount(minlength=length.shape[0] * ranks.size)
        chosen = _divide(length, owned.view(-1, ranks.size))
        wanted = [rows[chosen[document] == rank] for rank in range(ranks.size)]
        self._travel = RowTravel(layout, ranks, wanted, batch.device)
        self.uneven = bool(length.numel()) and int(length.max()) * ranks.size > UNEVEN * int(length.sum())
        self.packed_batch = in_one_row(length[chosen == ranks.rank], batch)

    def fetch(self, x: Any) -> Any:
        """The rows of this rank's documents, from a tensor (1, rows, ...) of its own rows; other values unchanged."""
        if not isinstance(x, Tensor) or x.shape[:2] != (1, self._travel.rows):
            return x
        return filled(self._travel.fetch(x[0])[None], self.packed_batch)

    def give_back(self, x: Any) -> Any:
        """The inverse of `fetch`. Padding gets zeros."""
        if not isinstance(x, Tensor) or x.shape[:2] != self.packed_batch.tokens:
            return x
        return self._travel.give_back(x[0, : self._travel.wanted])[None]


def in_one_row(length: Tensor, batch: PackedBatch) -> PackedBatch:
    """Documents of these lengths, (documents,) int64, as a batch of one row.

    A document of LEAST tokens follows if all are shorter.
    """
    lengths = length.tolist()
    if max(lengths, default=0) < LEAST:
        lengths.append(LEAST)
    positions = torch.cat([torch.arange(n, device="cpu") for n in lengths])[None].to(batch.device)
    return PackedBatch(None, positions, None, positions.shape, batch.device, batch.serving, by_document=True)


def filled(x: Tensor, packed_batch: PackedBatch) -> Tensor:
    """x, (1, rows, ...), with zeros for the document that `in_one_row` has appended."""
    zeros = packed_batch.tokens[1] - x.shape[1]
    return torch.cat([x, x.new_zeros(1, zeros, *x.shape[2:])], 1) if zeros else x


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
