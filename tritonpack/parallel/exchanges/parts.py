"""Parts of the keys that a rank attends to: its own ones, and those that travel in one message.

A part is between queries of the rank and some of its keys, in the order of the batch, so its mask is an interval mask
again. Results of several parts are merged (merge.py).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.exchanges.merge import nothing

Keys = Callable[[], tuple[Tensor, Tensor]]  # waits for keys and values
Addition = Callable[[Tensor, Tensor], None]  # waits for gradients and adds them to dk and dv of the own rows


class Part(Protocol):
    """Some of the keys that a rank attends to."""

    @property
    def mask(self) -> BlockDiagonalMask:
        """The mask between this rank's queries and these keys."""

    @property
    def queries(self) -> Tensor | None:
        """(n,) int64, those of this rank's queries that the mask has; None: all."""

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
    queries: Tensor | None

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        return lambda: (k[self.rows], v[self.rows])

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            total_dk[self.rows] += dk
            total_dv[self.rows] += dv

        return add


def own_keys(call: Call) -> OwnKeys:
    """All own keys."""
    return _own(call, "all", slice(None))


def own_halves(call: Call) -> tuple[OwnKeys, OwnKeys]:
    """The second half of the own keys, and the first half, which more queries of a causal document see."""
    middle = call.layout.lengths[call.ranks.rank] // 2
    return _own(call, "second half", slice(middle, None)), _own(call, "first half", slice(0, middle))


def _own(call: Call, name: str, places: slice) -> OwnKeys:
    """A run of the own keys, with a mask that is cached under a name."""
    rank, queries = call.ranks.rank, call.queries
    rows = call.layout.rows[rank]

    def restrict() -> BlockDiagonalMask:
        return call.mask.restrict(rows if queries is None else rows[queries], rows[places])

    mask = call.mask.cached(("own keys", name, call.layout, rank, queries is None), restrict)
    return OwnKeys(places, mask, queries)


def forward_part(call: Call, part: Part, q: Tensor, k: Tensor, v: Tensor, heads: slice) -> tuple[Tensor, Tensor]:
    """out and lse of some query heads over the keys of a part, for all queries."""
    places = part.queries
    if places is None:
        return call.forward(q, k, v, part.mask, heads, None)
    out, lse = nothing(q, v, q.dtype)
    some = call.of_rows(places).forward(q.index_select(0, places), k, v, part.mask, heads, None)
    return out.index_copy_(0, places, some[0]), lse.index_copy_(1, places, some[1])


def backward_part(
    call: Call, part: Part, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor,
    lse: Tensor, heads: slice,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """dq of all queries, and dk and dv of the part's keys; of some query heads."""
    places = part.queries
    if places is None:
        return call.backward(dout, dlse, q, k, v, out, lse, part.mask, heads, None)[:3]
    some = [x.index_select(0, places) for x in (dout, q, out)]
    some_dlse = None if dlse is None else dlse.index_select(1, places)
    dq, dk, dv, _ = call.of_rows(places).backward(
        some[0], some_dlse, some[1], k, v, some[2], lse.index_select(1, places), part.mask, heads, None
    )
    return torch.zeros_like(q).index_copy_(0, places, dq), dk, dv
