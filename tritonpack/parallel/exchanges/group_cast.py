"""Exchange by group cast: every rank receives the keys and values that its queries see, and no others.

All-to-all messages of unequal sizes carry them, in steps of key heads (by_heads.py). If no rank needs a row of another,
nothing is sent. Gradients return the same way, in float32 for half precision. The rank that owns a row adds them up in
the order of ranks, so that the sum is the same in each run.

Source: the group-cast and group-reduce primitives of MagiAttention (SandAI, 2025).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Arrival, Ranks, all_to_all, wide
from tritonpack.parallel.exchanges.call import Call, join, split
from tritonpack.parallel.exchanges.parts import Addition, Keys
from tritonpack.parallel.layouts import Layout


@dataclass(frozen=True, eq=False)
class CastKeys:
    """A part with rows of other ranks whose keys the rank sees.

    Attributes:
        sent: (sent,) int64, the places in the own shard of the rows that each rank gets, in the order of ranks.
        sent_counts: for each rank, how many of these it gets; 0 for this rank.
        received_counts: for each rank, how many rows come from it.
        order: (keys,) int64, where the keys lie among the received rows, in the order of the batch.
        mask: the mask between the own queries and these keys.
        queries: None, for all of them.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    order: Tensor
    mask: BlockDiagonalMask
    queries: Tensor | None = None

    def send(self, k: Tensor, v: Tensor, ranks: Ranks) -> Keys:
        rows = join(k, v)
        coming = self._exchange(rows.index_select(0, self.sent), self.sent_counts, self.received_counts, ranks)
        return lambda: split(coming().index_select(0, self.order), k, v)

    def give_back(self, dk: Tensor, dv: Tensor, ranks: Ranks) -> Addition:
        gradients = join(dk, dv).to(wide(dk.dtype))
        message = torch.empty_like(gradients).index_copy_(0, self.order, gradients)
        coming = self._exchange(message, self.received_counts, self.sent_counts, ranks)

        def add(total_dk: Tensor, total_dv: Tensor) -> None:
            for total, parts in zip((total_dk, total_dv), split(coming(), dk, dv), strict=True):
                pieces = self.sent.split(self.sent_counts), parts.split(self.sent_counts)
                for places, part in zip(*pieces, strict=True):
                    if places.shape[0]:
                        total.index_add_(0, places, part)  # no place twice, so the order of additions is fixed

        return add

    def _exchange(self, message: Tensor, sent: list[int], received: list[int], ranks: Ranks) -> Arrival:
        """Start to send rows (sum(sent), width); the result is (sum(received), width)."""
        width = message.shape[1]
        coming = all_to_all(message, [n * width for n in sent], [n * width for n in received], ranks)
        return lambda: coming().view(-1, width)


def divide(call: Call, count: int) -> Sequence[CastKeys]:
    """The keys of other ranks in at most `count` parts."""
    mask, layout, rank = call.mask, call.layout, call.ranks.rank
    return mask.cached(("group cast", layout, rank, count), lambda: make_parts(mask, layout, rank, count))


def make_parts(mask: BlockDiagonalMask, layout: Layout, rank: int, count: int) -> tuple[CastKeys, ...]:
    """The parts of one rank; waits for the mask's device."""
    rows, seen = layout.rows_on_host, layout.seen_by_ranks(mask)
    mine, nothing = rows[rank], rows[rank][:0]
    sent = [nothing if r == rank else seen[r].among(mine) for r in range(layout.ranks)]
    others = [nothing if r == rank else one[seen[rank].among(one)] for r, one in enumerate(rows)]
    count = min(count, max(layout.remote_keys(mask)))
    parts = []
    for number in range(count):
        given = [_piece(one, number, count) for one in sent]
        received = [_piece(one, number, count) for one in others]
        unordered = torch.cat(received)
        order = torch.from_numpy(
            np.argsort(unordered.numpy(), kind="stable")
        )  # runs that ascend, which this sort merges
        queries, keys = layout.rows[rank], unordered[order].to(mask.device)
        parts.append(
            CastKeys(
                torch.cat(given).to(mask.device),
                [one.shape[0] for one in given],
                [one.shape[0] for one in received],
                order.to(mask.device),
                mask.restrict(queries, keys),
            )
        )
    return tuple(parts)


def _piece(rows: Tensor, number: int, count: int) -> Tensor:
    """One of `count` equal pieces of rows."""
    return rows[rows.shape[0] * number // count : rows.shape[0] * (number + 1) // count]
