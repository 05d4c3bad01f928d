"""Layers that mix along the row: documents travel whole to one rank each, and their outputs travel back.

A recurrence or a convolution begins anew with each document, so a rank that has all tokens of a document computes it as
one process does. Each rank gets about equally many tokens.
"""

from __future__ import annotations

import math
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
        moves: whether any rank gets rows of another one. If not, nothing is sent.
        sent, received: for each rank, how many own rows it gets, and how many of its rows come here.
    """

    def __init__(self, batch: PackedBatch, layout: Layout, ranks: Ranks) -> None:
        """Divide the documents of a batch, whose flattened rows `layout` divides. Waits for the device.

        Raises:
            ValueError: on every rank, if a document has more than LONGEST times a rank's share of the tokens.
        """
        begin, length = batch.lengths()
        _require_short(length, ranks.size)
        document = torch.repeat_interleave(length)
        rows = begin[document] + torch.arange(document.shape[0], device="cpu") - (length.cumsum(0) - length)[document]
        owner, place = torch.empty(2, layout.num_rows, dtype=torch.int64, device="cpu")
        for rank, own in enumerate(layout.rows_on_host):
            owner[own], place[own] = rank, torch.arange(own.shape[0], device="cpu")
        owned = (document * ranks.size + owner[rows]).bincount(minlength=length.shape[0] * ranks.size)
        chosen = _divide(length, owned.view(-1, ranks.size))
        target = chosen[document]
        self._ranks, self._rows = ranks, layout.lengths[ranks.rank]
        self.moves = bool((owner[rows] != target).any())
        mine, wanted = owner[rows] == ranks.rank, rows[target == ranks.rank]
        self.sent = target[mine].bincount(minlength=ranks.size).tolist()
        self.received = owner[wanted].bincount(minlength=ranks.size).tolist()
        # The places of the own rows that leave, and of the rows that come, both in the order of ranks.
        self._leaving = place[rows[mine]][target[mine].argsort(stable=True)].to(batch.device)
        self._arriving = owner[wanted].argsort(stable=True).to(batch.device)
        lengths = length[chosen == ranks.rank].tolist()
        if max(lengths, default=0) < LEAST:
            lengths.append(LEAST)
        positions = torch.cat([torch.arange(n, device=batch.device) for n in lengths])[None]
        self.packed_batch = PackedBatch(
            None, positions, None, positions.shape, batch.device, batch.serving, by_document=True
        )

    def fetch(self, x: Any) -> Any:
        """The rows of this rank's documents, from a tensor (1, rows, ...) of its own rows; other values unchanged."""
        own = isinstance(x, Tensor) and x.shape[:2] == (1, self._rows)
        return _Travel.apply(x[0], self, True)[None] if own else x

    def give_back(self, x: Any) -> Any:
        """The inverse of `fetch`. Padding gets zeros."""
        fetched = isinstance(x, Tensor) and x.shape[:2] == self.packed_batch.tokens
        return _Travel.apply(x[0], self, False)[None] if fetched else x

    def travel(self, x: Tensor, there: bool) -> Tensor:
        """Send rows to the ranks that compute their documents, or back from `there`, without autograd."""
        leaving, arriving = (self._leaving, self._arriving) if there else (self._arriving, self._leaving)
        sent, received = (self.sent, self.received) if there else (self.received, self.sent)
        result = x.new_zeros(self.packed_batch.tokens[1] if there else self._rows, *x.shape[1:])
        x = x[leaving]
        if self.moves:
            x = all_to_all(x, sent, received, self._ranks)()
        result[arriving] = x
        return result


class _Travel(torch.autograd.Function):
    """(x, documents, there) -> `documents.travel(x, there)`. The gradient takes the opposite direction."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, documents: WholeDocuments, there: bool) -> Tensor:
        ctx.arguments = documents, there
        return documents.travel(x, there)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        documents, there = ctx.arguments
        return documents.travel(gradients[0], not there), None, None


def _require_short(length: Tensor, ranks: int) -> None:
    """Raise ValueError for documents that one rank can't compute in about its share of the time and the memory."""
    longest, total = int(length.max()) if length.numel() else 0, int(length.sum())
    if longest * ranks > LONGEST * total:
        raise ValueError(
            f"a document has {longest} of the batch's {total} tokens, and layers with recurrences or convolutions "
            f"compute it on one of the {ranks} ranks. At most {LONGEST} times a rank's equal share is allowed, here "
            f"{int(LONGEST * total / ranks)}. Put more documents into a batch, share it among fewer ranks, or cut them."
        )


def _divide(length: Tensor, owned: Tensor) -> Tensor:
    """The rank that computes each document, (documents,) int64, of which each rank has (documents, ranks) `owned` rows.

    The longest document is placed first. It goes to the rank that owns most of its rows among those where it fits into
    SLACK times an equal share of all tokens, or else to the rank with the fewest tokens so far.
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
