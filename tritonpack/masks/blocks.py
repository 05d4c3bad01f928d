"""The blocks of keys that a range of queries visits, for masks with bounds on both sides.

A pair is visible if the key lies within the query's bounds and the query within the key's bounds. Over a range of
queries and a range of keys, the smallest and largest of these bounds tell whether a pair can be visible, and whether
all pairs are (docs/math.md, section 8). No pair is looked at.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

NEVER = 2**31 - 1


class Ranges(NamedTuple):
    """Ranges [first, end) of rows, each (ranges,), with the extremes of their rows' bounds on the other side.

    `first_start` and `last_stop` are extremes over the rows that see something, the others over all rows.
    """

    first: Tensor
    end: Tensor
    first_start: Tensor
    last_start: Tensor
    first_stop: Tensor
    last_stop: Tensor


def aligned(start: Tensor, stop: Tensor, size: int) -> Ranges:
    """The ranges of `size` rows that begin at multiples of it; the last one also has rows that don't exist."""
    number = -(-start.shape[0] // size)
    first = torch.arange(0, number * size, size, device=start.device)
    start, stop = (pad(x, (0, number * size - x.shape[0])).view(number, size) for x in (start, stop))
    return Ranges(first, first + size, *_extremes(start, stop, start < stop))


def cut(start: Tensor, stop: Tensor, first: Tensor, end: Tensor, size: int) -> Ranges:
    """The ranges [first, end) of at most `size` rows; empty ones see nothing."""
    rows = first[:, None] + torch.arange(size, device=first.device)
    inside = rows < end[:, None]
    rows = torch.where(inside, rows, torch.where(end > first, first, 0)[:, None])
    return Ranges(first, end, *_extremes(start[rows], stop[rows], (start[rows] < stop[rows]) & inside))


def relation(queries: Ranges, keys: Ranges) -> tuple[Tensor, Tensor]:
    """(query ranges, key ranges) bool twice: whether a pair may be visible, and whether all pairs are.

    The first is exact in a tree without windows if all tokens belong to trees; otherwise it may hold for ranges
    without a visible pair.
    """
    touches = (queries.first_start[:, None] < keys.end) & (queries.last_stop[:, None] > keys.first)
    touches &= (keys.first_start < queries.end[:, None]) & (keys.last_stop > queries.first[:, None])
    full = (queries.last_start[:, None] <= keys.first) & (queries.first_stop[:, None] >= keys.end)
    full &= (keys.last_start <= queries.first[:, None]) & (keys.first_stop >= queries.end[:, None])
    return touches, full & touches


def _extremes(start: Tensor, stop: Tensor, live: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    never = start.new_full((), NEVER)
    return (
        torch.where(live, start, never).amin(1),
        start.amax(1),
        stop.amin(1),
        torch.where(live, stop, 0).amax(1),
    )
