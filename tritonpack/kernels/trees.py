"""The kernels that build the bounds of a mask of trees, from parents or from ends of subtrees, in three launches.

tritonpack/masks/tree.py computes the same in torch; docs/math.md, section 8, says why.

Legend: `token` is a place in the stream of all rows, `place` a place within a row; [token, end) is the subtree of a
token. A program has the ROWS tokens from `begin` on. It reads others in chunks of PIECE**3 tokens from `look` on: PIECE
groups of PIECE pieces of PIECE tokens. No length is a compile-time constant.

Cost: a program reads on until all of its tokens have what they look for, at most to an end of its row. At worst, in a
row that is one chain, each launch takes row length / PIECE**3 steps one after the other, and its programs read
T * row length / (2 * ROWS) integers, most of them from the L2 cache. A chunk takes more than a reduction only if a
subtree that begins among the program's tokens ends in it, or the other way round. Subtrees lie within each other or
apart, so there are at most about T / ROWS + T / PIECE**3 such pairs of a program and a chunk.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from tritonpack.kernels.intervals import ASSERTIONS, check_bounds, smaller

ROWS = 256
PIECE = 16
WARPS = 16  # with 8, a thread has up to 92 registers, so that half as many threads fit on a multiprocessor

SLACK = tl.constexpr(-2)  # as in tritonpack/masks/tree.py
NONE = tl.constexpr(2**31 - 1)  # more than any place or depth

PARENTS_RULE = tl.constexpr(
    "parents: each is the place of an earlier token whose subtree holds the token, counted from the begin of its row, "
    "-1 for the first token of a tree, or -2 for a token outside every tree. Put the tokens into depth-first order, "
    "parents first, each subtree in one piece"
)
ENDS_RULE = tl.constexpr(
    "ends: a subtree ends after its own token and within its row, and subtrees lie within each other or apart; an end "
    "at the token itself marks a token outside every tree"
)


@triton.jit
def nearest(values, numbers, limits, SIGN: tl.constexpr):
    """SIGN times the first (SIGN 1) or last (SIGN -1) number in each row whose value is at most the row's limit.

    NONE if there is none. values and numbers: [ROWS or 1, n]; limits: [ROWS].
    """
    return tl.min(tl.where(values <= limits[:, None], SIGN * numbers, NONE), 1)


@triton.jit
def nearest_in_chunk(values_ptr, look, low, high, limits, SIGN: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """SIGN times the first or last token of a chunk whose value is at most each row's limit, as `nearest`.

    Only the tokens [low, high) of the chunk count. If all values are above all limits, nothing but their minimum is
    computed.
    """
    number = tl.arange(0, PIECE)
    low = tl.maximum(low - look, 0).to(tl.int32)  # within the chunk, so that 32 bits are enough
    high = tl.minimum(high - look, PIECE * PIECE * PIECE).to(tl.int32)
    offs = tl.arange(0, PIECE * PIECE)[:, None] * PIECE + number[None, :]  # [PIECE**2, PIECE]
    inside = (offs >= low) & (offs < high)
    values = tl.load(values_ptr + look + offs, mask=inside, other=0).to(tl.int32)
    least = tl.min(tl.where(inside, values, NONE), 1)  # [PIECE**2], of each piece
    found = tl.full([ROWS], NONE, tl.int32)
    if tl.min(least, 0) <= tl.max(limits, 0):
        # The nearest of PIECE groups of pieces, then the nearest of its PIECE pieces, then of its PIECE tokens.
        group = nearest(tl.min(tl.reshape(least, [PIECE, PIECE]), 1)[None, :], number[None, :], limits, SIGN)
        hit = group < NONE
        pieces = tl.where(hit, SIGN * group, 0)[:, None] * PIECE + number[None, :]  # [ROWS, PIECE]
        of_pieces = tl.reshape(tl.gather(least, tl.reshape(pieces, [ROWS * PIECE]), 0), [ROWS, PIECE])
        piece = nearest(of_pieces, pieces, limits, SIGN)
        tokens = tl.where(hit, SIGN * piece, 0)[:, None] * PIECE + number[None, :]  # [ROWS, PIECE]
        there = hit[:, None] & (tokens >= low) & (tokens < high)
        of_tokens = tl.load(values_ptr + look + tokens, mask=there, other=0).to(tl.int32)
        token = nearest(tl.where(there, of_tokens, NONE), tokens, limits, SIGN)
        found = tl.where(hit, SIGN * look.to(tl.int32) + token, NONE)
    return found


@triton.jit
def nearest_own(values_ptr, begin, high, token, limits, SIGN: tl.constexpr, ROWS: tl.constexpr, PIECE: tl.constexpr):
    """As `nearest_in_chunk`, among the program's tokens: after (SIGN 1), or up to (SIGN -1), the own one."""
    found = tl.full([ROWS], NONE, tl.int32)
    for piece in range(0, ROWS, PIECE):
        offs = begin + piece + tl.arange(0, PIECE)
        values = tl.load(values_ptr + offs, mask=offs < high, other=0).to(tl.int32)
        ahead = offs[None, :] > token[:, None] if SIGN == 1 else offs[None, :] <= token[:, None]
        values = tl.where(ahead & (offs < high)[None, :], values[None, :], NONE)  # [ROWS, PIECE]
        found = tl.minimum(found, nearest(values, offs[None, :], limits, SIGN))
    return found


@triton.jit(do_not_specialize=["num_tokens", "row_length"])
def parents_kernel(
    parents_ptr,
    ends_ptr,
    num_tokens,
    row_length,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The end of each subtree [T]; asserts that parents are earlier tokens; grid (blocks of ROWS,).

    A subtree ends at the first token whose parent lies before the subtree.
    """
    begin = tl.program_id(0) * ROWS
    token = begin + tl.arange(0, ROWS)
    inside = token < num_tokens
    place = token % row_length
    parent = tl.load(parents_ptr + token, mask=inside, other=0).to(tl.int64)
    good = (parent >= SLACK) & (parent < place)
    tl.device_assert(tl.min((good | ~inside).to(tl.int32), 0) > 0, PARENTS_RULE)

    # No subtree goes beyond its row, because the parent of the next row's first token is negative.
    end = tl.where(parent == SLACK, token, num_tokens)
    end = tl.minimum(end, nearest_own(parents_ptr, begin, num_tokens, token, place - 1, 1, ROWS, PIECE))
    look = begin.to(tl.int64) + ROWS  # also a sum past the last token fits
    limits = tl.where(end >= look, place - 1, SLACK - 1)  # no parent is below SLACK: nothing more to find
    while (look < num_tokens) & (tl.max(limits, 0) >= SLACK):
        found = nearest_in_chunk(parents_ptr, look, look, num_tokens, limits, 1, ROWS, PIECE)
        end = tl.minimum(end, found)
        limits = tl.where(found < NONE, SLACK - 1, limits)
        look += PIECE * PIECE * PIECE
    tl.store(ends_ptr + token, end, mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "row_length"])
def ends_kernel(given_ptr, ends_ptr, num_tokens, row_length, ROWS: tl.constexpr):
    """The end of each subtree [T]; asserts that ends lie in their rows; grid as above."""
    token = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    inside = token < num_tokens
    place = token % row_length
    end = tl.load(given_ptr + token, mask=inside, other=0).to(tl.int64)
    good = (end >= place) & (end <= row_length)
    tl.device_assert(tl.min((good | ~inside).to(tl.int32), 0) > 0, ENDS_RULE)
    tl.store(ends_ptr + token, (token - place + end).to(tl.int32), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "row_length"])
def depths_kernel(
    parents_ptr,
    ends_ptr,
    level_ptr,
    depth_ptr,
    key_stop_ptr,
    query_start_ptr,
    first_ptr,
    num_tokens,
    row_length,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The depth of each token, its bounds but for key_start, and whether a tree begins there, each [T]; grid as above.

    A token's ancestors are the tokens before it whose subtrees end after it; the depth is their number. `level` is the
    depth, but NONE outside of trees. The kernel asserts that each subtree ends at the latest where the subtrees of the
    token's ancestors end, and that the parent, if there are parents, is an ancestor.
    """
    begin = tl.program_id(0) * ROWS
    token = begin + tl.arange(0, ROWS)
    inside = token < num_tokens
    place = token % row_length
    end = tl.load(ends_ptr + token, mask=inside, other=0)
    last = tl.minimum(begin + (ROWS - 1), num_tokens - 1)

    # Earlier tokens whose subtrees end after the program's last token are ancestors of all of its tokens. Of those
    # whose subtrees end among its tokens, `ending` has the number by ends.
    depth = 0
    shortest = NONE
    ending = tl.zeros([ROWS], dtype=tl.int32)
    look = (begin - begin % row_length).to(tl.int64)
    while look < begin:
        before = tl.minimum(begin - look, PIECE * PIECE * PIECE).to(tl.int32)
        offs = tl.arange(0, PIECE * PIECE * PIECE)
        earlier = tl.load(ends_ptr + look + offs, mask=offs < before, other=0)
        past = earlier > last
        among = (earlier > begin) & (earlier <= last)
        depth += tl.sum(past.to(tl.int32), 0)
        shortest = tl.minimum(shortest, tl.min(tl.where(past, earlier, NONE), 0))
        if tl.max(among.to(tl.int32), 0) > 0:
            ending += tl.histogram(tl.where(among, earlier - begin - 1, 0), ROWS, mask=among)
        look += PIECE * PIECE * PIECE
    depth += tl.cumsum(ending, 0, reverse=True)
    shortest = tl.minimum(
        shortest, tl.associative_scan(tl.where(ending > 0, token + 1, NONE), 0, smaller, reverse=True)
    )

    for piece in range(0, ROWS, PIECE):
        offs = begin + piece + tl.arange(0, PIECE)
        earlier = tl.load(ends_ptr + offs, mask=offs < num_tokens, other=0)
        holds = (offs[None, :] < token[:, None]) & (earlier[None, :] > token[:, None])  # [ROWS, PIECE]
        depth += tl.sum(holds.to(tl.int32), 1)
        shortest = tl.minimum(shortest, tl.min(tl.where(holds, earlier[None, :], NONE), 1))

    good = end <= shortest
    if parents_ptr is not None:
        parent = tl.load(parents_ptr + token, mask=inside, other=0).to(tl.int64)
        has_parent = inside & (parent >= 0) & (parent < place)  # the first launch has found others
        parent_end = tl.load(ends_ptr + (token - place + parent), mask=has_parent, other=0)
        good &= ~has_parent | (parent_end > token)
    tl.device_assert(tl.min((good | ~inside).to(tl.int32), 0) > 0, ENDS_RULE if parents_ptr is None else PARENTS_RULE)

    live = end > token
    tl.store(level_ptr + token, tl.where(live, depth, NONE), mask=inside)
    tl.store(depth_ptr + token, tl.where(live, depth, 0), mask=inside)
    tl.store(key_stop_ptr + token, token + live.to(tl.int32), mask=inside)
    tl.store(query_start_ptr + token, token, mask=inside)
    tl.store(first_ptr + token, (live & (depth == 0)).to(tl.int8), mask=inside)


@triton.jit(do_not_specialize=["num_tokens", "row_length", "left", "chunk"])
def starts_kernel(
    level_ptr,
    key_start_ptr,
    num_tokens,
    row_length,
    left,
    chunk,
    ROWS: tl.constexpr,
    PIECE: tl.constexpr,
):
    """The first key that each token sees [T]; grid (blocks of ROWS,).

    It is the last token up to the own one whose level is at most `top`: those between are deeper.
    """
    begin = tl.program_id(0) * ROWS
    token = begin + tl.arange(0, ROWS)
    inside = token < num_tokens
    level = tl.load(level_ptr + token, mask=inside, other=NONE)
    live = level < NONE
    # 2**31 - 1 in `left` or `chunk` means no limit, and gives 0.
    top = tl.maximum(tl.maximum(level - left, 0), level // chunk * chunk)
    limits = tl.where(live, top, -1)  # no level is below 0: nothing to find
    found = nearest_own(level_ptr, begin, num_tokens, token, limits, -1, ROWS, PIECE)
    start = tl.where(live, -found, token)
    limits = tl.where(found < NONE, -1, limits)
    look = begin.to(tl.int64)
    stop = look - look % row_length
    while (look > stop) & (tl.max(limits, 0) >= 0):
        look -= PIECE * PIECE * PIECE
        found = nearest_in_chunk(level_ptr, look, stop, begin, limits, -1, ROWS, PIECE)
        start = tl.where(found < NONE, -found, start)
        limits = tl.where(found < NONE, -1, limits)
    tl.store(key_start_ptr + token, start, mask=inside)


@triton.jit(do_not_specialize=["num_queries", "num_keys"])
def check_kernel(
    key_start_ptr, key_stop_ptr, query_start_ptr, query_stop_ptr, num_queries, num_keys, ROWS: tl.constexpr
):
    """Asserts that the given bounds of a tree are valid; grid (blocks of ROWS queries and keys,)."""
    offs = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    of_queries = check_bounds(key_start_ptr, key_stop_ptr, offs, num_queries, num_keys, False)
    of_keys = check_bounds(query_start_ptr, query_stop_ptr, offs, num_keys, num_queries, False)
    tl.device_assert(
        tl.minimum(of_queries, of_keys) > 0,
        "a tree's intervals must lie within its keys and within its queries, and end at or after their begin. "
        "mask.validate() names the first wrong one, on a copy of the bounds in host memory",
    )


def assert_bounds(key_start: Tensor, key_stop: Tensor, query_start: Tensor, query_stop: Tensor) -> None:
    """Assert in one launch that the bounds of a mask of trees are what `Bounds.validate` asks for."""
    num_queries, num_keys = key_start.shape[0], query_start.shape[0]
    if ASSERTIONS["debug"] and (rows := max(num_queries, num_keys)):
        with torch.cuda.device_of(key_start):
            check_kernel[(triton.cdiv(rows, ROWS),)](
                key_start_ptr=key_start.contiguous(),
                key_stop_ptr=key_stop.contiguous(),
                query_start_ptr=query_start.contiguous(),
                query_stop_ptr=query_stop.contiguous(),
                num_queries=num_queries,
                num_keys=num_keys,
                ROWS=ROWS,
                **ASSERTIONS,
            )


def bounds_of_rows(values: Tensor, kind: str, left: int, chunk: int) -> tuple[Tensor, ...]:
    """The fields of `TreeBounds`, each (B * T,). The kernels assert that the values are valid.

    Args:
        values: (B, T) integers.
        kind: "parents", as in `BlockDiagonalMask.from_tree`, or "ends", as in `TreeBatch.tree_ends`.
        left, chunk: from 0 (chunk: from 1) to 2**31 - 1, which means no limit.
    """
    total, row_length = values.numel(), values.shape[1]
    grid = (triton.cdiv(total, ROWS),)
    key_start, key_stop, query_start, ends, depth, level = (
        values.new_empty(total, dtype=torch.int32) for _ in range(6)
    )
    first = values.new_empty(total, dtype=torch.bool)
    if total:
        values = values.contiguous()
        stream = {"ends_ptr": ends, "num_tokens": total, "row_length": row_length, "ROWS": ROWS, **ASSERTIONS}
        with torch.cuda.device_of(values):
            if kind == "parents":
                parents_kernel[grid](parents_ptr=values, **stream, PIECE=PIECE, num_warps=WARPS)
            else:
                ends_kernel[grid](given_ptr=values, **stream)
            depths_kernel[grid](
                parents_ptr=values if kind == "parents" else None,
                level_ptr=level,
                depth_ptr=depth,
                key_stop_ptr=key_stop,
                query_start_ptr=query_start,
                first_ptr=first.view(torch.int8),
                **stream,
                PIECE=PIECE,
                num_warps=WARPS,
            )
            starts_kernel[grid](
                level_ptr=level,
                key_start_ptr=key_start,
                num_tokens=total,
                row_length=row_length,
                left=left,
                chunk=chunk,
                ROWS=ROWS,
                PIECE=PIECE,
                num_warps=WARPS,
            )
    return key_start, key_stop, query_start, ends, depth, first
