"""Counts the blocks of keys that tiles visit, from the mask."""

import torch
from torch import Tensor

from tritonpack import BlockDiagonalMask


def blocks_of(mask: BlockDiagonalMask, tiles: Tensor, block: int) -> tuple[Tensor, Tensor]:
    """For each tile (rows [first, end)), its blocks of `block` keys without masking, and those with masking."""
    first, last = tiles[:, 0].long(), tiles[:, 1].long() - 1
    start, stop = mask.key_start.long(), mask.key_stop.long()
    begin = start[first]
    blocks = (stop[last] - begin + block - 1) // block
    full = torch.minimum((start[last] - begin + block - 1) // block, blocks)
    full_end = torch.maximum((stop[first] - begin) // block, full)
    unmasked = full_end - full
    return unmasked, blocks - unmasked
