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

    return BlockMask.from_kv_blocks(
        *_listed(visited & ~full),
        *_listed(full),
        BLOCK_SIZE=sizes,
        mask_mod=mask_mod,
        seq_lengths=(num_queries, num_keys),
    )


def _listed(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """The number of blocks of each row of tiles, (1, 1, rows), and their columns, (1, 1, rows, columns); int32."""
    number = blocks.sum(1, dtype=torch.int32)
    # First the blocks of the row, then the others, both in ascending order, as in create_block_mask.
    indices = torch.argsort(blocks.to(torch.int32), dim=1, descending=True, stable=True).to(torch.int32)
    return number[None, None], indices[None, None].contiguous()
