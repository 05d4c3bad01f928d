"""Trees of tokens as intervals: the keys that each token may see, and the queries that may see it.

The tokens of a tree lie in depth-first order, each subtree in one piece. A token sees itself and its ancestors. So a
key is seen from its own place to the end of its subtree (docs/math.md, section 8). Rows of a batch lie end to end in
one stream. On GPUs the kernels of tritonpack/kernels/trees.py compute the same.
"""

from __future__ import annotations

from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Lengths, Reach, as_integers, check_rows, on_host, require
from tritonpack.masks.intervals import Intervals, number_documents

ROOT, SLACK = -1, -2  # the parents of a tree's first token, and of a token outside every tree

RULES = {
    "parents": (
        "a parent is the place of an earlier token of the row whose subtree hasn't ended, -1 for the first token of a "
        "tree, or -2 for a token outside every tree. Put the tokens into depth-first order, each subtree in one piece."
    ),
    "ends": (
        "a subtree ends after its own token, within its row and within the subtree that holds it; an end at the token "
        "itself marks a token outside every tree."
    ),
}


def forest_intervals(values: Lengths, kind: Literal["parents", "ends"], reach: Reach) -> Intervals:
    """The intervals of a forest, given by parents as in `BlockDiagonalMask.from_tree`, or by the end of each subtree:
    one past the token's last descendant in its row, and the token's own place outside every tree."""
    if not isinstance(values, Tensor):
        values = as_integers(values, kind)
    rows = check_rows(values, kind)
    if kernels.serve(rows):
        from tritonpack.kernels.trees import bounds_of_rows

        start, stop, query_start, query_stop, depth, first = bounds_of_rows(rows, kind, reach.left, reach.chunk)
        return Intervals(start, stop, depth, partial(number_documents, first), (query_start, query_stop), True)
    place = torch.arange(rows.shape[1], device=rows.device)
    row_begin = torch.arange(rows.shape[0], device=rows.device)[:, None] * rows.shape[1]
    stream = torch.where(rows < 0, rows, rows + row_begin).flatten()  # places in the stream instead of the row
    if kind == "parents":
        _require_all((rows >= SLACK) & (rows < place), rows, kind)
        ends = _ends_of_parents(stream)
        # Tokens are in depth-first order if each subtree ends within its parent's.
        _require_all((stream < 0) | (ends[stream.clamp(min=0)] >= ends), rows, kind)
        return _intervals(ends, reach)
    _require_all((rows >= place) & (rows <= rows.shape[1]), rows, kind)
    found = _intervals(stream, reach)
    depth = found.diagonal.long()
    parents = _ancestors_at(depth - 1, depth, found.stop > found.start)
    _require_all((depth == 0) | (stream[parents] >= stream), rows, kind)
    return found


def _ends_of_parents(parents: Tensor) -> Tensor:
    """The end of each token's subtree, (T,) int64, if tokens are in depth-first order."""
    total = parents.shape[0]
    # Tokens of the subtree at most 1, 2, 4, ... steps below each token; those above roots are counted at place `total`.
    up = pad(torch.where(parents < 0, total, parents), (0, 1), value=total)
    size = torch.ones_like(up)
    for _ in range(total.bit_length()):
        size, up = size.index_add(0, up, size), up[up]
    return torch.arange(total, device=parents.device) + torch.where(parents == SLACK, 0, size[:-1])


def _intervals(ends: Tensor, reach: Reach) -> Intervals:
    """The intervals of a forest, from the end of each token's subtree, (T,) int64. A token outside every tree has its
    own place as end. A query sees `reach.left` tokens up, or to the begin of its chunk."""
    token = torch.arange(ends.shape[0], device=ends.device)
    live = ends > token
    # A token's ancestors are the tokens before it, without those whose subtree has ended.
    ended = torch.zeros(ends.shape[0] + 1, dtype=torch.int64, device=ends.device)
    ended.index_add_(0, ends, torch.ones_like(ends))
    depth = torch.where(live, token - ended.cumsum(0)[:-1], 0)
    first = live & (depth == 0)
    if reach.left == UNLIMITED and reach.chunk == UNLIMITED:
        start = torch.where(first, token, 0).cummax(0).values if token.numel() else token
    else:
        top = (depth - reach.left).clamp(min=0)
        if reach.chunk < UNLIMITED:
            top = torch.maximum(top, depth // reach.chunk * reach.chunk)
        start = _ancestors_at(top, depth, live)
    start = torch.where(live, start, token)
    start, stop, token, ends, depth = (x.to(torch.int32) for x in (start, token + live, token, ends, depth))
    return Intervals(start, stop, depth, partial(number_documents, first), (token, ends), True)


def _ancestors_at(level: Tensor, depth: Tensor, live: Tensor) -> Tensor:
    """The ancestor of each token at a depth: the last token of that depth at or before the token."""
    token = torch.arange(depth.shape[0], device=depth.device)
    in_levels = (torch.where(live, depth, UNLIMITED) << 31 | token).sort().values
    number = torch.searchsorted(in_levels, level << 31 | token, right=True) - 1
    return in_levels[number.clamp(min=0)] & UNLIMITED if depth.numel() else depth


def _require_all(good: Tensor, rows: Tensor, name: Literal["parents", "ends"]) -> None:
    """Raise, or assert on the device, that all values of rows are good; the message names the first that isn't."""

    def message() -> str:
        if not on_host(good):
            return f"{name}: {RULES[name]}"
        row, place = divmod(int((~good).flatten().nonzero()[0]), rows.shape[1])
        where = f"{place}" if rows.shape[0] == 1 else f"{row}, {place}"
        return f"{name}[{where}] is {int(rows[row, place])}: {RULES[name]}"

    require(good.all(), message)
