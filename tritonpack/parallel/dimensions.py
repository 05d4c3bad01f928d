"""The dimensions of a group of ranks: along one they divide heads, along the other keys and values travel.

A group without a mesh has one of the two.

Source: Fang and Zhao, USP (arXiv:2405.07719); Gu et al., LoongTrain (arXiv:2406.18485).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
import torch.distributed as dist

from tritonpack.checks import check_choice
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks, as_ranks
from tritonpack.parallel.layouts import Layout, LayoutName, make_layout

if TYPE_CHECKING:
    from tritonpack.parallel.comm import GroupLike

KeyExchange = Literal["auto", "all_gather", "group_cast", "ring"]
Exchange = Literal[KeyExchange, "ulysses"]
Exchanges = Exchange | tuple[Exchange, Exchange]  # two for a mesh of two dimensions


@dataclass(frozen=True)
class Dimensions:
    """How the ranks of a group share attention.

    Ranks that divide heads own rows together: each computes its heads for all of these rows. The keys and values of
    these heads travel between the ranks that compute the same heads.

    Attributes:
        heads: the ranks with which this one divides heads; None if it computes all heads.
        keys: the ranks between which the keys and values of this rank's heads travel; None if it has all of them.
        exchange: how they travel; None if they never do.
        owners: for each rank of `keys`, the ranks of the group that own rows together, in the order of `heads`.
    """

    heads: Ranks | None
    keys: Ranks | None
    exchange: KeyExchange | None
    owners: tuple[tuple[int, ...], ...]

    @property
    def divides_heads(self) -> bool:
        """Whether each rank computes some heads; else keys travel, also to ranks of a mesh with one rank for heads."""
        return self.keys is None or self.heads is not None

    def make_layout(self, name: LayoutName, masks: Sequence[BlockDiagonalMask]) -> Layout:
        """The layout of a batch. If keys travel, it divides the batch among sets of ranks that own rows together.

        Each rank of a set gets a run of its rows: these ranks divide heads, so their work is even in any case.
        """
        ranks = [rank for owners in self.owners for rank in owners]
        parts = 1 if self.exchange is None else len(self.owners[0])
        layout = make_layout(name, masks, len(ranks) // parts).divide(parts)
        if ranks == sorted(ranks):
            return layout
        return Layout(tuple(layout.rows[ranks.index(rank)] for rank in range(len(ranks))))

    def layouts(self, mask: BlockDiagonalMask, layout: Layout) -> tuple[Layout, Layout]:
        """The layout of the batch among the ranks of `keys`, and that of this rank's part among those of `heads`.

        Args:
            mask: keeps the result, for further layers.
            layout: of the whole group.
        """

        if self.heads is None or self.keys is None:
            return layout, layout
        place = self.keys.rank

        def make() -> tuple[Layout, Layout]:
            rows = [torch.cat([layout.rows[rank] for rank in owners]).sort().values for owners in self.owners]
            own = [torch.searchsorted(rows[place], layout.rows[rank]) for rank in self.owners[place]]
            return Layout(tuple(rows)), Layout(tuple(own))

        return mask.cached(("dimensions", layout, self.owners, place), make)


def ranks_of(group: GroupLike) -> Ranks:
    """The ranks of a group, also of a DeviceMesh of two dimensions, whose ranks are numbered row by row.

    A mesh that isn't the whole world gets a process group of all its ranks at the first call, which every process of
    the world must make.

    Raises:
        ValueError: as `as_ranks`; a mesh of more dimensions; one whose ranks don't ascend row by row, or without names.
    """
    mesh: Any = group
    if not hasattr(group, "get_group") or mesh.ndim == 1:
        return as_ranks(group)
    names = mesh.mesh_dim_names
    if mesh.ndim > 2:
        raise ValueError(
            f"group is a DeviceMesh of {mesh.ndim} dimensions, {names}; pass one or two of them, such as mesh['sp'] or "
            "mesh['across', 'within']."
        )
    if mesh.get_coordinate() is None:
        raise ValueError(
            f"this process, rank {dist.get_rank()} of the world, isn't in the mesh; got {mesh!r:.100}. Pass the mesh "
            "that it belongs to."
        )
    numbers = mesh.mesh.flatten().tolist()
    if numbers != sorted(numbers):
        raise ValueError(
            f"the ranks of a mesh of two dimensions must ascend row by row; got {mesh.mesh.tolist()}. Make it with "
            "init_device_mesh."
        )
    if len(numbers) == dist.get_world_size():
        whole = as_ranks(None)
    elif names:
        whole = as_ranks(mesh._flatten())
    else:
        raise ValueError("a mesh of two dimensions needs names, such as mesh_dim_names=('across', 'within').")
    return replace(whole, dimensions=tuple(as_ranks(mesh.get_group(dim)) for dim in range(2)))


def dimensions_of(ranks: Ranks, exchange: Any) -> Dimensions:
    """The dimensions of a group for an exchange, or for one exchange along each dimension of a mesh.

    Raises:
        ValueError: unknown names; more or fewer names than dimensions; not exactly one dimension that divides heads.
    """
    if isinstance(exchange, (tuple, list)):
        return _of_mesh(ranks, exchange)
    check_choice(exchange, get_args(Exchange), "exchange")
    if ranks.dimensions:
        raise ValueError(
            "a mesh of two dimensions needs an exchange for each, such as exchange=('group_cast', 'ulysses'); got "
            f"{exchange!r}. For one exchange between all ranks, pass a process group or a mesh of one dimension."
        )
    every = range(ranks.size)
    if exchange == "ulysses":
        return Dimensions(ranks, None, None, (tuple(every),))
    return Dimensions(None, ranks, exchange, tuple((rank,) for rank in every))


def _of_mesh(ranks: Ranks, names: Sequence[Any]) -> Dimensions:
    """The dimensions of a mesh for a name along each."""
    others = [name for name in names if name in get_args(KeyExchange)]
    if len(names) != 2 or len(others) != 1 or "ulysses" not in names:
        raise ValueError(
            f"exchange must be one of {', '.join(map(repr, get_args(Exchange)))}, or for a mesh of two dimensions a "
            "pair: 'ulysses' for the dimension along which ranks divide heads, and another one for the other, such as "
            f"('group_cast', 'ulysses'); got {names!r:.100}."
        )
    if not ranks.dimensions:
        raise ValueError(
            f"exchange={names!r} is for a mesh of two dimensions, and the group has one. Pass a mesh such as "
            "mesh['across', 'within'], or one name."
        )
    along = names.index("ulysses")
    heads, keys = ranks.dimensions[along], ranks.dimensions[1 - along]
    numbers = torch.arange(ranks.size, device="cpu").view(ranks.dimensions[0].size, -1).movedim(along, -1)
    return Dimensions(
        heads if heads.size > 1 else None,
        keys if keys.size > 1 else None,
        others[0],
        tuple(map(tuple, numbers.tolist())),
    )
