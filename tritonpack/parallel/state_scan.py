"""What pieces of documents do to the state of a recurrence, combined over ranks in a prefix scan.

A piece makes the state before it into a state after it. Two such maps in a row are one such map, so the state before
each piece follows from the maps of all pieces before it in its document. They are combined by recursive doubling: after
each round an element covers twice as many pieces. Autograd sends gradients through the rounds in reverse. In a round a
piece gives its element to one other piece at most, so no gradient is a sum whose order could vary.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout
from tritonpack.parallel.row_travel import RowTravel

Join = Callable[[Tensor, Tensor], Tensor]


class StateScan:
    """An exclusive prefix scan over the pieces of documents that ranks have cut.

    A document of m pieces takes 1 + ceil(log2(m - 1)) rounds, which all documents share.
    """

    def __init__(self, begins: Tensor, owner: Tensor, ranks: Ranks, device: torch.device) -> None:
        """Plan the rounds.

        Args:
            begins: (pieces,) bool in host memory, which pieces begin a document. The pieces of a document follow each
                other.
            owner: (pieces,) int64, the rank that computes each piece.
            ranks: the group.
            device: where states lie.
        """
        piece = torch.arange(begins.shape[0], device="cpu")
        number = piece - torch.where(begins, piece, 0).cummax(0).values  # in its document
        layout = Layout(tuple(piece[owner == rank] for rank in range(ranks.size)))
        mine = owner == ranks.rank
        most = int(number.max())
        doubled = [1 << exponent for exponent in range(most.bit_length()) if 1 << exponent < most]
        self._rounds: list[tuple[RowTravel, Tensor]] = []
        for step, least in [(1, 1), *((step, step + 1) for step in doubled)]:
            takes = number >= least
            wanted = [piece[takes & (owner == rank)] - step for rank in range(ranks.size)]
            travel = RowTravel(layout, ranks, wanted, device)
            self._rounds.append((travel, takes[mine].nonzero()[:, 0].to(device)))

    def before(self, elements: Tensor, join: Join) -> Tensor:
        """The joined elements of all pieces before each own piece in its document.

        Every rank must call it, also one without pieces. Each round is in the graph of every rank's result.

        Args:
            elements: (own pieces, width) in the order of the documents.
            join: joins elements (n, width) with those that follow them.

        Returns:
            As `elements`. The first piece of a document has no pieces before it, and keeps its own element.
        """
        (travel, taking), *doubled = self._rounds
        found = elements.index_copy(0, taking, travel.fetch(elements))
        for travel, taking in doubled:
            came = travel.fetch(found)
            joined = join(came, found[taking]) if taking.shape[0] else came
            found = found.index_copy(0, taking, joined)
        return found
