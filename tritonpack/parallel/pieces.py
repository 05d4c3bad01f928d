"""Pieces of documents: the runs of rows that ranks compute in layers that mix along the row."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tritonpack.parallel.layouts import Layout
from tritonpack.parallel.row_travel import RowTravel
from tritonpack.parallel.shard_and_gather import Sharding
from tritonpack.parallel.state_scan import StateScan
from tritonpack.parallel.whole_documents import filled, in_one_row
from tritonpack.patches.document_places import Documents
from tritonpack.patches.packed_batch import PackedBatch


@dataclass(frozen=True)
class PieceTable:
    """The pieces of all ranks in the order of the batch, in host memory. All tensors are (pieces,).

    Attributes:
        first: int64, the row of the batch that each piece begins with.
        place: int64, the place of this row in its document.
        length: int64, how many rows.
        owner: int64, the rank that computes the piece.
        cut: bool, whether the document has several pieces.
    """

    first: Tensor
    place: Tensor
    length: Tensor
    owner: Tensor
    cut: Tensor

    @classmethod
    def of(cls, batch: PackedBatch, layout: Layout) -> PieceTable:
        """The longest runs of rows that belong to one document and one rank. Waits for the device."""
        begin, length = batch.lengths()
        document = torch.repeat_interleave(torch.arange(length.shape[0], device="cpu"), length)
        place = torch.arange(document.shape[0], device="cpu") - (length.cumsum(0) - length)[document]
        rows = begin[document] + place
        owner = torch.empty(layout.num_rows, dtype=torch.int64, device="cpu")
        for rank, own in enumerate(layout.rows_on_host):
            owner[own] = rank
        owner = owner[rows]
        starts = (place == 0) | (owner.diff(prepend=owner.new_tensor([-1])) != 0)
        first = starts.nonzero()[:, 0]
        lengths = first.diff(append=first.new_tensor([rows.shape[0]]))
        return cls(rows[first], place[first], lengths, owner[first], lengths < length[document[first]])

    def most_cut(self, ranks: int) -> int:
        """The number of pieces of cut documents on the rank that has most of them."""
        return int(self.owner[self.cut].bincount(minlength=ranks).max())


class Pieces:
    """The pieces that this rank computes, and how their rows travel.

    Attributes:
        packed_batch: the pieces with their halos, as a batch of one row. The halo of a piece are the rows just before
            it in its document.
        whole: the documents of this row that aren't cut, in batches of similar lengths.
        cut: the other pieces, without their halos, in the order of the batch.
        begins: for each of them, whether it begins its document.
        scan: the scan over the pieces of all ranks; None if no document is cut.
    """

    def __init__(self, batch: PackedBatch, sharding: Sharding, table: PieceTable, reach: int) -> None:
        """Plan the travel.

        Args:
            batch: the whole batch, with the padding of the layout.
            sharding: how it is divided.
            table: its pieces.
            reach: how many rows a halo has, or fewer at the begin of a document.
        """
        layout, ranks, device = sharding.layout, sharding.ranks, batch.device
        halo = table.place.clamp(max=reach)
        rows, rows_with_halo = [], []
        for rank in range(ranks.size):
            own = table.owner == rank
            rows.append(_runs(table.first[own], table.length[own]))
            rows_with_halo.append(_runs((table.first - halo)[own], (table.length + halo)[own]))
        wanted = [some.unique() for some in rows_with_halo]  # a halo may overlap the rows of another piece
        self._there = RowTravel(layout, ranks, wanted, device)
        self._back = RowTravel(layout, ranks, rows, device)
        self._laid = torch.searchsorted(wanted[ranks.rank], rows_with_halo[ranks.rank]).to(device)

        own = table.owner == ranks.rank
        lengths = (table.length + halo)[own]
        begin = lengths.cumsum(0) - table.length[own]  # in the row, after the halo
        length, cut = table.length[own], table.cut[own]
        self._inner = _runs(begin, length).to(device)
        self.packed_batch = in_one_row(lengths, batch)
        tokens = self.packed_batch.tokens
        added = tokens[1] - self._laid.shape[0]  # a document of zeros
        uncut_begin = torch.cat([begin[~cut], begin.new_full((min(added, 1),), tokens[1] - added)])
        uncut_length = torch.cat([length[~cut], length.new_full((min(added, 1),), added)])
        some = uncut_begin.shape[0] > 0
        self.whole = Documents.at(tokens, uncut_begin, uncut_length, device).in_batches() if some else []
        self.cut = [Documents.at(tokens, begin[i, None], length[i, None], device) for i in cut.nonzero()[:, 0]]
        self.begins = (table.place[own][cut] == 0).tolist()
        self.scan = None
        if table.cut.any():
            self.scan = StateScan(table.place[table.cut] == 0, table.owner[table.cut], ranks, device)

    def fetch(self, x: Any) -> Any:
        """The pieces with their halos, from a tensor (1, rows, ...) of own rows; other values unchanged."""
        if not isinstance(x, Tensor) or x.shape[:2] != (1, self._there.rows):
            return x
        return filled(self._there.fetch(x[0])[None, self._laid], self.packed_batch)

    def give_back(self, x: Any) -> Any:
        """Own rows, (1, rows, ...), from outputs for the pieces. Halos are dropped, and padding gets zeros."""
        if not isinstance(x, Tensor) or x.shape[:2] != self.packed_batch.tokens:
            return x
        return self._back.give_back(x[0, self._inner])[None]


def _runs(first: Tensor, length: Tensor) -> Tensor:
    """Runs of consecutive numbers, one after the other, int64."""
    run = torch.repeat_interleave(torch.arange(length.shape[0], device="cpu"), length)
    return torch.arange(run.shape[0], device="cpu") + (first - (length.cumsum(0) - length))[run]
