"""Layouts: which rows of a batch each rank owns.

Equal numbers of rows aren't equal work: the end of a long document sees many more keys than short documents. Every
rank's rows ascend, so that the mask between them and any keys is again an interval mask (docs/math.md, section 1).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, NamedTuple, get_args

import numpy as np
import torch
from torch import Tensor

from tritonpack.checks import check_choice, describe, is_int, require
from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.document_layout import divide_documents
from tritonpack.removed import refuse_attributes, refuse_removed

LayoutName = Literal["contiguous", "zigzag", "stripe", "documents"]


@refuse_attributes
@dataclass(frozen=True, eq=False)
class Layout:
    """The rows of a batch that each rank owns. Every row has one owner. Shards may differ in length.

    >>> mask = BlockDiagonalMask.from_seqlens([7])
    >>> layout = make_layout("zigzag", mask, 2)
    >>> [rows.tolist() for rows in layout.rows]
    [[0, 5, 6], [1, 2, 3, 4]]
    >>> layout.shard(torch.arange(10, 17), rank=0).tolist()
    [10, 15, 16]
    >>> layout.unshard(torch.tensor([10, 15, 16, 11, 12, 13, 14])).tolist()
    [10, 11, 12, 13, 14, 15, 16]

    Attributes:
        rows: for each rank, (length,) int64, its rows in ascending order; all on one device.

    Raises:
        ValueError: rows of another form; for rows in host memory also rows that don't ascend, or don't have exactly one
            owner.
    """

    rows: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        forms = {isinstance(rows, Tensor) and (rows.ndim, rows.dtype, rows.device) for rows in self.rows}
        if len(forms) != 1 or False in forms or self.rows[0].ndim != 1 or self.rows[0].dtype != torch.int64:
            given = "; ".join(map(describe, self.rows)) or "none, and every rank needs one"
            raise ValueError(f"rows must be one-dimensional int64 tensors on one device; got {given}.")
        together, _ = torch.cat(self.rows).sort()
        valid = (together == torch.arange(together.shape[0], device=together.device)).all()
        for rows in self.rows:
            valid &= (rows[1:] > rows[:-1]).all()
        require(
            valid,
            "the rows of each rank must ascend, and every row of the batch must belong to exactly one rank; "
            "make_layout makes such layouts.",
        )

    @property
    def ranks(self) -> int:
        return len(self.rows)

    @cached_property
    def rows_on_host(self) -> tuple[Tensor, ...]:
        """`rows` in host memory; waits for the device once."""
        return tuple(map(Tensor.cpu, self.rows))

    @cached_property
    def lengths(self) -> list[int]:
        """The number of rows of each rank."""
        return list(map(len, self.rows))

    @property
    def num_rows(self) -> int:
        return sum(self.lengths)

    @cached_property
    def inverse(self) -> Tensor:
        """(num_rows,) int64: the place of each row in the ranks' shards, laid end to end."""
        return torch.cat(self.rows).argsort()

    def shard(self, x: Tensor, rank: int, dim: int = 0) -> Tensor:
        """The rows of one rank, from a tensor with all rows of the batch along `dim`.

        Raises:
            ValueError: no such rank or dimension, or another number of rows along `dim`.
        """
        if not is_int(rank) or not 0 <= rank < self.ranks:
            raise ValueError(f"rank must be an integer from 0 to {self.ranks - 1}; got {rank!r}.")
        self._check(x, dim)
        return x.index_select(dim, self.rows[rank].to(x.device))

    def unshard(self, x: Tensor, dim: int = 0) -> Tensor:
        """All rows in the order of the batch, from the ranks' shards laid end to end along `dim`.

        Raises:
            ValueError: no such dimension, or another number of rows along it.
        """
        self._check(x, dim)
        return x.index_select(dim, self.inverse.to(x.device))

    def divide(self, parts: int) -> Layout:
        """A layout for `parts` ranks in place of each rank, which own runs of its rows that are equally long.

        On a mesh of two dimensions, ranks that divide heads own rows together: divide the batch among these groups
        first, and each group's rows with this.

        >>> layout = make_layout("zigzag", BlockDiagonalMask.from_seqlens([7]), 2).divide(2)
        >>> [rows.tolist() for rows in layout.rows]
        [[0, 5], [6], [1, 2], [3, 4]]

        Raises:
            ValueError: `parts` below 1.
        """
        if not is_int(parts) or parts < 1:
            raise ValueError(f"parts must be an integer of at least 1; got {parts!r}.")
        return self if parts == 1 else Layout(tuple(run for rows in self.rows for run in rows.tensor_split(parts)))

    def remote_keys(self, mask: BlockDiagonalMask) -> list[int]:
        """For each rank, how many keys of other ranks its rows see. Waits for the mask's device.

        The exchange "group_cast" receives as many rows of keys and values in each layer with this mask.
        """
        found = []
        for runs, rows in zip(self.seen_by_ranks(mask), self.rows_on_host, strict=True):
            found.append(int((runs.end - runs.begin).sum()) - runs.among(rows).shape[0])
        return found

    def seen_by_ranks(self, mask: BlockDiagonalMask) -> list[Runs]:
        """For each rank the keys that its rows see, in host memory; cached on the mask."""
        start, stop = host_bounds(mask)
        return mask.cached(("seen", self), lambda: [Runs.of(start[rows], stop[rows]) for rows in self.rows_on_host])

    def _check(self, x: Tensor, dim: int) -> None:
        if not -x.ndim <= dim < x.ndim or x.shape[dim] != self.num_rows:
            raise ValueError(
                f"the layout has {self.num_rows} rows, which the tensor must have along dim={dim}; got shape "
                f"{tuple(x.shape)}."
            )


class Runs(NamedTuple):
    """Ascending runs of keys: their first keys, and one past their last ones; each (runs,) int64."""

    begin: Tensor
    end: Tensor

    @classmethod
    def of(cls, start: Tensor, stop: Tensor) -> Runs:
        """The keys that lie between at least one pair of bounds, which ascend."""
        ahead = torch.cat([start[:1] - 1, stop[:-1]])  # the largest stop before each row
        begins = start > ahead
        return cls(start[begins], torch.cat([ahead[1:][begins[1:]], stop[-1:]]))

    def among(self, keys: Tensor) -> Tensor:
        """The places of the given ascending keys that lie in a run, int64."""
        first, last = torch.searchsorted(keys, self.begin), torch.searchsorted(keys, self.end)
        counts = last - first
        before = counts.cumsum(0) - counts
        return torch.arange(int(counts.sum()), device="cpu") + torch.repeat_interleave(first - before, counts)


def host_bounds(mask: BlockDiagonalMask) -> tuple[Tensor, Tensor]:
    """The first key that each row sees, and one past the last one, int64, in host memory; waits for the device once."""
    if mask.is_tree:
        raise ValueError(
            "the keys that rows of trees see can't be counted here. For a mask of trees use the layout 'contiguous', "
            "'zigzag' or 'stripe', and exchange='auto', 'all_gather', 'ring' or 'ulysses'."
        )
    return mask.cached("bounds on the host", lambda: (mask.key_start.cpu().long(), mask.key_stop.cpu().long()))


def check_layout_name(name: object) -> None:
    """Raise ValueError for a name that isn't one of `LayoutName`."""
    if name == "balanced":
        raise ValueError("layout='balanced' was removed: layout='documents' is as even and sends fewer keys.")
    check_choice(name, get_args(LayoutName), "layout")


def make_layout(
    name: LayoutName, mask: BlockDiagonalMask | Sequence[BlockDiagonalMask], ranks: int, **removed: Any
) -> Layout:
    """Divide a batch among ranks. The same arguments give the same layout on every rank.

    - "contiguous": one run of rows per rank. Work differs most.
    - "zigzag": two runs per rank, the r-th from the start and the r-th from the end. Balances one causal document.
    - "stripe": row i to rank i modulo `ranks`. Balances any causal mask; every rank needs nearly every key.
    - "documents": whole documents to ranks, with cuts only where visible pairs or rows would be uneven by more than 1%.
      Ranks then see few keys of others, and "group_cast" sends no more. It waits for the mask's device, and refuses
      masks of trees.

    Args:
        name: one of the names above.
        mask: the mask of the batch; its queries and keys are the same rows. If layers have different masks, such as
            windows in some of them, pass a sequence of masks; one that several layers share may be repeated, and counts
            as often.
        ranks: the number of ranks.

    Raises:
        ValueError: an unknown name, no mask, masks of unlike sizes, a mask whose queries aren't its keys, no ranks.
    """
    refuse_removed(removed, "make_layout()")
    check_layout_name(name)
    masks: list[Any] = list(mask) if isinstance(mask, (list, tuple)) else [mask]
    found = set()
    for one in masks:
        if not isinstance(one, BlockDiagonalMask):
            raise ValueError(f"mask must be a BlockDiagonalMask, or a sequence of them; got {describe(one)}.")
        if one.num_queries != one.num_keys:
            raise ValueError(
                f"a layout divides rows that are queries and keys alike; the mask has {one.num_queries} queries and "
                f"{one.num_keys} keys. Cross-attention can't be sharded this way."
            )
        found.add((one.num_queries, one.device))
    if len(found) != 1:
        given = "; ".join(map(repr, masks))
        raise ValueError(f"the masks of a batch's layers must have equally many rows, on one device; got [{given}].")
    ((total, device),) = found
    if not is_int(ranks) or ranks < 1:
        raise ValueError(f"ranks must be an integer of at least 1; got {ranks!r}.")
    if name == "documents":
        rows = _documents(masks, ranks)
        return Layout(torch.from_numpy(np.concatenate(rows)).to(device).split(list(map(len, rows))))
    every = torch.arange(total, device=device)
    if name == "stripe":
        return Layout(tuple(every[rank::ranks].clone() for rank in range(ranks)))
    runs = ranks if name == "contiguous" else 2 * ranks
    parts = [every[total * run // runs : total * (run + 1) // runs].clone() for run in range(runs)]
    if name == "zigzag":
        parts = [torch.cat([parts[rank], parts[-1 - rank]]) for rank in range(ranks)]
    return Layout(tuple(parts))


def _documents(masks: list[BlockDiagonalMask], ranks: int) -> list[np.ndarray]:
    """For each rank its rows of the layout "documents"."""
    start = torch.arange(masks[0].num_queries, device="cpu")
    stop, work = start, torch.zeros_like(start)
    for mask, times in Counter(masks).items():  # by identity
        first, last = host_bounds(mask)
        live = first < last
        start = start.minimum(torch.where(live, first, start))
        stop = stop.maximum(torch.where(live, last, stop))
        work = work + (last - first) * times
    return divide_documents(start.numpy(), stop.numpy(), work.numpy(), ranks, len(masks))
