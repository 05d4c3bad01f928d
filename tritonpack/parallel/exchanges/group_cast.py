"""Exchange by group cast: every rank receives the keys and values that its queries see, and no others.

All-to-all messages of unequal sizes carry them, in steps of key heads (by_heads.py). If no rank needs a row of another,
nothing is sent. Gradients return the same way, in float32 for half precision. The rank that owns a row adds them up in
the order of ranks, so that the sum is the same in each run.

Source: the group-cast and group-reduce primitives of MagiAttention (SandAI, 2025).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from tritonpack.masks.block_diagonal import BlockDiagonalMask
from tritonpack.parallel.comm import Arrival, all_to_all, wide
from tritonpack.parallel.exchanges.call import Call
from tritonpack.parallel.layouts import Layout


@dataclass(frozen=True, eq=False)
class GroupCastPlan:
    """Which rows travel between one rank and the others, for one mask and layout.

    The rank attends over its own rows and the received ones, in the order of the batch.

    Attributes:
        sent: (sent,) int64, the places in the own shard of the rows that each rank gets, in the order of ranks.
        sent_counts: for each rank, how many of these it gets; 0 for this rank.
        received_counts: for each rank, how many rows come from it.
        own: (n,) int64, the places of the own rows among the keys.
        others: (received,) int64, the places of the received rows among the keys, in the order of ranks.
        mask: the mask between the own queries and these keys.
        silent: whether no rank gets any row.
    """

    sent: Tensor
    sent_counts: list[int]
    received_counts: list[int]
    own: Tensor
    others: Tensor
    mask: BlockDiagonalMask
    silent: bool


def make_plan(mask: BlockDiagonalMask, layout: Layout, rank: int) -> GroupCastPlan:
    """The plan of one rank; waits for the mask's device."""
    rows, seen = layout.rows_on_host, layout.seen_by_ranks(mask)
    mine, nothing = rows[rank], rows[rank][:0]
    sent = [nothing if r == rank else seen[r].among(mine) for r in range(layout.ranks)]
    others = [nothing if r == rank else one[seen[rank].among(one)] for r, one in enumerate(rows)]
    received = torch.cat(others)
    keys = torch.cat([mine, received]).sort().values
    return GroupCastPlan(
        torch.cat(sent).to(mask.device),
        [one.shape[0] for one in sent],
        [one.shape[0] for one in others],
        torch.searchsorted(keys, mine).to(mask.device),
        torch.searchsorted(keys, received).to(mask.device),
        _restrict(mask, layout.rows[rank], keys.to(mask.device)),
        silent=not any(layout.remote_keys(mask)),
    )


def mask_of(call: Call) -> BlockDiagonalMask:
    """The mask between own queries and the keys that this rank has after `send`."""
    return _plan(call).mask


def send(call: Call, rows: Tensor) -> Arrival:
    """Start to send own rows (n, width) to the ranks that see them; the result has the rows of all keys."""
    plan = _plan(call)
    if plan.silent:
        return lambda: rows
    width = rows.shape[1]
    message = rows.index_select(0, plan.sent)
    coming = all_to_all(message, _times(plan.sent_counts, width), _times(plan.received_counts, width), call.ranks)

    def arrive() -> Tensor:
        keys = rows.new_empty(plan.mask.num_keys, width)
        keys.index_copy_(0, plan.own, rows)
        return keys.index_copy_(0, plan.others, coming().view(-1, width))

    return arrive


def give_back(call: Call, gradients: Tensor) -> Arrival:
    """Start to send gradients (keys, width) to the owners of the keys; the result is their sum for the own rows."""
    plan = _plan(call)
    if plan.silent:
        return lambda: gradients
    width = gradients.shape[1]
    gradients = gradients.to(wide(gradients.dtype))
    message = gradients.index_select(0, plan.others)
    total = gradients.index_select(0, plan.own)
    coming = all_to_all(message, _times(plan.received_counts, width), _times(plan.sent_counts, width), call.ranks)

    def arrive() -> Tensor:
        parts = coming().view(-1, width).split(plan.sent_counts)
        for places, part in zip(plan.sent.split(plan.sent_counts), parts, strict=True):
            if places.shape[0]:
                total.index_add_(0, places, part)  # no place twice, so the order of additions is fixed
        return total

    return arrive


def plan_of(mask: BlockDiagonalMask, layout: Layout, rank: int) -> GroupCastPlan:
    """The plan of one rank, cached on the mask."""
    return mask.cached(("group cast", layout, rank), lambda: make_plan(mask, layout, rank))


def _plan(call: Call) -> GroupCastPlan:
    return plan_of(call.mask, call.layout, call.ranks.rank)


def _times(counts: list[int], width: int) -> list[int]:
    return [count * width for count in counts]


def _restrict(mask: BlockDiagonalMask, rows: Tensor, keys: Tensor) -> BlockDiagonalMask:
    """The mask between rows and keys that hold all that the rows see, with distances.

    The keys that a row sees follow each other among these keys, too. So the row's interval and its diagonal move by the
    same number of places. (In a tree other branches lie between the keys of a row, and depths aren't places.)
    """
    part = mask.restrict(rows, keys)
    if mask.is_tree or mask.diagonal is None:
        return part
    return replace(part, diagonal=mask.diagonal[rows] + part.key_start - mask.key_start[rows], trusted=True)
