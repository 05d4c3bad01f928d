"""The keys that the rows of a rank see, as runs, computed in host memory."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask


class HostBounds(NamedTuple):
    """The first key that each row sees, and one past the last one, in host memory, int64. Both ascend."""

    start: Tensor
    stop: Tensor

    @property
    def counts(self) -> Tensor:
        """How many keys each row sees."""
        return self.stop - self.start


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
    """The bounds of a mask in host memory; waits for its device once.

    Raises:
        ValueError: a mask of trees, whose rows don't see all keys between their bounds.
    """
    if mask.is_tree:
        raise ValueError(
            "the keys that rows of trees see can't be counted here. For a mask of trees use the layout 'contiguous', "
            "'zigzag' or 'stripe', and exchange='auto', 'all_gather', 'ring' or 'ulysses'."
        )
    return mask.cached(
        "bounds on the host", lambda: HostBounds(mask.key_start.cpu().long(), mask.key_stop.cpu().long())
    )


def seen_runs(bounds: HostBounds, rows: Tensor) -> Runs:
    """The keys that at least one of the rows sees.

    Args:
        bounds: of the mask.
        rows: ascending int64 in host memory.
    """
    start, stop = bounds.start[rows], bounds.stop[rows]
    ahead = torch.cat([start[:1] - 1, stop[:-1]])  # bounds ascend, so it is the largest stop before each row
    begins = start > ahead
    return Runs(start[begins], torch.cat([ahead[1:][begins[1:]], stop[-1:]]))
