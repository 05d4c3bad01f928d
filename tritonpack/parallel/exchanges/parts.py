"""Parts of the keys that a rank attends to: its own ones, and those that travel in one message.

A part is between queries of the rank and some of its keys, in the order of the batch, so its mask is an interval mask
again. Results of several parts are merged (merge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges.call import Call

Keys = Callable[[], tuple[Tensor, Tensor]]  # waits for keys and values
Addition = Callable[[Tensor, Tensor], None]  # waits for gradients and adds them to dk and dv of the own rows


class Part(Protocol):
    """Some of the keys that a rank attends to."""

    @property
    def mask(self) -> BlockDiagonalMask:
        """The mask between this rank's queries and these keys."""

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        """Start to send k (n, heads, D) and v (n, heads, D_v) of the own rows; the result has those of the part."""

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        """Start to send gradients of the part's keys and values to the ranks that own them.

        The result adds what arrives at this rank to dk (n, heads, D) and dv (n, heads, D_v), in `comm.wide`.
        """


@dataclass(frozen=True, eq=False)
class OwnKeys:
    """A part with a run of the own rows, which don't travel."""

    rows: slice
    mask: BlockDiagonalMask

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        return lambda: (k[self.rows], v[self.rows])

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            total_dk[self.rows] += dk
            total_dv[self.rows] += dv

        return add


def own_keys(call: Call) -> OwnKeys:
    """All own keys."""
    return OwnKeys(slice(None), call.rows_mask(call.ranks.rank))


def own_halves(call: Call) -> tuple[OwnKeys, OwnKeys]:
    """The second half of the own keys, and the first half, which more queries of a causal document see."""
    rank = call.ranks.rank
    rows = call.layout.rows[rank]
    middle = rows.shape[0] // 2

    def half(number: int, places: slice) -> OwnKeys:
        mask = call.mask.cached(("own half", call.layout, rank, number), lambda: call.mask.restrict(rows, rows[places]))
        return OwnKeys(places, mask)

    return half(1, slice(middle, None)), half(0, slice(0, middle))
