"""Trees of tokens as intervals: the keys that each token may see, and the queries that may see it.

The tokens of a tree lie in depth-first order: each token after its parent, each subtree in one piece. A token sees
itself and its ancestors. So a key is seen from its own place to the end of its subtree, which is one integer per key
(docs/math.md, section 8). The functions here work on one stream; several rows of a batch lie end to end in it. On GPUs
the kernels of tritonpack/kernels/trees.py compute the same.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Lengths, Reach, as_integers, check_rows, describe, on_host, require

ROOT, SLACK = -1, -2  # the parents of a tree's first token, and of a token outside every tree


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
    if kind == "parents":
        return _bounds(_ends_of_parents(rows), reach)
    place = torch.arange(rows.shape[1], device=rows.device)
    rule = (
        "a subtree ends after its own token and within its row; an end at the token itself marks a token outside every"
    )
    ends = _checked_stream(rows, (place, rows.shape[1]), "ends", f"{rule} tree.")
    bounds = _bounds(ends, reach)
    parent = _ancestors_at(bounds.depth.long() - 1, bounds.depth.long(), bounds.key_stop > bounds.key_start)
    _require_all(
        ((bounds.depth == 0) | (ends[parent] >= ends)).view_as(rows),
        rows,
        "ends",
        "a subtree that begins within another one ends after it. Subtrees lie within each other or apart.",
    )
    return bounds


def _ends_of_parents(parents: Tensor) -> Tensor:
    """The end of each token's subtree, (B * T,) int64, of (B, T) parents."""
    place = torch.arange(parents.shape[1], device=parents.device)
    stream = _checked_stream(
        parents,
        (SLACK, place - 1),
        "parents",
        "a parent is the place of an earlier token, counted from the begin of its row, -1 for the first token of a "
        "tree, or -2 for a token outside every tree. Put the tokens into depth-first order, parents first.",
    )
    total, live = stream.shape[0], stream != SLACK
    # Descendants and ancestors at most 1, 2, 4, ... steps away; those of roots are counted at place `total`.
    up = pad(torch.where(stream < 0, total, stream), (0, 1), value=total)
    size = torch.ones_like(up)
    depth = (up < total).to(torch.int64)
    for _ in range(total.bit_length()):
        size, depth, up = size.index_add(0, up, size), depth + depth[up], up[up]
    size, depth = size[:-1], depth[:-1]
    # In depth-first order a token is at most one deeper than the token before, and its parent is the last token of the
    # parent's depth.
    before = pad(torch.where(live, depth, -1), (1, 0), value=-1)[:-1]
    follows = (stream < 0) | ((depth <= before + 1) & (_ancestors_at(depth - 1, depth, live) == stream))
    _require_all(
        follows.view_as(parents),
        parents,
        "parents",
        "the subtree of this parent has ended before the token, or the parent is outside every tree. Put the tokens "
        "into depth-first order, each subtree in one piece, and count places from the begin of the row.",
    )
    return torch.arange(total, device=stream.device) + torch.where(live, size, 0)


def _checked_stream(values: Tensor, limits: tuple[int | Tensor, int | Tensor], name: str, rule: str) -> Tensor:
    """(B, T) places within rows, which must lie between the limits, as (B * T,) int64 places in the stream."""
    values = values.to(torch.int64)
    _require_all((values >= limits[0]) & (values <= limits[1]), values, name, rule)
    row_begin = torch.arange(values.shape[0], device=values.device)[:, None] * values.shape[1]
    return torch.where(values < 0, values, values + row_begin).reshape(-1)


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


def _require_all(good: Tensor, values: Tensor, name: str, rule: str) -> None:
    """Raise, or assert on the device, that all values are good; the message names the first that isn't."""

    def message() -> str:
        if not on_host(good):
            return f"{name}: {rule}"
        row, place = (~good).nonzero()[0].tolist()
        where = f"{place}" if good.shape[0] == 1 else f"{row}, {place}"
        return f"{name}[{where}] is {int(values[row, place])}: {rule}"

    require(good.all(), message)
