"""The keys that the rows of a rank see, as runs, computed in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask


class HostBounds(NamedTuple):
    """The bounds of a mask and its `diagonal` in host memory, each int64; the last three only of a mask of trees."""

    start: Tensor
    stop: Tensor
    query_start: Tensor | None
    query_stop: Tensor | None
    depth: Tensor | None

    @property
    def live(self) -> Tensor:
        """Whether each row sees any key (of a tree restricted to some keys: whether it may)."""
        return self.start < self.stop

    @property
    def counts(self) -> Tensor:
        """How many keys each row sees. In a tree these are ancestors, whose number depths tell."""
        if self.depth is None:
            return self.stop - self.start
        first = self.depth[self.start.clamp(max=max(self.depth.shape[0] - 1, 0))]
        return torch.where(self.live, self.depth - first + 1, 0)

    def part(self, begin: int, end: int) -> HostBounds:
        """The bounds of the rows from `begin` to `end`, whose keys lie among the same rows, counted from `begin`."""

        def moved(x: Tensor) -> Tensor:  # a subtree may end later, after rows that don't see its root
            return (x[begin:end] - begin).clamp(0, end - begin)

        start, stop = moved(self.start), moved(self.stop)
        if self.query_start is None or self.query_stop is None or self.depth is None:
            return HostBounds(start, stop, None, None, None)
        return HostBounds(start, stop, moved(self.query_start), moved(self.query_stop), self.depth[begin:end])


class Runs(NamedTuple):
    """Ascending runs of keys: their first keys, and one past their last ones; each (runs,) int64."""

    begin: Tensor
    end: Tensor

    def size(self) -> int:
        """How many keys lie in the runs."""
        return int((self.end - self.begin).sum())

    def among(self, keys: Tensor) -> Tensor:
        """The places of those of the given ascending keys that lie in a run, int64."""
        first, last = torch.searchsorted(keys, self.begin), torch.searchsorted(keys, self.end)
        counts = last - first
        before = counts.cumsum(0) - counts
        return torch.arange(int(counts.sum()), device="cpu") + torch.repeat_interleave(first - before, counts)


def host_bounds(mask: BlockDiagonalMask) -> HostBounds:
    """The bounds of a mask in host memory; waits for its device once."""

    def read() -> HostBounds:
        depth = mask.diagonal if mask.key_places is None else None  # only some of the ancestors, or of the rows
        sides = (mask.query_start, mask.query_stop, depth) if mask.is_tree else (None, None, None)
        values = (None if x is None else x.cpu().long() for x in (mask.key_start, mask.key_stop, *sides))
        return HostBounds(*values)  # type: ignore[arg-type]

    return mask.cached("bounds on the host", read)


def seen_runs(bounds: HostBounds, rows: Tensor) -> Runs:
    """The keys that at least one of the rows sees, in a mask that a constructor made.

    Args:
        bounds: of the mask.
        rows: ascending int64 in host memory.
    """
    start, stop = bounds.start[rows], bounds.stop[rows]
    if bounds.query_start is None or bounds.query_stop is None:
        ahead = torch.cat([start[:1] - 1, stop[:-1]])  # bounds ascend, so it is the largest stop before each row
        begins = start > ahead
        return Runs(start[begins], torch.cat([ahead[1:][begins[1:]], stop[-1:]]))
    # A key is seen by the rows of its subtree whose own interval reaches up to it.
    before = torch.zeros(bounds.start.shape[0] + 1, dtype=torch.int64, device="cpu")
    before[rows + 1] = 1
    before = before.cumsum(0)
    first, last = before[bounds.query_start], before[bounds.query_stop]
    keys = (first < last).nonzero()[:, 0]
    first, last = first[keys], last[keys]
    ascends = bool((start.diff() >= 0).all())  # as without windows, and in documents
    keys = keys[(start[first] if ascends else _least(start, first, last)) <= keys]
    edge = keys.diff() > 1
    return Runs(torch.cat([keys[:1], keys[1:][edge]]), torch.cat([keys[:-1][edge], keys[-1:]]) + 1)


def _least(values: Tensor, first: Tensor, last: Tensor) -> Tensor:
    """The least of values[first[n]:last[n]] for each n; no range is empty."""
    least = torch.empty_like(first)
    size, table = 1, values  # table[i] is the least of values[i:i + size]
    while True:
        fits = (last - first >= size) & (last - first < 2 * size)
        least[fits] = torch.minimum(table[first[fits]], table[last[fits] - size])
        if 2 * size > values.shape[0]:
            return least
        table = torch.minimum(table[:-size], table[size:])
        size *= 2
