"""Ulysses among the ranks of a set, while the keys of their heads travel across sets: meshes of two dimensions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.exchanges.call import Call, of_heads
from tritonpack.parallel.exchanges.merge import merge_sinks
from tritonpack.parallel.exchanges.trade import weave
from tritonpack.parallel.exchanges.ulysses import HeadsCall


@dataclass(frozen=True, eq=False)
class AcrossSets(HeadsCall):
    """A call of "ulysses" whose ranks have all rows of their set, and not of the batch.

    Attributes:
        exchange: how keys travel; has the functions `forward` and `backward`.
        across: its call, with the ranks that compute the same heads for the other sets.
    """

    divides_groups = False  # because the key head would travel across sets in each of them

    exchange: Any
    across: Call

    @property
    def local(self) -> BlockDiagonalMask:
        return self.across.rows_mask(self.across.ranks.rank)

    def forward_others(
        self, own: Tensor, q: Tensor, k: Tensor, v: Tensor, heads: slice, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor, tuple[Tensor, Tensor] | None]:
        mine, others = self._rows()
        out, lse = self.exchange.forward(self._of(heads), weave(self, own, q), k, v, None)
        own_part = out.index_select(0, mine), lse.index_select(1, mine)
        out, lse = out.index_select(0, others), lse.index_select(1, others)
        if sinks is not None:
            wide_out, lse = merge_sinks(out.to(lse.dtype), lse, sinks[heads])
            out = wide_out.to(q.dtype)
        return out, lse, own_part

    def backward_others(
        self, own: Sequence[Tensor], own_dlse: Tensor | None, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor,
        v: Tensor, out: Tensor, lse: Tensor, heads: slice,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:  # fmt: skip
        mine, others = self._rows()
        whole = [weave(self, x, y) for x, y in zip(own[:3], (dout, q, out), strict=True)]
        whole_lse = weave(self, own[3].T, lse.T).T.contiguous()
        whole_dlse = None if dlse is None or own_dlse is None else weave(self, own_dlse.T, dlse.T).T
        dq, dk, dv, _ = self.exchange.backward(
            self._of(heads), whole[0], whole_dlse, whole[1], k, v, None, whole[2], whole_lse
        )
        return dq.index_select(0, others), dk, dv, dq.index_select(0, mine)

    def _of(self, heads: slice) -> Call:
        """The call across sets, in which the own rows don't attend to keys of their set."""
        return replace(self.across, options=of_heads(self.across.options, heads, None), queries=self._rows()[1])

    def _rows(self) -> tuple[Tensor, Tensor]:
        """The own rows and those of others, among the rows of the set."""
        return self.layout.rows[self.ranks.rank], self.layout.others(self.ranks.rank).rows
