"""Ulysses among the ranks of a set, while the keys of their heads travel across sets: meshes of two dimensions."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.exchanges.call import Call, of_heads


@dataclass(frozen=True, eq=False)
class AcrossSets(Call):
    """A call of "ulysses" whose ranks have all rows of their set, and not of the batch.

    Attributes:
        exchange: how keys travel; has the functions `forward` and `backward`.
        across: its call, with the ranks that compute the same heads for the other sets.
    """

    divides_groups = False  # because the key head would travel across sets in each of them

    exchange: Any
    across: Call

    def forward(
        self, q: Tensor, k: Tensor, v: Tensor, mask: BlockDiagonalMask, heads: slice, sinks: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """out and lse of some query heads over the keys of all sets."""
        return self.exchange.forward(self._of(heads), q, k, v, None if sinks is None else sinks[heads])

    def backward(
        self, dout: Tensor, dlse: Tensor | None, q: Tensor, k: Tensor, v: Tensor, out: Tensor, lse: Tensor,
        mask: BlockDiagonalMask, heads: slice, sinks: Tensor | None,
    ) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
        """dq, dk, dv and dsinks (empty without sinks) of some query heads."""
        own = None if sinks is None else sinks[heads]
        dq, dk, dv, dsinks = self.exchange.backward(self._of(heads), dout, dlse, q, k, v, own, out, lse)
        return dq, dk, dv, q.new_empty(0) if dsinks is None else dsinks

    def _of(self, heads: slice) -> Call:
        return replace(self.across, options=of_heads(self.across.options, heads, None))
