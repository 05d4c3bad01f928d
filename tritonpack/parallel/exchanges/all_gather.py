"""Exchange by all-gather: every rank receives the keys and values of all ranks, in steps of key heads (by_heads.py).

A reduce-scatter returns their gradients, in float32 for half precision. Shards are padded to the length of the longest.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Ranks, gather, pad_to, scatter_sum, wide
from tritonpack.parallel.exchanges.call import Call, join, split
from tritonpack.parallel.exchanges.parts import Addition, Keys
from tritonpack.parallel.layouts import Layout


@dataclass(frozen=True, eq=False)
class GatheredKeys:
    """A part with a run of each rank's rows.

    Attributes:
        rows: which rows of each shard. Shorter shards are padded.
        places: (keys,) int64, where the keys lie in the gathered runs, laid end to end, in the order of the batch.
        mask: the mask between the own queries and these keys.
        queries: None, for all of them.
    """

    rows: slice
    places: Tensor
    mask: BlockDiagonalMask
    queries: Tensor | None = None

    @property
    def length(self) -> int:
        return self.rows.stop - self.rows.start

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        coming = gather(pad_to(join(k[self.rows], v[self.rows]), 0, self.length), ranks)
        return lambda: split(coming().flatten(0, 1).index_select(0, self.places), k, v)

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        gradients = join(dk, dv).to(wide(dk.dtype))
        runs = gradients.new_zeros(ranks.size * self.length, gradients.shape[1])
        runs.index_copy_(0, self.places, gradients)
        coming = scatter_sum(runs.unflatten(0, (ranks.size, self.length)), ranks)

        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            for total, part in zip((total_dk, total_dv), split(coming(), dk, dv), strict=True):
                mine = total[self.rows]
                mine += part[: mine.shape[0]]

        return add


def divide(call: Call, count: int) -> Sequence[GatheredKeys]:
    """The keys of other ranks in at most `count` parts."""
    mask, layout, rank = call.mask, call.layout, call.ranks.rank
    return mask.cached(("all gather", layout, rank, count), lambda: _divide(mask, layout, rank, count))


def _divide(mask: BlockDiagonalMask, layout: Layout, rank: int, count: int) -> tuple[GatheredKeys, ...]:
    sources = [source for source in range(layout.ranks) if source != rank]
    longest, own = max(layout.lengths), layout.rows[rank]
    count = min(count, max(longest, 1)) if sources else 0
    parts = []
    for number in range(count):
        run = slice(longest * number // count, longest * (number + 1) // count)
        rows = [layout.rows[source][run] for source in sources]
        places = [
            torch.arange(one.shape[0], device=one.device) + source * (run.stop - run.start)
            for source, one in zip(sources, rows, strict=True)
        ]
        keys, order = torch.cat(rows).sort()
        parts.append(GatheredKeys(run, torch.cat(places)[order], mask.restrict(own, keys)))
    return tuple(parts)
