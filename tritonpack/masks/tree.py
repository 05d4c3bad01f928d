"""Trees of tokens as intervals: the keys that each token may see, and the queries that may see it.

The tokens of a tree lie in depth-first order: each token after its parent, each subtree in one piece. A token sees
itself and its ancestors. So a key is seen from its own place to the end of its subtree, which is one integer per key
(docs/math.md, section 8). The functions here work on one stream; several rows of a batch lie end to end in it. On GPUs
the kernels of tritonpack/kernels/trees.py compute the same.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, Lengths, Reach, as_integers, check_rows, describe, on_host, require

ROOT, SLACK = -1, -2  # the parents of a tree's first token, and of a token outside every tree
NOTHING = -(2**31)


class TreeBounds(NamedTuple):
    """The bounds of both sides, each (T,) int32, with the depth of each token and whether a tree begins there."""

    key_start: Tensor
    key_stop: Tensor
    query_start: Tensor
    query_stop: Tensor
    depth: Tensor
    first: Tensor


def from_parents(parents: Lengths, reach: Reach) -> TreeBounds:
    """The bounds of a forest, of parents as `BlockDiagonalMask.from_tree` takes them.

    Raises:
        ValueError: the errors of `from_tree`.
    """
    parents = _rows(parents, "parents")
    if kernels.serve(parents):
        return _by_kernels(parents, "parents", reach)
    return bounds(_ends_of_parents(parents), reach)


def from_ends(ends: Lengths, reach: Reach) -> TreeBounds:
    """The bounds of a forest, of ends as `BlockDiagonalMask.from_tree_ends` takes them.

    Raises:
        ValueError: the errors of `from_tree_ends`.
    """
    ends = _rows(ends, "ends")
    if kernels.serve(ends):
        return _by_kernels(ends, "ends", reach)
    return bounds(_checked_ends(ends), reach)


def _by_kernels(values: Tensor, kind: str, reach: Reach) -> TreeBounds:
    from tritonpack.kernels.trees import bounds_of_rows

    return TreeBounds(*bounds_of_rows(values, kind, reach.left, reach.chunk))


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
    token = torch.arange(stream.shape[0], device=stream.device)
    # A subtree ends at the first token whose parent lies before the subtree.
    ends = torch.where(stream == SLACK, token, _first_below(stream, token))
    whole = (stream < 0) | (ends[stream.clamp(min=0)] > token) if stream.numel() else stream < 0
    _require_all(
        whole.view_as(parents),
        parents,
        "parents",
        "the subtree of this parent has ended before the token, or the parent is outside every tree. Put the tokens "
        "into depth-first order, each subtree in one piece, and count places from the begin of the row.",
    )
    return ends


def _checked_ends(ends: Tensor) -> Tensor:
    """The end of each token's subtree, (B * T,) int64, of (B, T) ends within rows."""
    stream = _checked_stream(
        ends,
        (torch.arange(ends.shape[1], device=ends.device), ends.shape[1]),
        "ends",
        "a subtree ends after its own token and within its row; an end at the token itself marks a token outside every "
        "tree.",
    )
    if not torch.compiler.is_compiling():  # there nothing is checked, and a graph with these steps would fit few sizes
        _require_all(
            (_largest_end_within(stream) <= stream).view_as(ends),
            ends,
            "ends",
            "a subtree that begins within this token's subtree ends after it. Subtrees lie within each other or apart.",
        )
    return stream


def _checked_stream(values: Tensor, limits: tuple[int | Tensor, int | Tensor], name: str, rule: str) -> Tensor:
    """(B, T) places within rows, which must lie between the limits, as (B * T,) int64 places in the stream."""
    values = values.to(torch.int64)
    _require_all((values >= limits[0]) & (values <= limits[1]), values, name, rule)
    row_begin = torch.arange(values.shape[0], device=values.device)[:, None] * values.shape[1]
    return torch.where(values < 0, values, values + row_begin).reshape(-1)


def bounds(ends: Tensor, reach: Reach) -> TreeBounds:
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


def _first_below(values: Tensor, limits: Tensor) -> Tensor:
    """For each place the first later place whose value is below the limit, or the length; in steps of powers of two."""
    length = values.shape[0]
    place = torch.arange(1, length + 1, device=values.device)
    for step, smallest in reversed(_windows(pad(values, (0, 1), value=NOTHING), torch.minimum)):
        place = torch.where(smallest[place] >= limits, place + step, place)  # past the end stands NOTHING
    return place


def _largest_end_within(ends: Tensor) -> Tensor:
    """The largest end among the tokens of each subtree."""
    largest = ends.clone()
    place = torch.arange(ends.shape[0], device=ends.device)
    for step, window in reversed(_windows(ends, torch.maximum)):
        inside = place + step <= ends
        largest = torch.where(inside, torch.maximum(largest, window[place.clamp(max=ends.shape[0] - 1)]), largest)
        place = torch.where(inside, place + step, place)
    return largest


def _windows(values: Tensor, reduce: Callable[[Tensor, Tensor], Tensor]) -> list[tuple[int, Tensor]]:
    """Pairs (size, the reduction of the `size` values from each place on), for all powers of two below the length."""
    levels, size = [(1, values.to(torch.int32))] if values.numel() else [], 1
    while 2 * size <= values.shape[0]:
        last = levels[-1][1]
        levels.append((2 * size, torch.cat([reduce(last[:-size], last[size:]), last[-size:]])))
        size *= 2
    return levels


def _rows(values: Lengths, name: str) -> Tensor:
    if not isinstance(values, Tensor):
        nested = isinstance(values, (list, tuple)) and any(isinstance(x, (list, tuple)) for x in values)
        if nested or getattr(values, "ndim", 1) > 1:
            raise ValueError(f"{name} of several rows must be a (B, T) tensor; got {describe(values)}.")
        values = as_integers(values, name)
    return check_rows(values, name)


def _require_all(good: Tensor, values: Tensor, name: str, rule: str) -> None:
    """Raise, or assert on the device, that all values are good; the message names the first that isn't."""

    def message() -> str:
        if not on_host(good):
            return f"{name}: {rule}"
        row, place = (~good).nonzero()[0].tolist()
        where = f"{place}" if good.shape[0] == 1 else f"{row}, {place}"
        return f"{name}[{where}] is {int(values[row, place])}: {rule}"

    require(good.all(), message)
