"""Trees of tokens as intervals: the keys that each token may see, and the queries that may see it.

The tokens of a tree lie in depth-first order: each token after its parent, each subtree in one piece. A token sees
itself and its ancestors. So a key is seen from its own place to the end of its subtree, which is one integer per key
(docs/math.md, section 8). The functions here work on one stream; several rows of a batch lie end to end in it. On GPUs
the kernels of tritonpack/kernels/trees.py compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Lengths, Reach, as_integers, check_rows, describe, on_host, require

ROOT, SLACK = -1, -2  # the parents of a tree's first token, and of a token outside every tree

PLACE_RULE = (
    "a parent is the place of an earlier token, counted from the begin of its row, -1 for the first token of a tree, "
    "or -2 for a token outside every tree. Put the tokens into depth-first order, parents first."
)
ORDER_RULE = (
    "the subtree of this parent has ended before the token, or the parent is outside every tree. Put the tokens into "
    "depth-first order, each subtree in one piece, and count places from the begin of the row."
)
END_RULE = (
    "a subtree ends after its own token and within its row; an end at the token itself marks a token outside every "
    "tree."
)
NESTING_RULE = "a subtree that begins within another one ends after it. Subtrees lie within each other or apart."


class TreeBounds(NamedTuple):
    """The bounds of both sides, each (T,) int32, with the depth of each token and whether a tree begins there."""

    key_start: Tensor
    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor
    depth: Tensor
    first: Tensor


def forest_bounds(values: Lengths, kind: Literal["parents", "ends"], reach: Reach) -> TreeBounds:
    """The bounds of a forest, of what `BlockDiagonalMask.from_tree` or `from_tree_ends` takes.

    Raises:
        ValueError: their errors.
    """
    if not isinstance(values, Tensor):
        nested = isinstance(values, (list, tuple)) and any(isinstance(x, (list, tuple)) for x in values)
        if nested or getattr(values, "ndim", 1) > 1:
            raise ValueError(f"{kind} of several rows must be a (B, T) tensor; got {describe(values)}.")
        values = as_integers(values, kind)
    rows = check_rows(values, kind)
    if kernels.serve(rows):
        from tritonpack.kernels.trees import bounds_of_rows

        return TreeBounds(*bounds_of_rows(rows, kind, reach.left, reach.chunk))
    place = torch.arange(rows.shape[1], device=rows.device)
    row_begin = torch.arange(rows.shape[0], device=rows.device)[:, None] * rows.shape[1]
    stream = torch.where(rows < 0, rows, rows + row_begin).flatten()  # places in the stream instead of the row
    if kind == "parents":
        _require_all((rows >= SLACK) & (rows < place), rows, kind, PLACE_RULE)
        ends = _ends_of_parents(stream)
        # Tokens are in depth-first order if each subtree ends within its parent's.
        within = (stream < 0) | (ends[stream.clamp(min=0)] >= ends)
        _require_all(within, rows, kind, ORDER_RULE, lambda: _first_out_of_order(stream.tolist()))
        return _bounds(ends, reach)
    _require_all((rows >= place) & (rows <= rows.shape[1]), rows, kind, END_RULE)
    bounds = _bounds(stream, reach)
    depth = bounds.depth.long()
    parents = _ancestors_at(depth - 1, depth, bounds.key_stop > bounds.key_start)
    _require_all((depth == 0) | (stream[parents] >= stream), rows, kind, NESTING_RULE)
    return bounds


def _ends_of_parents(parents: Tensor) -> Tensor:
    """The end of each token's subtree, (T,) int64, if tokens are in depth-first order. The end of a token outside every
    tree is its own place."""
    total = parents.shape[0]
    # Tokens of the subtree at most 1, 2, 4, ... steps below each token; those above roots are counted at place `total`.
    up = pad(torch.where(parents < 0, total, parents), (0, 1), value=total)
    size = torch.ones_like(up)
    for _ in range(total.bit_length()):
        size, up = size.index_add(0, up, size), up[up]
    return torch.arange(total, device=parents.device) + torch.where(parents == SLACK, 0, size[:-1])


def _bounds(ends: Tensor, reach: Reach) -> TreeBounds:
    """The bounds of a forest.

    Args:
        ends: (T,) int64, where the subtree of each token ends; a token outside every tree has its own place.
        reach: how far a query sees among its ancestors: `left` tokens up, or to the begin of its chunk.
    """
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
        top = torch.maximum(depth - reach.left, torch.zeros_like(depth))
        if reach.chunk < UNLIMITED:
            top = torch.maximum(top, depth // reach.chunk * reach.chunk)
        start = _ancestors_at(top, depth, live)
    start = torch.where(live, start, token)
    start, stop, query_stop, depth = (x.to(torch.int32) for x in (start, token + live, ends, depth))
    return TreeBounds(start, stop, token.to(torch.int32), query_stop, depth, first)


def _ancestors_at(level: Tensor, depth: Tensor, live: Tensor) -> Tensor:
    """The ancestor of each token at a depth: the last token of that depth at or before the token."""
    token = torch.arange(depth.shape[0], device=depth.device)
    in_levels = (torch.where(live, depth, UNLIMITED) << 31 | token).sort().values
    number = torch.searchsorted(in_levels, level << 31 | token, right=True) - 1
    return in_levels[number.clamp(min=0)] & UNLIMITED if depth.numel() else depth


def _first_out_of_order(parents: list[int]) -> int:
    """The first token whose parent isn't on the path from the root to the token before."""
    path: list[int] = []
    for token, parent in enumerate(parents):
        while path and path[-1] != parent:
            path.pop()
        if parent >= 0 and not path:
            return token
        path += [token] if parent != SLACK else []
    raise AssertionError("the tokens are in depth-first order")


def _require_all(good: Tensor, rows: Tensor, name: str, rule: str, first: Callable[[], int] | None = None) -> None:
    """Raise, or assert on the device, that all values of rows are good; the message names the first that isn't."""

    def message() -> str:
        if not on_host(good):
            return f"{name}: {rule}"
        place = first() if first is not None else int((~good).flatten().nonzero()[0])
        row, place = divmod(place, rows.shape[1])
        where = f"{place}" if rows.shape[0] == 1 else f"{row}, {place}"
        return f"{name}[{where}] is {int(rows[row, place])}: {rule}"

    require(good.all(), message)
