"""Intervals as FlexAttention's block mask, without evaluating a mask function on pairs."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from tritonpack.checks import is_length
from tritonpack.masks.blocks import aligned, relation
from tritonpack.masks.bounds import Bounds

if TYPE_CHECKING:
    from torch.nn.attention.flex_attention import BlockMask


def block_mask(mask: Bounds, block_size: int | tuple[int, int]) -> BlockMask:
    """See `BlockDiagonalMask.to_block_mask`."""
    from torch.nn.attention.flex_attention import BlockMask

    sizes = block_size if isinstance(block_size, (tuple, list)) else (block_size, block_size)
    if len(sizes) != 2 or not all(is_length(size) and size >= 1 for size in sizes):
        raise ValueError(f"BLOCK_SIZE must be an integer of at least 1, or two (queries, keys); got {block_size!r}.")
    num_queries, num_keys = mask.num_queries, mask.num_keys
    if not num_queries or not num_keys:
        raise ValueError(
            f"a block mask needs queries and keys; this mask has {num_queries} queries and {num_keys} keys."
        )
    if mask.query_start is not None and mask.query_stop is not None:
        queries = aligned(mask.key_start, mask.key_stop, sizes[0])
        visited, full = relation(queries, aligned(mask.query_start, mask.query_stop, sizes[1]))
    else:
        visited, full = _relation(mask.key_start, mask.key_stop, num_keys, sizes)
    key_start, key_stop, query_start, query_stop = (
        mask.key_start,
        mask.key_stop,
        mask.query_start,
        mask.query_stop,
    )

    def mask_mod(b: Tensor, h: Tensor, q_idx: Tensor, kv_idx: Tensor) -> Tensor:
        visible = (key_start[q_idx] <= kv_idx) & (kv_idx < key_stop[q_idx])
        if query_start is not None and query_stop is not None:
            visible = visible & (query_start[kv_idx] <= q_idx) & (q_idx < query_stop[kv_idx])
        return visible

    return BlockMask.from_kv_blocks(
        *_listed(visited & ~full),
        *_listed(full),
        BLOCK_SIZE=sizes,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def _relation(key_start: Tensor, key_stop: Tensor, num_keys: int, sizes: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """(blocks of queries, blocks of keys) bool twice: whether a pair is visible, and whether all are."""
    num_queries, device = key_start.shape[0], key_start.device
    row, key = (torch.arange(0, n, size, device=device) for n, size in zip((num_queries, num_keys), sizes, strict=True))
    row_end, key_end = (row + sizes[0]).clamp(max=num_queries), (key + sizes[1]).to(torch.int32)

    # Rows [first, last) may see keys of a block. A tile visits the block if any of these rows in the tile sees a key at
    # all (docs/math.md, section 1).
    first = torch.searchsorted(key_stop, key.to(torch.int32), right=True)
    last = torch.searchsorted(key_start, key_end)
    seeing = torch.zeros(num_queries + 1, dtype=torch.int32, device=device)
    seeing[1:] = (key_start < key_stop).cumsum(0)
    visited = seeing[torch.minimum(row_end[:, None], last)] > seeing[torch.maximum(row[:, None], first)]
    full = (key_start[row_end - 1][:, None] <= key) & (key_stop[row][:, None] >= key_end)
    full &= (row + sizes[0] <= num_queries)[:, None]  # for flex_attention rows past the end see nothing
    return visited, full


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row of tiles, (1, 1, rows), and their columns, (1, 1, rows, columns); int32."""
    number = blocks.sum(1, dtype=torch.int32)
    # First the blocks of the row, then the others, both in ascending order, as in create_block_mask.
    indices = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None], indices[None, None].contiguous()
