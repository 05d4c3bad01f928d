"""The dimensions of a group of ranks: along one they divide heads, along the other keys and values travel.

Source: Fang and Zhao, USP (arXiv:2405.07719); Gu et al., LoongTrain (arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, get_args

import torch

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks
from tritonpack.parallel.layouts import Layout, LayoutName, make_layout

KeyExchange = Literal["auto", "all_gather", "group_cast", "ring"]
Exchange = Literal[KeyExchange, "ulysses"]
Exchanges = Exchange | tuple[Exchange, Exchange]  # two for a mesh of two dimensions


@dataclass(frozen=True)
class Dimensions:
    """The dimensions of a group of ranks that share attention.

    Ranks that divide heads own rows together: each computes its heads for all of these rows. The keys and values of
    these heads travel between the ranks that compute the same heads.

    Attributes:
        ranks: the whole group.
        heads: the ranks with which this one divides heads; None if it computes all heads.
        keys: the ranks between which the keys and values of this rank's heads travel; None if it has all of them.
        exchange: how they travel; "ulysses" if they never do.
        owners: for each rank of `keys`, the ranks of the group that own rows together, in the order of `heads`.
        checked: the options and the backend of each form of q, k and v that a model's layers have passed.
    """

    ranks: Ranks
    heads: Ranks | None
    keys: Ranks | None
    exchange: Exchange
    owners: tuple[tuple[int, ...], ...]
    checked: dict[Any, Any] = field(default_factory=dict, compare=False, repr=False)

    def make_layout(self, name: LayoutName, masks: Sequence[BlockDiagonalMask]) -> Layout:
        """The layout of a batch. Ranks that divide heads get runs of the rows that they own together."""
        parts = len(self.owners[0])
        if self.exchange == "ulysses" or parts == 1:
            return make_layout(name, masks, self.ranks.size)
        ranks = [rank for owners in self.owners for rank in owners]
        rows = make_layout(name, masks, len(self.owners)).divide(parts).rows
        return Layout(tuple(rows[ranks.index(rank)] for rank in range(len(ranks))))

    def layouts(self, mask: BlockDiagonalMask, layout: Layout) -> tuple[Layout, Layout]:
        """The layout of the batch among the ranks of `keys`, and of this rank's part among the ranks of `heads`.

        `layout` is the layout of the whole group. The result is cached on the mask.
        """
        if self.heads is None or self.keys is None:
            return layout, layout
        place = self.keys.rank

        def make() -> tuple[Layout, Layout]:
            rows = [torch.cat([layout.rows[rank] for rank in owners]).sort().values for owners in self.owners]
            own = [torch.searchsorted(rows[place], layout.rows[rank]) for rank in self.owners[place]]
            return Layout(tuple(rows)), Layout(tuple(own))

        return mask.cached(("dimensions", layout, self.owners, place), make)


def dimensions_of(ranks: Ranks, exchange: Any) -> Dimensions:
    """The dimensions of a group for an exchange, or for one exchange along each dimension of a mesh.

    Raises:
        ValueError: unknown names; more or fewer names than dimensions; not exactly one dimension that divides heads.
    """
    pair = isinstance(exchange, (tuple, list))
    names = list(exchange) if pair else [exchange]
    keys = [name for name in names if name in get_args(KeyExchange)]
    if len(names) != 2 or len(keys) != 1 or "ulysses" not in names if pair else names[0] not in get_args(Exchange):
        raise ValueError(
            f"exchange must be one of {', '.join(map(repr, get_args(Exchange)))}, or for a mesh of two dimensions a "
            "pair: 'ulysses' for the dimension along which ranks divide heads, and another one for the other, such as "
            f"('group_cast', 'ulysses'); got {exchange!r:.100}."
        )
    if pair != bool(ranks.dimensions):
        raise ValueError(
            "a mesh of two dimensions, such as mesh['across', 'within'], needs a pair of exchanges, such as "
            "('group_cast', 'ulysses'), and a process group or a mesh of one dimension needs one exchange; got "
            f"exchange={exchange!r} for {'two dimensions' if ranks.dimensions else 'one dimension'}."
        )
    if pair:
        along = names.index("ulysses")
        numbers = torch.arange(ranks.size, device="cpu").view(ranks.dimensions[0].size, -1).movedim(along, -1)
        heads, between = (
            one if one.size > 1 else None for one in (ranks.dimensions[along], ranks.dimensions[1 - along])
        )
        return Dimensions(ranks, heads, between, keys[0], tuple(map(tuple, numbers.tolist())))
    if exchange == "ulysses":
        return Dimensions(ranks, ranks, None, exchange, (tuple(range(ranks.size)),))
    return Dimensions(ranks, None, ranks, exchange, tuple((rank,) for rank in range(ranks.size)))
