"""A mask in other forms: dense, as the blocks of keys that ranges of queries visit, and FlexAttention's block mask."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from tritonpack import kernels
from tritonpack.checks import UNLIMITED, check_flag, is_length
from tritonpack.masks.bounds import Bounds

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask

DTYPES = (torch.bool, torch.bfloat16, torch.float16, torch.float32)


def dense(mask: Bounds, dtype: torch.dtype, additive: bool) -> Tensor:
    """See `BlockDiagonalMask.to_dense`."""
    allowed = DTYPES[1:] if check_flag(additive, "additive") else DTYPES
    if dtype not in allowed:
        raise ValueError(f"dtype must be one of {', '.join(map(str, allowed))}; got {dtype}. Cast a mask of those.")
    seen, hidden = (0.0, torch.finfo(dtype).min) if additive else (1.0, 0.0)
    # Rows begin at multiples of 16 bytes, which wide stores and torch's attention need.
    per_word = 4 // dtype.itemsize
    words = -(-mask.num_keys // (4 * per_word)) * 4
    if kernels.serve(mask.key_start) and not mask.is_tree:
        from tritonpack.kernels.dense_mask import write_words

        patterns = [
            int(torch.full((per_word,), value, dtype=dtype, device="cpu").view(torch.int32)) for value in (seen, hidden)
        ]
        padded = write_words(mask.key_start, mask.key_stop, words, per_word, *patterns).view(dtype)
    else:
        visible = _visible(mask, words * per_word)
        padded = torch.full_like(visible, hidden, dtype=dtype).masked_fill_(visible, seen)
    return padded[:, : mask.num_keys]


def _visible(mask: Bounds, columns: int) -> Tensor:
    """(num_queries, columns) bool, whether each pair is visible; columns past the keys aren't."""
    keys = torch.arange(columns, device=mask.device, dtype=torch.int32)
    visible = (keys >= mask.key_start[:, None]) & (keys < mask.key_stop[:, None])
    if mask.query_start is not None and mask.query_stop is not None:
        queries = torch.arange(mask.num_queries, device=mask.device, dtype=torch.int32)[:, None]
        visible[:, : mask.num_keys] &= (queries >= mask.query_start) & (queries < mask.query_stop)
    return visible


class Ranges(NamedTuple):
    """Ranges [first, end) of rows, each (ranges,), with the extremes of their rows' bounds on the other side. They tell
    whether a pair can be visible, and whether all pairs are (docs/math.md, section 8). `first_start` and `last_stop`
    are extremes over the rows that see something, the others over all rows."""

    first: Tensor
    end: Tensor
    first_start: Tensor
    last_start: Tensor
    first_stop: Tensor
    last_stop: Tensor


def aligned(start: Tensor, stop: Tensor, size: int) -> Ranges:
    """The ranges of `size` rows that begin at multiples of it. The last one may end after the last row."""
    first = torch.arange(0, start.shape[0], size, device=start.device)
    return cut(start, stop, first, first + size, size)


def cut(start: Tensor, stop: Tensor, first: Tensor, end: Tensor, size: int) -> Ranges:
    """The ranges [first, end) of at most `size` rows; empty ones see nothing."""
    rows = first[:, None] + torch.arange(size, device=first.device)
    inside = rows < end.clamp(max=start.shape[0])[:, None]
    rows = torch.where(inside, rows, torch.where(end > first, first, 0)[:, None])
    start, stop = start[rows], stop[rows]
    live = (start < stop) & inside
    first_start, last_stop = torch.where(live, start, UNLIMITED).amin(1), torch.where(live, stop, 0).amax(1)
    return Ranges(first, end, first_start, start.amax(1), stop.amin(1), last_stop)


def relation(queries: Ranges, keys: Ranges) -> tuple[Tensor, Tensor]:
    """(query ranges, key ranges) bool twice: whether a pair may be visible, and whether all pairs are. The first may
    hold for ranges without a visible pair in trees with windows or padding, nowhere else."""
    touches = (queries.first_start[:, None] < keys.end) & (queries.last_stop[:, None] > keys.first)
    touches &= (keys.first_start < queries.end[:, None]) & (keys.last_stop > queries.first[:, None])
    full = (queries.last_start[:, None] <= keys.first) & (queries.first_stop[:, None] >= keys.end)
    full &= (keys.last_start <= queries.first[:, None]) & (keys.first_stop >= queries.end[:, None])
    return touches, full & touches


def block_mask(mask: Bounds, block_size: int | tuple[int, int]) -> BlockMask:
    """See `BlockDiagonalMask.to_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or not all(is_length(size) and size >= 1 for size in sizes):
        raise ValueError(f"BLOCK_SIZE must be an integer of at least 1, or two (queries, keys); got {block_size!r}.")
    shape = mask.num_queries, mask.num_keys
    if 0 in shape:
        raise ValueError(f"a block mask needs queries and keys; this mask has {shape[0]} queries and {shape[1]} keys.")
    seen_by = mask.transpose()
    visited, full = relation(
        aligned(mask.key_start, mask.key_stop, sizes[0]), aligned(seen_by.key_start, seen_by.key_stop, sizes[1])
    )
    key_start, key_stop, query_start, query_stop = mask.key_start, mask.key_stop, mask.query_start, mask.query_stop

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = (key_start[q_idx] <= kv_idx) & (kv_idx < key_stop[q_idx])
        if query_start is not None and query_stop is not None:
            visible = visible & (query_start[kv_idx] <= q_idx) & (q_idx < query_stop[kv_idx])
        return visible

    blocks = *_listed(visited & ~full), *_listed(full)
    return BlockMask.from_kv_blocks(*blocks, BLOCK_SIZE=sizes, mask_mod=mask_mod, seq_lengths=shape)


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row of tiles, (1, 1, rows), and their columns, (1, 1, rows, columns); int32."""
    number = blocks.sum(1, dtype=torch.int32)
    # First the blocks of the row, then the others, both in ascending order, as in create_block_mask.
    indices = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None], indices[None, None].contiguous()
